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

local function shortage()
  if not may_preempt() then return nil end
  look()
  local gone, order, others = taken_back(), candidates()
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
  local slot = wanted(ticket)
  if not slot then return nil end
  local found = { served = ticket, place = place, engine = config.engines[slot][E_ID], before = {}, closed = {} }
  for i = 1, at - 1 do
    local other = order[i].ticket
    if wanted(other) == slot and (fits(other, NOBODY) or holds(other, order[i].class)) then
      found.before[#found.before + 1] = other
    end
  end
  found.burst = burst_beside(ticket)
  for tier = ticket[TIER] + 1, #tiers do
    for _, head in ipairs(heads_of(tier)) do
      if is_place_before(place_of(head, OTHER), place) then found.closed[tiers[tier][NAME]] = true end
    end
  end
  local is_served = #found.burst == 0 and has_room(ticket, slot, found.before, gone.engines[found.engine])
    and fits(ticket, found.before, gone)
  return not is_served and found or nil
end

-- The tokens of the leases of a replica that may be taken back for it.
local function takeable(name, found)
  local tokens = 0
  local function add(cell, amount)
    local tier = tier_of(cell[CELL_TIER])
    if tier and tier > found.served[TIER] and rules[R_TIERS][tier][T_PREEMPTIBLE] and not found.closed[cell[CELL_TIER]]
      and cell[CELL_ENGINE] == found.engine then
      tokens = tokens + amount
    end
  end
  for_cells(name, function(cell) add(cell, cell[CELL_FIGURES + 1] - cell[CELL_FIGURES + 5]) end)
  for _, cell in ipairs(members[name][LEAVING]) do add(cell, -cell[CELL_FIGURES + 1]) end
  return tokens
end

local function needed(tickets, engine)
  local told = {}
  for i, it in ipairs(tickets) do
    told[i] = { it[ID], tiers[it[TIER]][NAME], it[TOKENS], it[REQUESTS], it[PROMPT], best_hit(it), it[HITS][engine] or 0, it[ARRIVED],
      it[NUMBER] }
  end
  return told
end

-- The room that the caller is to take back (`calls.ShortageTold`). Another one, which has more to take from, is woken instead.
local function shortage_for_caller()
  if state[HOLD_UNTIL] ~= 0 or (state[ASKED] and state[ASKED] ~= who and now < state[ASKED_UNTIL]) then return nil end
  state[ASKED] = false
  local found = shortage()
  if not found then return nil end
  local most, most_tokens
  for name in pairs(members) do
    local tokens = takeable(name, found)
    local is_more = not most or tokens > most_tokens
    if most and tokens == most_tokens then is_more = name == who or (most ~= who and is_less(most, name)) end
    if is_more then most, most_tokens = name, tokens end
  end
  if most_tokens == 0 then return nil end
  state[ASKED], state[ASKED_UNTIL] = most, now + ASKED_FOR_US
  if most ~= who then
    wake_ups[#wake_ups + 1] = { most, {}, true }
    return nil
  end
  local engine, place = found.engine, found.place
  return { engine, place.class, place.before, place.key, needed({ found.served }, engine)[1], needed(found.before, engine),
    needed(found.burst, engine), sorted_keys(found.closed) }
end
