-- break_votes: an operator's release of all holders, or of certain requests, on one node of a quorum. Waiters
-- stay, holders are told. Without ids, lock-delay is ignored too, and votes of requests that do not hold yet stay; who
-- may hold already does not. Tokens differ by node until a request holds: so requests are named here.
--
-- KEYS  1 state  2 queue  3 waiters  4 token  5 broken
-- ARGV  1 channel prefix  2 token retention (ms)  3 publish command  4 ms for which the break is remembered
--       5 `all`, or the ids of the requests that are meant, with spaces between them
-- Result  the ids of the live requests that held
local keys = {state = KEYS[1], queue = KEYS[2], waiters = KEYS[3], token = KEYS[4]}
local broken = KEYS[5]
local options = {channel = ARGV[1], retention = tonumber(ARGV[2]), publish = ARGV[3]}

need_no_memory(keys.state)
local votes, dead = load_votes(keys.state)
local ids, kept = {}, {}
local all, wanted = ARGV[5] == 'all', ' ' .. ARGV[5] .. ' '
local remember = tonumber(ARGV[4])
for _, vote in ipairs(votes) do
  if all and vote.stage == 'v' or not all and not (vote.live and string.find(wanted, ' ' .. vote.id .. ' ', 1, true)) then
    kept[#kept + 1] = vote
  else
    if vote.live then
      ids[#ids + 1] = vote.id
      remember = math.max(remember, vote.deadline - now)
      redis.call('HSET', broken, vote.id, vote.token)
      say(options.publish, options.channel .. vote.client, 'broken', keys.state, vote.id, vote.token)
    end
    dead[#dead + 1] = vote.id
  end
end
if #ids > 0 then
  keep_until(broken, now + remember)
end
local oldest = vote_for_oldest(keys, options, kept)
bury(keys.state, dead)
if oldest then
  inquire(keys, options, kept, oldest)
  hint(keys, options, oldest, kept)
end
return ids
