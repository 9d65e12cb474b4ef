-- Rules 3 to 6 and 10: the order of what waits, and one step after the other into engines and into the line (`scheduler.py`).

local FIRST, LINE, INSIDE, TURN, OTHER = 0, 1, 2, 3, 4 -- rule 3: the classes, in order

local function used(tier, d) return tiers[tier][ON_ENGINES][d] + tiers[tier][IN_LINE][d] end

-- U where it is compared with R: by gain, what was let in for the floor (rule 9).
local function on_floor(tier, d)
  if not rules[R_BY_GAIN] then return used(tier, d) end
  return tiers[tier][ON_FLOOR][d] + tiers[tier][IN_LINE_ON_FLOOR][d]
end

local function add_sums(tier, what, sign, tokens, requests, prompt)
  local sums = tiers[tier][what]
  sums[1], sums[2], sums[3] = sums[1] + sign * tokens, sums[2] + sign * requests, sums[3] + sign * prompt
end

-- Adds to what a tier holds on an engine; on the engine only, where the rules do not know the tier.
local function hold(tier, id, sign, tokens, requests, prompt, sent, floor_tokens, floor_requests, floor_prompt)
  if tier then
    add_sums(tier, ON_ENGINES, sign, tokens, requests, prompt)
    add_sums(tier, ON_FLOOR, sign, floor_tokens, floor_requests, floor_prompt)
  end
  local slot = slot_of(id) or add_unknown(id) -- which makes another `held`
  local it = held[slot]
  it[H_TOKENS], it[H_REQUESTS] = it[H_TOKENS] + sign * tokens, it[H_REQUESTS] + sign * requests
  it[H_PROMPT], it[H_SENT] = it[H_PROMPT] + sign * prompt, it[H_SENT] + sign * sent
end

local function hold_in_line(ticket, sign)
  add_sums(ticket[TIER], IN_LINE, sign, ticket[TOKENS], ticket[REQUESTS], ticket[COUNT])
  if ticket[IS_IN_FLOOR] then
    add_sums(ticket[TIER], IN_LINE_ON_FLOOR, sign, ticket[TOKENS], ticket[REQUESTS], ticket[COUNT])
  end
end

-- Rule 5: the tier has no turn for so much longer.
local function owe(tier, owed_us)
  if tier and owed_us > 0 then tiers[tier][OWES_UNTIL], state[NEXT] = max(now, tiers[tier][OWES_UNTIL]) + owed_us, false end
end

local function owes(tier) return now < tiers[tier][OWES_UNTIL] end

-- Rule 10 (`guard.py`): work below a guarded tier may fill the pool up to a share, or its floors.
local function new_guard(tier, share)
  local guard = { tier = tier, below = {}, floors = { 0, 0, 0 }, most = {} }
  for q = tier + 1, #tiers do guard.below[q] = not rules[R_TIERS][q][T_FIRST] or nil end
  for d = 1, 3 do
    for q in pairs(guard.below) do guard.floors[d] = guard.floors[d] + figures.R[q][d] end
    guard.most[d] = part_of(share * PPM, figures.C[d], UNBOUNDED)
  end
  return guard
end

