-- holders: a record of the state as a table. It stands where a script says so: extending a lease needs this and no more, and
-- it is what a server does most.

-- A server that is out of memory refuses a script's write that may need more of it, but only the first:
-- Lua does not roll back. Extending and leaving begin with a write that needs none and does nothing, so
-- that holders are kept, released and followed while new requests are refused.
local function need_no_memory(state)
  redis.call('HDEL', state, '')
end

-- The key outlives every record in it; it is never brought nearer.
local function keep_until(key, moment)
  local left = moment - now
  if redis.call('PTTL', key) < left then
    redis.call('PEXPIRE', key, int(left + 2))
  end
end

-- A deadline further away than the record's length means that the clock was set back. Whoever meets one
-- writes the clamped deadline, or the record would have its whole length left at every look.
local function clamp(deadline, length)
  return math.min(tonumber(deadline), now + tonumber(length))
end

local function decode_record(id, text)
  local mode, token, deadline, length, delay, owner, client, words = read_record(text)
  local record = {
    id = id, mode = mode, token = token, deadline = clamp(deadline, length), length = tonumber(length),
    delay = tonumber(delay), owner = owner, client = client, words = words,
  }
  record.set_back = record.deadline < tonumber(deadline)
  record.live = now < record.deadline
  record.closed_until = record.deadline + record.delay
  if words ~= '' and has_hold(words) then
    local hold, kept_until = string.match(words, ' h=(%d+)'), tonumber(string.match(words, ' u=(%d+)') or '')
    record.hold_until = clamp(kept_until or now + hold, hold)
    if kept_until and record.hold_until < kept_until then
      record.set_back = true
      record.words = string.gsub(words, ' u=%d+', ' u=' .. int(record.hold_until), 1)
    end
    if string.find(words, ' b=1', 1, true) then
      record.closed_until = math.max(record.closed_until, record.hold_until)
    end
  end
  return record
end

local function write_record(state, record, call)
  (call or redis.call)('HSET', state, record.id, table.concat({
    record.mode, record.token, int(record.deadline), int(record.length), int(record.delay),
    record.owner, record.client,
  }, ' ') .. record.words)
end

-- The body of this holder has begun, or is about to: from now on the name stays closed as long as its hold_at_least says.
-- True if that is new.
local function begin(record)
  if record.hold_until and not string.find(record.words, ' b=1', 1, true) then
    record.words = record.words .. ' b=1'
    record.closed_until = math.max(record.closed_until, record.hold_until)
    return true
  end
end

-- It is granted now: its hold_at_least counts from here.
local function count_hold(record)
  if record.words ~= '' and has_hold(record.words) then
    record.hold_until = now + tonumber(string.match(record.words, ' h=(%d+)'))
    record.words = record.words .. ' u=' .. int(record.hold_until)
  end
end
