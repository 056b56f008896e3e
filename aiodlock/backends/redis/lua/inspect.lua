-- inspect: what people want to know of one or several names. Writes nothing.
--
-- KEYS  1 state  2 queue  3 waiters  4 token
-- They are followed by the same four keys of the next name, and so on.
-- Result  for each name
--         {last token or '0', ms for which lock-delay still keeps the name closed,
--          {owner, mode, token, ms left, client, further words, ...},
--          {owner, mode, ms waited, client, further words, ...},
--          the number of holders' places that lock-delay keeps closed}
local seen = {}
for at = 0, #KEYS - 1, 4 do
  local state, queue, waiters, token_key = KEYS[at + 1], KEYS[at + 2], KEYS[at + 3], KEYS[at + 4]

  local holding, closed, closed_places = {}, 0, 0
  for _, record in ipairs((load_state(state, true))) do
    if record.live then
      local left = int(record.deadline - now)
      for _, value in ipairs({record.owner, record.mode, record.token, left, record.client, record.words}) do
        holding[#holding + 1] = value
      end
    else
      closed, closed_places = math.max(closed, record.closed_until - now), closed_places + 1
    end
  end

  local waiting, deadlines = {}, {}
  local entries = redis.call('XRANGE', queue, '-', '+')
  local fields = entries[1] and redis.call('HGETALL', waiters) or {}
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
  seen[#seen + 1] = {redis.call('GET', token_key) or '0', int(closed), holding, waiting, closed_places}
end
return seen
