-- vote: ask one node of a quorum for its vote, keep it, or make it count. One message for all, so that a node
-- which was away, or has forgotten, hears everything it needs; repeating it is harmless.
--
-- KEYS  1 state  2 queue  3 waiters  4 token  5 marker  6 broken
-- ARGV  1 id  2 mode  3 owner  4 length (ms)  5 lock-delay (ms)  6 client  7 ticket (us); a later one
--         than before counts from now on
--       8 "ask" for a vote or a place in the queue, "wait" for a place alone, since its client cannot count votes now
--         (a vote that it has stays, until it is given back by its token), "try" for a vote only, "fence": write the token,
--         "held": the name is held by a majority with this token; without a vote here it waits in front of all others
--       9 with "fence" and "held", that token; with "ask" and "wait", the largest one that its client has written in vain, '0' with none:
--         a vote that was confirmed with it, or with an older one, is open again; '0' with "try"
--       10 channel prefix  11 token retention (ms)  12 publish command
--       13 further words of the record, as `records` says; '' for none
--       14 with "held", the token by which its client knows this vote, '0' with none: a vote that the client has not heard of
--         is not confirmed, so a message that comes when its client is dead confirms no vote that was given since
-- Result  {'vote', token, ms left, stage, 1 if it is asked back, server time in us}
--         {'waiting', ms left, ms until the earliest blocker ends if it is the oldest, else -1,
--          token floor, server time in us}
--         {'busy', server time in us}  {'deadlock', server time in us}
--         {'gone', 'broken' | 'expired' | 'gone', server time in us}
local keys = {state = KEYS[1], queue = KEYS[2], waiters = KEYS[3], token = KEYS[4]}
local marker, broken = KEYS[5], KEYS[6]
local id, mode, owner, length = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local what, fence = ARGV[8], ARGV[9]
-- By how much the ticket is further in this node's future than clocks that are right can be apart (us).
local ahead = ARGV[7] - now_us - 1000000

-- One exclusive vote, somebody older who waits for another owner's, and both alive: where many want a name, the common
-- case. When three of the four keys are there, and state, queue and waiters are found, then there is no marker. It takes
-- 0.54 of the time of the way below.
if what == 'ask' and redis.call('EXISTS', keys.state, keys.queue, keys.waiters, marker) == 3 then
  local given = redis.call('HGETALL', keys.state)
  local oldest = #given == 2 and redis.call('ZRANGE', keys.queue, '0', '0')[1]
  local waiter = oldest and redis.call('HGET', keys.waiters, oldest)
  if waiter then
    local given_mode, _, given_until, given_for, _, given_to = read_vote(given[2])
    local _, _, waits_until, waits_for, _, waits_too, _, ticket, waits_as = read_vote(waiter)
    local given_left, waits_left = given_until - now, waits_until - now
    if given_mode == 'x' and given_to ~= owner and given_left > 0 and given_left <= tonumber(given_for)
      and waits_as ~= 'w' and given_to ~= waits_too and waits_left > 0 and waits_left <= tonumber(waits_for)
      and tonumber(ticket) < tonumber(ARGV[7]) and ahead <= 0 and redis.call('HEXISTS', keys.waiters, id) == 0
    then
      redis.call('HSET', keys.waiters, id, mode .. ' 0 ' .. int(now + length) .. ' ' .. ARGV[4] .. ' ' .. ARGV[5]
        .. ' ' .. owner .. ' ' .. ARGV[6] .. ' ' .. ARGV[7] .. ' v' .. ARGV[13])
      redis.call('ZADD', keys.queue, ARGV[7], id)
      keep_queue_until(keys.queue, keys.waiters, now + length)
      return {'waiting', ARGV[4], '-1', vote_floor(keys.token), int(now_us)}
    end
  end
end

-- (prelude)

local options = {channel = ARGV[10], retention = tonumber(ARGV[11]), publish = ARGV[12]}

-- An out-of-memory server refuses new requests, and those alone.
if what == 'held' or redis.call('HEXISTS', keys.state, id) == 1 or redis.call('HEXISTS', keys.waiters, id) == 1 then
  need_no_memory(keys.state)
end
if redis.call('EXISTS', marker) == 1 then
  return {'gone', 'gone', int(now_us)}
end
-- With that token or an older one it holds no more. Who asks does not hold, and waits again.
local broken_with = (what == 'fence' or what == 'held') and redis.call('HGET', broken, id)
if broken_with and tonumber(fence) <= tonumber(broken_with) then
  return {'gone', 'broken', int(now_us)}
end

