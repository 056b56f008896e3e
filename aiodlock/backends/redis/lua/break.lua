-- break: an operator's release of all holders, or of those with certain tokens. Waiters stay, holders are told.
-- Without tokens, lock-delay and holds are ignored too: the name is open afterwards.
--
-- KEYS  1 state  2 queue  3 waiters  4 token  5 broken
-- ARGV  1 channel prefix  2 token retention (ms)  3 publish command  4 ms for which the break is remembered
--       5 `all`, or the tokens of the holders that are released, with spaces between them
-- Result  the number of live requests that held
local state, queue, waiters, token_key, broken = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local options = {channel = ARGV[1], retention = tonumber(ARGV[2]), publish = ARGV[3]}
local keys = {state = state, queue = queue, waiters = waiters, token = token_key}

need_no_memory(state)
local holders, dead = load_state(state)
local count, kept = 0, {}
local all, wanted = ARGV[5] == 'all', ' ' .. ARGV[5] .. ' '
local remember = tonumber(ARGV[4])
for _, record in ipairs(holders) do
  if not all and not (record.live and string.find(wanted, ' ' .. record.token .. ' ', 1, true)) then
    kept[#kept + 1] = record
  elseif record.live then
    count = count + 1
    remember = math.max(remember, record.deadline - now)
    redis.call('HSET', broken, record.id, '1')
    say(options.publish, options.channel .. record.client, 'broken', state, record.id, record.token)
    dead[#dead + 1] = record.id
  else
    dead[#dead + 1] = record.id
  end
end
if count > 0 then
  keep_until(broken, now + remember)
end
local granted = {}
local head = grant_waiting(keys, options, kept, granted)
if next(granted) then
  keep_state(state, kept)
end
bury(state, dead)
if head then
  hint(keys, options, head, kept)
end
return count
