-- records: how what is kept of a request is read and written, and for how long its queue is. It stands at the head of each script, behind the time,
-- or behind its shortest way, which needs one word of one record.
--
-- A state record      "mode token deadline length delay owner client"
-- A queue entry       id <request id>, r "mode delay owner client"
-- A waiters record    "stream-id deadline length"
--
-- Each may go on with further words, " key=value" each. A script that does not know a word keeps it, and copies those of a
-- queue entry to the state record that follows it: so a later version adds words, and both work on the same names.
-- The words of this version:
--   h  hold_at_least (ms)             u  until when that keeps the name closed, since the grant
--   b  the body has begun, so u counts      l  left: what is kept of it only keeps the name closed
--   m  the mode that is in use for a semaphore, where it is another than that of the queue entry
--   g  the holder lingers: 1, or 2 once it is recalled, since others want the name
--   n, d  the note and the client's description, for people
-- Times are milliseconds of the server's clock, read once. Tokens are strings.

-- mode, token, deadline, length, delay, owner, client, further words
local function read_record(text)
  return string.match(text, '^([^ ]+) ([^ ]+) ([^ ]+) ([^ ]+) ([^ ]+) ([^ ]+) ([^ ]+)(.*)$')
end

-- stream id, deadline, length, further words
local function read_place(text)
  return string.match(text, '^([^ ]+) ([^ ]+) ([^ ]+)(.*)$')
end

-- mode, delay, owner, client, further words
local function read_entry(entry)
  return string.match(entry[2][4], '^([^ ]+) ([^ ]+) ([^ ]+) ([^ ]+)(.*)$')
end

local function lingers(words)
  return string.find(words, ' g=1', 1, true)
end

-- Others wait behind it: it must not linger. In place, so that it needs no more memory.
local function recalled(words)
  return (string.gsub(words, ' g=1', ' g=2', 1))
end

local function is_recalled(words)
  return string.find(words, ' g=2', 1, true)
end

local function has_hold(words)
  return string.find(words, ' h=', 1, true)
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
  return last and tonumber(last) > now_us and last or stamp
end
