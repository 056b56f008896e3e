-- reading: how the holders and the waiters of a name are read. It stands between holders and prelude. To tell people of a
-- name takes no more than these.

-- Holders that block, and the ids of those that are overdue and past their lock-delay. The dead are
-- removed last (`bury`): a removal before the successor is written would make the key vanish.
local function load_state(state)
  local holders, dead = {}, {}
  local fields = redis.call('HGETALL', state)
  for i = 1, #fields, 2 do
    local record = decode_record(fields[i], fields[i + 1])
    if now < record.closed_until then
      if record.set_back then
        write_record(state, record, redis.pcall) -- an out-of-memory server may refuse it, and a user may only read
      end
      holders[#holders + 1] = record
    else
      dead[#dead + 1] = record.id
    end
  end
  return holders, dead
end

local function decode_waiter(text)
  local stream_id, deadline, length, place_words = read_place(text)
  local waiter = {
    stream_id = stream_id, deadline = clamp(deadline, length), length = tonumber(length), place_words = place_words,
  }
  waiter.set_back = waiter.deadline < tonumber(deadline)
  return waiter
end

local function write_place(waiters, id, waiter, call)
  (call or redis.call)('HSET', waiters, id, table.concat({
    waiter.stream_id, int(waiter.deadline), int(waiter.length),
  }, ' ') .. waiter.place_words)
end

-- What its queue entry says of it, too.
local function read_wish(waiter, entry)
  waiter.mode, waiter.delay, waiter.owner, waiter.client, waiter.words = read_entry(entry)
  waiter.delay = tonumber(waiter.delay)
  if waiter.place_words ~= '' then
    waiter.mode = string.match(waiter.place_words, ' m=([^ ]+)') or waiter.mode
  end
end

-- All at once: many dead waiters cost together what one costs, also after the clock was set back.
local function clamp_waiters(waiters)
  local fields = redis.call('HGETALL', waiters)
  for i = 1, #fields, 2 do
    local waiter = decode_waiter(fields[i + 1])
    if waiter.set_back then
      write_place(waiters, fields[i], waiter, redis.pcall)
    end
  end
end
