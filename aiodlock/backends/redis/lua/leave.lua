-- leave: release a holder or withdraw a waiter, whichever the request is by now, and hand off.
--
-- KEYS  1 state  2 queue  3 waiters  4 token  5 marker  6 broken  7 record, of a name of kind `once` alone
-- ARGV  1 id  2 channel prefix  3 token retention (ms)  4 publish command
--       5 marker ttl (ms): refuse a late duplicate of the acquire for that long; 0 writes none
--       6 "ended"; "lost": the lease ran out for its holder, so its lock-delay is kept; "unused": no body has begun, so
--         nothing is kept closed; "recorded": the body ended well, and that is put on record
--       7 with "recorded", the result  8 and for how long it is kept (ms)
-- Result  a line, as of acquire:
--         'released'  'withdrawn'  'gone <broken | expired | gone>'  'recorded'
--         'released <state> <id> <token> ...': with what was granted thereby to requests of the same client,
--         which needs no other notice; a token ends with `r` if that request lingers and is recalled at once
local state, queue, waiters, token_key, marker, broken, record_key =
  KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7]
local id, why = ARGV[1], ARGV[6]

-- Nobody waits and nothing went wrong: the common case, which needs no knowledge of the other holders. It takes 0.37 of
-- the time of the way below.
local quiet = redis.call('EXISTS', queue, waiters) == 0
if quiet and ARGV[5] == '0' and why == 'ended' then
  local text = redis.call('HGET', state, id)
  -- Whether the clamp would bring the deadline nearer or not, the record is live as long as it is to come.
  if text and not string.find(text, ' h=', 1, true) and now < tonumber(string.match(text, '^[^ ]+ [^ ]+ ([^ ]+)')) then
    redis.call('HDEL', state, id)
    return 'released'
  end
end

-- (time)

-- (records)

-- Of a waiter who stands there and lives: the ms left, and its deadline and length as they are written.
local function alive(text, stream_id)
  local place, deadline, length = read_place(text or '')
  if place == stream_id then
    local left = deadline - now
    return left > 0 and left <= tonumber(length) and left, deadline, length
  end
end

-- The only holder, followed by an exclusive request and another owner's, and all that is looked at alive: where many
-- want a name, the common case. Who is the head then is told to look, unless it will ask soon enough by itself. It takes
-- 0.54 of the time of the way below.
local function hand_off()
  local holding = redis.call('HGETALL', state)
  if #holding ~= 2 or holding[1] ~= id then
    return
  end
  local _, _, held_until, _, _, _, own_client = read_record(holding[2])
  local entries = redis.call('XRANGE', queue, '-', '+', 'COUNT', '2')
  local head, second = entries[1], entries[2]
  if now >= tonumber(held_until) or not head or has_hold(holding[2]) then
    return
  end
  local next_id = head[2][2]
  local left, deadline, length = alive(redis.call('HGET', waiters, next_id), head[1])
  local mode, delay, owner, client, words = read_entry(head)
  if not left or mode ~= 'x' or has_hold(words) then
    return
  end
  local asks_in, second_client
  if second then
    local second_left, _, second_length = alive(redis.call('HGET', waiters, second[2][2]), second[1])
    local _, _, second_owner, its_client = read_entry(second)
    if not second_left or second_owner == owner then
      return
    end
    asks_in, second_client = second_left - second_length * 2 / 3, its_client
  end
  local mark = ''
  if second and lingers(words) then
    words, mark = recalled(words), 'r'
  end
  -- Needs no memory: what follows is not refused by a server that is out of it.
  redis.call('HDEL', state, '')
  local token = next_token(token_key, tonumber(ARGV[3]))
  redis.call('HSET', state, next_id, mode .. ' ' .. token .. ' ' .. deadline .. ' ' .. length .. ' ' .. delay .. ' '
    .. owner .. ' ' .. client .. words)
  if second then
    redis.call('XDEL', queue, head[1])
    redis.call('HDEL', waiters, next_id)
  else
    redis.call('DEL', queue, waiters)
  end
  local closed_for = left + delay
  redis.call('PEXPIRE', state, int(closed_for + 2))
  redis.call('HDEL', state, id)
  local own = client == own_client
  redis.call(ARGV[4], ARGV[2] .. client .. (own and ':own' or ''), 'granted ' .. state .. ' ' .. next_id .. ' ' .. token .. mark)
  if second and closed_for < asks_in then
    redis.call(ARGV[4], ARGV[2] .. second_client, 'look ' .. state .. ' ' .. second[2][2] .. ' 0')
  end
  return own and 'released ' .. state .. ' ' .. next_id .. ' ' .. token .. mark or 'released'
