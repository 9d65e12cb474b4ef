-- Rules 2 and 3, and the admission of a ticket: the twin of `scheduling/scheduler.py`, which says what the rules are.

function pool.is_at_limit(level, ticket)
  local rule, tier = rules[FIRST_RULE + level], tiers[level]
  return rule[LIMITED] == 1 and (tier[HELD_TOKENS] + ticket.tokens > rule[LIMIT_TOKENS]
    or tier[HELD_REQUESTS] + ticket.requests > rule[LIMIT_REQUESTS])
end

-- Rule 2: room for the ticket beside the leases and the headroom of every more important tier.
function pool.fits(candidate)
  local ticket = candidate.ticket
  local tokens = rules[CAPACITY_TOKENS] - all_tokens - ticket.tokens
  local requests = rules[CAPACITY_REQUESTS] - all_requests - ticket.requests
  for level = 0, candidate.headroom_level - 1 do
    if level ~= ticket.level then
      local rule, tier = rules[FIRST_RULE + level], tiers[level]
      tokens = tokens - math.max(0, rule[HEADROOM_TOKENS] - tier[HELD_TOKENS])
      requests = requests - math.max(0, rule[HEADROOM_REQUESTS] - tier[HELD_REQUESTS])
    end
  end
  return tokens >= 0 and requests >= 0
end

-- What a tier holds that counts in its reserve.
function pool.in_reserve(tier) return tier[HELD_TOKENS], tier[HELD_REQUESTS] end

-- Rule 3: whether the ticket would fit once all after it had released what they hold beyond their reserves.
function pool.holds_its_place(candidate)
  if candidate.order_class == CLASS_ALWAYS_FIRST then return true end
  local tokens = rules[CAPACITY_TOKENS] - candidate.ticket.tokens
  local requests = rules[CAPACITY_REQUESTS] - candidate.ticket.requests
  for level = 0, levels - 1 do
    if level ~= candidate.ticket.level then
      local rule, tier = rules[FIRST_RULE + level], tiers[level]
      local kept_tokens, kept_requests = tier[HELD_TOKENS], tier[HELD_REQUESTS]
      if rule[ALWAYS_FIRST] == 0 and not (candidate.order_class == CLASS_OTHER and level < candidate.yields_to) then
        local tokens_inside, requests_inside = pool.in_reserve(tier)
        kept_tokens = math.min(tokens_inside, rule[RESERVE_TOKENS])
        kept_requests = math.min(requests_inside, rule[RESERVE_REQUESTS])
      end
      if level < candidate.headroom_level then
        kept_tokens = math.max(kept_tokens, rule[HEADROOM_TOKENS])
        kept_requests = math.max(kept_requests, rule[HEADROOM_REQUESTS])
      end
      tokens, requests = tokens - kept_tokens, requests - kept_requests
    end
  end
  return tokens >= 0 and requests >= 0
end

function pool.is_held_back() return now < meta[BACK_UNTIL] end

-- The candidates in order. While the pool is held back, none until the ticket that was admitted has ended.
function pool.candidates()
  if not pool.is_held_back() then return pool.in_order() end
  if held_back_lease then return {} end
  return pool.in_turn()
end

-- The ticket that is admitted next: the first in order that fits, unless one before it holds its place. A ticket of a
-- dead replica is ended instead, one of a replica that is cut off parked. Where this call has done that to as many as it
-- may, such a ticket is skipped.
function pool.next_admission()
  for _, candidate in ipairs(pool.candidates()) do
    if candidate.ticket.is_away then
      if pool.may_discard() then return candidate end
    elseif pool.fits(candidate) then
      return candidate
    elseif pool.holds_its_place(candidate) then
      return nil
    end
  end
end

-- Admits every ticket that the rules let in now, in order, as long as this call may.
function pool.dispatch()
  if meta[WAITING] == 0 or pool.is_engine_gone() or pool.is_on_hold() then return end
  while meta[WAITING] > 0 and pool.to_admit_us > 0 and all_tokens < rules[CAPACITY_TOKENS] and all_requests < rules[CAPACITY_REQUESTS] do
    local candidate = pool.next_admission()
    if not candidate then return end
    if candidate.ticket.is_away then
      pool.discard(candidate.ticket)
    else
      pool.to_admit_us = pool.to_admit_us - ADMISSION_US
      pool.admit(candidate)
    end
  end
end

