-- tell: keep what a client tells of its waits, unless there is a newer record: an old message may arrive late.
--
-- KEYS  1 record, of the client
-- ARGV  1 serial (20 digits)  2 for how long it is kept (ms)  3 the record, or 'again' for the one that is there
-- Result  {'told'}, {'older'} (a newer record is there) or {'missing'} (there is none to be kept)
local record = KEYS[1]
local serial, keep, text = ARGV[1], ARGV[2], ARGV[3]
local there = string.sub(redis.call('GET', record) or '', 1, 20)
if there > serial then
  return {'older'}
end
if there == serial then
  redis.call('PEXPIRE', record, keep)
elseif text == 'again' then
  return {'missing'}
else
  redis.call('SET', record, serial .. text, 'PX', keep)
end
return {'told'}
