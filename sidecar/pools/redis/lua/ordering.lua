-- The order of the waiting tickets, rules 1 and 4: the twin of `scheduling/order.py`, which says what an order decides.
-- A second order is another text of this file, with the same functions.

-- The aged level as a precedence, and rounded up to a whole level.
function pool.aged(level, arrived)
  local unit = rules[PROMOTE_AFTER]
  if unit == 0 then return level, level end
  local precedence = level * unit
  if level <= rules[CEILING] then return precedence, level end
  precedence = math.max(precedence - (now - arrived), rules[CEILING] * unit)
  return precedence, math.ceil(precedence / unit)
end

-- The place and the levels of one waiting ticket.
function pool.candidate(level, ticket)
  local rule, tier = rules[FIRST_RULE + level], tiers[level]
  local held_tokens, held_requests = tier[HELD_TOKENS], tier[HELD_REQUESTS]
  local order_class, turn = CLASS_OTHER, 0
  if rule[ALWAYS_FIRST] == 1 then
    order_class = CLASS_ALWAYS_FIRST
  elseif held_tokens + ticket.tokens <= rule[RESERVE_TOKENS] and held_requests + ticket.requests <= rule[RESERVE_REQUESTS] then
    order_class = CLASS_INSIDE
  elseif now >= tier[OWES_UNTIL] and held_tokens < rule[RESERVE_TOKENS] and held_requests < rule[RESERVE_REQUESTS] then
    order_class, turn = CLASS_TURN, tier[LATEST_ADMISSION]
  end
  local precedence, aged_level = pool.aged(level, ticket.arrived)
  return {
    order_class = order_class, turn = turn, precedence = precedence, ticket = ticket,
    headroom_level = aged_level, yields_to = aged_level, engine_level = aged_level,
  }
end

function pool.is_before(one, other)
  if one.order_class ~= other.order_class then return one.order_class < other.order_class end
  if one.turn ~= other.turn then return one.turn < other.turn end
  if one.precedence ~= other.precedence then return one.precedence < other.precedence end
  if one.ticket.arrived ~= other.ticket.arrived then return one.ticket.arrived < other.ticket.arrived end
  return one.ticket.sequence < other.ticket.sequence
end

-- The candidates, the first in order first.
function pool.in_order()
  local found = {}
  for level = 0, levels - 1 do
    if tiers[level][QUEUED] > 0 then
      local head, second = pool.head_of(level), pool.second_head(level)
      if not pool.is_at_limit(level, head) then found[#found + 1] = pool.candidate(level, head) end
      if second and not pool.is_at_limit(level, second) then found[#found + 1] = pool.candidate(level, second) end
    end
  end
  if found[2] then table.sort(found, pool.is_before) end
  return found
end

-- The candidates while the pool is held back; those of class OTHER only while it is idle. Classes INSIDE and TURN count
-- as one: in it the tier with the oldest latest admission comes first.
function pool.in_turn()
  local found = {}
  for place, candidate in ipairs(pool.in_order()) do
    if candidate.order_class < CLASS_OTHER or all_requests == 0 then
      candidate.place = place
      candidate.claim = candidate.order_class == CLASS_INSIDE and CLASS_TURN or candidate.order_class
      found[#found + 1] = candidate
    end
  end
  table.sort(found, function(one, other)
    local latest, other_latest = tiers[one.ticket.level][LATEST_ADMISSION], tiers[other.ticket.level][LATEST_ADMISSION]
    if one.claim ~= other.claim then return one.claim < other.claim end
    if latest ~= other_latest then return latest < other_latest end
    return one.place < other.place
  end)
  return found
end

-- Whether a ticket of a tier that has its reserve comes before a candidate.
function pool.comes_before(ticket, candidate)
  local place = pool.candidate(ticket.level, ticket)
  place.order_class, place.turn = CLASS_OTHER, 0
  return pool.is_before(place, candidate)
end

-- The rule by which a candidate is admitted before the head of another tier that arrived earlier.
function pool.rule_code(candidate, head)
  if pool.is_before(head, candidate) then return 'o' end
  if candidate.order_class == CLASS_TURN then return 't' end
  if candidate.order_class == head.order_class then return 'l' end
  return candidate.order_class == CLASS_ALWAYS_FIRST and 'a' or 'r'
end

-- The time until a head reaches a whole level, where that is before `soonest`.
function pool.next_rise(soonest)
  local unit, ceiling = rules[PROMOTE_AFTER], rules[CEILING]
  if unit == 0 then return soonest end
  for level = ceiling + 1, levels - 1 do
    if tiers[level][QUEUED] > 0 then
      for _, head in ipairs({pool.head_of(level), pool.second_head(level)}) do
        local rise = math.floor((now - head.arrived) / unit) + 1
        local change = head.arrived + rise * unit - now
        if rise <= level - ceiling and (soonest < 0 or change < soonest) then soonest = change end
      end
    end
  end
  return soonest
end
