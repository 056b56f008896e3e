-- acquire: grant, queue or refuse one request. Decides and writes in one step; repeating it is harmless.
--
-- KEYS  1 state  2 queue  3 waiters  4 token  5 marker  6 record, of a name of kind `once` alone
-- ARGV  1 id  2 mode  3 owner  4 ttl (ms)  5 waiter ttl (ms)  6 lock-delay (ms)  7 client
--       8 channel prefix  9 token retention (ms)  10 publish command  11 "wait" or "nowait"
--       12 further words of the record, as `records` says; '' for none
--       13 "begins": with the grant the body begins; "later": it does not yet, and there is a hold_at_least; "resize": the
--          limit of the mode is in use from now on; or several of these; or ''
-- Result  a line, since a table of words takes the server as long as two commands:
--         'granted <token> <ms left>'  'recalled <token> <ms left>': granted, and others want the name: it must not linger
--         'waiting <ms left> <ms until the earliest blocker ends if at the head, else -1> <token floor>'
--         'busy'  'deadlock'  'gone': a marker refuses this id  'limit <the mode in use>'
--         'done <the result that is on record>', which may be any bytes
local state, queue, waiters, token_key, marker, record_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local id, mode, owner, client = ARGV[1], ARGV[2], ARGV[3], ARGV[7]
local ttl, delay = tonumber(ARGV[4]), tonumber(ARGV[6])
local words, how = ARGV[12], ARGV[13]

local on_record = record_key and redis.call('HGET', record_key, 'result')
if on_record then
  return 'done ' .. on_record
end

