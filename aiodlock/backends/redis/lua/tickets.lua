-- tickets: what the scripts of a quorum's node share; it comes after the prelude.
--
-- A vote        "mode token deadline length delay owner client ticket stage", in the state hash
-- A waiter      the same without a token yet: "mode 0 deadline length delay owner client ticket v", or "… h": it holds
--               by a majority of the nodes, and asks for this node's vote too
--               or "… w": it rests.
--               Both may go on with further words, which are kept, as `records` says.
-- The queue     a sorted set of request ids; the scores are tickets, so it has the same order on every node. Waiters of
--               stage `h` are in front of all others: without them nobody gets in elsewhere anyway. Those of stage `w`
--               are behind them all: their clients cannot count votes now. They keep their tickets, and get no vote.
-- Stages        v  given, and may be asked back
--               p  the same, with the token that the leaving holder proposed to all nodes: a request without
--                  lock-delay that has it from a majority holds already
--               c  confirmed: its request holds the name by a majority, with this token
--               a  given to an owner that has a confirmed vote here, with that token; it becomes a `v` when that is gone

-- Not confirmed: it goes back to an older request that asks for it, unless its client has a majority.
local function is_open(vote)
  return vote.stage == 'v' or vote.stage == 'p'
end

-- Only who has held closes the name behind itself.
local function closed_until(vote)
  return vote.deadline + (is_open(vote) and 0 or vote.delay)
end

local function decode_vote(id, text)
  local mode, token, deadline, length, delay, owner, client, ticket, stage, words = read_vote(text)
  local vote = {
    id = id, mode = mode, token = token, deadline = clamp(deadline, length), length = tonumber(length),
    delay = tonumber(delay), owner = owner, client = client, ticket = tonumber(ticket), stage = stage,
    words = words,
  }
  vote.set_back = vote.deadline < tonumber(deadline)
  vote.live = now < vote.deadline
  vote.closed_until = closed_until(vote)
  return vote
end

local function encode_vote(vote)
  return table.concat({
    vote.mode, vote.token, int(vote.deadline), int(vote.length), int(vote.delay), vote.owner, vote.client,
    int(vote.ticket), vote.stage,
  }, ' ') .. vote.words
end