-- Figures change with the engines, in slow start with time.
local function look()
  local capacity = { 0, 0, 0 }
  needs, total, largest_prefill, places, is_divided = {}, { 0, 0, 0 }, 0, 0, false
  for slot, engine in ipairs(config.engines) do
    local it = held[slot]
    for d = 1, 3 do total[d] = total[d] + it[H_ID + d] end
    if is_ready(engine) then
      local tokens, requests, prefill = size_of(engine)
      places, largest_prefill, is_divided = places + 1, max(largest_prefill, prefill), is_divided or engine[E_UNREACHABLE]
      capacity[1], capacity[2], capacity[3] = capacity[1] + tokens, capacity[2] + requests, capacity[3] + prefill
    else
      for d = 1, 3 do capacity[d] = capacity[d] + it[H_ID + d] end
    end
  end
  for d = 1, 3 do capacity[d] = min(capacity[d], UNBOUNDED) end
  figures = config.figures
  local C = figures and figures.C
  if not C or C[1] ~= capacity[1] or C[2] ~= capacity[2] or C[3] ~= capacity[3] then
    figures = figures_of(capacity)
    config.figures, is_config_new, state[NEXT] = figures, true, false
  end
  guards, kept_out = {}, NOBODY
  for tier, t in ipairs(tiers) do
    if t[GUARD][G_SHARE] then guards[#guards + 1] = new_guard(tier, t[GUARD][G_SHARE]) end
  end
end

-- ---- rule 4: room -----------------------------------------------------------------------------------------------------

local function best_hit(ticket)
  local hit = 0
  for _, tokens in pairs(ticket[HITS]) do hit = max(hit, tokens) end
  return hit
end

local function uncached(ticket) return max(1, ticket[PROMPT] - best_hit(ticket)) end

-- t: its prompt counts less its best hit, for no more than its size limit and the largest engine's prefill.
local function need(ticket)
  needs[ticket] = needs[ticket]
    or { ticket[TOKENS], ticket[REQUESTS], min(uncached(ticket), largest_prefill, figures.most_prompt[ticket[TIER]]) }
  return needs[ticket]
end

-- `t <= R`.
local function is_small(ticket)
  local t, most = need(ticket), figures.R[ticket[TIER]]
  return t[1] <= most[1] and t[2] <= most[2] and t[3] <= most[3]
end

-- `level * promote_after - waited`: a ticket rises one level per `promote_after`, not past the ceiling.
local function aged_level(tier, arrived)
  local level, promote_after, ceiling = tier - 1, rules[R_PROMOTE], rules[R_CEILING]
  if not promote_after then return level end
  if level <= ceiling then return level * promote_after end
  return max(level * promote_after - (now - arrived), ceiling * promote_after)
end

-- How many tiers are more important than the ticket: those at a level less than its aged level.
local function tiers_above(ticket) return ceil(aged_level(ticket[TIER], ticket[ARRIVED]) / (rules[R_PROMOTE] or 1)) end

-- Beside what engines hold and the idle headroom of tiers that are more important than the ticket.
-- As if `gone` had ended and those `before` the ticket had entered.
local function fits(ticket, before, gone)
  local t, above = need(ticket), figures.has_headroom and tiers_above(ticket) or 0
  for d = 1, 3 do
    local needed = total[d] + t[d] - (gone and gone.total[d] or 0)
    for _, other in ipairs(before) do needed = needed + need(other)[d] end
    for q = 1, min(above, #tiers) do
      if q ~= ticket[TIER] then
        local of_tier = gone and gone.tiers[q]
        needed = needed + max(0, figures.H[q][d] - used(q, d) + (of_tier and of_tier[d] or 0))
      end
    end
    if needed > figures.C[d] then return false end
  end
  return true
end

-- Whether it holds its place though it does not fit, so that nothing after it is admitted.
local function holds(ticket, class)
  if class == FIRST then return true end
  local t, above = need(ticket), tiers_above(ticket)
  for d = 1, 3 do
    local kept = t[d]
    for q = 1, #tiers do
      if q ~= ticket[TIER] then
        local is_better, k = q <= above, used(q, d)
        if not (rules[R_TIERS][q][T_FIRST] or (class == OTHER and is_better and not rules[R_BY_GAIN])) then
          k = min(on_floor(q, d), figures.R[q][d])
        end
        kept = kept + (is_better and max(k, figures.H[q][d]) or k)
      end
    end
    if kept > figures.C[d] then return false end
  end
  return true
end

-- ---- rule 3: order ----------------------------------------------------------------------------------------------------

local function is_for_floor(ticket) return ticket[IN_LINE_SINCE] and ticket[ADMISSION] > 0 end

-- The ready engines that a replica's tickets can enter.
local function reached(owner)
  local found = {}
  for slot, engine in ipairs(config.engines) do
    if is_ready(engine) and not (engine[E_UNREACHABLE] and engine[E_UNREACHABLE][owner]) then found[slot] = true end
  end
  return found
end

local function has_common(a, b)
  for slot in pairs(a) do
    if b[slot] then return true end
  end
end

-- The next in fair order; while the tier owes and that one is not small, also the next that is. Where replicas see different
-- engines, also the next that can reach one which none before it can.
local function heads_of(tier)
  local first = next_of(tier)
  if not first then return NOBODY end
  local firsts = { first, owes(tier) and not is_small(first) and next_of(tier, is_small) or nil }
  local seen = is_divided and reached(first[OWNER])
  for _, it in ipairs(is_divided and first_of_each_owner(tier) or NOBODY) do
    local is_new, ticket = false, it.ticket
    for slot in pairs(reached(ticket[OWNER])) do is_new, seen[slot] = is_new or not seen[slot], true end
    if is_new and ticket ~= first and ticket ~= firsts[2] then firsts[#firsts + 1] = ticket end
  end
  return firsts
end

local function is_within(tier, t, most, sum)
  for d = 1, 3 do
    if sum(tier, d) + t[d] > most[d] then return false end
  end
  return true
end

-- A floor is for its tier's front; while the tier owes, also for what is small beside a front that is not.
-- `front`: of those in line that are not for the floor the first. `is_head`: it is a head of its tier.
local function class_of(ticket, front, is_head)
  local tier = ticket[TIER]
  if rules[R_TIERS][tier][T_FIRST] then return FIRST end
  if is_for_floor(ticket) then return LINE end
  local may_be_inside = ticket == front
  if not front then
    may_be_inside = is_head
  elseif ticket ~= front and owes(tier) and not is_small(front) and is_small(ticket) then
    may_be_inside = ticket[IN_LINE_SINCE] or is_head
  end
  if not may_be_inside then return OTHER end
  local reserve = figures.R[tier]
  if is_within(tier, need(ticket), reserve, on_floor) then return INSIDE end
  for d = 1, 3 do
    if on_floor(tier, d) >= reserve[d] then return OTHER end
  end
  return owes(tier) and OTHER or TURN
end

-- Rule 9: weight for time; what earns nothing, or whose tenant is ahead, comes after all others, by level.
local function gain_key(ticket)
  local earns, waits_in_queue = earned(ticket), not ticket[IN_LINE_SINCE] and ticket[ADMISSION] == 0
  if earns > 0 and not (waits_in_queue and is_ahead(ticket)) then return 0, -earns end
  return 1, aged_level(ticket[TIER], ticket[ARRIVED])
end

-- What the order compares. Turns: whose last admission is longest ago. Ties and the others: by aged level.
local function place_of(ticket, class)
  local before, key = 0, nil
  if class == LINE then
    before = ticket[ADMISSION]
  elseif class == TURN then
    before = tiers[ticket[TIER]][LATEST]
  elseif class == OTHER and rules[R_BY_GAIN] then
    before, key = gain_key(ticket)
  end
  return { class = class, before = before, key = key or aged_level(ticket[TIER], ticket[ARRIVED]), tier = ticket[TIER], ticket = ticket }
end

local function is_place_before(a, b)
  if a.class ~= b.class then return a.class < b.class end
  if a.before ~= b.before then return a.before < b.before end
  if a.key ~= b.key then return a.key < b.key end
  return is_before(a.ticket, b.ticket)
end

-- Whether a guarded tier leaves room to a ticket, each dimension for itself: one is let in where those below hold floors only.
local function leaves_room(guard, ticket)
  local t = need(ticket)
  for d = 1, 3 do
    local below, beyond = 0, 0
    for q in pairs(guard.below) do
      below, beyond = below + used(q, d), beyond + max(0, used(q, d) - figures.R[q][d])
    end
    if beyond > 0 and below + t[d] > guard.floors[d] and total[d] + t[d] > guard.most[d] then return false end
  end
  return true
end

-- Those of class 4, in order, without those for which a guarded tier leaves no room, and those like them that come after.
local function allowed(others)
  local kept, closed = {}, {}
  kept_out = {}
  table.sort(others, is_place_before)
  for _, place in ipairs(others) do
    local is_kept = true
    for _, guard in ipairs(guards) do
      if guard.below[place.tier] and (closed[guard] or not leaves_room(guard, place.ticket)) then
        is_kept, closed[guard], kept_out[place.tier] = false, true, true
        local of = tiers[guard.tier][GUARD]
        of[G_KEPT_OUT] = of[G_KEPT_OUT] or fits(place.ticket, NOBODY)
      end
    end
    if is_kept then kept[#kept + 1] = place end
  end
  return kept
end

-- The candidates: those in line, the heads of all tiers, by gain the best of each tier. In order, but for those of class 4.
-- `open`, where nobody in line stops others: one in class 4 whose engine is not among these, and who goes to no other, does nothing.
-- Who was left out so is told, too; by level of each tier the first. Where no one `may_enter`, only who may be early is looked for.
local function candidates(open, may_enter)
  local early, others, fronts, left_out, is_open = {}, {}, {}, {}, {}
  local function consider(ticket, is_head)
    local tier = ticket[TIER]
    if is_for_floor(ticket) or rules[R_TIERS][tier][T_LIMIT] >= PPM or is_within(tier, need(ticket), figures.L[tier], used) then
      local class = class_of(ticket, fronts[tier], is_head)
      local list = class == OTHER and others or early
      list[#list + 1] = place_of(ticket, class)
    end
  end
  for slot in pairs(open or NOBODY) do is_open[config.engines[slot][E_ID]] = true end
  for _, ticket in ipairs(load_line()) do
    local tier = ticket[TIER]
    if not fronts[tier] and not is_for_floor(ticket) then fronts[tier] = ticket end
    local may_be_early = ticket == fronts[tier] or owes(tier) or rules[R_TIERS][tier][T_FIRST]
    local is_plain = not is_for_floor(ticket) and rules[R_TIERS][tier][T_LIMIT] >= PPM
    if not may_be_early and open and (not next(open) or (is_plain and ticket[STAYS] and not is_open[ticket[ENGINE]])) then
      local at = rules[R_BY_GAIN] and ticket or tier -- by level the first of a tier is the one that came first
      if may_enter and (not left_out[at] or is_before(ticket, left_out[at])) then left_out[at] = ticket end
    else
      consider(ticket, false)
    end
  end
  for tier = 1, #tiers do
    local firsts = heads_of(tier)
    for i = 1, #firsts do consider(firsts[i], true) end
    if may_enter and rules[R_BY_GAIN] and firsts[1] and not rules[R_TIERS][tier][T_FIRST] then
      local best = best_in_queue(tier)
      for i = 1, #firsts do best = best ~= firsts[i] and best end
      if best then consider(best, false) end
    end
  end
  table.sort(early, is_place_before)
  if #guards > 0 then others = allowed(others) end
  return early, others, left_out
end

-- For reports (`reports.py`): the other tiers whose first came before the ticket, with the rule by which it enters before that one.
local RULE_OF_CLASS = { [0] = 'always_first', 'reserve', 'reserve', 'reserve_turn' }

local function rule_before(place, first)
  if is_place_before(first, place) then return fits(first.ticket, NOBODY) and 'claim' or 'passed_over' end
  if place.class < first.class or place.class == TURN then return RULE_OF_CLASS[place.class] end
  return place.class == OTHER and rules[R_BY_GAIN] and place.before == 0 and 'gain' or 'level'
end

local function passed(place, ...)
  local firsts, found = {}, {}
  for _, places in ipairs({ ... }) do
    for _, it in pairs(places) do
      if not it.class then it = place_of(it, OTHER) end
      if not firsts[it.tier] or is_place_before(it, firsts[it.tier]) then firsts[it.tier] = it end
    end
  end
  for tier, t in ipairs(tiers) do
    if tier ~= place.tier and (t[LINED] > 0 or t[QUEUED] > 0) then
      local first = firsts[tier]
      local ticket = first and first.ticket or next_of(tier)
      if ticket and is_before(ticket, place.ticket) then
        found[#found + 1] = { t[NAME], first and rule_before(place, first) or (kept_out[tier] and 'guarded' or 'limit') }
      end
    end
  end
  return found
end

-- ---- rule 6: engines and the line -------------------------------------------------------------------------------------

local function wait_for(ticket, slot)
  local own = ticket[ENGINE] and held[slot_of(ticket[ENGINE])]
  if own then own[H_LINED] = own[H_LINED] - ticket[PROMPT] end
  if slot then held[slot][H_LINED] = held[slot][H_LINED] + ticket[PROMPT] end
  ticket[ENGINE] = slot and config.engines[slot][E_ID] or false
  local own = ticket[HITS][ticket[ENGINE]] or 0
  ticket[STAYS] = own > 0
  for id, tokens in pairs(ticket[HITS]) do
    if id ~= ticket[ENGINE] and tokens >= own then ticket[STAYS] = false end
  end
  change_line(ticket)
end

local function leave_line(ticket)
  take_from(line, ticket)
  tiers[ticket[TIER]][LINED] = tiers[ticket[TIER]][LINED] - 1
  if #line == 0 then state[LEAST], state[MOST] = UNBOUNDED, { 0, 0, 0 } end
  moved(ticket)
  wait_for(ticket, nil)
  if is_for_floor(ticket) then hold_in_line(ticket, -1) end
  ticket[IN_LINE_SINCE] = false
end

local function remove(ticket)
  if not ticket[IN_LINE_SINCE] then return queue_remove(ticket) end
  local owed = (ticket[EXCESS] + ticket[EXCESS_PROMPT]) * (now - ticket[COUNTED])
  leave_line(ticket)
  owe(ticket[TIER], owed)
end

-- Those in line for an engine that can take them no more.
local function choose_again()
  for _, ticket in ipairs(load_line()) do
    local before = ticket[ENGINE]
    local own = before and slot_of(before)
    if not own or not could_take(ticket, own) then
      wait_for(ticket, nil)
      wait_for(ticket, wanted(ticket))
      if ticket[ENGINE] ~= before then moved(ticket) end
    end
  end
end

-- Rule 5: by a turn, how many whole reserves too much; of the prompt, what is above that.
local function begin_to_count(ticket, class)
  local tier, t = ticket[TIER], need(ticket)
  if class == TURN then
    local excess, reserve = {}, figures.R[tier]
    for d = 1, 3 do
      excess[d] = min(MOST_EXCESS, max(0, floor((on_floor(tier, d) + t[d] - reserve[d]) / reserve[d])))
    end
    ticket[EXCESS] = max(excess[1], excess[2])
    ticket[EXCESS_PROMPT] = max(0, excess[3] - ticket[EXCESS])
  end
  ticket[COUNT], ticket[IS_IN_FLOOR], ticket[COUNTED] = t[3], rules[R_BY_GAIN] and class ~= OTHER, now
  state[ADMISSIONS] = state[ADMISSIONS] + 1
  tiers[tier][LATEST], ticket[ADMISSION], ticket.packed = state[ADMISSIONS], state[ADMISSIONS], nil
end

local function enter(ticket, slot, class, over)
  local is_counted, lined_us = is_for_floor(ticket), ticket[IN_LINE_SINCE] and now - ticket[IN_LINE_SINCE] or 0
  local most_tokens, most_requests = size_of(config.engines[slot])
  local it = held[slot]
  local found = { most_tokens, most_requests, it[H_TOKENS], it[H_REQUESTS], it[H_SENT], lined_us }
  if ticket[IN_LINE_SINCE] then leave_line(ticket) else queue_leave(ticket) end
  if not is_counted then begin_to_count(ticket, class) end
  ticket[ENGINE] = false
  local id, floor_of = it[H_ID], ticket[IS_IN_FLOOR] and 1 or 0
  local tokens, requests, count = ticket[TOKENS], ticket[REQUESTS], ticket[COUNT]
  local sent = count > 0 and sent_to(ticket, id) or 0
  hold(ticket[TIER], id, 1, tokens, requests, count, sent, floor_of * tokens, floor_of * requests, floor_of * count)
  total[1], total[2], total[3] = total[1] + tokens, total[2] + requests, total[3] + count
  tiers[ticket[TIER]][SERVED] = tiers[ticket[TIER]][SERVED] + tokens
  if rules[R_TIERS][ticket[TIER]][T_PREEMPT_AFTER] then state[ASKED_BEFORE] = {} end
  if ticket[ARRIVED] > state[LATEST_CAME] then
    state[LATEST_CAME], state[LATEST_OWNER], state[LATEST_GRANTED] = ticket[ARRIVED], ticket[OWNER], now
  end
  granted[#granted + 1] = { ticket[OWNER], { ticket[ID], tiers[ticket[TIER]][NAME], id, tokens, requests, count, sent, ticket[EXCESS],
    ticket[EXCESS_PROMPT], ticket[IS_IN_FLOOR], ticket[COUNTED], found, over } }
end

local function join(ticket, slot)
  local most = state[MOST]
  queue_leave(ticket)
  tiers[ticket[TIER]][LINED] = tiers[ticket[TIER]][LINED] + 1
  ticket[IN_LINE_SINCE], state[LEAST] = now, min(state[LEAST], ticket[TOKENS])
  state[MOST] = { max(most[1], ticket[TOKENS]), max(most[2], ticket[REQUESTS]), max(most[3], uncached(ticket)) }
  load_line()
  line[#line + 1] = ticket
  moved(ticket)
  wait_for(ticket, slot)
end

-- The slots of engines with room for the smallest that waits, and its tokens. Beside them nobody can enter.
local function find_open()
  local least, open = state[LEAST], {}
  for tier = 1, #tiers do least = min(least, tiers[tier][SMALLEST]) end
  for slot, engine in ipairs(config.engines) do
    local tokens, requests, prefill = size_of(engine)
    local it = held[slot]
    open[slot] = is_ready(engine) and it[H_TOKENS] + least <= tokens and it[H_REQUESTS] < min(requests, cap_of(slot))
      and (it[H_SENT] == 0 or it[H_SENT] < prefill) or nil
  end
  return open, least
end

-- The engine that it enters now: the one that it wants, or the best other one without less of its prompt.
local function engine_for(ticket, own, open, takes_any)
  if own and open[own] and has_room(ticket, own, NOBODY) then return own end
  local other = best_of(ticket, function(slot) return open[slot] and could_take(ticket, slot) and has_room(ticket, slot, NOBODY) end)
  if not other or takes_any then return other end
  local hits = ticket[HITS]
  local hit, own_hit = hits[config.engines[other][E_ID]] or 0, own and hits[config.engines[own][E_ID]] or 0
  return hit >= own_hit and other or nil
end

-- Each tier has as many places in line as there are ready engines; class 0 has always one.
-- Where replicas see different engines: as its replica sees, beside those that can reach one of these.
local function has_place(ticket)
  local tier = ticket[TIER]
  if rules[R_TIERS][tier][T_FIRST] then return true end
  if not is_divided then return tiers[tier][LINED] < places end
  local own, free = reached(ticket[OWNER]), 0
  for _ in pairs(own) do free = free + 1 end
  for _, other in ipairs(load_line()) do
    if other[TIER] == tier and has_common(own, reached(other[OWNER])) then free = free - 1 end
  end
  return free > 0
end

-- The slots that it would enter if they had room: the one that it wants, then the next best.
local function would_enter(ticket, class)
  local own, others, points = wanted(ticket), {}, {}
  if not own then return NOBODY end
  for slot = 1, #config.engines do
    if slot ~= own and could_take(ticket, slot) then others[#others + 1], points[slot] = slot, score(ticket, slot) end
  end
  table.sort(others, function(a, b) return points[a] < points[b] or (points[a] == points[b] and a < b) end)
  local waits = class ~= FIRST and has_place(ticket)
  if ticket[IN_LINE_SINCE] then waits = class ~= FIRST and now < ticket[IN_LINE_SINCE] + PATIENCE_US end
  local found, hits = { own }, ticket[HITS]
  for _, slot in ipairs(others) do
    if waits and (hits[config.engines[slot][E_ID]] or 0) < (hits[config.engines[own][E_ID]] or 0) then break end
    found[#found + 1] = slot
  end
  return found
end

local function someone_may_join()
  for tier = 1, #tiers do
    if tiers[tier][QUEUED] > 0 and (is_divided or tiers[tier][LINED] < places or rules[R_TIERS][tier][T_FIRST]) then return true end
  end
end

-- Whether one in line may be in class 0, 2 or 3, and not for the floor yet.
local function front_may_stand_for_floor()
  for tier = 1, #tiers do
    local reserve = figures.R[tier]
    local tokens, prompt = on_floor(tier, 1), on_floor(tier, 3)
    local has_floor = on_floor(tier, 2) < reserve[2]
      and ((tokens + state[LEAST] <= reserve[1] and prompt <= reserve[3]) or (not owes(tier) and tokens < reserve[1] and prompt < reserve[3]))
    if tiers[tier][LINED] > 0 and (rules[R_TIERS][tier][T_FIRST] or has_floor) then return true end
  end
end

-- One in line matters to others if it holds its place or has stood there for long. Whether none does.
local function is_line_calm()
  for d = 1, 3 do
    if total[d] + state[MOST][d] > figures.C[d] then return false end
  end
  return not figures.has_headroom and not (load_line()[1] and now >= line[1][IN_LINE_SINCE] + PATIENCE_US)
end

-- What one candidate does: true where that is a step, false where it stops all after it.
local function visit(place, open, ...)
  local class = place.class
  local ticket, stopped = place.ticket, open.stopped
  if class == OTHER and stopped and (not is_divided or has_common(stopped, reached(ticket[OWNER]))) then return nil end
  if not fits(ticket, NOBODY) then return not holds(ticket, class) and nil end
  local was_in_line = ticket[IN_LINE_SINCE]
  local joins = not was_in_line and has_place(ticket)
  local is_late = was_in_line and now >= was_in_line + PATIENCE_US
  local may_count = was_in_line and not is_for_floor(ticket) and class ~= OTHER
  if not (next(open) or joins or is_late or may_count) then return nil end -- whatever it wants
  local own = wanted(ticket)
  local slot = engine_for(ticket, own, open, class == FIRST or is_late or not (was_in_line or joins))
  if slot then
    enter(ticket, slot, class, passed(place, ...))
    return true
  end
  if joins then join(ticket, own) end
  if ticket[IN_LINE_SINCE] and not is_for_floor(ticket) and own and class ~= OTHER then
    begin_to_count(ticket, class)
    hold_in_line(ticket, 1)
    change_line(ticket)
    return true
  end
  if joins then return true end
  if own then
    open[own] = nil
    if is_late and is_small(ticket) then -- a small one has stood in line for 5 s
      open.stopped = stopped or {}
      open.stopped[own] = true
    end
  end
end

-- The next step, one enters an engine or comes to stand in line. False where there is none.
local function step()
  local open, least = find_open()
  if total[1] + least > figures.C[1] or total[2] >= figures.C[2] then return false end -- nothing that waits fits the pool
  local may_enter = #guards > 0 or next(open) or someone_may_join()
  if not may_enter and not front_may_stand_for_floor() then return false end
  local early, others, left_out = candidates(#guards == 0 and is_line_calm() and open, may_enter)
  for _, places in ipairs({ early, others }) do
    if places == others then
      if (open.stopped and not is_divided) or (not next(open) and not someone_may_join()) then return false end
      table.sort(others, is_place_before)
    end
    for i = 1, #places do
      local is_step = visit(places[i], open, early, others, left_out)
      if is_step ~= nil then return is_step end
    end
  end
  return false
end

local function decide(waiting)
  look()
  if places == 0 then return end
  if state[CHOOSES] then
    choose_again()
    state[CHOOSES] = false
    for slot = 1, #config.engines do state[CHOOSES] = state[CHOOSES] or now < held[slot][H_CAP_UNTIL] end
  end
  while #granted < waiting and step() do
    if state[CHOOSES] then choose_again() end
  end
end
