-- time: the server's clock, read once, and what follows it: tokens, and until when a queue is kept. It stands at the
-- head of each script, before the short ways that need no prelude.

local clock = redis.call('TIME')
local now_us = clock[1] * 1000000 + clock[2]
local now = math.floor(now_us / 1000)

local function int(number)
  return string.format('%.0f', number)
end

-- Larger than every token before it and, when the key is gone, larger still: it follows the clock.
local function next_token(key, retention)
  local last = redis.call('GET', key)
  local token = now_us
  local left = -2
  if last then
    token = math.max(tonumber(last) + 1, now_us)
    left = redis.call('PTTL', key)
  end
  local keep = math.max(left, retention + math.max(0, math.ceil(token / 1000) - now))
  token = int(token)
  redis.call('SET', key, token, 'PX', int(keep))
  return token
end

-- Waiters are extended all the time: round up to whole seconds, so that few of the beats touch a TTL.
local function keep_queue_until(queue, waiters, moment)
  local left = moment - now
  if redis.call('PTTL', waiters) < left then
    local rounded = int((math.ceil(left / 1000) + 1) * 1000)
    redis.call('PEXPIRE', waiters, rounded)
    redis.call('PEXPIRE', queue, rounded)
  end
end

-- Every later grant has a larger token than this, so a notice with one that is not larger is stale.
local function token_floor(key)
  local last = redis.call('GET', key)
  return int(last and math.max(tonumber(last), now_us) or now_us)
end
