-- The order by gain: the twin of `scheduling/gain_order.py` and `scheduling/gain_scheduler.py`, which say what it is. It
-- replaces parts of `ordering.lua`, `scheduler.lua`, `operations.lua` and `preemption.lua`.

-- The ranks in class OTHER, a candidate's turn
local RANK_HEADROOM, RANK_URGENT, RANK_CALM, RANK_NO_GAIN = 0, 1, 2, 3
local LOOK_AGAIN_US = 100000 -- as in `scheduling/gain_scheduler.py`

local aged = pool.aged

-- -- floors

function pool.is_below_floor(level)
  local rule, tier = rules[FIRST_RULE + level], tiers[level]
  return tier[FLOOR_TOKENS] < rule[RESERVE_TOKENS] and tier[FLOOR_REQUESTS] < rule[RESERVE_REQUESTS]
end

function pool.has_floor_for(level, ticket)
  local rule, tier = rules[FIRST_RULE + level], tiers[level]
  return tier[FLOOR_TOKENS] + ticket.tokens <= rule[RESERVE_TOKENS]
    and tier[FLOOR_REQUESTS] + ticket.requests <= rule[RESERVE_REQUESTS]
end

function pool.book_floor(level, tokens, requests)
  local tier = tiers[level]
  tier[FLOOR_TOKENS], tier[FLOOR_REQUESTS] = tier[FLOOR_TOKENS] + tokens, tier[FLOOR_REQUESTS] + requests
  is_changed[level] = true
end

function pool.excess(ticket)
  local rule, tier = rules[FIRST_RULE + ticket.level], tiers[ticket.level]
  local tokens = math.floor((tier[FLOOR_TOKENS] + ticket.tokens - rule[RESERVE_TOKENS]) / rule[RESERVE_TOKENS])
  local requests = math.floor((tier[FLOOR_REQUESTS] + ticket.requests - rule[RESERVE_REQUESTS]) / rule[RESERVE_REQUESTS])
  return math.min(MOST_EXCESS, math.max(0, tokens, requests))
end

-- -- the order

function pool.is_in_headroom(level, ticket)
  local rule, tier = rules[FIRST_RULE + level], tiers[level]
  local tokens, requests = rule[HEADROOM_TOKENS], rule[HEADROOM_REQUESTS]
  return (tokens > 0 or requests > 0)
    and (rules[CAPACITY_TOKENS] == UNLIMITED or tier[HELD_TOKENS] + ticket.tokens <= tokens)
    and (rules[CAPACITY_REQUESTS] == UNLIMITED or tier[HELD_REQUESTS] + ticket.requests <= requests)
end

-- The place of any ticket beyond its tier's floor. A lease is as dense as it would be now. `is_known`: the ticket was just
-- found by its density or its deadline.
function pool.beyond(level, ticket, is_known)
  local precedence, aged_level = aged(level, ticket.arrived)
  local rank = RANK_NO_GAIN
  if pool.is_in_headroom(level, ticket) then
    rank = RANK_HEADROOM
  elseif ticket.gain then
    if not is_known then pool.look_up(ticket) end
    if ticket.is_lease or not pool.is_ahead(level, ticket) then
      if ticket.is_calm then
        rank, precedence = RANK_CALM, ticket.arrived + ticket.gain.deadline
      elseif ticket.density > 0 then
        rank, precedence = RANK_URGENT, -ticket.density
      end
    end
  end
  return {
    order_class = CLASS_OTHER, turn = rank, precedence = precedence, ticket = ticket,
    headroom_level = aged_level, yields_to = 0, engine_level = aged_level,
  }
end

-- The class and the turn of a ticket.
function pool.class_of(level, ticket)
  if rules[FIRST_RULE + level][ALWAYS_FIRST] == 1 then return CLASS_ALWAYS_FIRST, 0 end
  if pool.has_floor_for(level, ticket) then return CLASS_INSIDE, 0 end
  if now >= tiers[level][OWES_UNTIL] and pool.is_below_floor(level) then return CLASS_TURN, tiers[level][LATEST_ADMISSION] end
  return CLASS_OTHER, 0
end

function pool.candidate(level, ticket)
  local order_class, turn = pool.class_of(level, ticket)
  if order_class == CLASS_OTHER then return pool.beyond(level, ticket) end
  local precedence, aged_level = aged(level, ticket.arrived)
  return {
    order_class = order_class, turn = turn, precedence = precedence, ticket = ticket,
    headroom_level = aged_level, yields_to = aged_level, engine_level = aged_level,
  }
