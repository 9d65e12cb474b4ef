-- What a tenant has used of its limits: see `save_accounts` in rate_limits.lua. It changes nothing.
--
-- KEYS[1]  the root of the pool
-- ARGV[1]  the tenant
-- RETURN   {its figures as they are stored, empty where there are none; the pool's time in microseconds}, or {} where
--          there is no pool
local meta = redis.call('HGET', KEYS[1], 'meta')
if not meta then return {} end
local birth, _, offset = struct.unpack('<ddd', meta) -- see `read_root`
local time = redis.call('TIME')
local account = redis.call('HGET', string.format('%s:%d:a', KEYS[1], birth), ARGV[1])
return {account or '', string.format('%d', time[1] * 1000000 + time[2] + offset)}
