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

-- -- the order

function pool.class_of(level, ticket) return pool.class_in_fair_order(level, ticket) end

-- What is admitted beyond the floor is not counted in it.
function pool.kept_from_being_passed() return nil end

local is_in_headroom = pool.is_in_headroom

function pool.is_in_headroom(level, ticket)
  local rule, tier = rules[FIRST_RULE + level], tiers[level]
  if fleet[SIZED_PREFILL] ~= UNLIMITED and tier[HELD_PREFILL] + pool.prefill_of(ticket) > rule[HEADROOM_PREFILL] then
    return false
  end
  return is_in_headroom(level, ticket)
end

pool.in_order = pool.in_order_of_tiers -- in place of that of `gain_order.lua`

local add_candidates = pool.add_candidates

function pool.add_candidates(level, found)
  add_candidates(level, found)
  local best = pool.best_beside(level)
  if best and not pool.is_at_limit(level, best) then found[#found + 1] = pool.beyond(level, best, true) end
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

local create = pool.create

function pool.create(expected)
  create(expected)
  for level = 0, levels - 1 do tiers[level][FLOOR_PREFILL] = 0 end
end

function pool.load_preemption()
  if not pool.preempt then
    define_preemptible()
    define_preemption()
    pool.define_fleet_preemption()
    pool.define_gain_preemption()
    pool.define_gain_fleet_preemption()
  end
end