-- Nobody holds, nobody waits and no marker: the common case, told by one command. It takes 0.61 of the time of the way
-- below (the server's time, the least of 60 interleaved rounds each on Valkey 9, as all such figures in these scripts).
local present = redis.call('EXISTS', state, queue, waiters, marker)
if present == 0 and how == '' then
  local token = next_token(token_key, tonumber(ARGV[9]))
  redis.call('HSET', state, id, mode .. ' ' .. token .. ' ' .. int(now + ttl) .. ' ' .. ARGV[4] .. ' '
    .. ARGV[6] .. ' ' .. owner .. ' ' .. client .. words)
  redis.call('PEXPIRE', state, int(ttl + delay + 2))
  return 'granted ' .. token .. ' ' .. ARGV[4]
end

-- (records)

-- Stand at the end of the queue; `look`: the ms until the earliest blocker ends if that is the head of it, else '-1'.
local function queue_up(look)
  local stream_id = redis.call('XADD', queue, '*', 'id', id,
    'r', mode .. ' ' .. ARGV[6] .. ' ' .. owner .. ' ' .. client .. words)
  redis.call('HSET', waiters, id, stream_id .. ' ' .. int(now + ARGV[5]) .. ' ' .. ARGV[5])
  keep_queue_until(queue, waiters, now + ARGV[5])
  return 'waiting ' .. ARGV[5] .. ' ' .. look .. ' ' .. token_floor(token_key)
end

-- One exclusive holder, somebody who waits, and both alive: where many want a name, the common case. If the holder lingers,
-- it was recalled for who waits already. When three of the four keys are there, and state, queue and waiters are found,
-- then there is no marker. It takes 0.66 of the time of the way below.
if present == 3 then
  local holding = redis.call('HGETALL', state)
  local head = #holding == 2 and redis.call('XRANGE', queue, '-', '+', 'COUNT', '1')[1]
  local waiter = head and redis.call('HGET', waiters, head[2][2])
  if waiter then
    local held_mode, _, deadline, length, _, holder = read_record(holding[2])
    local place, waits_until, waits_for = read_place(waiter)
    local held, waits = deadline - now, waits_until - now
    if held_mode == 'x' and holder ~= owner and held > 0 and held <= tonumber(length)
      and place == head[1] and waits > 0 and waits <= tonumber(waits_for)
      and redis.call('HEXISTS', waiters, id) == 0
    then
      return ARGV[11] == 'nowait' and 'busy' or queue_up('-1')
    end
  end
end

-- (prelude)

local waiter_ttl = tonumber(ARGV[5])
local options = {channel = ARGV[8], retention = tonumber(ARGV[9]), publish = ARGV[10]}
local keys = {state = state, queue = queue, waiters = waiters, token = token_key}

local holders, dead = load_state(state)
local granted = {}
local head, changed

local function finish(result)
  if next(granted) or #dead > 0 then
    keep_state(state, holders)
    bury(state, dead)
  end
  if head and changed and head.id ~= id then
    hint(keys, options, head, holders)
  end
  return result
end

local function holds(record)
  return (is_recalled(record.words) and 'recalled ' or 'granted ') .. record.token .. ' ' .. int(record.deadline - now)
end

local function become_holder(token)
  local record = {
    id = id, mode = mode, deadline = now + ttl, length = ttl, delay = delay,
    owner = owner, client = client, live = true, closed_until = now + ttl + delay,
    words = head and recalled(words) or words,
  }
  count_hold(record)
  if string.find(how, 'begins', 1, true) then
    begin(record)
  end
  -- An out-of-memory server refuses the first of these writes, so none of them.
  record.token = token or next_token(token_key, options.retention)
  write_record(state, record)
  holders[#holders + 1] = record
  keep_state(state, holders)
  -- The overdue record of the same id, when a request is repeated late, has just been overwritten.
  for i = #dead, 1, -1 do
    if dead[i] == id then
      table.remove(dead, i)
    end
  end
  bury(state, dead)
  return holds(record)
end

local function look()
  return int(math.max(0, (earliest_end(holders) or now) - now))
end

-- Nobody waits and no marker, when nothing was there but the state.
local quiet = present == ((#holders > 0 or #dead > 0) and 1 or 0)
if not quiet then
  if redis.call('EXISTS', marker) == 1 then
    return 'gone'
  end
  head, changed = grant_waiting(keys, options, holders, granted)
end

for _, record in ipairs(holders) do
  if record.id == id then
    if not record.live then
      return finish('gone')
    end
    if string.find(how, 'begins', 1, true) and begin(record) then
      write_record(state, record)
      keep_state(state, holders)
    end
    return finish(holds(record))
  end
end
local known = not quiet and redis.call('HGET', waiters, id)
if known then
  local waiter = decode_waiter(known)
  if now < waiter.deadline then
    local own_look = head and head.id == id and look() or '-1'
    return finish('waiting ' .. int(waiter.deadline - now) .. ' ' .. own_look .. ' ' .. token_floor(token_key))
  end
  redis.call('XDEL', queue, waiter.stream_id)
  redis.call('HDEL', waiters, id)
end

-- Every request for a semaphore carries its limit in the mode, and all records have the one that is in use. Two limits for
-- one name are a mistake, unless a request says that it sets the limit: the others follow it.
if #mode > 1 then
  local used = (holders[1] or head or {mode = mode}).mode
  if string.find(how, 'resize', 1, true) then
    mode = mode .. 'r'
    if used ~= mode and (holders[1] or head) then
      set_mode(keys, holders, mode)
      local again
      head, again = grant_waiting(keys, options, holders, granted)
      changed = changed or again
    end
  elseif string.sub(used, -1) == 'r' then
    mode = used
  elseif used ~= mode then
    return finish('limit ' .. used)
  end
end

local held_token, held_exclusive = hold_of(owner, holders)
if held_token then
  if mode == 'x' and not held_exclusive then
    return finish('deadlock')
  end
  local earliest = earliest_end(holders)
  local result = become_holder(held_token)
  if head and changed then
    hint(keys, options, head, holders)
  elseif head and holders[#holders].closed_until < earliest then
    hint(keys, options, head, holders)
  end
  return result
end
if not head and compatible(mode, holders) then
  return become_holder()
end
if ARGV[11] == 'nowait' then
  recall(keys, options, holders)
  return finish('busy')
end

local answer = queue_up(head and '-1' or look())
recall(keys, options, holders)
head = head or {id = id}
return finish(answer)
