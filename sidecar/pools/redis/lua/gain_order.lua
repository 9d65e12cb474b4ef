-- The order by gain: the twin of `scheduling/gain_order.py` and `scheduling/gain_scheduler.py`, which say what it is. It
-- replaces parts of `ordering.lua`, `scheduler.lua`, `operations.lua` and `preemption.lua`.

local aged = pool.aged

-- -- floors

-- A lease is noted by 'IN_FLOOR URGENT FIGURES' for as long as it lasts.
function pool.note_lease(owner, id, in_floor, is_urgent, gain_text)
  call('HSET', prefix .. 'y', owner .. ' ' .. id, (in_floor and '1 ' or '0 ') .. (is_urgent and '1 ' or '0 ') .. gain_text)
end

function pool.read_note(owner, id)
  local in_floor, is_urgent, text = match(call('HGET', prefix .. 'y', owner .. ' ' .. id) or '', '^(%d) (%d) (.*)$')
  return in_floor == '1', is_urgent == '1', text or '-'
end

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

-- What is known of a waiting ticket: whether it is calm, else its density as last computed. Heads are kept for a whole
-- call, so they are looked up each time.
function pool.look_up(ticket)
  if not ticket.gain or ticket.is_lease or ticket.lane then return end
  local lane, member = pool.lane_name(ticket), pool.member_of(ticket)
  ticket.is_calm = call('ZSCORE', pool.calm_key(ticket.level, lane), member) and true or false
  if ticket.is_calm then return end
  ticket.is_urgent, ticket.density = true, -tonumber(call('ZSCORE', pool.urgent_key(ticket.level, lane), member) or 0)
end

function pool.is_in_headroom(level, ticket)
  local rule, tier = rules[FIRST_RULE + level], tiers[level]
  local tokens, requests = rule[HEADROOM_TOKENS], rule[HEADROOM_REQUESTS]
  return (tokens > 0 or requests > 0)
    and (rules[CAPACITY_TOKENS] == UNLIMITED or tier[HELD_TOKENS] + ticket.tokens <= tokens)
    and (rules[CAPACITY_REQUESTS] == UNLIMITED or tier[HELD_REQUESTS] + ticket.requests <= requests)
end

-- The place of any ticket beyond its tier's floor. A lease is as dense as it would be now.
function pool.beyond(level, ticket)
  local precedence, aged_level = aged(level, ticket.arrived)
  local rank = RANK_NO_GAIN
  if pool.is_in_headroom(level, ticket) then
    rank = RANK_HEADROOM
  elseif ticket.gain then
    pool.look_up(ticket)
    if ticket.is_lease or not pool.is_ahead(level, pool.lane_name(ticket), pool.virtual_now(level)) then
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

function pool.candidate(level, ticket)
  local order_class, turn = CLASS_TURN, 0
  if rules[FIRST_RULE + level][ALWAYS_FIRST] == 1 then
    order_class = CLASS_ALWAYS_FIRST
  elseif pool.has_floor_for(level, ticket) then
    order_class = CLASS_INSIDE
  elseif now >= tiers[level][OWES_UNTIL] and pool.is_below_floor(level) then
    turn = tiers[level][LATEST_ADMISSION]
  else
    return pool.beyond(level, ticket)
  end
  local precedence, aged_level = aged(level, ticket.arrived)
  return {
    order_class = order_class, turn = turn, precedence = precedence, ticket = ticket,
    headroom_level = aged_level, yields_to = aged_level, engine_level = aged_level,
  }
end

-- The best ticket of a tier by gain, where it is none of its heads. It may be that of a replica that is away: then it leaves
-- the queue when it is first in order, as a head does.
function pool.best_beside(level, head, second)
  if rules[FIRST_RULE + level][ALWAYS_FIRST] == 1 then return nil end
  local best = pool.densest(level) or pool.earliest(level)
  if not best or best.sequence == head.sequence or (second and best.sequence == second.sequence) then return nil end
  if pool.is_any_away() and pool.is_away(best.owner) then best.is_away = true end
  return best
end

local is_any_head_away = pool.is_any_head_away

