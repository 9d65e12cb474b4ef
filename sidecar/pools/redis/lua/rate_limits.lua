-- The limits of tenants: the twin of `core/rate_limit.py`.

local UNIT, FULLEST, GUESSED_US = 60000000, 9007199254740991, 1000000
local REMEMBERED_US = 600000000
local accounts_key, accounts = prefix .. 'a', {}

-- A bucket without a limit is always empty.
function pool.drain(account)
  local elapsed = math.max(0, now - account.at)
  account.requests = math.max(0, account.requests - elapsed * (account.rpm > 0 and account.rpm or FULLEST))
  account.tokens = math.max(0, account.tokens - elapsed * (account.tpm > 0 and account.tpm or FULLEST))
  account.at = math.max(account.at, now)
end

function pool.account(tenant)
  local account = accounts[tenant]
  if not account then
    local figures = {}
    for figure in string.gmatch(call('HGET', accounts_key, tenant) or '', '%S+') do
      figures[#figures + 1] = tonumber(figure)
    end
    account = {
      requests = figures[1] or 0, tokens = figures[2] or 0, at = figures[3] or now, concurrent = figures[4] or 0,
      refunded = figures[5] or 0, mean = figures[6] or 0, rpm = figures[7] or -1, tpm = figures[8] or -1,
      requests_refunded = figures[9] or 0, stored_at = figures[3],
    }
    accounts[tenant] = account
    pool.drain(account)
  end
  return account
end

function pool.is_at_rest(account)
  return account.concurrent == 0 and account.requests == 0 and account.tokens == 0
end

function pool.save_accounts()
  for tenant, account in pairs(accounts) do
    if account.is_forgotten or (pool.is_at_rest(account) and account.mean == 0 and account.refunded == 0
      and account.requests_refunded == 0) then
      call('HDEL', accounts_key, tenant)
    else
      call('HSET', accounts_key, tenant, fmt('%.0f %.0f %.0f %.0f %.0f %.0f %.0f %.0f %.0f', account.requests,
        account.tokens, account.at, account.concurrent, account.refunded, account.mean, account.rpm, account.tpm,
        account.requests_refunded))
    end
  end
end

-- Forgets accounts at rest. Every beat checks a few, so memory is bounded, and no call reads all of them. One that has
-- a mean is forgotten when nothing has changed for `REMEMBERED_US`: the check keeps the time of its last change.
function pool.forget_accounts(tenants)
  for _, tenant in ipairs(tenants) do
    local account = pool.account(tenant)
    if pool.is_at_rest(account) then
      account.at = account.stored_at or account.at
      account.is_forgotten = account.mean == 0 or now - account.at > REMEMBERED_US
    end
  end
end

-- Microseconds until a charge conforms, -1 for never, nil where it conforms now.
function pool.wait_for(per_minute, capacity, level, cost)
  if per_minute < 0 or level <= capacity - cost then return nil end
  if cost > capacity then return -1 end
  return math.ceil((level - (capacity - cost)) / per_minute)
end

-- The limit that is exceeded longest, t, r or c, and for how long.
function pool.over(account, tokens, most, burst)
  local worst, after
  local function consider(limit, us)
    if us and (not after or (us < 0 and FULLEST or us) > (after < 0 and FULLEST or after)) then worst, after = limit, us end
  end
  consider('t', pool.wait_for(account.tpm, account.tpm * burst, account.tokens, tokens * UNIT))
  consider('r', pool.wait_for(account.rpm, math.max(UNIT, account.rpm * burst), account.requests, UNIT))
  if most >= 0 and account.concurrent >= most then
    consider('c', account.mean > 0 and math.floor(account.mean / most) or GUESSED_US)
  end
  return worst, after
end

function pool.left_text(account, burst)
  local function left(per_minute, capacity, level)
    if per_minute < 0 then return '-1 -1' end
    return fmt('%.0f %.0f', math.floor(math.max(0, capacity - level) / UNIT), math.ceil(level / per_minute))
  end
  return left(account.rpm, math.max(UNIT, account.rpm * burst), account.requests) .. ' '
    .. left(account.tpm, account.tpm * burst, account.tokens)
end

function pool.charge(account, tenant, tokens)
  account.concurrent = account.concurrent + 1
  if account.rpm > 0 then account.requests = math.min(FULLEST, account.requests + UNIT) end
  if account.tpm > 0 then account.tokens = math.min(FULLEST, account.tokens + tokens * UNIT) end
  return fmt('%s %.0f %.0f %.0f %.0f %.0f %.0f %.0f %.0f', tenant, tokens, account.at, math.max(0, account.tpm),
    account.tokens, account.refunded, account.requests, account.requests_refunded, math.max(0, account.rpm))
end

-- Takes a charge back, in the call that made it.
function pool.undo(account, tokens)
  account.concurrent = account.concurrent - 1
  if account.rpm > 0 then account.requests = math.max(0, account.requests - UNIT) end
  if account.tpm > 0 then account.tokens = math.max(0, account.tokens - tokens * UNIT) end
end

function pool.settle_tokens(account, tokens, used, drained_since, level, refunded, rate)
  local over = math.min(used, math.floor(FULLEST / UNIT)) - tokens
  if over >= 0 then
    account.tokens = math.min(FULLEST, account.tokens + over * UNIT)
    return
  end
  local drained = rate * math.max(0, account.at - drained_since)
  local refund = math.min(-over * UNIT, level - (account.refunded - refunded) * UNIT - drained, account.tokens)
  if refund > 0 then
    account.tokens, account.refunded = account.tokens - refund, account.refunded + math.ceil(refund / UNIT)
  end
end

-- The request itself counts no more, as far as it has not drained.
function pool.refund_request(account, at, level, refunded, rate)
  if account.rpm <= 0 or rate <= 0 then return end
  local drained = math.max(rate, account.rpm) * math.max(0, account.at - at)
  local refund = math.max(0, math.min(UNIT, level - (account.requests_refunded - refunded) - drained, account.requests))
  account.requests, account.requests_refunded = account.requests - refund, account.requests_refunded + refund
end

-- Corrects a charge. `used` is -1 where the number is not known: the estimate stands. It is -2 where the engine failed the
-- request: it used none, and the request itself is refunded.
function pool.correct(charge, used, was_held)
  local tenant, tokens, at, per_minute, level, refunded, of_requests =
    match(charge, '^(%S+) (%d+) (%d+) (%d+) (%d+) (%d+) ?(.*)$')
  local account = pool.account(tenant)
  tokens, at, per_minute = tonumber(tokens), tonumber(at), tonumber(per_minute)
  if used == -2 then
    local requests_level, requests_refunded, rate = match(of_requests, '^(%d+) (%d+) (%d+)$')
    used = 0
    if rate then
      pool.refund_request(account, at, tonumber(requests_level), tonumber(requests_refunded), tonumber(rate))
    end
  end
  account.concurrent = math.max(0, account.concurrent - 1)
  if was_held then
    local took = math.max(0, now - at)
    account.mean = account.mean > 0 and account.mean + math.floor((took - account.mean) / 8) or took
  end
  if account.tpm > 0 and per_minute > 0 then
    pool.settle_tokens(account, tokens, used < 0 and tokens or used, at, tonumber(level), tonumber(refunded),
      math.max(per_minute, account.tpm))
  end
  if pool.is_at_rest(account) then account.refunded, account.requests_refunded = 0, 0 end
end

function pool.correct_own(id, used)
  local key = prefix .. 'm:' .. me
  local charge = call('HGET', key, id)
  if not charge then return end
  local is_lease = pool.is_lease_record(call('HGET', mine, id) or nil)
  call('HDEL', key, id)
  pool.correct(charge, (is_lease or used == -2) and used or 0, is_lease)
end

function pool.correct_lost(charge, record)
  local is_lease = pool.is_lease_record(record)
  pool.correct(charge, is_lease and -1 or 0, is_lease)
end

-- It counts as one of its tenant's requests that run or wait. Its charge is known here, or was lost with the store.
function pool.restate(id, tenant)
  local key = prefix .. 'm:' .. me
  if call('HEXISTS', key, id) == 1 then return end
  local account = pool.account(tenant)
  account.concurrent = account.concurrent + 1
  call('HSET', key, id, fmt('%s 0 %.0f 0 0 0', tenant, now))
end

function pool.enter_limited(index, promised)
  local id, tenant, charged = ARGV[index + 1], ARGV[index + 3], pool.charged
  pool.charged = false
  if call('HEXISTS', mine, id) == 1 then return end
  local figure = {}
  for place = 2, 11 do figure[place] = tonumber(ARGV[index + place]) end
  local level, tokens, burst, lower = figure[2], figure[5], figure[10], figure[11]
  local account = pool.account(tenant)
  account.rpm, account.tpm = figure[7], figure[8]
  charged = charged or tokens
  local over, after = pool.over(account, charged, figure[9], burst)
  if over and lower < 0 then
    pool.verdicts[#pool.verdicts + 1] = fmt('%s o %s %.0f ', id, over, after) .. pool.left_text(account, burst)
    return
  end
  local charge, before = nil, #refused
  if over then level = math.max(level, lower) else charge = pool.charge(account, tenant, charged) end
  pool.enter(id, level, tenant, figure[4], tokens, figure[6], promised)
  if #refused > before then
    if charge then pool.undo(account, charged) end
  elseif charge then
    call('HSET', prefix .. 'm:' .. me, id, charge)
  end
  pool.verdicts[#pool.verdicts + 1] = fmt('%s %s %d ', id, over and 'd' or 'w', level) .. pool.left_text(account, burst)
end