end

-- The best ticket of a tier by gain, where it is none of its heads. It may be that of a replica that is away: then it leaves
-- the queue when it is first in order, as a head does.
function pool.best_beside(level)
  if rules[FIRST_RULE + level][ALWAYS_FIRST] == 1 then return nil end
  local best, head, second = pool.densest(level) or pool.earliest(level), pool.head_of(level), pool.second_head(level)
  if not best or best.sequence == head.sequence or (second and best.sequence == second.sequence) then return nil end
  return best
end

local is_any_head_away = pool.is_any_head_away

function pool.is_any_head_away()
  if is_any_head_away() then return true end
  if not pool.is_any_away() then return false end
  for level = 0, levels - 1 do
    if tiers[level][QUEUED] > 0 then
      local best = pool.best_beside(level)
      if best and best.is_away then return true end
    end
  end
  return false
end

function pool.in_order()
  local found = {}
  for level = 0, levels - 1 do
    if tiers[level][QUEUED] > 0 then
      local head, second = pool.head_of(level), pool.second_head(level)
      if not pool.is_at_limit(level, head) then found[#found + 1] = pool.candidate(level, head) end
      if second and not pool.is_at_limit(level, second) then found[#found + 1] = pool.candidate(level, second) end
      local best = pool.best_beside(level)
      if best and not pool.is_at_limit(level, best) then found[#found + 1] = pool.beyond(level, best, true) end
    end
  end
  if found[2] then table.sort(found, pool.is_before) end
  return found
end

function pool.may_be_in_headroom(level)
  local rule, tier = rules[FIRST_RULE + level], tiers[level]
  local tokens, requests = rule[HEADROOM_TOKENS], rule[HEADROOM_REQUESTS]
  return (tokens > 0 or requests > 0)
    and (rules[CAPACITY_TOKENS] == UNLIMITED or tier[HELD_TOKENS] < tokens)
    and (rules[CAPACITY_REQUESTS] == UNLIMITED or tier[HELD_REQUESTS] < requests)
end

-- The first candidate in order, where it is found without the others. nil says nothing: a ticket may be in its tier's
-- headroom, or the best one is at its tier's limit. `densest` are the tiers' densest tickets.
function pool.first_of_all(densest)
  local first
  for level = 0, levels - 1 do
    if tiers[level][QUEUED] > 0 then
      if pool.may_be_in_headroom(level) then return nil end
      if rules[FIRST_RULE + level][ALWAYS_FIRST] == 1 or pool.is_below_floor(level) then
        for _, head in pairs({pool.head_of(level), pool.second_head(level)}) do
          if not pool.is_at_limit(level, head) and pool.class_of(level, head) < CLASS_OTHER then
            local candidate = pool.candidate(level, head)
            if not first or pool.is_before(candidate, first) then first = candidate end
          end
        end
      end
    end
  end
  if first then return first end
  local best = pool.first_by_gain(densest)
  if not best then
    local earliest = {}
    for level = 0, levels - 1 do
      if tiers[level][QUEUED] > 0 and rules[FIRST_RULE + level][ALWAYS_FIRST] == 0 then earliest[level] = pool.earliest(level) end
    end
    best = pool.first_by_gain(earliest)
  end
  return best and not pool.is_at_limit(best.level, best) and pool.beyond(best.level, best, true)
end

local candidate_of, rule_code = pool.candidate, pool.rule_code

-- Of the heads that the first in order passes only the class counts.
local function only_class(level, ticket) return {order_class = pool.class_of(level, ticket), turn = 0, precedence = 0, ticket = ticket} end

function pool.rule_code(candidate, head)
  if candidate.order_class ~= CLASS_OTHER then
    if not candidate.is_first or candidate.order_class ~= head.order_class then return rule_code(candidate, head) end
    return candidate.order_class == CLASS_TURN and 't' or 'l'
  end
  if not candidate.is_first and pool.is_before(head, candidate) then return 'o' end
  if candidate.turn == RANK_HEADROOM then return 'r' end
  return candidate.turn == RANK_NO_GAIN and 'l' or 'g'
end

-- Rule 3 has the floors in place of the reserves.
function pool.in_reserve(tier) return tier[FLOOR_TOKENS], tier[FLOOR_REQUESTS] end

-- -- decisions

local dispatch, next_admission, admit = pool.dispatch, pool.next_admission, pool.admit

-- The one ticket that waits, where it is not stored: no order is needed.
function pool.lone_ticket()
  if meta[WAITING] ~= 1 then return nil end
  for level = 0, levels - 1 do
    if tiers[level][QUEUED] > 0 then
      local ticket = pool.head_of(level)
      return ticket and not ticket.is_stored and ticket
    end
  end
end

-- What time has changed, before tickets are admitted.
function pool.keep_up() pool.make_urgent() end

function pool.dispatch()
  if meta[WAITING] > 0 and not pool.lone_ticket() and not pool.is_engine_gone() and not pool.is_on_hold() then pool.keep_up() end
  dispatch()
end

function pool.next_admission()
  local lone = pool.lone_ticket()
  local densest = pool.refresh_densities(lone)
  if lone and not pool.is_held_back() then
    local candidate = not pool.is_at_limit(lone.level, lone) and pool.candidate(lone.level, lone)
    return candidate and pool.fits(candidate) and candidate
  end
  local first = not pool.is_held_back() and pool.first_of_all(densest)
  if first then
    first.is_first = true
    if first.ticket.is_away then
      if pool.may_discard() then return first end
    elseif pool.fits(first) then
      return first
    elseif pool.holds_its_place(first) then
      return nil
    end
  end
  return next_admission()
end

function pool.admit(candidate, ledger)
  local ticket = candidate.ticket
  local in_floor = candidate.order_class ~= CLASS_OTHER
  if candidate.is_first then pool.candidate = only_class end
  if not ticket.is_stored and ticket.gain then
    ticket.was_urgent = ticket.arrived + ticket.gain.deadline < now + pool.patience()
  end
  pool.begins, ticket.in_floor = ticket, in_floor
  admit(candidate, ledger)
  pool.begins, pool.candidate = nil, candidate_of
  meta[REFRESHES] = meta[REFRESHES] + MOST_REFRESHED
  if in_floor then pool.book_floor(ticket.level, ticket.tokens, ticket.requests) end
end

local free, resize = pool.free, pool.resize

-- Books what a lease in a floor holds with the floor, in (1) or out (-1).
function pool.book_lease_in_floor(record, sign)
  if not pool.read_note(record) then return end
  local level, tokens, requests = pool.read_lease(record)
  pool.book_floor(level, sign * tokens, sign * requests)
end

-- A lease has ended, or returns.
function pool.free(owner, id, record)
  pool.book_lease_in_floor(record, -1)
  return free(owner, id, record)
end

function pool.resize(id, tokens)
  local record = call('HGET', mine, id)
  local level, held = pool.read_lease(record or '')
  if level and pool.read_note(record) then pool.book_floor(level, tokens - held, 0) end
  resize(id, tokens)
end

local charge_more = pool.charge_more

function pool.charge_more(level, tenant, weight, tokens)
  charge_more(level, tenant, weight, tokens)
  if tiers[level][QUEUED] == 0 then return end
  local lane = pool.lane_of(level, tenant)
  pool.forget_best(level)
  pool.delay(level, tenant, lane)
  pool.save_lane(level, tenant, lane)
end

-- -- time

local next_rise, next_change_of_waiting = pool.next_rise, pool.next_change_of_waiting

local function at_most(soonest, after)
  return after > 0 and (soonest < 0 or after < soonest) and after or soonest
end

-- A best ticket rises, too.
function pool.next_rise(soonest)
  local found, unit, ceiling = next_rise(soonest), rules[PROMOTE_AFTER], rules[CEILING]
  if unit == 0 then return found end
  for level = ceiling + 1, levels - 1 do
    local best = tiers[level][QUEUED] > 0 and pool.best_beside(level)
    if best then
      local rise = math.floor((now - best.arrived) / unit) + 1
      if rise <= level - ceiling then found = at_most(found, best.arrived + rise * unit - now) end
    end
  end
  return found
end

local is_unfinished = pool.is_unfinished

-- Tenants may be left to bring back, too.
function pool.is_unfinished() return is_unfinished() or (meta[WAITING] > 0 and pool.to_bring_back == 0) end

-- Whether any urgent ticket waits that earns something.
function pool.is_any_urgent()
  for level = 0, levels - 1 do
    if tiers[level][QUEUED] > 0 and pool.densest(level) then return true end
  end
  return false
end

-- A ticket becomes urgent, or densities have fallen.
function pool.next_change_of_waiting()
  local found = next_change_of_waiting()
  if meta[WAITING] == 0 then return found end
  local deadline = pool.first_due()
  if deadline then found = at_most(found, math.max(1, deadline - pool.patience() + 1 - now)) end
  return pool.is_any_urgent() and at_most(found, LOOK_AGAIN_US) or found
end
