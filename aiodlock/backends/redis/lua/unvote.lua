-- unvote: give the vote of one node of a quorum back, or the place in its queue, and hand it on.
--
-- KEYS  1 state  2 queue  3 waiters  4 token  5 marker  6 broken
-- ARGV  1 id  2 "ended": the request is over; "lost": its lease ran out for the holder, so its lock-delay is
--         kept; "yield": an older request goes first, if one waits, and this one waits on;
--         "rest": its client cannot count votes now, so this one waits on and gets none
--       3 marker ttl (ms): refuse a late duplicate of the request for that long; 0 writes none
--       4 with "yield" and "rest", the token of the vote that is meant; else one for the next vote, the same on every node,
--         or '0'
--       5 channel prefix  6 token retention (ms)  7 publish command
-- Result  {'released'}  {'withdrawn'}  {'gone', 'broken' | 'expired' | 'gone'}
--         with "yield" and "rest" what the script vote answers, or {'gone', 'gone', server time in us}
local keys = {state = KEYS[1], queue = KEYS[2], waiters = KEYS[3], token = KEYS[4]}
local marker, broken = KEYS[5], KEYS[6]
local id, what = ARGV[1], ARGV[2]
local options = {channel = ARGV[5], retention = tonumber(ARGV[6]), publish = ARGV[7]}
local gives_back = what == 'yield' or what == 'rest'
local wanted = not gives_back and ARGV[4] ~= '0' and ARGV[4] or nil

-- Of a waiter who lives, and does not hold elsewhere: the ms left, and its record in pieces.
local function alive(text)
  local mode, _, deadline, length, delay, owner, client, ticket, stage, words = read_vote(text or '')
  local left = mode and deadline - now
  if left and left > 0 and left <= tonumber(length) and stage ~= 'h' and stage ~= 'w' then
    return left, mode, deadline, length, delay, owner, client, ticket, words
  end
end

-- The only vote, followed by an exclusive request, and all that is looked at alive: where many want a name, the
-- common case. Who is the oldest then is told to look, unless it will ask soon enough by itself. It takes 0.59 of the time
-- of the way below.
local function hand_on()
  local given = redis.call('HGETALL', keys.state)
  if #given ~= 2 or given[1] ~= id or now >= tonumber((select(3, read_vote(given[2])))) then
    return
  end
  local oldest = redis.call('ZRANGE', keys.queue, '0', '1')
  local next_id, second_id = oldest[1], oldest[2]
  local left, mode, deadline, length, delay, owner, client, ticket, words =
    alive(redis.call('HGET', keys.waiters, next_id))
  if mode ~= 'x' then
    return
  end
  local asks_in, second_client
  if second_id then
    local second_left, _, _, second_length, _, _, its_client = alive(redis.call('HGET', keys.waiters, second_id))
    if not second_left then
      return
    end
    asks_in, second_client = second_left - second_length * 2 / 3, its_client
  end
  -- Needs no memory: what follows is not refused by a server that is out of it.
  redis.call('HDEL', keys.state, '')
  local proposed = take_wanted(keys.token, options, wanted)
  local token = proposed or next_token(keys.token, options.retention)
  redis.call('HSET', keys.state, next_id, 'x ' .. token .. ' ' .. deadline .. ' ' .. length .. ' ' .. delay .. ' '
    .. owner .. ' ' .. client .. ' ' .. ticket .. (proposed and ' p' or ' v') .. words)
  if second_id then
    redis.call('ZREM', keys.queue, next_id)
    redis.call('HDEL', keys.waiters, next_id)
  else
    redis.call('DEL', keys.queue, keys.waiters)
  end
  redis.call('PEXPIRE', keys.state, int(left + 2))
  redis.call('HDEL', keys.state, id)
  redis.call(options.publish, options.channel .. client, 'granted ' .. keys.state .. ' ' .. next_id .. ' ' .. token)
  if second_id and left < asks_in then
    redis.call(options.publish, options.channel .. second_client, 'look ' .. keys.state .. ' ' .. second_id .. ' 0')
  end
  return {'released'}
end

local is_queue = redis.call('EXISTS', keys.queue) == 1
if is_queue and what == 'ended' and ARGV[3] == '0' then
  local answer = hand_on()
  if answer then
    return answer
  end
end

-- (prelude)

need_no_memory(keys.state)
if ARGV[3] ~= '0' then
  redis.call('SET', marker, '1', 'PX', ARGV[3])
end
local head_before = redis.call('ZRANGE', keys.queue, 0, 0)[1]
-- While nobody waits, a leave changes nothing for the others: there may be thousands of readers. The last few look at all,
-- so that nothing is left of those that died.
local alone = not is_queue and not gives_back and redis.call('HLEN', keys.state) > 8
local votes, dead = load_votes(keys.state, alone and id)
local vote, index = find(votes, id)

if gives_back then
  local oldest = find_oldest(keys)
  local meant = vote and vote.live and is_open(vote) and vote.token == ARGV[4]
  if meant and what == 'yield' and not in_the_way(vote, oldest) then
    -- Who gave it back counts it no more: under a token of its own it is a new vote, which a late
    -- repetition of this does not take.
    vote.token, vote.stage = next_token(keys.token, options.retention), 'v'
    redis.call('HSET', keys.state, id, encode_vote(vote))
  elseif meant then
    table.remove(votes, index)
    votes.known = nil
    vote.token, vote.stage = '0', what == 'rest' and 'w' or 'v'
    stand(keys, vote)
    oldest = vote_for_oldest(keys, options, votes, id)
    if not find(votes, id) then
      dead[#dead + 1] = id
    end
  end
  bury(keys.state, dead)
  local text = redis.call('HGET', keys.waiters, id)
  local waiter = text and decode_vote(id, text)
  if find(votes, id) or (waiter and waiter.live) then
    return answer(keys, id, votes, oldest, waiter)
  end
  return {'gone', 'gone', int(now_us)}
end

local result = {'gone', 'gone'}
if withdraw(keys, id) then
  result = {'withdrawn'}
end
if vote and vote.live and (what ~= 'lost' or vote.delay == 0) then
  table.remove(votes, index)
  dead[#dead + 1] = id
  result = {'released'}
elseif vote then
  -- Lost, here or for its holder, and within its lock-delay: leaving does not open the name early.
  result = {'gone', 'expired'}
end
local oldest = vote_for_oldest(keys, options, votes, nil, wanted)
bury(keys.state, dead)
if oldest and oldest.id ~= head_before then
  inquire(keys, options, votes, oldest)
  hint(keys, options, oldest, votes)
end
if result[1] == 'gone' and redis.call('HEXISTS', broken, id) == 1 then
  return {'gone', 'broken'}
end
return result