end

if not quiet and ARGV[5] == '0' and why == 'ended' then
  local answer = hand_off()
  if answer then
    return answer
  end
end

-- (prelude)

local options = {channel = ARGV[2], retention = tonumber(ARGV[3]), publish = ARGV[4]}
local keys = {state = state, queue = queue, waiters = waiters, token = token_key}

if ARGV[5] ~= '0' then
  need_no_memory(state)
  redis.call('SET', marker, '1', 'PX', ARGV[5])
end
-- Ends the record of this request: it is gone, or it stays and keeps the name closed. Returns what to answer, and whether it
-- is gone.
local function release(record)
  local keeps = record.hold_until and now < record.hold_until
  if string.find(record.words, ' l=1', 1, true) then
    -- The answer to an earlier leave was lost.
    return now < record.closed_until and 'released' or 'gone gone', false
  elseif not record.live then
    if why ~= 'unused' or not keeps then
      return 'gone expired', false
    end
    -- The grant came too late. Only a lock-delay keeps the name closed.
    record.words = string.gsub(record.words, ' [hub]=%d+', '')
    record.closed_until = record.deadline + record.delay
    write_record(state, record)
    return 'gone expired', record.closed_until <= now
  elseif why == 'lost' and (record.delay > 0 or keeps and string.find(record.words, ' b=1', 1, true)) then
    return 'gone expired', false
  elseif why == 'ended' and keeps then
    record.deadline, record.length, record.delay = now, 0, record.hold_until - now
    record.words = string.gsub(record.words, ' [hub]=%d+', '') .. ' l=1'
    record.live, record.closed_until = false, record.hold_until
    write_record(state, record)
    keep_until(state, record.closed_until)
    return 'released', false
  end
  return 'released', true
end

if why == 'recorded' then
  if redis.call('HGET', record_key, 'id') == id then
    return 'recorded' -- the answer to an earlier leave was lost
  end
  local text = redis.call('HGET', state, id)
  if text and decode_record(id, text).live then
    need_no_memory(state)
    redis.call('HSET', record_key, 'id', id, 'result', ARGV[7], 'at', int(now))
    redis.call('PEXPIRE', record_key, ARGV[8])
    tell_done(keys, options)
    return 'recorded'
  end
end

if quiet then
  -- Nobody waits: no need to know the other holders.
  local text = redis.call('HGET', state, id)
  local answer, ended = 'gone gone', false
  if text then
    local record = decode_record(id, text)
    answer, ended = release(record)
    if record.set_back and not ended then
      write_record(state, record, redis.pcall) -- as whoever reads all of them
    end
  end
  if ended then
    redis.call('HDEL', state, id)
  end
  if answer ~= 'released' and redis.call('HEXISTS', broken, id) == 1 then
    return 'gone broken'
  end
  return answer
end

need_no_memory(state)
local result = 'gone gone'
local holders, dead = load_state(state)
local others = {}
local nearer = false
for _, record in ipairs(holders) do
  if record.id ~= id then
    others[#others + 1] = record
  else
    local ended
    local before = record.closed_until
    options.reader, options.reply = record.client, {'released', state}
    result, ended = release(record)
    nearer = record.closed_until < before
    if ended then
      dead[#dead + 1] = id
    else
      others[#others + 1] = record
    end
    if result ~= 'released' then
      options.reader, options.reply = nil, nil
    end
  end
end

local was_head = false
local known = result ~= 'released' and redis.call('HGET', waiters, id)
if known then
  local waiter = decode_waiter(known)
  local head = redis.call('XRANGE', queue, '-', '+', 'COUNT', '1')[1]
  was_head = head and head[1] == waiter.stream_id
  local entry = redis.call('XRANGE', queue, waiter.stream_id, waiter.stream_id)[1]
  if entry and entry[2][2] == id then
    redis.call('XDEL', queue, waiter.stream_id)
  end
  redis.call('HDEL', waiters, id)
  if result ~= 'gone expired' then
    result = 'withdrawn'
  end
end

local granted = {}
local head, changed = grant_waiting(keys, options, others, granted)
if next(granted) then
  keep_state(state, others)
end
bury(state, dead)
if head and (changed or was_head or nearer) then
  hint(keys, options, head, others)
end
if options.reply and #options.reply > 2 then
  return table.concat(options.reply, ' ')
end
if result ~= 'released' and result ~= 'withdrawn' and redis.call('HEXISTS', broken, id) == 1 then
  return 'gone broken'
end
return result
