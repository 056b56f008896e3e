-- tell: keep what a client tells of its waits, unless there is a newer record. An old message may arrive late.
--
-- KEYS  1 the client's record
-- ARGV  1 serial (20 digits)  2 for how long it is kept (ms)  3 the record, or 'again' for the one that is there
-- Result  {'told'}, {'older'} (a newer record is there) or {'missing'} (there is none to be kept)
local key = KEYS[1]
local serial, keep, record = ARGV[1], ARGV[2], ARGV[3]
local there = string.sub(redis.call('GET', key) or '', 1, 20)
if there > serial then
  return {'older'}
end
if there == serial then
  redis.call('PEXPIRE', key, keep)
elseif record == 'again' then
  return {'missing'}
else
  redis.call('SET', key, serial .. record, 'PX', keep)
end
return {'told'}
