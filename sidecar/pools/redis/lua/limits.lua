-- The limits of tenants: `limits.py` and `rate_limit.py`. Beside the root `ROOT:a:TENANT` is a tenant's account, for as long as it
-- is used; `ROOT:n:WHO` has how many requests of each tenant wait or run at a replica. Of users' accounts some are kept, those of
-- `ROOT:k:TENANT user`, a sorted set in the order of their last use.

local UNIT, GUESSED_US, REMEMBERED_US = 60000000, 1000000, 600000000
-- An account; since `A_SINCE` it was never at rest. The limits of its latest request, or false.
local A_REQUESTS, A_TOKENS, A_AT, A_SINCE, A_MEAN, A_REFUNDED, A_REQUESTS_REFUNDED, A_RPM, A_TPM = 1, 2, 3, 4, 5, 6, 7, 8, 9
local CH_TENANT, CH_TOKENS, CH_AT, CH_TPM, CH_LEVEL, CH_REFUNDED, CH_REQUESTS, CH_REQUESTS_REFUNDED, CH_RPM = 1, 2, 3, 4, 5, 6, 7, 8, 9

local function drain(account)
  local elapsed = max(0, now - account[A_AT])
  account[A_REQUESTS] = max(0, account[A_REQUESTS] - elapsed * (account[A_RPM] or UNBOUNDED))
  account[A_TOKENS] = max(0, account[A_TOKENS] - elapsed * (account[A_TPM] or UNBOUNDED))
  account[A_AT] = max(account[A_AT], now)
  if account[A_REQUESTS] == 0 and account[A_TOKENS] == 0 then
    account[A_SINCE], account[A_REFUNDED], account[A_REQUESTS_REFUNDED] = account[A_AT], 0, 0
    if elapsed > REMEMBERED_US then account[A_MEAN] = 0 end
  end
end

local function account_of(tenant)
  if accounts[tenant] == nil then
    local packed = redis_call('GET', root .. ':a:' .. tenant)
    accounts[tenant] = packed and unpacked(packed)
  end
  if accounts[tenant] then drain(accounts[tenant]) end
  return accounts[tenant]
end

-- Keeps an account, and so `most` in all of those like it that came last. By a count: several come at one time.
local function keep_within(tenant, most)
  local name = root .. ':k:' .. tenant:match('^(.*) ')
  local last = redis_call('ZREVRANGE', name, 0, 0, 'WITHSCORES')
  redis_call('ZADD', name, tonumber(last[2] or 0) + 1, tenant)
  redis_call('PEXPIRE', name, HOUR_MS)
  local more = redis_call('ZCARD', name) - most
  local gone = more > 0 and redis_call('ZPOPMIN', name, more) or NOBODY
  for i = 1, #gone, 2 do
    redis_call('DEL', root .. ':a:' .. gone[i])
    accounts[gone[i]] = false
  end
end

local function own_count(tenant)
  return counts[tenant] or not forgotten[who] and tonumber(redis_call('HGET', root .. ':n:' .. who, tenant)) or 0
end

local function running(tenant)
  local sum = own_count(tenant)
  for name in pairs(members) do
    if name ~= who then sum = sum + (tonumber(redis_call('HGET', root .. ':n:' .. name, tenant)) or 0) end
  end
  return sum
end

-- The limit that is exceeded longest, and for how long, `UNBOUNDED` for ever.
local function over(account, asked, most_requests, most_tokens)
  local _, tenant, tokens, _, _, _, most = unpack(asked)
  local worst, after
  local function consider(limit, us)
    if not after or us > after then worst, after = limit, us end
  end
  local function bucket(limit, per_minute, capacity, level, cost)
    if per_minute and level > capacity - cost then
      consider(limit, cost > capacity and UNBOUNDED or ceil((level - (capacity - cost)) / per_minute))
    end
  end
  bucket('tokens_per_minute', account[A_TPM], most_tokens, account[A_TOKENS], tokens * UNIT)
  bucket('requests_per_minute', account[A_RPM], most_requests, account[A_REQUESTS], UNIT)
  if most and running(tenant) >= most then
    consider('concurrent_requests', account[A_MEAN] > 0 and floor(account[A_MEAN] / most) or GUESSED_US)
  end
  return worst, after
end

local function packed_charge(account, tenant, tokens)
  if account[A_RPM] then account[A_REQUESTS] = min(UNBOUNDED, account[A_REQUESTS] + UNIT) end
  if account[A_TPM] then account[A_TOKENS] = min(UNBOUNDED, account[A_TOKENS] + tokens * UNIT) end
  return pack({ tenant, tokens, account[A_AT], account[A_TPM] or 0, account[A_TOKENS], account[A_REFUNDED], account[A_REQUESTS],
    account[A_REQUESTS_REFUNDED], account[A_RPM] or 0 })
end

local function left(per_minute, capacity, level)
  return per_minute and { floor(max(0, capacity - level) / UNIT), ceil(level / per_minute) } or nil
end

