-- records: how what is kept of a request is read and written. It stands at the head of each script, behind the time,
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
