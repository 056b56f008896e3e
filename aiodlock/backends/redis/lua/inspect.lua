-- inspect: what people want to know of one or several names. It writes only where the clock was set back: a
-- deadline that is clamped at each look and never written would never come.
--
-- KEYS  1 state  2 queue  3 waiters  4 token  5 record, of names of kind `once` alone
-- They are followed by the same keys of the next name, and so on.
-- ARGV  1 the number of keys of a name: 4 or 5  2 'holders', or 'queues': then waiters are told, too
-- Result  for each name
--         {last token or '0', ms for which lock-delay still keeps the name closed,
--          {owner, mode, token, ms left, client, further words, length of the lease in ms, ...},
--          {owner, mode, ms waited, client, further words, ...},
--          the number of holders' places that lock-delay keeps closed,
--          {ms since a success was recorded, ms for which it stays on record} or {}}
--         and behind the last name, the server's time in us
local states, queues, waiters_of, tokens, records = {}, {}, {}, {}, {}
local each = tonumber(ARGV[1])
for at = 0, #KEYS - each, each do
  local state, queue, waiters, token, record_key = KEYS[at + 1], KEYS[at + 2], KEYS[at + 3], KEYS[at + 4], KEYS[at + 5]
  local number = #states + 1
  states[number], queues[number], waiters_of[number], tokens[number] = state, queue, waiters, token
  records[number] = each == 5 and record_key
end
-- Asked of all names together: most have no queue.
local any_queue = ARGV[2] ~= 'holders' and redis.call('EXISTS', unpack(queues)) > 0
tokens = redis.call('MGET', unpack(tokens))

local seen = {}
for number, queue in ipairs(queues) do
  local holding, size, closed, closed_places = {}, 0, 0, 0
  for _, record in ipairs((load_state(states[number]))) do
    if record.live then
      holding[size + 1], holding[size + 2], holding[size + 3] = record.owner, record.mode, record.token
      holding[size + 4], holding[size + 5] = int(record.deadline - now), record.client
      holding[size + 6], holding[size + 7], size = record.words, int(record.length), size + 7
    else
      closed, closed_places = math.max(closed, record.closed_until - now), closed_places + 1
    end
  end

  local waiting, deadlines = {}, {}
  local entries = any_queue and redis.call('XRANGE', queue, '-', '+') or {}
  local fields = entries[1] and redis.call('HGETALL', waiters_of[number]) or {}
  for i = 1, #fields, 2 do
    deadlines[fields[i]] = decode_waiter(fields[i + 1])
  end
  for _, entry in ipairs(entries) do
    local waiter = deadlines[entry[2][2]]
    if waiter and waiter.stream_id == entry[1] and now < waiter.deadline then
      if waiter.set_back then
        write_place(waiters_of[number], entry[2][2], waiter, redis.pcall)
      end
      read_wish(waiter, entry)
      local since = tonumber(string.match(entry[1], '^(%d+)'))
      for _, value in ipairs({
        waiter.owner, waiter.mode, int(math.max(0, now - since)), waiter.client, waiter.words,
      }) do
        waiting[#waiting + 1] = value
      end
    end
  end
  local recorded = {}
  local recorded_at = records[number] and redis.call('HGET', records[number], 'at')
  if recorded_at then
    recorded = {int(math.max(0, now - recorded_at)), redis.call('PTTL', records[number])}
  end
  seen[number] = {tokens[number] or '0', int(closed), holding, waiting, closed_places, recorded}
end
seen[#seen + 1] = int(now_us)
return seen
