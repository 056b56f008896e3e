-- leave: release a holder or withdraw a waiter, whichever the request is by now, and hand off.
--
-- KEYS  1 state  2 queue  3 waiters  4 token  5 marker  6 broken
-- ARGV  1 id  2 channel prefix  3 token retention (ms)  4 publish command
--       5 marker ttl (ms): refuse a late duplicate of the acquire for that long; 0 writes none
--       6 "lost": the lease ran out for its holder, so its lock-delay is kept; else "ended"
-- Result  {'released'}  {'withdrawn'}  {'gone', 'broken' | 'expired' | 'gone'}
--         {'released', state, id, token, ...}: with what was granted thereby to requests of the same client,
--         which needs no other notice
local state, queue, waiters, token_key, marker, broken = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local id = ARGV[1]

-- Nobody waits and nothing went wrong: the common case, which needs no knowledge of the other holders.
local quiet = redis.call('EXISTS', queue, waiters) == 0
if quiet and ARGV[5] == '0' and ARGV[6] == 'ended' then
  local text = redis.call('HGET', state, id)
  -- Whether the clamp would bring the deadline nearer or not, the record is live as long as it is to come.
  if text and now < tonumber(string.match(text, '^[^ ]+ [^ ]+ ([^ ]+)')) then
    redis.call('HDEL', state, id)
    return {'released'}
  end
end

-- Of a waiter who stands there and lives: the ms left, and its deadline and length as they are written.
local function alive(text, stream_id)
  local place, deadline, length = string.match(text or '', '^([^ ]+) ([^ ]+) ([^ ]+)$')
  if place == stream_id then
    local left = deadline - now
    return left > 0 and left <= tonumber(length) and left, deadline, length
  end
end

-- The only holder, followed by an exclusive request and another owner's, and all that is looked at alive: where many
-- want a name, the common case. Who is the head then is told to look, unless it will ask soon enough by itself.
local function hand_off()
  local holding = redis.call('HGETALL', state)
  if #holding ~= 2 or holding[1] ~= id then
    return
  end
  local held_until, own_client = string.match(holding[2], '^[^ ]+ [^ ]+ ([^ ]+) [^ ]+ [^ ]+ [^ ]+ ([^ ]+)$')
  local entries = redis.call('XRANGE', queue, '-', '+', 'COUNT', '2')
  local head, second = entries[1], entries[2]
  if now >= tonumber(held_until) or not head then
    return
  end
  local next_id = head[2][2]
  local left, deadline, length = alive(redis.call('HGET', waiters, next_id), head[1])
  local mode, delay, owner, client = string.match(head[2][4], '^([^ ]+) ([^ ]+) ([^ ]+) ([^ ]+)$')
  if not left or mode ~= 'x' then
    return
  end
  local asks_in
  if second then
    local second_left, _, second_length = alive(redis.call('HGET', waiters, second[2][2]), second[1])
    if not second_left or string.match(second[2][4], '^[^ ]+ [^ ]+ ([^ ]+)') == owner then
      return
    end
    asks_in = second_left - second_length * 2 / 3
  end
  -- Needs no memory: what follows is not refused by a server that is out of it.
  redis.call('HDEL', state, '')
  local token = next_token(token_key, tonumber(ARGV[3]))
  redis.call('HSET', state, next_id, mode .. ' ' .. token .. ' ' .. deadline .. ' ' .. length .. ' ' .. delay .. ' '
    .. owner .. ' ' .. client)
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
  redis.call(ARGV[4], ARGV[2] .. client .. (own and ':own' or ''), 'granted ' .. state .. ' ' .. next_id .. ' ' .. token)
  if second and closed_for < asks_in then
    local waits = string.match(second[2][4], '[^ ]+$')
    redis.call(ARGV[4], ARGV[2] .. waits, 'look ' .. state .. ' ' .. second[2][2] .. ' 0')
  end
  return own and {'released', state, next_id, token} or {'released'}
end

if not quiet and ARGV[5] == '0' and ARGV[6] == 'ended' then
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
if quiet then
  -- Nobody waits: no need to know the other holders.
  local text = redis.call('HGET', state, id)
  local record = text and decode_record(id, text)
  if record and record.live then
    if ARGV[6] == 'lost' and record.delay > 0 then
      return {'gone', 'expired'}
    end
    redis.call('HDEL', state, id)
    return {'released'}
  end
  if redis.call('HEXISTS', broken, id) == 1 then
    return {'gone', 'broken'}
  end
  return {'gone', text and 'expired' or 'gone'}
end

need_no_memory(state)
local result = {'gone', 'gone'}
local holders, dead = load_state(state)
local others = {}
for _, record in ipairs(holders) do
  if record.id ~= id then
    others[#others + 1] = record
  elseif record.live and (ARGV[6] ~= 'lost' or record.delay == 0) then
    dead[#dead + 1] = id
    result = {'released'}
    options.reader, options.reply = record.client, {'released', state}
  else
    -- Lost, here or for its holder, and within its lock-delay: leaving does not open the name early.
    others[#others + 1] = record
    result = {'gone', 'expired'}
  end
end

local was_head = false
local known = result[1] ~= 'released' and redis.call('HGET', waiters, id)
if known then
  local waiter = decode_waiter(known)
  local head = redis.call('XRANGE', queue, '-', '+', 'COUNT', '1')[1]
  was_head = head and head[1] == waiter.stream_id
  local entry = redis.call('XRANGE', queue, waiter.stream_id, waiter.stream_id)[1]
  if entry and entry[2][2] == id then
    redis.call('XDEL', queue, waiter.stream_id)
  end
  redis.call('HDEL', waiters, id)
  if result[2] ~= 'expired' then
    result = {'withdrawn'}
  end
end

local granted = {}
local head, changed = grant_waiting(keys, options, others, granted)
if next(granted) then
  keep_state(state, others)
end
bury(state, dead)
if head and (changed or was_head) then
  hint(keys, options, head, others)
end
if options.reply and #options.reply > 2 then
  return options.reply
end
if result[1] == 'gone' and redis.call('HEXISTS', broken, id) == 1 then
  return {'gone', 'broken'}
end
return result
