-- Tenants that are kept in the store, beside those of the policy's files. No admission reads them: each replica asks twice
-- a second for what has changed.
--
-- Every change has a version, one more than the last. A replica that knows a later version than the store has (the store
-- was flushed, or its successor lacks the last writes) pushes what is missing. All of one `birth` are versions of one list.
-- Each push makes a new `epoch`, in which every replica reads the whole list: the store decides between two changes of
-- one version.
--
-- KEYS[1]  the root. The keys are
--          `<root>`          a hash: birth, epoch, version, floor. Removals up to the version `floor` are forgotten.
--          `<root>:records`  a hash, tenant -> its JSON text
--          `<root>:keys`     a hash, hash of an API key -> tenant
--          `<root>:changed`  a sorted set, tenant -> the version in which it was written
--          `<root>:removed`  a sorted set, tenant -> the version in which it was removed
-- ARGV[1]  changes | put | remove | push
-- ARGV[2]  birth, ARGV[3] epoch, ARGV[4] version, ARGV[5] floor: what the replica knows
-- ARGV[6]  put, remove: the tenant; put: ARGV[7] its text, ARGV[8] 'create' or 'replace', ARGV[9] the most tenants, then the hashes of its keys
--          push: the tenant, the version, and the text, empty where it was removed; the same of the next
--
-- RETURN   changes: {'none'} where the store has no list; {'older', VERSION} where it lacks what the replica knows;
--                   {'all' | 'changed', birth, epoch, version, floor, UP_TO, TENANT, VERSION, TEXT, ...}: the whole list from
--                   its begin, or what comes after the replica's version. The rest follows where UP_TO is less than version
--          put, remove: {'done'}, {'late'} where the replica does not know the last version, {'exists'}, {'unknown'},
--                   {'full'}, {'key', TENANT} where another tenant has one of the keys
--          push: {'done'}, or {'late'} where the store has another list
local PAGE, MOST_REMOVED = 500, 1000

local root = KEYS[1]
local records, keys, changed, removed = root .. ':records', root .. ':keys', root .. ':changed', root .. ':removed'
local action, birth, epoch, known, floor = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local found = redis.call('HMGET', root, 'birth', 'epoch', 'version', 'floor')
local is_there, is_same_list = found[1], found[1] == birth
local version = tonumber(found[3] or 0)

local function whole(number) return string.format('%d', number) end

local function keys_in(text)
  local is_json, record = pcall(cjson.decode, text)
  local listed = is_json and type(record) == 'table' and record.keys
  local hashes = {}
  for place, key in ipairs(type(listed) == 'table' and listed or {}) do
    hashes[place] = type(key) == 'table' and tostring(key.hash) or key
  end
  return hashes
end

local function forget_keys(tenant)
  for _, key in ipairs(keys_in(redis.call('HGET', records, tenant) or '')) do redis.call('HDEL', keys, key) end
end

local function set(tenant, at, text, hashes)
  forget_keys(tenant)
  for _, digest in ipairs(hashes) do redis.call('HSET', keys, digest, tenant) end
  redis.call('HSET', records, tenant, text)
  redis.call('ZADD', changed, at, tenant)
  redis.call('ZREM', removed, tenant)
end

local function take_out(tenant, at)
  forget_keys(tenant)
  redis.call('HDEL', records, tenant)
  redis.call('ZREM', changed, tenant)
  redis.call('ZADD', removed, at, tenant)
  if redis.call('ZCARD', removed) > MOST_REMOVED then
    redis.call('HSET', root, 'floor', redis.call('ZPOPMIN', removed)[2])
  end
end

local function begin(at_epoch)
  redis.call('HSET', root, 'birth', birth, 'epoch', whole(at_epoch), 'version', '0', 'floor', whole(floor))
end

if action == 'changes' then
  if not is_there then return {'none'} end
  if is_same_list and known > version then return {'older', whole(version)} end
  local kind, since = 'changed', known
  if not is_same_list or tonumber(found[2]) ~= epoch or (known < tonumber(found[4]) and floor ~= tonumber(found[4])) then
    kind, since = 'all', 0
  end
  local after = '(' .. whole(since)
  local written = redis.call('ZRANGEBYSCORE', changed, after, '+inf', 'WITHSCORES', 'LIMIT', 0, PAGE)
  local up_to = #written < 2 * PAGE and version or tonumber(written[#written])
  local answer = {kind, found[1], found[2], found[3], found[4], whole(up_to)}
  local function add(listed, text_of)
    for place = 1, #listed, 2 do
      answer[#answer + 1], answer[#answer + 2], answer[#answer + 3] = listed[place], listed[place + 1], text_of(listed[place])
    end
  end
  add(written, function(tenant) return redis.call('HGET', records, tenant) end)
  add(redis.call('ZRANGEBYSCORE', removed, after, whole(up_to), 'WITHSCORES'), function() return '' end)
  return answer
end

if action == 'push' then
  if is_there and not is_same_list then return {'late'} end
  if not is_there then begin(epoch) end
  local last = version
  for place = 6, #ARGV, 3 do
    local tenant, at, text = ARGV[place], tonumber(ARGV[place + 1]), ARGV[place + 2]
    if at > last then
      if text == '' then take_out(tenant, at) else set(tenant, at, text, keys_in(text)) end
      version = math.max(version, at)
    end
  end
  if version > last then
    redis.call('HINCRBY', root, 'epoch', 1)
    redis.call('HSET', root, 'version', whole(version))
  end
  return {'done'}
end

local tenant = ARGV[6]
local is_late = is_there and not (is_same_list and tonumber(found[2]) == epoch and version == known)
if is_late or (not is_there and known > 0) then return {'late'} end
local exists = redis.call('HEXISTS', records, tenant) == 1
if action == 'remove' then
  if not exists then return {'unknown'} end
  take_out(tenant, version + 1)
else
  if exists and ARGV[8] == 'create' then return {'exists'} end
  if not exists and redis.call('HLEN', records) >= tonumber(ARGV[9]) then return {'full'} end
  local hashes = {}
  for place = 10, #ARGV do
    local owner = redis.call('HGET', keys, ARGV[place])
    if owner and owner ~= tenant then return {'key', owner} end
    hashes[#hashes + 1] = ARGV[place]
  end
  if not is_there then begin(epoch) end
  set(tenant, version + 1, ARGV[7], hashes)
end
redis.call('HINCRBY', root, 'version', 1)
return {'done'}
