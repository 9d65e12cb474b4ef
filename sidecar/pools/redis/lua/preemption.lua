-- Rule 7: room that is taken back for the first in order that has waited long enough (`preemption.py`).

-- What is as good as given free: sums of leases that are taken back, by tier and by engine.
local function taken_back()
  local gone = { total = { 0, 0, 0 }, tiers = {}, engines = {} }
  for _, member in pairs(members) do
    for _, cell in ipairs(member[LEAVING]) do
      local tier, id = tier_of(cell[CELL_TIER]), cell[CELL_ENGINE]
      if tier then
        local of_tier, of_engine = gone.tiers[tier] or { 0, 0, 0 }, gone.engines[id] or { 0, 0, 0, 0 }
        gone.tiers[tier], gone.engines[id] = of_tier, of_engine
        for d = 1, 4 do
          local amount = cell[CELL_FIGURES + d]
          of_engine[d] = of_engine[d] + amount
          if d < 4 then of_tier[d], gone.total[d] = of_tier[d] + amount, gone.total[d] + amount end
        end
      end
    end
  end
  return gone
end

local function may_preempt()
  if not rules or rules[R_PREEMPTIONS] == 0 then return false end
  for i, tier in ipairs(rules[R_TIERS]) do
    if tier[T_PREEMPT_AFTER] and (tiers[i][LINED] > 0 or tiers[i][QUEUED] > 0) then return true end
  end
  return false
end

