-- prelude: what the scripts share. It is put in front of each of them, or where one says so: what a script
-- needs often enough comes before, since making these functions takes the server longer than most answers.

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

-- `x` excludes all, `s` excludes `x`, `s3` is one of at most three; `s3r` is the same, and a request said so (`resize`).
local function compatible(mode, holders)
  if mode == 'x' then
    return #holders == 0
  end
  local limit = tonumber(string.match(mode, '%d+')) or math.huge
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
      read_wish(waiter, entry)
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

-- The waiter holds from now on, with the deadline it had: a ghost that is granted costs no more than one that waits.
local function admit(keys, options, holders, waiter, token)
  local record = {
    id = waiter.id, mode = waiter.mode, deadline = waiter.deadline, length = waiter.length, delay = waiter.delay,
    owner = waiter.owner, client = waiter.client, live = true, closed_until = waiter.deadline + waiter.delay,
    words = waiter.words,
  }
  count_hold(record)
  -- An out-of-memory server refuses the first of these writes, so none of them.
  record.token = token or next_token(keys.token, options.retention)
  write_record(keys.state, record)
  holders[#holders + 1] = record
  redis.call('XDEL', keys.queue, waiter.stream_id)
  redis.call('HDEL', keys.waiters, waiter.id)
  return record
end

-- Grants from the head on, as far as the holders allow, each with a notice to the one who waits; those of the
-- client `options.reader` are put into `options.reply` instead, which it is about to read.
-- Whoever lingers and is granted while others still wait is recalled at once: its token ends with `r` in the notice.
-- `granted` maps request ids to records. Returns the head that stays, and whether it is a new one.
local function grant_waiting(keys, options, holders, granted)
  local changed, new = false, {}
  local head, dropped
  while true do
    head, dropped = find_head(keys.queue, keys.waiters)
    changed = changed or dropped > 0
    if not head then
      break
    end
    local token, exclusive = hold_of(head.owner, holders)
    local again = token and (head.mode ~= 'x' or exclusive)
    if not again and not compatible(head.mode, holders) then
      break
    end
    local record = admit(keys, options, holders, head, again and token)
    granted[head.id] = record
    new[#new + 1] = record
    changed = true
  end
  for _, record in ipairs(new) do
    local token = record.token
    if head and lingers(record.words) then
      record.words = recalled(record.words)
      write_record(keys.state, record)
      token = token .. 'r'
    end
    local channel = options.channel .. record.client
    if record.client == options.reader then
      local reply = options.reply
      reply[#reply + 1], reply[#reply + 2] = record.id, token
      channel = channel .. ':own' -- the client does not listen there, who counts hand-overs does
    end
    say(options.publish, channel, 'granted', keys.state, record.id, token)
  end
  return head, changed
end

-- Somebody queues behind them, or is refused because of them: each that lingers is told so, once. Also one that is
-- overdue: if the clock is set back, it may be live again.
local function recall(keys, options, holders)
  for _, record in ipairs(holders) do
    if lingers(record.words) then
      record.words = recalled(record.words)
      write_record(keys.state, record, redis.pcall) -- an out-of-memory server may refuse it
      say(options.publish, options.channel .. record.client, 'recall', keys.state, record.id, record.token)
    end
  end
end

-- Another limit is in use: all who hold and wait have it from now on.
local function set_mode(keys, holders, mode)
  for _, record in ipairs(holders) do
    record.mode = mode
    write_record(keys.state, record)
  end
  local fields = redis.call('HGETALL', keys.waiters)
  for i = 1, #fields, 2 do
    local waiter = decode_waiter(fields[i + 1])
    waiter.place_words = string.gsub(waiter.place_words, ' m=[^ ]+', '') .. ' m=' .. mode
    write_place(keys.waiters, fields[i], waiter)
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

-- A success is on record: nobody holds and nobody waits any more. Each client is sent one message, with its requests, and they ask.
local function tell_done(keys, options)
  local clients, ids_of = {}, {}
  for _, entry in ipairs(redis.call('XRANGE', keys.queue, '-', '+')) do
    local _, _, _, client = read_entry(entry)
    if not ids_of[client] then
      clients[#clients + 1], ids_of[client] = client, {}
    end
    local ids = ids_of[client]
    ids[#ids + 1] = entry[2][2]
  end
  redis.call('DEL', keys.state, keys.queue, keys.waiters)
  for _, client in ipairs(clients) do
    redis.call(options.publish, options.channel .. client,
      'done ' .. keys.state .. ' ' .. table.concat(ids_of[client], ',') .. ' 0')
  end
end
