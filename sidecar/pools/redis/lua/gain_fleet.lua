-- Several engines by gain: the twin of `scheduling/gain_fleet.py` and `scheduling/gain_fleet_scheduler.py`, which say what
-- they are. It replaces parts of `fleet_scheduler.lua`, `gain_order.lua`, `placement.lua` and `gain_state.lua`.

-- -- floors, in three dimensions

local is_below_floor, book_lease_in_floor = pool.is_below_floor, pool.book_lease_in_floor

function pool.is_below_floor(level)
  return is_below_floor(level) and tiers[level][FLOOR_PREFILL] < rules[FIRST_RULE + level][RESERVE_PREFILL]
end

function pool.prefill_in_reserve(tier) return tier[FLOOR_PREFILL] end

function pool.book_prefill_in_floor(level, prefill)
  tiers[level][FLOOR_PREFILL], is_changed[level] = tiers[level][FLOOR_PREFILL] + prefill, true
end

function pool.book_lease_in_floor(record, sign)
  book_lease_in_floor(record, sign)
  if not pool.read_note(record) then return end
  local level, _, _, _, _, _, _, _, on_engine = pool.read_lease(record)
  pool.book_prefill_in_floor(level, sign * on_engine[2])
end

local give_prefill_back, free = pool.give_prefill_back, pool.free

-- The lease was just read, so its note is known. That of one that ends has left its floor before.
function pool.give_prefill_back(level, on_engine, admitted)
  if not pool.is_ending and string.sub(pool.lease_note, 1, 1) == '1' then pool.book_prefill_in_floor(level, -on_engine[2]) end
  give_prefill_back(level, on_engine, admitted)
end

function pool.free(owner, id, record)
  pool.is_ending = true
  local level = free(owner, id, record)
  pool.is_ending = false
  return level
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
  local tokens, requests, prefill = tier[FLOOR_TOKENS], tier[FLOOR_REQUESTS], tier[FLOOR_PREFILL]
  local is_first = not owes and pool.is_below_floor(level)
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

-- -- the order

-- The classes of a tier, while several of its tickets are looked at.
local classes = {}

function pool.class_of(level, ticket)
  if rules[FIRST_RULE + level][ALWAYS_FIRST] == 1 then return CLASS_ALWAYS_FIRST, 0 end
  local order_class = (classes[level] or pool.for_floor(level))[ticket.sequence] or CLASS_OTHER
  return order_class, order_class == CLASS_TURN and tiers[level][LATEST_ADMISSION] or 0
end

local is_in_headroom, first_of = pool.is_in_headroom, pool.first_of

function pool.is_in_headroom(level, ticket)
  local rule, tier = rules[FIRST_RULE + level], tiers[level]
  if fleet[SIZED_PREFILL] ~= UNLIMITED and tier[HELD_PREFILL] + pool.prefill_of(ticket) > rule[HEADROOM_PREFILL] then
    return false
  end
  return is_in_headroom(level, ticket)
end

function pool.in_order()
  local found = {}
  for level = 0, levels - 1 do
    if tiers[level][QUEUED] > 0 then
      classes[level] = pool.for_floor(level)
      for _, ticket in ipairs(pool.firsts_of(level)) do
        if not pool.is_at_limit(level, ticket) then found[#found + 1] = pool.candidate(level, ticket) end
      end
      classes[level] = nil
      local best = pool.best_beside(level)
      if best and not pool.is_at_limit(level, best) then found[#found + 1] = pool.beyond(level, best, true) end
    end
  end
  if found[2] then table.sort(found, pool.is_before) end
  return found
end

function pool.first_of(level)
  classes[level] = tiers[level][QUEUED] > 0 and pool.for_floor(level) or nil
  local found = first_of(level)
  classes[level] = nil
  return found
end

-- -- walks

local for_floors, is_walking = {}, false -- by sequence; else an engine is only asked for
local best, walk = pool.best, pool.walk

local function place_in_walk(candidate)
  local ticket = candidate.ticket
  if candidate.order_class == CLASS_ALWAYS_FIRST then return -1 end
  if candidate.order_class == CLASS_OTHER or not ticket.is_claimant then return LATEST_US end
  return ticket.patient_until - pool.patience_of(ticket)
end

-- Claimants for their tiers' floors come first, in the order of their claims.
function pool.in_order_of_walk()
  local order = pool.candidates()
  for_floors = {}
  for place, candidate in ipairs(order) do
    candidate.place, candidate.in_walk = place, place_in_walk(candidate)
    if candidate.order_class == CLASS_INSIDE or candidate.order_class == CLASS_TURN then
      for_floors[candidate.ticket.sequence] = true
    end
  end
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

function pool.walk()
  is_walking = true
  local found, place = walk()
  is_walking = false
  return found, place
end

-- -- decisions

local admit = pool.admit

function pool.keep_up()
  if pool.make_urgent() > 0 then fleet[SAME_UNTIL] = 0 end
  pool.refresh_densities()
end

function pool.admit(candidate, ledger)
  local ticket = candidate.ticket
  local prefill = pool.prefill_of(ticket)
  admit(candidate, ledger)
  if candidate.order_class ~= CLASS_OTHER then pool.book_prefill_in_floor(ticket.level, prefill) end
  if meta[WAITING] > 0 then pool.refresh_densities() end
end

-- -- the state

function pool.tier_text(tier)
  return fmt('[%.0f,%.0f,%.0f,%.0f,%.17g,%.0f,%.0f,%.0f,%.0f,%.0f,%.0f,%.0f,%.0f,%.0f,%.0f,%.0f,%.0f,%.0f,%.0f,%.0f,%.0f,%.0f]',
    unpack(tier))
end

local create = pool.create

function pool.create(expected)
  create(expected)
  for level = 0, levels - 1 do tiers[level][FLOOR_PREFILL] = 0 end
end

function pool.load_preemption()
  if not pool.preempt then
    define_preemption()
    pool.define_fleet_preemption()
    pool.define_gain_preemption()
    pool.define_gain_fleet_preemption()
  end
end
