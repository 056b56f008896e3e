-- records: how a record of the state is read, written and kept. It stands in front of the prelude, or where a script
-- says so: extending a lease needs this and nothing else, and it is what a server does most.

-- A server that is out of memory refuses a script's write that may need more of it, but only the first:
-- Lua does not roll back. Extending and leaving begin with a write that needs none and does nothing, so
-- that holders are kept, released and followed while new requests are refused.
local function need_no_memory(state)
  redis.call('HDEL', state, '')
end

-- A deadline further away than the record's length means that the clock was set back. Whoever meets one
-- writes the clamped deadline, or the record would have its whole length left at every look.
local function clamp(deadline, length)
  return math.min(tonumber(deadline), now + tonumber(length))
end

local function decode_record(id, text)
  local mode, token, deadline, length, delay, owner, client =
    string.match(text, '^([^ ]+) ([^ ]+) ([^ ]+) ([^ ]+) ([^ ]+) ([^ ]+) ([^ ]+)$')
  local record = {
    id = id, mode = mode, token = token, deadline = clamp(deadline, length), length = tonumber(length),
    delay = tonumber(delay), owner = owner, client = client,
  }
  record.set_back = record.deadline < tonumber(deadline)
  record.live = now < record.deadline
  record.closed_until = record.deadline + record.delay
  return record
end

local function write_record(state, record, call)
  (call or redis.call)('HSET', state, record.id, table.concat({
    record.mode, record.token, int(record.deadline), int(record.length), int(record.delay),
    record.owner, record.client,
  }, ' '))
end

-- The key outlives every record in it; it is never brought nearer.
local function keep_until(key, moment)
  local left = moment - now
  if redis.call('PTTL', key) < left then
    redis.call('PEXPIRE', key, int(left + 2))
  end
end
