-- time: what follows the clock: tokens. It stands behind it, or behind a short way that needs no more than the clock.

-- The microseconds as a token: to print the number takes four times as long.
local stamp = clock[1] .. string.sub('00000' .. clock[2], -6)

-- `%d` is as wide as the server's `long`, which has 32 bits on some machines; `%.0f` takes nearly three times as long.
local function int(number)
  return string.format(number < 2147483648 and '%d' or '%.0f', number)
end

-- Larger than every token before it and, when the key is gone, larger still: it follows the clock. The key is kept a second
-- longer than it has to be, so that few tokens touch its TTL.
local function next_token(key, retention)
  local token, keep = stamp, retention
  local last = redis.call('SET', key, token, 'KEEPTTL', 'GET')
  if last and tonumber(last) >= now_us then
    token = int(last + 1)
    keep = retention + math.ceil(token / 1000) - now
    redis.call('SET', key, token, 'KEEPTTL')
  end
  if redis.call('PTTL', key) < keep then
    redis.call('PEXPIRE', key, int(keep + 1000))
  end
  return token
end
