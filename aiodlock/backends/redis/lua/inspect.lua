-- inspect: what people want to know of one or several names. Writes nothing.
--
-- KEYS  1 state  2 queue  3 waiters  4 token
-- They are followed by the same four keys of the next name, and so on.
-- Result  for each name
--         {last token or '0', ms for which lock-delay still keeps the name closed,
--          {owner, mode, token, ms left, client, further words, ...},
--          {owner, mode, ms waited, client, further words, ...},
--          the number of holders' places that lock-delay keeps closed}
local states, queues, waiters_of, tokens = {}, {}, {}, {}
for at = 0, #KEYS - 4, 4 do
  local state, queue, waiters, token = KEYS[at + 1], KEYS[at + 2], KEYS[at + 3], KEYS[at + 4]
  local number = #states + 1
  states[number], queues[number], waiters_of[number], tokens[number] = state, queue, waiters, token
end
-- Asked of all names together: most have no queue.
local any_queue = redis.call('EXISTS', unpack(queues)) > 0
tokens = redis.call('MGET', unpack(tokens))

local seen = {}
for number, queue in ipairs(queues) do
  local holding, size, closed, closed_places = {}, 0, 0, 0
  for _, record in ipairs((load_state(states[number], true))) do
    if record.live then
      holding[size + 1], holding[size + 2], holding[size + 3] = record.owner, record.mode, record.token
      holding[size + 4], holding[size + 5] = int(record.deadline - now), record.client
      holding[size + 6], size = record.words, size + 6
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
      read_wish(waiter, entry)
      local since = tonumber(string.match(entry[1], '^(%d+)'))
      for _, value in ipairs({
        waiter.owner, waiter.mode, int(math.max(0, now - since)), waiter.client, waiter.words,
      }) do
        waiting[#waiting + 1] = value
      end
    end
  end
  seen[number] = {tokens[number] or '0', int(closed), holding, waiting, closed_places}
end
return seen