-- No later vote of this node has a smaller token.
local function remember(token)
  local last = redis.call('GET', keys.token)
  if not last or tonumber(last) < tonumber(token) then
    local left = last and redis.call('PTTL', keys.token) or 0
    local keep = math.max(left, options.retention + math.max(0, math.ceil(tonumber(token) / 1000) - now))
    redis.call('SET', keys.token, token, 'PX', int(keep))
  end
end

local function push(record)
  record.ticket = math.max(record.ticket, ARGV[7])
  record.deadline = math.max(record.deadline, now + length)
  record.length = math.max(length, record.deadline - now)
end

local function keep(vote)
  vote.closed_until = closed_until(vote)
  redis.call('HSET', keys.state, id, encode_vote(vote))
  keep_until(keys.state, vote.closed_until)
end

-- Who goes on holding changes nothing for others, and need not know them: there may be thousands of readers.
local held = what == 'held' and redis.call('HGET', keys.state, id)
if held then
  local vote = decode_vote(id, held)
  if vote.live and (vote.stage == 'c' or vote.token == ARGV[14]) then
    push(vote)
    vote.token, vote.stage = fence, 'c'
    remember(fence)
    keep(vote)
    return answer(keys, id, {vote})
  end
end

-- Readers that hold together are told apart by their tokens too; the holds of one owner have the same.
local function taken(token)
  local word = ' ' .. token .. ' '
  for _, text in ipairs(mode == 'x' and {} or redis.call('HGETALL', keys.state)) do
    if string.find(text, word, 1, true) then
      local _, its_token, _, _, _, its_owner = read_vote(text)
      if its_token == token and its_owner ~= owner then
        return true
      end
    end
  end
end

-- While nobody waits, a token that is written changes nothing for others either.
local votes, dead = load_votes(keys.state, what == 'fence' and redis.call('EXISTS', keys.queue) == 0 and id)
local vote = find(votes, id)
local overdue = vote ~= nil and not vote.live
for i = #dead, 1, -1 do
  if dead[i] == id then
    redis.call('HDEL', keys.state, id)
    table.remove(dead, i)
    overdue = overdue or what == 'held' or what == 'fence'
  end
end
if overdue or (what == 'fence' and not vote) then
  return {'gone', overdue and 'expired' or 'gone', int(now_us)}
end

local waiter
if vote then
  push(vote)
  if what == 'fence' and tonumber(fence) >= tonumber(vote.token) then
    if fence ~= vote.token and taken(fence) then
      vote.token, vote.stage = next_token(keys.token, options.retention), 'v'
    else
      vote.token, vote.stage = fence, 'c'
      remember(fence)
    end
  elseif (what == 'ask' or what == 'wait') and vote.stage == 'c' and tonumber(fence) >= tonumber(vote.token) then
    vote.stage = 'v' -- its client could not confirm it by a majority
  end
  keep(vote)
else
  local token, exclusive = confirmed_hold(owner, votes)
  local deadlock = token and mode == 'x' and not exclusive
  local text = redis.call('HGET', keys.waiters, id)
  waiter = text and decode_vote(id, text)
  if waiter and waiter.live then
    push(waiter)
  elseif deadlock then
    return {'deadlock', int(now_us)}
  else
    waiter = {
      id = id, mode = mode, token = '0', deadline = now + length, length = length, delay = tonumber(ARGV[5]),
      owner = owner, client = ARGV[6], ticket = tonumber(ARGV[7]), live = true, words = ARGV[13],
    }
  end
  waiter.stage = what == 'held' and 'h' or what == 'wait' and 'w' or 'v'
  if token and not deadlock and what ~= 'wait' then
    -- Its owner is in already, and does not wait behind anybody.
    waiter.token, waiter.stage, waiter.closed_until = token, 'a', waiter.deadline + waiter.delay
    redis.call('HSET', keys.state, id, encode_vote(waiter))
    withdraw(keys, id)
    votes[#votes + 1] = waiter
    keep_state(keys.state, votes)
  else
    stand(keys, waiter)
  end
end

if (what == 'ask' or what == 'wait') and ahead > 0 then
  remember(ARGV[7]) -- who comes later is told of it by the floor, and takes a later ticket
end

local head_before = redis.call('ZRANGE', keys.queue, 0, 0)[1]
local oldest = vote_for_oldest(keys, options, votes, id)
bury(keys.state, dead)
if what == 'try' and not find(votes, id) then
  withdraw(keys, id)
  find_oldest(keys)
  return {'busy', int(now_us)}
end
if oldest and (oldest.id == id or oldest.id ~= head_before) then
  inquire(keys, options, votes, oldest)
  if oldest.id ~= id then
    hint(keys, options, oldest, votes)
  end
end
return answer(keys, id, votes, oldest, waiter)
