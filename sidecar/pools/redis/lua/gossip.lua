-- Reports of the replicas of a pool to each other, for people and for learned lengths. No admission reads them.
--
-- In a pool of at most 8 replicas each reads the reports of all others. In a larger one that would grow with the square
-- of their number: there one of them, the merger, reads all reports and writes one merged text, and the others read
-- only that. Whoever finds no merger becomes it, and stays it by writing: who does not write for 4 s loses the lease.
--
-- KEYS[1]  the root of the pool. `<root>:reports`, a hash, replica -> 'MICROSECONDS REPORT', and `<root>:merged`, 'MICROSECONDS TEXT',
--          last for as long as a replica may be silent; `<root>:merger`, the replica that merges, for its lease
-- ARGV     share, the replica, its report | merged, the replica, the merged text | leave, the replica. Texts are any bytes
--
-- RETURN   share: {'each', REPLICA, AGE_US, REPORT, ...} of the others, at most 128, in a small pool;
--                 {'merge', ...} the same for the merger, which is to write the merged text;
--                 {'merged', AGE_US, TEXT} for the others, or {'merged'} while there is none.
--                 Reports of silent replicas, and those that are too long, are left out.
--          merged, leave: {}

local SILENCE_US, SILENCE_MS, LEASE_MS, MOST, FEW, MOST_BYTES = 10000000, 10000, 4000, 128, 8, 65536

local reports, merger, merged = KEYS[1] .. ':reports', KEYS[1] .. ':merger', KEYS[1] .. ':merged'
local action, replica = ARGV[1], ARGV[2]

if action == 'leave' then
  redis.call('HDEL', reports, replica)
  if redis.call('GET', merger) == replica then redis.call('DEL', merger) end
  return {}
end

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

local function stamped(text) return string.format('%d ', now) .. text end

-- The age and the text of what was written; nothing where it is too old or too long.
local function read(written)
  local stamp = string.match(written, '^%d+') or ''
  local age = now - (tonumber(stamp) or 0)
  if age <= SILENCE_US and #written - #stamp - 1 <= MOST_BYTES then
    return string.format('%d', age), string.sub(written, #stamp + 2)
  end
end

if action == 'merged' then
  if redis.call('GET', merger) == replica then
    redis.call('SET', merged, stamped(ARGV[3]), 'PX', SILENCE_MS)
    redis.call('PEXPIRE', merger, LEASE_MS)
  end
  return {}
end

redis.call('HSET', reports, replica, stamped(ARGV[3]))
redis.call('PEXPIRE', reports, SILENCE_MS)

local is_small = redis.call('HLEN', reports) <= FEW
if not is_small then
  redis.call('SET', merger, replica, 'NX', 'PX', LEASE_MS)
  if redis.call('GET', merger) ~= replica then
    return { 'merged', read(redis.call('GET', merged) or '') }
  end
end

local answer, count = { is_small and 'each' or 'merge' }, 0
local fields = redis.call('HGETALL', reports)
for index = 1, #fields, 2 do
  local age, report = read(fields[index + 1])
  if not age then
    redis.call('HDEL', reports, fields[index])
  elseif fields[index] ~= replica and count < MOST then
    count = count + 1
    answer[#answer + 1], answer[#answer + 2], answer[#answer + 3] = fields[index], age, report
  end
end
return answer