-- The tiers whose head arrived before the ticket, as text after its figures. The amounts held are those of the decision.
function pool.passed_text(candidate)
  local codes, is_any, ticket = {}, false, candidate.ticket
  for level = 0, levels - 1 do
    codes[level + 1] = '.'
    if level ~= ticket.level and tiers[level][QUEUED] > 0 then
      local head = pool.head_of(level)
      if head.arrived < ticket.arrived or (head.arrived == ticket.arrived and head.sequence < ticket.sequence) then
        is_any = true
        if pool.is_at_limit(level, head) then
          codes[level + 1] = 'x'
        elseif pool.is_held_back() then
          codes[level + 1] = candidate.order_class == CLASS_ALWAYS_FIRST and 'a' or 't'
        else
          codes[level + 1] = pool.rule_code(candidate, pool.candidate(level, head))
        end
      end
    end
  end
  return is_any and ' p' .. concat(codes) or ''
end

-- How many whole reserves too much the tier, which is below its reserve, would hold with a ticket.
function pool.excess(ticket)
  local rule, tier = rules[FIRST_RULE + ticket.level], tiers[ticket.level]
  local tokens = math.floor((tier[HELD_TOKENS] + ticket.tokens - rule[RESERVE_TOKENS]) / rule[RESERVE_TOKENS])
  local requests = math.floor((tier[HELD_REQUESTS] + ticket.requests - rule[RESERVE_REQUESTS]) / rule[RESERVE_REQUESTS])
  return math.min(MOST_EXCESS, math.max(0, tokens, requests))
end

-- A lease has ended: its tier owes for the excess, in addition to what it owes already.
function pool.owe(level, excess, admitted)
  local owed = excess * math.max(0, now - admitted)
  tiers[level][OWES_UNTIL] = math.min(LATEST_US, math.max(now, tiers[level][OWES_UNTIL]) + owed)
end

-- The wait of a ticket that is admitted by the call that it came with.
function pool.served_text(level)
  local parts = {'0', '-1', pool.int(level)}
  for other = 0, levels - 1 do parts[#parts + 1] = pool.int(served_since[other] or 0) end
  return concat(parts, ' ')
end

-- The grant of a ticket as text, and when the ticket was first overtaken.
function pool.grant_text(candidate)
  local ticket, overtaken = candidate.ticket, nil
  local text = ticket.id
  if ticket.is_stored then
    if not ticket.served then
      local record = call('HGET', pool.replica_key(ticket.owner), ticket.id)
      if not record then return pool.damaged() end
      local read = pool.read_ticket(ticket.owner, ticket.id, record)
      ticket.served, ticket.times, ticket.overtaken, ticket.after = read.served, read.times, read.overtaken, read.after
    end
    local figures
    figures, overtaken = pool.wait_text(ticket, candidate.engine_level)
    text = text .. ' ' .. figures
  elseif next(served_since) or candidate.engine_level ~= ticket.level then -- others were admitted first by this call
    text = text .. ' ' .. pool.served_text(candidate.engine_level)
  end
  if meta[WAITING] > 1 then text = text .. pool.passed_text(candidate) end
  if ticket.times then text = text .. ' r' .. ticket.times end
  return text, overtaken
end

function pool.admit(candidate)
  local ticket = candidate.ticket
  local level = ticket.level
  local text, overtaken = pool.grant_text(candidate)
  if ticket.is_stored then pool.charge_tenant(ticket) end
  if rules[FIRST_RULE + level][PREEMPTIBLE] > 0 then pool.may_return(ticket, overtaken) end
  local excess = candidate.order_class == CLASS_TURN and pool.excess(ticket) or 0
  if pool.is_held_back() then held_back_lease = ticket.owner .. ' ' .. ticket.id end
  meta[ADMISSIONS] = meta[ADMISSIONS] + 1
  tiers[level][LATEST_ADMISSION] = meta[ADMISSIONS]
  pool.remove(ticket)
  pool.book(level, ticket.tokens, ticket.requests)
  tiers[level][SERVED], tiers[level][ADMITTED] = tiers[level][SERVED] + ticket.tokens, tiers[level][ADMITTED] + 1
  served_since[level] = (served_since[level] or 0) + ticket.tokens
  meta[LEASES] = meta[LEASES] + 1
  pool.note_overtaking(ticket.sequence, ticket.arrived)
  if ticket.is_stored then pool.settle_steps(ticket, overtaken) end
  call('HSET', pool.replica_key(ticket.owner), ticket.id,
    pool.lease_record(level, ticket.tokens, ticket.requests, excess, excess > 0 and now or 0, ticket.sequence,
      ticket.arrived, ticket.is_stored and text))
  ticket.is_admitted = true
  pool.grant(ticket.owner, text)
end