function pool.is_any_head_away()
  if is_any_head_away() then return true end
  if not pool.is_any_away() then return false end
  for level = 0, levels - 1 do
    if tiers[level][QUEUED] > 0 then
      local best = pool.best_beside(level, pool.head_of(level), pool.second_head(level))
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
      local best = pool.best_beside(level, head, second)
      if best and not pool.is_at_limit(level, best) then found[#found + 1] = pool.beyond(level, best) end
    end
  end
  if found[2] then table.sort(found, pool.is_before) end
  return found
end

local rule_code = pool.rule_code

function pool.rule_code(candidate, head)
  if candidate.order_class ~= CLASS_OTHER or pool.is_before(head, candidate) then return rule_code(candidate, head) end
  if candidate.turn == RANK_HEADROOM then return 'r' end
  return candidate.turn == RANK_NO_GAIN and 'l' or 'g'
end

-- Rule 3, with the floors in place of the reserves.
function pool.holds_its_place(candidate)
  if candidate.order_class == CLASS_ALWAYS_FIRST then return true end
  local tokens = rules[CAPACITY_TOKENS] - candidate.ticket.tokens
  local requests = rules[CAPACITY_REQUESTS] - candidate.ticket.requests
  for level = 0, levels - 1 do
    if level ~= candidate.ticket.level then
      local rule, tier = rules[FIRST_RULE + level], tiers[level]
      local kept_tokens, kept_requests = tier[HELD_TOKENS], tier[HELD_REQUESTS]
      if rule[ALWAYS_FIRST] == 0 then
        kept_tokens = math.min(tier[FLOOR_TOKENS], rule[RESERVE_TOKENS])
        kept_requests = math.min(tier[FLOOR_REQUESTS], rule[RESERVE_REQUESTS])
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

-- -- decisions

local dispatch, next_admission, admit = pool.dispatch, pool.next_admission, pool.admit

function pool.dispatch()
  if meta[WAITING] > 0 and not pool.is_engine_gone() and not pool.is_on_hold() then pool.make_urgent() end
  dispatch()
end

function pool.next_admission()
  pool.refresh_densities()
  return next_admission()
end

function pool.admit(candidate)
  local ticket = candidate.ticket
  local in_floor = candidate.order_class ~= CLASS_OTHER
  admit(candidate)
  meta[REFRESHES] = meta[REFRESHES] + MOST_REFRESHED
  if in_floor then pool.book_floor(ticket.level, ticket.tokens, ticket.requests) end
  pool.note_lease(ticket.owner, ticket.id, in_floor, ticket.was_urgent, ticket.gain_text)
end

local free, resize = pool.free, pool.resize

-- A lease has ended, or returns.
function pool.free(owner, id, record)
  local in_floor = pool.read_note(owner, id)
  if in_floor then
    local level, tokens, requests = pool.read_lease(record)
    pool.book_floor(level, -tokens, -requests)
  end
  call('HDEL', prefix .. 'y', owner .. ' ' .. id)
  return free(owner, id, record)
end

function pool.resize(id, tokens)
  local level, held = pool.read_lease(call('HGET', mine, id) or '')
  if level and pool.read_note(me, id) then pool.book_floor(level, tokens - held, 0) end
  resize(id, tokens)
end

local charge_more = pool.charge_more

function pool.charge_more(level, tenant, weight, tokens)
  charge_more(level, tenant, weight, tokens)
  if tiers[level][QUEUED] > 0 then pool.delay(level, tenant) end
end

-- -- time

local next_rise = pool.next_rise

-- A best ticket rises, too; one becomes urgent; or densities have fallen.
function pool.next_rise(soonest)
  local found = next_rise(soonest)
  local function at_most(after)
    if after > 0 and (found < 0 or after < found) then found = after end
  end
  local unit, ceiling = rules[PROMOTE_AFTER], rules[CEILING]
  local is_any_urgent = false
  for level = 0, levels - 1 do
    if tiers[level][QUEUED] > 0 then
      local head, second = pool.head_of(level), pool.second_head(level)
      local best = pool.best_beside(level, head, second)
      if best and unit > 0 and level > ceiling then
        local rise = math.floor((now - best.arrived) / unit) + 1
        if rise <= level - ceiling then at_most(best.arrived + rise * unit - now) end
      end
      if pool.densest(level) then is_any_urgent = true end
    end
  end
  local first = call('ZRANGE', prefix .. 'e', 0, 0, 'WITHSCORES')
  if first[1] then at_most(math.max(1, tonumber(first[2]) - pool.patience() + 1 - now)) end
  if is_any_urgent then at_most(LOOK_AGAIN_US) end
  return found
end
