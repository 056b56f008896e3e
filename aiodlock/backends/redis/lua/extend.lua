-- extend: push the deadline of a waiter or a holder into the future, never nearer, and look.
--
-- KEYS  1 state  2 queue  3 waiters  4 token  5 broken  6 record, of a name of kind `once` alone
-- ARGV  1 id  2 length (ms)  3 owner  4 channel prefix  5 token retention (ms)  6 publish command
--       7 "begins": if the request holds, its body begins; or none
-- Result  a line, as of acquire:
--         'held <token> <ms left>'  'recalled <token> <ms left>': held, and others want the name: it must not linger
--         'waiting <ms left> <ms until the earliest blocker ends if at the head, else -1> <token floor>'
--         'done <the result that is on record>', which may be any bytes
--         'gone <broken | expired | taken_over | gone>'
local state, queue, waiters, token_key, broken, record_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local id, length, owner, begins = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[7] == 'begins'

-- (holders)

local function held(record)
  return (is_recalled(record.words) and 'recalled ' or 'held ') .. record.token .. ' ' .. int(record.deadline - now)
end

local function push(record)
  record.deadline = math.max(record.deadline, now + length)
  -- Not shorter than what was promised before: the clamp must not bring the deadline nearer.
  record.length = math.max(length, record.deadline - now)
end

need_no_memory(state)
local why = 'gone'
local text = redis.call('HGET', state, id)
if text then
  local record = decode_record(id, text)
  if record.live then
    push(record)
    record.closed_until = math.max(record.closed_until, record.deadline + record.delay)
    if begins then
      begin(record)
    end
    write_record(state, record)
    keep_until(state, record.closed_until)
    return held(record)
  end
  why = 'expired'
end

local on_record = record_key and redis.call('HGET', record_key, 'result')
if on_record then
  return 'done ' .. on_record
end

-- (prelude)

local options = {channel = ARGV[4], retention = tonumber(ARGV[5]), publish = ARGV[6]}
local keys = {state = state, queue = queue, waiters = waiters, token = token_key}

local waiter
local was_head = false
text = redis.call('HGET', waiters, id)
if text then
  waiter = decode_waiter(text)
  local entry = redis.call('XRANGE', queue, waiter.stream_id, waiter.stream_id)[1]
  local own = entry and entry[2][2] == id
  if own and now < waiter.deadline then
    push(waiter)
    write_place(waiters, id, waiter)
    keep_queue_until(queue, waiters, waiter.deadline)
  else
    if own then
      -- Too late, and at the head: the next one has to be told, nobody else will.
      was_head = redis.call('XRANGE', queue, '-', '+', 'COUNT', '1')[1][1] == waiter.stream_id
      redis.call('XDEL', queue, waiter.stream_id)
    end
    redis.call('HDEL', waiters, id)
    waiter = nil
  end
end

local holders, dead = load_state(state)
local granted = {}
local head, changed = grant_waiting(keys, options, holders, granted)

-- A waiter whose named owner came to hold meanwhile gets in, wherever it stands.
local nearer = false
if waiter and not granted[id] and string.sub(owner, 1, 1) == 'u' then
  local token, exclusive = hold_of(owner, holders)
  waiter.id = id
  read_wish(waiter, redis.call('XRANGE', queue, waiter.stream_id, waiter.stream_id)[1])
  if token and (waiter.mode ~= 'x' or exclusive) then
    local earliest = earliest_end(holders)
    granted[id] = admit(keys, options, holders, waiter, token)
    nearer = granted[id].closed_until < earliest
    local again
    head, again = grant_waiting(keys, options, holders, granted)
    changed = changed or again or nearer
    if head and lingers(granted[id].words) then
      granted[id].words = recalled(granted[id].words)
      write_record(state, granted[id])
    end
  end
end

if begins and granted[id] and begin(granted[id]) then
  write_record(state, granted[id])
end
if next(granted) or #dead > 0 then
  keep_state(state, holders)
  bury(state, dead)
end
if head and (changed or was_head) and head.id ~= id then
  hint(keys, options, head, holders)
end
if granted[id] then
  return held(granted[id])
end
if waiter then
  local look = -1
  if head and head.id == id then
    look = math.max(0, (earliest_end(holders) or now) - now)
  end
  return 'waiting ' .. int(waiter.deadline - now) .. ' ' .. int(look) .. ' ' .. token_floor(token_key)
end
if redis.call('HEXISTS', broken, id) == 1 then
  why = 'broken'
elseif why == 'gone' and #holders > 0 then
  why = 'taken_over'
end
return 'gone ' .. why
