-- The rules of a pool with several engines: the twin of `scheduling/fleet_tier.py` and `scheduling/fleet_scheduler.py`, which
-- say what they are. It replaces parts of `ordering.lua` and `scheduler.lua`.

local is_at_limit, holds_its_place, candidate_of = pool.is_at_limit, pool.holds_its_place, pool.candidate
local book = pool.book

function pool.book(level, tokens, requests)
  fleet[SAME_UNTIL] = 0
  book(level, tokens, requests)
end

-- The tickets of a tier that may be admitted for the floor stand in fair order: the heads, and the claimants that no head is
-- before.
local function is_before_in_fair_order(one, other)
  if one.start ~= other.start then return one.start < other.start end
  return one.sequence < other.sequence
end

function pool.in_fair_order(level)
  local head, second = pool.head_of(level), pool.second_head(level)
  local found, last = {head, second}, head
  if second and is_before_in_fair_order(head, second) then last = second end
  if tiers[level][CLAIMANTS] > 0 then
    for _, ticket in ipairs(pool.claimants()) do
      if ticket.level == level and (not last or is_before_in_fair_order(ticket, last)) then found[#found + 1] = ticket end
    end
  end
  if found[2] then table.sort(found, is_before_in_fair_order) end
  return found
end

-- Their classes, by sequence.
function pool.for_floor(level)
  local rule, tier, found, owes = rules[FIRST_RULE + level], tiers[level], {}, now < tiers[level][OWES_UNTIL]
  local tokens, requests = pool.in_reserve(tier)
  if tokens >= rule[RESERVE_TOKENS] or requests >= rule[RESERVE_REQUESTS] then return found end
  local prefill = pool.prefill_in_reserve(tier)
  local is_first = not owes and prefill < rule[RESERVE_PREFILL]
  for _, ticket in ipairs(pool.in_fair_order(level)) do
    if not owes or pool.is_small(ticket) then
      tokens, requests, prefill = tokens + ticket.tokens, requests + ticket.requests, prefill + pool.prefill_of(ticket)
      if tokens > rule[RESERVE_TOKENS] or requests > rule[RESERVE_REQUESTS] or prefill > rule[RESERVE_PREFILL] then
        if is_first then found[ticket.sequence] = CLASS_TURN end
        return found
      end
      found[ticket.sequence], is_first = CLASS_INSIDE, false
    end
  end
  return found
end

-- The classes of a tier, while several of its tickets are looked at.
local classes = {}

function pool.class_in_fair_order(level, ticket)
  if rules[FIRST_RULE + level][ALWAYS_FIRST] == 1 then return CLASS_ALWAYS_FIRST, 0 end
  local order_class = (classes[level] or pool.for_floor(level))[ticket.sequence] or CLASS_OTHER
  return order_class, order_class == CLASS_TURN and tiers[level][LATEST_ADMISSION] or 0
end

function pool.candidate(level, ticket)
  local found = candidate_of(level, ticket)
  found.order_class, found.turn = pool.class_in_fair_order(level, ticket)
  return found
end

function pool.is_at_limit(level, ticket)
  local rule = rules[FIRST_RULE + level]
  return is_at_limit(level, ticket) or (rule[LIMITED] == 1
    and tiers[level][HELD_PREFILL] + pool.prefill_of(ticket) > rule[LIMIT_PREFILL])
end

-- Rule 2, in three dimensions.
function pool.fits(candidate)
  local ticket = candidate.ticket
  local tokens = rules[CAPACITY_TOKENS] - all_tokens - ticket.tokens
  local requests = rules[CAPACITY_REQUESTS] - all_requests - ticket.requests
  local prefill = fleet[SIZED_PREFILL] - all_prefill - pool.prefill_of(ticket)
  for level = 0, candidate.headroom_level - 1 do
    if level ~= ticket.level then
      local rule, tier = rules[FIRST_RULE + level], tiers[level]
      tokens = tokens - math.max(0, rule[HEADROOM_TOKENS] - tier[HELD_TOKENS])
      requests = requests - math.max(0, rule[HEADROOM_REQUESTS] - tier[HELD_REQUESTS])
      prefill = prefill - math.max(0, rule[HEADROOM_PREFILL] - tier[HELD_PREFILL])
    end
  end
  return tokens >= 0 and requests >= 0 and prefill >= 0
end

function pool.prefill_in_reserve(tier) return tier[HELD_PREFILL] end

-- Rule 3, in three dimensions.
function pool.holds_its_place(candidate)
  if candidate.order_class == CLASS_ALWAYS_FIRST then return true end
  if not holds_its_place(candidate) then return false end
  local prefill = fleet[SIZED_PREFILL] - pool.prefill_of(candidate.ticket)
  for level = 0, levels - 1 do
    if level ~= candidate.ticket.level then
      local rule, kept = rules[FIRST_RULE + level], tiers[level][HELD_PREFILL]
      if rule[ALWAYS_FIRST] == 0 and not (candidate.order_class == CLASS_OTHER and level < candidate.yields_to) then
        kept = math.min(pool.prefill_in_reserve(tiers[level]), rule[RESERVE_PREFILL])
      end
      if level < candidate.headroom_level then kept = math.max(kept, rule[HEADROOM_PREFILL]) end
      prefill = prefill - kept
    end
  end
  return prefill >= 0
end

-- How many whole reserves more are too much in un-prefilled tokens than in the other dimensions.
function pool.excess_prefill(ticket)
  local reserve = rules[FIRST_RULE + ticket.level][RESERVE_PREFILL]
  local prefill = math.floor((pool.prefill_in_reserve(tiers[ticket.level]) + pool.prefill_of(ticket) - reserve) / reserve)
  return math.max(0, math.min(MOST_EXCESS, prefill) - pool.excess(ticket))
end

-- The candidates of a tier.
function pool.add_candidates(level, found)
  classes[level] = pool.for_floor(level)
  for _, ticket in ipairs(pool.firsts_of(level)) do
    if not pool.is_at_limit(level, ticket) then found[#found + 1] = pool.candidate(level, ticket) end
  end
  classes[level] = nil
end

-- The same in order. A walk keeps those of each tier: only a claim of the tier changes them before the walk ends, or what
-- calls `forget_orders`.
function pool.order_of(level)
  local found = pool.orders and pool.orders[level]
  if not found then
    found = {}
    pool.add_candidates(level, found)
    if found[2] then table.sort(found, pool.is_before) end
    if pool.orders then pool.orders[level] = found end
  end
  return found
end

function pool.forget_orders() pool.orders = pool.orders and {} end

local function merged(one, other)
  local found, place, of_other, is_before = {}, 1, 1, pool.is_before
  while one[place] or other[of_other] do
    if not other[of_other] or (one[place] and is_before(one[place], other[of_other])) then
      found[#found + 1], place = one[place], place + 1
    else
      found[#found + 1], of_other = other[of_other], of_other + 1
    end
  end
  return found
end

function pool.in_order_of_tiers()
  local found = {}
  for level = 0, levels - 1 do
    if tiers[level][QUEUED] > 0 then found = merged(found, pool.order_of(level)) end
  end
  return found
end

pool.in_order = pool.in_order_of_tiers

-- -- walks

-- A walk makes so many claimants of tickets that claimed an engine: as in `scheduling/claims.py`.
local MOST_NEW_CLAIMANTS = 4
local for_floors, is_walking = {}, false -- by sequence; else an engine is only asked for
local new_claimants -- of those that claimed an engine in this walk
local best = pool.best

local function place_in_walk(candidate)
  local ticket = candidate.ticket
  if candidate.order_class == CLASS_ALWAYS_FIRST then return -1 end
  if candidate.order_class == CLASS_OTHER or not ticket.is_claimant then return LATEST_US end
  return ticket.patient_until - pool.patience_of(ticket)
end

-- The first ticket of a tier in fair order, where none may pass it beyond the floor: it is no larger than that, no claimant
-- with patience, and an engine could hold it.
function pool.kept_from_being_passed(level)
  local owes = now < tiers[level][OWES_UNTIL]
  for _, first in ipairs(pool.in_fair_order(level)) do
    if pool.is_small(first) then
      if first.is_claimant and now < first.patient_until then return nil end
      pool.know_placing(first)
      return pool.usable(first)[1] and first
    elseif not owes then
      return nil
    end
  end
end

-- Whether there are claimants, and more than one tier has tickets or leases.
local function has_claimants_beside_others()
  local busy = 0
  for level = 0, fleet[ALL_CLAIMANTS] > 0 and levels - 1 or -1 do
    if tiers[level][QUEUED] > 0 or tiers[level][HELD_REQUESTS] > 0 then busy = busy + 1 end
  end
  return busy > 1
end

local function without_passing(order)
  for level = 0, has_claimants_beside_others() and levels - 1 or -1 do
    local first = tiers[level][CLAIMANTS] > 0 and pool.kept_from_being_passed(level)
    if first then
      local found = {}
      for _, candidate in ipairs(order) do
        if candidate.order_class ~= CLASS_OTHER or candidate.ticket.level ~= level
          or not is_before_in_fair_order(first, candidate.ticket) then
          found[#found + 1] = candidate
        end
      end
      order = found
    end
  end
  return order
end

-- Claimants for their tiers' floors come first, in the order of their claims.
function pool.in_order_of_walk()
  local order = without_passing(pool.candidates())
  local is_sorted = true
  for_floors = {}
  for place, candidate in ipairs(order) do
    candidate.place, candidate.in_walk = place, place_in_walk(candidate)
    if place > 1 and candidate.in_walk < order[place - 1].in_walk then is_sorted = false end
    if candidate.order_class == CLASS_INSIDE or candidate.order_class == CLASS_TURN then
      for_floors[candidate.ticket.sequence] = true
    end
  end
  if is_sorted then return order end
  table.sort(order, function(one, other)
    if one.in_walk ~= other.in_walk then return one.in_walk < other.in_walk end
    return one.place < other.place
  end)
  return order
end

-- One for a floor keeps the engine that it claimed first, as long as it could go there.
function pool.best(ticket)
  if not for_floors[ticket.sequence] then return best(ticket) end
  local found, kept = nil, ticket.kept and pool.places()[ticket.kept]
  if kept then
    for _, place in ipairs(pool.usable(ticket)) do
      if place == kept then found = kept end
    end
  end
  found = found or best(ticket)
  if is_walking then
    local id = found and pool.taking()[found]
    if ticket.kept ~= id then
      ticket.kept = id
      if ticket.is_claimant then pool.save_claimant(ticket) end
    end
  end
  return found
end

-- A head that was read by its member alone learns its placing from its record.
function pool.know_placing(ticket)
  if not ticket.prompt and not ticket.placing then pool.fill(ticket) end
  pool.read_placing(ticket)
end

-- Looks at one candidate. Returns 'hold', 'over' or 'again', which end the walk, 'pass', or the place of its engine.
function pool.look_at(order, index)
  local candidate = order[index]
  local ticket = candidate.ticket
  if not pool.fits(candidate) then return pool.holds_its_place(candidate) and 'hold' or 'pass' end
  pool.know_placing(ticket)
  local place, is_over = pool.best(ticket), false
  if not place then
    if ticket.is_claimant or fleet[ALL_CLAIMANTS] >= pool.most_looked_at() then return 'pass' end
  else
    local taking = pool.taken_by(ticket, place)
    if taking then return taking end
    is_over = pool.claim_engine(place, ticket.prompt)
  end
  if new_claimants == MOST_NEW_CLAIMANTS and not ticket.is_claimant then
    ticket.kept = nil
  elseif not ticket.is_claimant then
    pool.claim(ticket)
    pool.to_admit_us = pool.to_admit_us - CLAIM_US
    if place then new_claimants = new_claimants + 1 end
    local present = pool.in_order_of_walk()
    for before = 1, index do
      if not present[before] or present[before].ticket.sequence ~= order[before].ticket.sequence then return 'again' end
    end
    order.present = present
  end
  return is_over and 'over' or 'pass'
end

-- The candidate that is admitted next, with the place of its engine; or one whose replica is away. nil where none is;
-- 'again' where the walk has to begin anew.
function pool.walk_once()
  local order, index = pool.in_order_of_walk(), 1
  while order[index] do
    local candidate = order[index]
    if candidate.ticket.is_away then
      if pool.may_discard() then return candidate end
    else
      local found = pool.look_at(order, index)
      if type(found) == 'number' then return candidate, found end
      if found == 'again' then return found end
      if found ~= 'pass' then return nil end
      order = order.present or order
    end
    index = index + 1
  end
end

function pool.walk()
  local found, place
  pool.has_walked, is_walking, new_claimants, pool.orders = true, true, 0, {}
  repeat
    pool.begin_walk()
    found, place = pool.walk_once()
    pool.end_walk()
  until found ~= 'again'
  is_walking, pool.orders = false, nil
  pool.trim(found and found.ticket)
  return found, place
end

-- Whether another walk follows one that admitted none: see `scheduling/fleet_scheduler.py`.
local looks_further

-- The claimants beyond the most that may be return to their queues, the last in order.
function pool.trim(admitted)
  local is_full = fleet[ALL_CLAIMANTS] > pool.most_looked_at()
  pool.has_too_many = is_full
  looks_further = not is_full and new_claimants > 0 and new_claimants == MOST_NEW_CLAIMANTS
  if not is_full then return end
  local order = {}
  for level = 0, levels - 1 do
    if tiers[level][CLAIMANTS] > 0 then classes[level] = pool.for_floor(level) end
  end
  for _, ticket in ipairs(pool.claimants()) do
    if ticket ~= admitted then order[#order + 1] = pool.candidate(ticket.level, ticket) end
  end
  classes = {}
  table.sort(order, pool.is_before)
  for place = pool.most_looked_at() + 1, #order do pool.go_back(order[place].ticket) end
end

function pool.has_any_room()
  return fleet[OPEN] > 0 and all_tokens < rules[CAPACITY_TOKENS] and all_requests < rules[CAPACITY_REQUESTS]
end

function pool.dispatch()
  if meta[WAITING] == 0 or pool.is_engine_gone() or pool.is_on_hold() then return pool.note_blocked(false) end
  pool.refresh()
  if held_back_until ~= meta[BACK_UNTIL] then held_back_until, fleet[SAME_UNTIL] = meta[BACK_UNTIL], 0 end
  if pool.to_admit_us <= 0 or (now < fleet[SAME_UNTIL] and spare == 0) then return end
  while meta[WAITING] > 0 and pool.has_any_room() do
    local candidate, place = pool.walk()
    if not candidate and looks_further then
      if pool.to_admit_us <= 0 then return end
    elseif not candidate then
      fleet[SAME_UNTIL] = 0
      local change = pool.next_change_of_queue()
      fleet[SAME_UNTIL] = pool.is_any_away() and 0 or change < 0 and LATEST_US or now + change
      return pool.note_blocked(next(claims) ~= nil)
    elseif candidate.ticket.is_away then
      pool.discard(candidate.ticket)
    else
      pool.to_admit_us = pool.to_admit_us - ADMISSION_US
      pool.admit(candidate, pool.ledger_at(place))
      if pool.to_admit_us <= 0 then return end
    end
  end
  pool.note_blocked(pool.fits_without_walk())
end

-- Whether a ticket fits the pool, where no walk began because no engine has any room. That is rare.
function pool.fits_without_walk()
  if meta[WAITING] == 0 or all_tokens >= rules[CAPACITY_TOKENS] or all_requests >= rules[CAPACITY_REQUESTS]
    or all_prefill >= fleet[SIZED_PREFILL] or not loads[1] then
    return false
  end
  for _, candidate in ipairs(pool.candidates()) do
    if not candidate.ticket.is_away and pool.fits(candidate) then return true end
  end
  return false
end

-- The tiers whose first ticket in order arrived before the ticket, as text after its figures.
function pool.passed_text(candidate)
  local codes, is_any, ticket = {}, false, candidate.ticket
  for level = 0, levels - 1 do
    codes[level + 1] = '.'
    local first = level ~= ticket.level and pool.first_of(level)
    if first and (first.ticket.arrived < ticket.arrived
      or (first.ticket.arrived == ticket.arrived and first.ticket.sequence < ticket.sequence)) then
      local code = pool.code_of(candidate, level, first)
      is_any, codes[level + 1] = true, code == 'o' and pool.fits(first) and 'c' or code
    end
  end
  return is_any and ' p' .. concat(codes) or ''
end

function pool.code_of(candidate, level, first)
  if pool.is_at_limit(level, first.ticket) then return 'x' end
  if pool.is_held_back() then return candidate.order_class == CLASS_ALWAYS_FIRST and 'a' or 't' end
  return pool.rule_code(candidate, first)
end

-- The first of the claimants and the head of a tier.
function pool.first_of(level)
  local found
  if tiers[level][QUEUED] == 0 then return nil end
  local second = pool.second_head(level)
  classes[level] = pool.for_floor(level)
  for _, ticket in ipairs(pool.firsts_of(level)) do
    if ticket ~= second then
      local candidate = pool.candidate(level, ticket)
      if not found or pool.is_before(candidate, found) then found = candidate end
    end
  end
  classes[level] = nil
  return found
end

function pool.admit(candidate, ledger)
  local ticket = candidate.ticket
  local level = ticket.level
  local text, overtaken = pool.grant_text(candidate)
  text = text .. pool.found_text(ledger, ticket)
  pool.charge_for_admission(ticket)
  if rules[FIRST_RULE + level][PREEMPTIBLE] > 0 then pool.may_return(ticket, overtaken) end
  local owed, owed_prefill = 0, 0
  if candidate.order_class == CLASS_TURN then owed, owed_prefill = pool.excess(ticket), pool.excess_prefill(ticket) end
  if pool.is_held_back() then held_back_lease = ticket.owner .. ' ' .. ticket.id end
  meta[ADMISSIONS] = meta[ADMISSIONS] + 1
  tiers[level][LATEST_ADMISSION] = meta[ADMISSIONS]
  local prefill, unprefilled = pool.prefill_of(ticket), pool.unprefilled_on(ticket, ledger.id)
  pool.remove(ticket)
  pool.book(level, ticket.tokens, ticket.requests)
  pool.book_engine(level, ledger.id, ticket.tokens, ticket.requests, prefill, unprefilled)
  tiers[level][SERVED], tiers[level][ADMITTED] = tiers[level][SERVED] + ticket.tokens, tiers[level][ADMITTED] + 1
  served_since[level] = (served_since[level] or 0) + ticket.tokens
  meta[LEASES] = meta[LEASES] + 1
  pool.note_overtaking(ticket.sequence, ticket.arrived)
  if ticket.is_stored then pool.settle_steps(ticket, overtaken) end
  local on_engine = {ledger.id, prefill, unprefilled, owed_prefill}
  call('HSET', pool.replica_key(ticket.owner), ticket.id,
    pool.lease_record(level, ticket.tokens, ticket.requests, owed, owed + owed_prefill > 0 and now or 0, ticket.sequence,
      ticket.arrived, text, on_engine))
  ticket.is_admitted = true
  pool.grant(ticket.owner, text)
end

function pool.charge_for_admission(ticket)
  if not ticket.is_stored or ticket.is_claimant then return end
  if ticket.is_back then
    local tier = tiers[ticket.level]
    tier[VIRTUAL] = math.max(tier[VIRTUAL], ticket.start)
  else
    pool.charge_tenant(ticket)
  end
end

-- The time until a claimant or a head reaches a whole level, where that is before `soonest`. While a walk would end as the
-- last one did, all that claimants and heads do with time is in SAME_UNTIL: none of them is read for it again.
function pool.next_rise(soonest)
  local unit, ceiling = rules[PROMOTE_AFTER], rules[CEILING]
  if now < fleet[SAME_UNTIL] then
    local change = fleet[SAME_UNTIL] - now
    return fleet[SAME_UNTIL] < LATEST_US and (soonest < 0 or change < soonest) and change or soonest
  end
  if unit == 0 then return soonest end
  for level = ceiling + 1, levels - 1 do
    for _, first in ipairs(pool.firsts_of(level)) do
      local rise = math.floor((now - first.arrived) / unit) + 1
      local change = first.arrived + rise * unit - now
      if rise <= level - ceiling and (soonest < 0 or change < soonest) then soonest = change end
    end
  end
  return soonest
end

-- The time until a claimant loses its patience, where that is before `soonest`.
function pool.next_impatience(soonest)
  if now < fleet[SAME_UNTIL] then return soonest end
  for _, ticket in ipairs(pool.claimants()) do
    local change = ticket.patient_until - now
    if change > 0 and (soonest < 0 or change < soonest) then soonest = change end
  end
  return soonest
end

local next_change_of_waiting = pool.next_change_of_waiting

function pool.next_change_of_queue() return pool.next_impatience(next_change_of_waiting()) end

function pool.next_change_of_waiting()
  local soonest = pool.next_change_of_queue()
  if meta[WAITING] == 0 then return -1 end
  local engines = fleet[CHANGES] - now
  return fleet[CHANGES] >= 0 and (soonest < 0 or engines < soonest) and math.max(0, engines) or soonest
end

function pool.is_any_head_away()
  if not pool.is_any_away() then return false end
  for level = 0, levels - 1 do
    for _, first in ipairs(pool.firsts_of(level)) do
      if first.is_away then return true end
    end
  end
  return false
end