-- Those that block, and the ids of the others; `only` of this request, if it is named: that does not tell what its owner holds.
local function load_votes(state, only)
  local votes, dead = {alone = only}, {}
  local fields = only and {only, redis.call('HGET', state, only) or nil} or redis.call('HGETALL', state)
  for i = 1, #fields - 1, 2 do
    local vote = decode_vote(fields[i], fields[i + 1])
    if now < vote.closed_until then
      if vote.set_back then
        redis.pcall('HSET', state, vote.id, encode_vote(vote)) -- an out-of-memory server may refuse it
      end
      votes[#votes + 1] = vote
    else
      dead[#dead + 1] = vote.id
    end
  end
  return votes, dead
end

local function find(votes, id)
  for index, vote in ipairs(votes) do
    if vote.id == id then
      return vote, index
    end
  end
end

-- Byte by byte, as a sorted set compares them: Lua's `<` follows the server's locale.
local function smaller(one, other)
  for i = 1, math.min(#one, #other) do
    local byte, other_byte = string.byte(one, i), string.byte(other, i)
    if byte ~= other_byte then
      return byte < other_byte
    end
  end
  return #one < #other
end

-- Whether one request goes before another, on every node alike.
local function before(one, other)
  return one.ticket < other.ticket or (one.ticket == other.ticket and smaller(one.id, other.id))
end

-- What the owner holds here for certain: its token, and whether it is exclusive.
local function confirmed_hold(owner, votes)
  local token, exclusive
  for _, vote in ipairs(votes) do
    if vote.owner == owner and vote.live and vote.stage == 'c' then
      token, exclusive = token or vote.token, exclusive or vote.mode == 'x'
    end
  end
  return token, exclusive
end

-- Larger than all tickets, and both together are exact: behind all who do not rest.
local RESTS = 4000000000000000

local function stand(keys, waiter)
  local score = waiter.ticket
  if waiter.stage == 'h' then
    score = 0
  elseif waiter.stage == 'w' then
    score = score + RESTS
  end
  redis.call('HSET', keys.waiters, waiter.id, encode_vote(waiter))
  redis.call('ZADD', keys.queue, int(score), waiter.id)
  keep_queue_until(keys.queue, keys.waiters, waiter.deadline)
end

local function withdraw(keys, id)
  redis.call('ZREM', keys.queue, id)
  return redis.call('HDEL', keys.waiters, id) == 1
end

-- The oldest live waiter that does not rest; overdue ones before it are dropped on the way.
local function find_oldest(keys)
  while true do
    local id = redis.call('ZRANGE', keys.queue, 0, 0)[1]
    if not id then
      redis.call('DEL', keys.queue, keys.waiters)
      return nil
    end
    local text = redis.call('HGET', keys.waiters, id)
    local waiter = text and decode_vote(id, text)
    if waiter and waiter.live then
      if waiter.set_back then
        redis.pcall('HSET', keys.waiters, id, encode_vote(waiter))
      end
      return waiter.stage ~= 'w' and waiter or nil
    end
    withdraw(keys, id)
  end
end

-- A vote that was given because its owner holds is one like others when that hold is over here: elsewhere it may have
-- been over before, and then somebody else has the votes. Under a token of its own it can be asked back.
local function open_again(keys, options, votes)
  for _, vote in ipairs(votes.alone and {} or votes) do
    if vote.stage == 'a' and vote.live and not confirmed_hold(vote.owner, votes) then
      vote.token, vote.stage = next_token(keys.token, options.retention), 'v'
      vote.closed_until = closed_until(vote)
      redis.call('HSET', keys.state, vote.id, encode_vote(vote))
    end
  end
end

-- Gives votes from the oldest waiter on, as far as the other votes allow, each with a notice.
-- Returns the waiter that is the oldest then.
local function vote_for_oldest(keys, options, votes, silent_for, wanted)
  local given = false
  open_again(keys, options, votes)
  while true do
    local oldest = find_oldest(keys)
    local token, exclusive
    if oldest then
      token, exclusive = confirmed_hold(oldest.owner, votes)
    end
    local again = token and (oldest.mode ~= 'x' or exclusive)
    if not oldest or not (again or compatible(oldest.mode, votes)) then
      if given then
        keep_state(keys.state, votes)
      end
      return oldest
    end
    local proposed = not again and take_wanted(keys.token, options, wanted)
    oldest.token = again and token or proposed or next_token(keys.token, options.retention)
    oldest.stage = again and 'a' or proposed and 'p' or 'v'
    oldest.closed_until = closed_until(oldest)
    redis.call('HSET', keys.state, oldest.id, encode_vote(oldest))
    votes[#votes + 1] = oldest
    given = true
    withdraw(keys, oldest.id)
    if oldest.id ~= silent_for then
      say(options.publish, options.channel .. oldest.client, 'granted', keys.state, oldest.id, oldest.token)
    end
  end
end

-- The vote may be asked back: a request with an older ticket waits here. (Maekawa 1985, corrected by Sanders 1987.)
-- Or one that holds elsewhere: it needs this vote when another node dies, and the other request cannot get in before.
local function in_the_way(vote, oldest)
  return oldest ~= nil and is_open(vote) and vote.live and (oldest.stage == 'h' or before(oldest, vote))
end

-- Tells those whose votes are in the way of the oldest. An inquiry that is lost is repeated by the next answer.
local function inquire(keys, options, votes, oldest)
  for _, vote in ipairs(votes) do
    if in_the_way(vote, oldest) then
      say(options.publish, options.channel .. vote.client, 'look', keys.state, vote.id, vote.token)
    end
  end
end

-- {'vote', token, ms left, stage, 1 if it is asked back, server time in us}
-- {'waiting', ms left, ms until the earliest blocker ends if it is the oldest, else -1, token floor,
--  server time in us}
local function answer(keys, id, votes, oldest, waiter)
  local vote = find(votes, id)
  if vote then
    local back = in_the_way(vote, oldest) and '1' or '0'
    local stage = is_open(vote) and 'v' or vote.stage
    return {'vote', vote.token, int(vote.deadline - now), stage, back, int(now_us)}
  end
  local look = -1
  if oldest and oldest.id == id then
    look = math.max(0, (earliest_end(votes) or now) - now)
  end
  return {'waiting', int(waiter.deadline - now), int(look), vote_floor(keys.token), int(now_us)}
end
