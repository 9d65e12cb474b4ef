-- Reports of the replicas of a pool to each other, for people. No decision reads them.
--
-- KEYS[1]  the root of the pool. The reports are in the hash `<root>:reports`, replica -> 'MICROSECONDS REPORT'. It
--          vanishes when none was written for as long as a replica may be silent.
-- ARGV[1]  share | leave
-- ARGV[2]  the replica
-- ARGV[3]  share: its report, any bytes
--
-- RETURN   share: {REPLICA, AGE_US, REPORT, ...} of the others, at most 128. Reports of silent replicas are removed.
--          leave: {}
--
-- The time is that of the Redis server.

local SILENCE_US, SILENCE_MS = 10000000, 10000
local MOST = 128

local key, replica = KEYS[1] .. ':reports', ARGV[2]

if ARGV[1] == 'leave' then
  redis.call('HDEL', key, replica)
  return {}
end

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local others, count = {}, 0
local fields = redis.call('HGETALL', key)
for index = 1, #fields, 2 do
  local stamp = string.match(fields[index + 1], '^%d+')
  local age = now - (tonumber(stamp) or 0)
  if age > SILENCE_US then
    redis.call('HDEL', key, fields[index])
  elseif fields[index] ~= replica and count < MOST then
    count = count + 1
    others[#others + 1] = fields[index]
    others[#others + 1] = string.format('%.0f', age)
    others[#others + 1] = string.sub(fields[index + 1], #stamp + 2)
  end
end
redis.call('HSET', key, replica, string.format('%.0f ', now) .. ARGV[3])
redis.call('PEXPIRE', key, SILENCE_MS)
return others
