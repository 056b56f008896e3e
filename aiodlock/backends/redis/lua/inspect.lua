-- inspect: what people want to know of a name. Writes nothing.
--
-- KEYS  1 state  2 queue  3 waiters  4 token
-- Result  {last token or '0', ms for which lock-delay still keeps the name closed,
--          {owner, mode, token, ms left, client, ...}, {owner, mode, ms waited, client, ...},
--          the number of holders' places that lock-delay keeps closed}
local state, queue, waiters, token_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]

local holding, closed, closed_places = {}, 0, 0
for _, record in ipairs((load_state(state, true))) do
  if record.live then
    for _, value in ipairs({record.owner, record.mode, record.token, int(record.deadline - now), record.client}) do
      holding[#holding + 1] = value
    end
  else
    closed, closed_places = math.max(closed, record.closed_until - now), closed_places + 1
  end
end

local deadlines = {}
local fields = redis.call('HGETALL', waiters)
for i = 1, #fields, 2 do
  deadlines[fields[i]] = decode_waiter(fields[i + 1])
end
local waiting = {}
for _, entry in ipairs(redis.call('XRANGE', queue, '-', '+')) do
  local waiter = deadlines[entry[2][2]]
  if waiter and waiter.stream_id == entry[1] and now < waiter.deadline then
    local mode, _, owner, client = string.match(entry[2][4], '^([^ ]+) ([^ ]+) ([^ ]+) ([^ ]+)$')
    local since = tonumber(string.match(entry[1], '^(%d+)'))
    for _, value in ipairs({owner, mode, int(math.max(0, now - since)), client}) do
      waiting[#waiting + 1] = value
    end
  end
end
return {redis.call('GET', token_key) or '0', int(closed), holding, waiting, closed_places}