-- The verdicts (`calls.MeterVerdict`, packed) on the questions about one request: it is charged to all of its accounts, or to none.
-- Then whether it exceeds a limit, and whether it was charged.
local function verdicts_on(group)
  local found, is_over, charges = {}, false, group[1][4]
  for i, asked in ipairs(group) do
    local _, tenant, _, _, rpm, tpm, _, burst, most = unpack(asked)
    if (most or 0) > 0 then keep_within(tenant, most) end
    local account = account_of(tenant) or { 0, 0, now, now, 0, 0, 0, false, false }
    accounts[tenant], account[A_RPM], account[A_TPM] = account, rpm, tpm
    local most_requests, most_tokens = max(UNIT, (rpm or 0) * burst), (tpm or 0) * burst
    local limit, after = over(account, asked, most_requests, most_tokens)
    is_over, found[i] = is_over or limit ~= nil, { account, most_requests, most_tokens, limit, after }
  end
  local packed, is_charged = {}, charges and not is_over
  for i, asked in ipairs(group) do
    local account, most_requests, most_tokens, limit, after = unpack(found[i], 1, 5)
    local charge = is_charged and packed_charge(account, asked[2], asked[3])
    if after == UNBOUNDED then after = nil end
    local lefts = pack(limit, after, left(account[A_RPM], most_requests, account[A_REQUESTS]), left(account[A_TPM], most_tokens, account[A_TOKENS]))
    packed[i] = '\150' .. pack(asked[1]) .. (charge or '\192') .. lefts
  end
  return packed, is_over, is_charged
end

local function refund_request(account, charge)
  if not account[A_RPM] or charge[CH_RPM] == 0 or charge[CH_AT] < account[A_SINCE] then return end
  local drained = max(charge[CH_RPM], account[A_RPM]) * max(0, account[A_AT] - charge[CH_AT])
  local left = charge[CH_REQUESTS] - (account[A_REQUESTS_REFUNDED] - charge[CH_REQUESTS_REFUNDED]) - drained
  local refund = max(0, min(UNIT, left, account[A_REQUESTS]))
  account[A_REQUESTS], account[A_REQUESTS_REFUNDED] = account[A_REQUESTS] - refund, account[A_REQUESTS_REFUNDED] + refund
end

local function settle_tokens(account, charge, used)
  local more = min(used, floor(UNBOUNDED / UNIT)) - charge[CH_TOKENS]
  if more >= 0 then
    account[A_TOKENS] = min(UNBOUNDED, account[A_TOKENS] + more * UNIT)
    return
  end
  local drained = max(charge[CH_TPM], account[A_TPM]) * max(0, account[A_AT] - charge[CH_AT])
  local left = charge[CH_LEVEL] - (account[A_REFUNDED] - charge[CH_REFUNDED]) * UNIT - drained
  local refund = min(-more * UNIT, left, account[A_TOKENS])
  if refund > 0 and charge[CH_AT] >= account[A_SINCE] then
    account[A_TOKENS], account[A_REFUNDED] = account[A_TOKENS] - refund, account[A_REFUNDED] + ceil(refund / UNIT)
  end
end

local function settle(charge, used, is_counted, was_held)
  local account = account_of(charge[CH_TENANT])
  if not account then return end
  if not is_counted then
    refund_request(account, charge)
    drain(account)
  end
  if was_held then
    local took, mean = max(0, now - charge[CH_AT]), account[A_MEAN]
    account[A_MEAN] = mean > 0 and mean + floor((took - mean) / 8) or took
  end
  if account[A_TPM] and charge[CH_TPM] > 0 then settle_tokens(account, charge, used or charge[CH_TOKENS]) end
end

-- Decides what the call asks, and takes no bid of a request that is refused. `last_number`: of the replica's call before.
local function take_limits(member, last_number)
  local is_statement = call[C_KIND] == 'state'
  if is_statement then forgotten[who] = true end
  for _, of in ipairs(call[C_RUNNING]) do counts[of[1]] = of[2] end
  for _, settled in ipairs(call[C_SETTLED]) do
    local first_call, charge, used, is_counted, was_held = unpack(settled)
    if first_call > last_number then settle(charge, used, is_counted, was_held) end
  end
  local known, charged, refused = {}, {}, {}
  -- The charges of its call before, whose answer was lost: others were lost between the two.
  local unanswered = is_statement and call[C_NUMBER] > last_number + 1 and member[CHARGED] or {}
  for _, packed in ipairs(unanswered) do
    local number = unpacked(packed)[1]
    known[number] = known[number] or {}
    table.insert(known[number], packed)
  end
  local i, metered = 1, call[C_METERED]
  while metered[i] do
    local number, group = metered[i][1], {}
    while metered[i + #group] and metered[i + #group][1] == number do group[#group + 1] = metered[i + #group] end
    local found, is_over, is_charged = known[number], false, true
    if not found then found, is_over, is_charged = verdicts_on(group) end
    known[number], refused[number] = nil, is_over
    for j, packed in ipairs(found) do
      verdicts[#verdicts + 1] = packed
      if is_charged then charged[#charged + 1], counts[group[j][2]] = packed, own_count(group[j][2]) + 1 end
    end
    i = i + #group
  end
  for _, packed in ipairs(unanswered) do -- a client that left before the replica had an answer
    local verdict = unpacked(packed)
    if known[verdict[1]] then settle(verdict[2], 0, true, false) end
  end
  member[CHARGED] = charged
  for i = next(refused) and #call[C_BIDS] or 0, 1, -1 do
    if refused[call[C_BIDS][i][NUMBER]] then table.remove(call[C_BIDS], i) end
  end
end

local function write_limits()
  for tenant, account in pairs(accounts) do
    if account then
      local full_us = max(account[A_REQUESTS] / (account[A_RPM] or UNBOUNDED), account[A_TOKENS] / (account[A_TPM] or UNBOUNDED))
      redis_call('SET', root .. ':a:' .. tenant, pack(account), 'PX', HOUR_MS + ceil(full_us / 1000))
    end
  end
  for name in pairs(forgotten) do redis_call('DEL', root .. ':n:' .. name) end
  for tenant, count in pairs(counts) do
    if count > 0 then redis_call('HSET', root .. ':n:' .. who, tenant, count) else redis_call('HDEL', root .. ':n:' .. who, tenant) end
  end
  if next(counts) or call[C_WHOLE] then redis_call('PEXPIRE', root .. ':n:' .. who, HOUR_MS) end
end
