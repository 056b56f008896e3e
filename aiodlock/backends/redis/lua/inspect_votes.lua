-- inspect_votes: what one node of a quorum knows of a name. Like `inspect`, it writes only clamped deadlines.
--
-- KEYS  1 state  2 queue  3 waiters  4 token
-- Result  {last token or '0', ms for which lock-delay still keeps the name closed,
--          {id, owner, mode, token, ms left, client, stage, ticket, further words, length in ms, ...},
--          {id, owner, mode, client, ticket, further words, ...}, server time in us}
local state, queue, waiters, token_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]

local voted, closed = {}, 0
for _, vote in ipairs((load_votes(state))) do
  if vote.live then
    for _, value in ipairs({
      vote.id, vote.owner, vote.mode, vote.token, int(vote.deadline - now), vote.client, vote.stage, int(vote.ticket),
      vote.words, int(vote.length),
    }) do
      voted[#voted + 1] = value
    end
  else
    closed = math.max(closed, vote.closed_until - now)
  end
end
local waiting = {}
for _, id in ipairs(redis.call('ZRANGE', queue, 0, -1)) do
  local text = redis.call('HGET', waiters, id)
  local waiter = text and decode_vote(id, text)
  if waiter and waiter.live then
    if waiter.set_back then
      redis.pcall('HSET', waiters, id, encode_vote(waiter))
    end
    for _, value in ipairs({id, waiter.owner, waiter.mode, waiter.client, int(waiter.ticket), waiter.words}) do
      waiting[#waiting + 1] = value
    end
  end
end
return {redis.call('GET', token_key) or '0', int(closed), voted, waiting, int(now_us)}
