-- tokens: what a quorum's node says and hears of them, and how it reads a vote. It comes after the records, before the short
-- ways that need no prelude.

-- mode, token, deadline, length, delay, owner, client, ticket, stage, further words
local function read_vote(text)
  return string.match(text,
    '^([^ ]+) ([^ ]+) ([^ ]+) ([^ ]+) ([^ ]+) ([^ ]+) ([^ ]+) ([^ ]+) ([^ ]+)(.*)$')
end

-- Every later vote of this node has a larger token than this, so a notice with one that is not larger is stale.
local function vote_floor(key)
  return redis.call('GET', key) or int(now_us - 1)
end

-- Takes the token for the next vote that the leaving holder wants on every node, if it is larger than all that
-- this node gave or took. Without the last one it cannot be told: then the clock decides.
local function take_wanted(key, options, wanted)
  local last = wanted and redis.call('GET', key)
  if last and tonumber(last) < tonumber(wanted) then
    local ahead = math.max(0, math.ceil(tonumber(wanted) / 1000) - now)
    redis.call('SET', key, wanted, 'PX', int(math.max(redis.call('PTTL', key), options.retention + ahead)))
    return wanted
  end
end
