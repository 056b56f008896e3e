-- prelude: what the scripts share. It is put in front of each of them, or where one says so: what a script
-- needs often enough comes before, since making these functions takes the server longer than most answers.
--
-- A state record      "mode token deadline length delay owner client"
-- A queue entry       id <request id>, r "mode delay owner client"
-- A waiters record    "stream-id deadline length"
-- Times are milliseconds of the server's clock, read once. Tokens are strings.

local function bury(state, dead)
  for first = 1, #dead, 1000 do
    redis.call('HDEL', state, unpack(dead, first, math.min(first + 999, #dead)))
  end
end

local function keep_state(state, holders)
  if #holders == 1 then
    redis.call('PEXPIRE', state, int(holders[1].closed_until - now + 2))
    return
  end
  local latest = 0
  for _, record in ipairs(holders) do
    latest = math.max(latest, record.closed_until)
  end
  if latest > 0 then
    keep_until(state, latest)
  end
end

-- Is one of the holders exclusive, and what does each owner hold by live records? Kept with the list, which only
-- grows: when thousands are granted in one script, a look at all for each of them would take seconds.
local function summary(holders)
  local known = holders.known or {seen = 0, owners = {}}
  holders.known = known
  for i = known.seen + 1, #holders do
    local record = holders[i]
    known.exclusive = known.exclusive or record.mode == 'x'
    if record.live then
      local own = known.owners[record.owner] or {token = record.token}
      own.exclusive = own.exclusive or record.mode == 'x'
      known.owners[record.owner] = own
    end
  end
  known.seen = #holders
  return known
end

-- Does `owner` hold already? Its token and the strongest mode, from live records only.
local function hold_of(owner, holders)
  local own = summary(holders).owners[owner]
  if own then
    return own.token, own.exclusive
  end
end

-- `x` excludes all, `s` excludes `x`, `s3` is one of at most three.
local function compatible(mode, holders)
  if mode == 'x' then
    return #holders == 0
  end
  local limit = tonumber(string.sub(mode, 2)) or math.huge
  if #holders >= limit then
    return false
  end
  return not summary(holders).exclusive
end

local function earliest_end(holders)
  local earliest
  for _, record in ipairs(holders) do
    if not earliest or record.closed_until < earliest then
      earliest = record.closed_until
    end
  end
  return earliest
end

local function say(publish, channel, word, state, id, token)
  redis.call(publish, channel, table.concat({word, state, id, token}, ' '))
end

-- All at once: many dead waiters cost together what one costs, also after the clock was set back.
local function clamp_waiters(waiters)
  local fields = redis.call('HGETALL', waiters)
  for i = 1, #fields, 2 do
    local waiter = decode_waiter(fields[i + 1])
    if waiter.set_back then
      redis.pcall('HSET', waiters, fields[i],
        table.concat({waiter.stream_id, int(waiter.deadline), int(waiter.length)}, ' '))
    end
  end
end

-- The first live entry of the queue; overdue ones before it are dropped on the way.
local function find_head(queue, waiters)
  local dropped = 0
  while true do
    local entry = redis.call('XRANGE', queue, '-', '+', 'COUNT', '1')[1]
    if not entry then
      redis.call('DEL', queue, waiters)
      return nil, dropped
    end
    local id = entry[2][2]
    local text = redis.call('HGET', waiters, id)
    local waiter = text and decode_waiter(text)
    local own = waiter and waiter.stream_id == entry[1]
    if own and now < waiter.deadline then
      waiter.id = id
      waiter.mode, waiter.delay, waiter.owner, waiter.client =
        string.match(entry[2][4], '^([^ ]+) ([^ ]+) ([^ ]+) ([^ ]+)$')
      if waiter.set_back then
        clamp_waiters(waiters)
      end
      return waiter, dropped
    end
    redis.call('XDEL', queue, entry[1])
    if own then
      redis.call('HDEL', waiters, id)
    end
    dropped = dropped + 1
  end
end

-- Grants from the head on, as far as the holders allow, each with a notice to the one who waits; those of the
-- client `options.reader` are put into `options.reply` instead, which it is about to read.
-- `granted` maps request ids to records. Returns the head that stays, and whether it is a new one.
local function grant_waiting(keys, options, holders, granted)
  local changed = false
  while true do
    local head, dropped = find_head(keys.queue, keys.waiters)
    changed = changed or dropped > 0
    if not head then
      return nil, changed
    end
    local token, exclusive = hold_of(head.owner, holders)
    local again = token and (head.mode ~= 'x' or exclusive)
    if not again and not compatible(head.mode, holders) then
      return head, changed
    end
    -- A granted waiter keeps the deadline it had: a ghost that is granted costs no more than one that waits.
    local record = {
      id = head.id, mode = head.mode, deadline = head.deadline, length = head.length,
      delay = tonumber(head.delay), owner = head.owner, client = head.client, live = true,
      closed_until = head.deadline + tonumber(head.delay),
    }
    -- An out-of-memory server refuses the first of these writes, so none of them.
    record.token = again and token or next_token(keys.token, options.retention)
    write_record(keys.state, record)
    holders[#holders + 1] = record
    granted[head.id] = record
    redis.call('XDEL', keys.queue, head.stream_id)
    redis.call('HDEL', keys.waiters, head.id)
    local channel = options.channel .. head.client
    if head.client == options.reader then
      local reply = options.reply
      reply[#reply + 1], reply[#reply + 2] = head.id, record.token
      channel = channel .. ':own' -- the client does not listen there, who counts hand-overs does
    end
    say(options.publish, channel, 'granted', keys.state, head.id, record.token)
    changed = true
  end
end

-- A head that did not know when to look is told to, unless it will ask soon enough by itself.
local function hint(keys, options, head, holders)
  local look = earliest_end(holders)
  local next_extension = head.deadline - head.length * 2 / 3
  if look and look < next_extension then
    say(options.publish, options.channel .. head.client, 'look', keys.state, head.id, '0')
  end
end
