-- Use of the tenants, by day, tier and model. No admission waits for it: each replica adds what it has counted once a
-- second, and reads the sums of the tenants that have a budget.
--
-- KEYS[1]  the root. The keys are
--          `<root>:<day>`           a hash, 'TENANT TIER MODEL' -> 'REQUESTS INPUT OUTPUT', with tabs between the three names
--          `<root>:day:<day>`       a hash, account (a tenant, or one beside it) -> what counts in its budget of the day
--          `<root>:month:<month>`   a hash, account -> what counts in its budget of the month
--          `<root>:added:<replica>` the number of the last part that the replica has added
-- ARGV[1]  add | day
-- ARGV[2]  add: the replica, ARGV[3] the number of this part, 0 for none, ARGV[4] the days for which use is kept,
--          ARGV[5] the day and ARGV[6] the month of the sums, ARGV[7] how many entries follow: each is a day, a tenant, a
--          tier, a model, requests, input and output tokens; after them ARGV[8] charges: each is a day, an account and
--          tokens; after them the accounts whose sums are asked for
--          day: the day, ARGV[3] a cursor, '0' at first
--
-- RETURN   add: {the server's time in microseconds, the sums of the day and of the month of each account asked for, ...}
--          day: {the next cursor, '0' at the end, NAMES, FIGURES, ...}
--
-- A part that comes again, because its answer was lost or because the script failed in it, is not added again.
local REMEMBERED_S, DAY_S, LONGEST_MONTH_S = 86400, 86400, 32 * 86400

local root = KEYS[1]

if ARGV[1] == 'day' then
  local found = redis.call('HSCAN', root .. ':' .. ARGV[2], ARGV[3], 'COUNT', 500)
  local answer = {found[1]}
  for _, part in ipairs(found[2]) do answer[#answer + 1] = part end
  return answer
end

local function add_to(sums, account, tokens, for_s)
  -- A sum that is no whole number is another program's.
  if type(redis.pcall('HINCRBY', sums, account, tokens)) == 'table' then redis.call('HSET', sums, account, tokens) end
  redis.call('EXPIRE', sums, for_s)
end

local function sum_keys(day, month) return root .. ':day:' .. day, root .. ':month:' .. month end

local added, part, kept_days = root .. ':added:' .. ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local charges = 9 + 7 * tonumber(ARGV[7])
local asked = charges + 3 * tonumber(ARGV[8])
local is_new = part > tonumber(redis.call('GET', added) or 0)
-- First: what a script has written before it fails stays written.
if is_new and part > 0 then redis.call('SET', added, ARGV[3], 'EX', REMEMBERED_S) end
for place = 9, is_new and charges - 1 or 0, 7 do
  local day, tenant = ARGV[place], ARGV[place + 1]
  local names = tenant .. '\t' .. ARGV[place + 2] .. '\t' .. ARGV[place + 3]
  local requests, input, output = string.match(redis.call('HGET', root .. ':' .. day, names) or '', '^(%d+) (%d+) (%d+)$')
  redis.call('HSET', root .. ':' .. day, names, string.format('%.0f %.0f %.0f', ARGV[place + 4] + (requests or 0),
    ARGV[place + 5] + (input or 0), ARGV[place + 6] + (output or 0)))
  redis.call('EXPIRE', root .. ':' .. day, (kept_days + 1) * DAY_S)
end
for place = charges, is_new and asked - 1 or 0, 3 do
  local day, account, tokens = ARGV[place], ARGV[place + 1], ARGV[place + 2]
  local of_day, of_month = sum_keys(day, string.sub(day, 1, 7))
  add_to(of_day, account, tokens, 2 * DAY_S)
  add_to(of_month, account, tokens, LONGEST_MONTH_S)
end

local time = redis.call('TIME')
local answer = {string.format('%.0f', time[1] * 1000000 + time[2])}
if ARGV[asked] then
  local of_day, of_month = sum_keys(ARGV[5], ARGV[6])
  local days, months = redis.call('HMGET', of_day, unpack(ARGV, asked)), redis.call('HMGET', of_month, unpack(ARGV, asked))
  for place = 1, #days do
    answer[#answer + 1], answer[#answer + 2] = days[place] or '0', months[place] or '0'
  end
end
return answer
