-- lengths: the longest leases in use, which the clients of a quorum tell each other through its nodes.
--
-- KEYS  1 the hash: length of a lease (ms) -> until when it counts (ms of the server's clock)
-- ARGV  length and ms for which it counts from now on, in turn: what the client knows of
-- Result  the same, of all that the node knows
local kept, latest = {}, 0
local fields = redis.call('HGETALL', KEYS[1])
for i = 1, #fields, 2 do
  -- At most two digits of a length are no zeros. Anything else somebody else has written: it goes.
  local until_then = #fields[i] <= 8 and string.match(fields[i], '^%d%d?0*$') and tonumber(fields[i + 1])
  kept[fields[i]] = until_then and until_then < 9e15 and until_then or 0
end
for i = 1, #ARGV, 2 do
  local until_then = now + tonumber(ARGV[i + 1])
  if until_then > (kept[ARGV[i]] or 0) then
    kept[ARGV[i]] = until_then
    redis.call('HSET', KEYS[1], ARGV[i], int(until_then))
  end
end
local result = {}
for length, until_then in pairs(kept) do
  if until_then > now then
    latest = math.max(latest, until_then)
    result[#result + 1], result[#result + 2] = length, int(until_then - now)
  else
    redis.call('HDEL', KEYS[1], length)
  end
end
if latest > 0 then
  redis.call('PEXPIRE', KEYS[1], int(latest - now))
end
return result