-- Of an always_first tier, what else waits in its queue, in the order of submission.
local function burst_beside(ticket)
  local burst = {}
  if not rules[R_TIERS][ticket[TIER]][T_FIRST] then return burst end
  for_queue(ticket[TIER], function(other)
    if other ~= ticket then burst[#burst + 1] = other end
  end)
  table.sort(burst, function(a, b) return a[NUMBER] < b[NUMBER] or (a[NUMBER] == b[NUMBER] and is_less(a[OWNER], b[OWNER])) end)
  return burst
end

-- Where the ticket is to be served, with those that come before it there: the one that it wants first, then others that it would
-- enter. One of the first `last` in order that holds its place for an engine keeps it from others.
local function slots_for(found, order, last)
  local before, holding, slots = {}, {}, {}
  local function is_held_elsewhere(slot)
    for other in pairs(holding) do
      if other ~= slot then return true end
    end
  end
  for i = 1, last do
    local other, slot = order[i].ticket, wanted(order[i].ticket) or 0
    local does_fit = fits(other, NOBODY)
    if does_fit or holds(other, order[i].class) then
      before[slot] = before[slot] or {}
      table.insert(before[slot], other)
      if not does_fit then holding[slot] = true end
    end
  end
  found.engines, found.before = {}, {}
  for i, slot in ipairs(would_enter(found.served, found.place.class)) do
    if i == 1 or not is_held_elsewhere(slot) then
      slots[#slots + 1] = slot
      found.engines[#slots], found.before[#slots] = config.engines[slot][E_ID], before[slot] or {}
    end
  end
  return slots
end

local function shortage()
  if not may_preempt() then return nil end
  look()
  local gone, order, others = taken_back(), candidates(false, true)
  for _, place in ipairs(others) do order[#order + 1] = place end
  table.sort(order, is_place_before)
  local at, place, ticket = 0, nil, nil
  repeat
    at = at + 1
    place = order[at]
    if not place then return nil end
    ticket = place.ticket
    local after = rules[R_TIERS][place.tier][T_PREEMPT_AFTER]
  until after and now - ticket[ARRIVED] >= after
  local found = { served = ticket, place = place, closed = {} }
  local slots = slots_for(found, order, at - 1)
  if #slots == 0 then return nil end
  found.burst = burst_beside(ticket)
  for tier = ticket[TIER] + 1, #tiers do
    for _, head in ipairs(heads_of(tier)) do
      if is_place_before(place_of(head, OTHER), place) then found.closed[tiers[tier][NAME]] = true end
    end
  end
  for i, slot in ipairs(slots) do
    local id, those = found.engines[i], found.before[i]
    if has_room(ticket, slot, those, gone.engines[id]) and fits(ticket, those, gone) then -- enough is on its way there
      found.engines, found.before = { id }, { those }
      return #found.burst > 0 and found or nil
    end
  end
  return found
end

-- The tokens of the leases of a replica that may be taken back for it, on each of the engines.
local function takeable(name, found)
  local tokens, place_of_engine = {}, {}
  for i, id in ipairs(found.engines) do tokens[i], place_of_engine[id] = 0, i end
  local function add(cell, amount)
    local tier, i = tier_of(cell[CELL_TIER]), place_of_engine[cell[CELL_ENGINE]]
    if i and tier and tier > found.served[TIER] and rules[R_TIERS][tier][T_PREEMPTIBLE] and not found.closed[cell[CELL_TIER]] then
      tokens[i] = tokens[i] + amount
    end
  end
  for_cells(name, function(cell) add(cell, cell[CELL_FIGURES + 1] - cell[CELL_FIGURES + 5]) end)
  for _, cell in ipairs(members[name][LEAVING]) do add(cell, -cell[CELL_FIGURES + 1]) end
  return tokens
end

-- By the first of the engines where they differ.
local function compared(tokens, others)
  for i = 1, #tokens do
    if tokens[i] ~= others[i] then return tokens[i] - others[i] end
  end
  return 0
end

local function needed(tickets, engines)
  local bids = {}
  for i, it in ipairs(tickets) do
    local there = {}
    for j, id in ipairs(engines) do there[j] = it[HITS][id] or 0 end
    bids[i] = { it[ID], tiers[it[TIER]][NAME], it[TOKENS], it[REQUESTS], it[PROMPT], best_hit(it), there, it[ARRIVED], it[NUMBER] }
  end
  return bids
end

local function was_asked(name)
  for _, other in ipairs(state[ASKED_BEFORE]) do
    if other == name then return true end
  end
end

local function note_asked(name)
  if not was_asked(name) then state[ASKED_BEFORE][#state[ASKED_BEFORE] + 1] = name end
end

-- The replica that has most to take from, of those that were not asked before, and the caller; false where none has anything.
local function whom_to_ask(found, has_answered)
  local most, most_tokens = false, nil
  for name in pairs(members) do
    if not was_asked(name) or (name == who and not has_answered) then
      local tokens = takeable(name, found)
      local more = most and compared(tokens, most_tokens) or 1
      if more > 0 or (more == 0 and (name == who or (most ~= who and is_less(most, name)))) then most, most_tokens = name, tokens end
    end
  end
  for _, tokens in ipairs(most_tokens or NOBODY) do
    if tokens ~= 0 then return most end
  end
  return false
end

-- The room that the caller is to take back (`calls.ShortageTold`). Another one, which has more to take from, is woken instead.
-- Each is woken once. Who can give nothing says so (`leaving`, as before); it is asked again when it calls anyway.
local function shortage_for_caller()
  if state[ASKED] and now >= state[ASKED_UNTIL] then
    note_asked(state[ASKED]) -- it was silent
    state[ASKED] = false
  end
  if state[HOLD_UNTIL] ~= 0 or (state[ASKED] and state[ASKED] ~= who) then return nil end
  local has_answered = state[ASKED] and was_asked(who) and call[C_LEAVING] and next(members, next(members))
  state[ASKED] = false
  local found = shortage()
  local most = found and whom_to_ask(found, has_answered)
  if not most then return nil end
  state[ASKED], state[ASKED_UNTIL] = most, now + ASKED_FOR_US
  if most ~= who then
    wake_ups[#wake_ups + 1] = { most, {}, true }
    return nil
  end
  note_asked(who)
  local place, engines, before = found.place, found.engines, {}
  for i, tickets in ipairs(found.before) do before[i] = needed(tickets, engines) end
  return { engines, place.class, place.before, place.key, needed({ found.served }, engines)[1], before, needed(found.burst, engines),
    sorted_keys(found.closed) }
end
