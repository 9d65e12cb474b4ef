-- Time, epochs and members, and what a statement says of everything (`ledger.py`).

local function cell_of(grant)
  local _, tier, id, tokens, requests, prompt, sent, _, _, is_in_floor = unpack(grant)
  local floor_of = is_in_floor and 1 or 0
  return { tier, id, tokens, requests, prompt, sent, floor_of * tokens, floor_of * requests, floor_of * prompt }
end

local function hold_cell(cell, sign) hold(tier_of(cell[CELL_TIER]), cell[CELL_ENGINE], sign, unpack(cell, CELL_FIGURES + 1)) end

local function drop_outbox(member)
  for _, grant in ipairs(member[OUTBOX]) do hold_cell(cell_of(grant), -1) end
  member[OUTBOX] = {}
end

local function drop_cells(name)
  for_cells(name, function(cell, it)
    hold_cell(cell, -1)
    set_cell(name, it)
  end)
end

-- What waits of a replica, in line and in one queue, or in all.
local function bids_of(name, in_tier)
  local own = {}
  local function take(ticket)
    if ticket[OWNER] == name then own[#own + 1] = ticket end
  end
  for _, ticket in ipairs(load_line()) do take(ticket) end
  for tier = in_tier or 1, in_tier or #tiers do for_queue(tier, take) end
  return own
end

-- Gives up all bids of a replica, in each tier by arrival.
local function drop_bids(name)
  if members[name][BIDS] == 0 then return end
  local own = bids_of(name)
  table.sort(own, function(a, b) return a[TIER] < b[TIER] or (a[TIER] == b[TIER] and is_before(a, b)) end)
  for _, ticket in ipairs(own) do remove(ticket) end
  change_member(name)[BIDS] = 0
end

-- The newest view that names an engine counts, from when it was told first; any that reaches it will do.
local function combine_views()
  local views, offers, reached = {}, {}, {}
  for name in pairs(members) do
    local view = field('v:' .. name)
    if view then views[#views + 1] = { name, unpack(unpacked(view)) } end
  end
  table.sort(views, function(a, b) return a[2] < b[2] end)
  for _, view in ipairs(views) do
    local of, _, stated_at, engines = unpack(view)
    for _, e in ipairs(engines) do
      local id, tokens, requests, prefill, speed, is_reachable, age_us, ramp_us = unpack(e)
      local takes_new = is_reachable or (offers[id] and offers[id][E_TAKES_NEW]) or false
      offers[id] = { id, tokens, requests, prefill, speed, takes_new, stated_at - age_us, ramp_us, true, false }
      reached[id .. '\0' .. of] = is_reachable
    end
  end
  for id, engine in pairs(offers) do
    local drained = config.drained[split(id)]
    if drained and drained[1] then engine[E_TAKES_NEW] = false end
    local unreachable = {}
    for name in pairs(members) do unreachable[name] = not reached[id .. '\0' .. name] or nil end
    engine[E_UNREACHABLE] = next(unreachable) and unreachable or false
  end
  set_engines(offers)
  state[VERSION] = state[VERSION] + 1
end

local function drop(name)
  forgotten[name] = true
  drop_bids(name)
  drop_outbox(change_member(name))
  drop_cells(name)
  set_field('v:' .. name)
  members[name] = nil
  combine_views()
end

-- The dead go. Who has missed a heartbeat is granted nothing: its bids go, and it states them when it is back.
local function drop_dead(but)
  local is_dead = {}
  for name, member in pairs(members) do
    local silent_for = name == but and 0 or now - max(member[MEMBER_CALL], state[EPOCH])
    if silent_for >= LOST_US then is_dead[name] = silent_for >= DEAD_US end
  end
  for _, name in ipairs(sorted_keys(is_dead)) do
    if is_dead[name] then drop(name) else drop_bids(name) end
  end
end

-- While the store was silent replicas may have admitted alone: rows are a floor, bids and line are stated anew.
local function begin_epoch()
  state[EPOCH], state[HOLD_UNTIL], state[IS_EMPTY], state[EXPECTED], state[NEXT] = now, now + HOLD_US, false, 0, false
  for _, name in ipairs(sorted_keys(members)) do
    local member = change_member(name)
    state[EXPECTED] = state[EXPECTED] + 1
    drop_bids(name)
    for _, grant in ipairs(member[OUTBOX]) do
      local cell = cell_of(grant)
      local it = cell_field(name, cell[CELL_TIER], cell[CELL_ENGINE])
      local before = field(it) and unpacked(field(it))
      for i = CELL_FIGURES + 1, before and CELL_FIGURES + FIGURES or 0 do cell[i] = cell[i] + before[i] end
      set_cell(name, it, pack(cell))
    end
    member[OUTBOX], member[IS_NEW] = {}, false
  end
  wake_ups[#wake_ups + 1] = { '', {}, false, 0 }
end

-- With the last replica that is expected. One that knows of nobody proves nothing.
local function end_hold()
  if state[HOLD_UNTIL] == 0 then return end
  local stated = 0
  for _, member in pairs(members) do
    if member[STATED] == state[EPOCH] and not member[IS_NEW] then stated = stated + 1 end
  end
  if now >= state[HOLD_UNTIL] or stated >= max(state[EXPECTED], 1) then state[HOLD_UNTIL] = 0 end
end

local function acks()
  local acked = {}
  for _, id in ipairs(call[C_ACKS]) do acked[id] = true end
  return acked
end

local function is_next_of(member)
  return member and member[STATED] == state[EPOCH] and call[C_NUMBER] == member[LATEST_NUMBER] + 1
end

local function is_accepted(member)
  if call[C_KIND] == 'ask' then return false end
  if call[C_KIND] == 'state' then
    local is_of_others = call[C_KNEW] == 0 and not call[C_REPLACES] -- it had stated other tiers than the pool's
    if is_of_others and #tiers == 0 and state[IS_EMPTY] and now < state[HOLD_UNTIL] then return false end
    return not member or call[C_NUMBER] > member[LATEST_NUMBER]
  end
  if not is_next_of(member) or not call[C_BID_COUNT] then return is_next_of(member) end
  local acked, unseen = acks(), 0
  for _, grant in ipairs(member[OUTBOX]) do unseen = unseen + (acked[grant[1]] and 0 or 1) end
  return member[BIDS] <= call[C_BID_COUNT] and call[C_BID_COUNT] <= member[BIDS] + unseen
end

local function has_tiers(stated)
  if #stated[R_TIERS] ~= #tiers then return false end
  for i, tier in ipairs(stated[R_TIERS]) do
    if tier[T_NAME] ~= tiers[i][NAME] then return false end
  end
  return true
end

-- A tier as it is guarded by the rules: it keeps what it was, where it was guarded before.
local function guard_of(tier, before)
  if rules[R_TIERS][tier][T_HOLD] == 0 then return {} end
  return before and before[GUARD][G_SHARE] and before[GUARD] or { FIRST_SHARE, 0, 0, 0, false, {} }
end

local function take_rules(stated)
  local is_same, is_owned = has_tiers(stated), false
  for name, member in pairs(members) do is_owned = is_owned or name ~= who and not member[IS_FOREIGN] end
  if #tiers > 0 and (is_same and not call[C_REPLACES] or not is_same and is_owned and not call[C_TAKES_OVER]) then return end
  local is_by_gain = rules and rules[R_BY_GAIN] or false
  config.figures, is_config_new, state[NEXT] = nil, true, false
  if is_same and stated[R_BY_GAIN] == is_by_gain then
    config.rules, rules = stated, stated
    for i, t in ipairs(tiers) do t[GUARD] = guard_of(i, t) end
    return
  end
  for _, name in ipairs(sorted_keys(members)) do
    drop_bids(name) -- a replica whose number of bids is not right states everything
    change_member(name)[IS_FOREIGN] = not is_same and not members[name][IS_FOREIGN]
  end
  local before = {}
  for _, t in ipairs(tiers) do before[t[NAME]] = t end
  tiers, heads, queues, config.rules, rules = {}, {}, {}, stated, stated
  for i, tier in ipairs(stated[R_TIERS]) do
    local old = before[tier[T_NAME]]
    local t = { tier[T_NAME], 0, 0, 0, { 0, 0, 0 }, { 0, 0, 0 }, { 0, 0, 0 }, { 0, 0, 0 }, 0, {}, 1, 0, 0, 0, 64, UNBOUNDED }
    if old then t[VIRTUAL], t[OWES_UNTIL], t[LATEST], t[SERVED] = old[VIRTUAL], old[OWES_UNTIL], old[LATEST], old[SERVED] end
    t[GUARD] = guard_of(i, old)
    tiers[i], heads[i], changed['q:' .. i] = t, false, true
  end
  for _, it in ipairs(held) do it[H_TOKENS], it[H_REQUESTS], it[H_PROMPT], it[H_SENT] = 0, 0, 0, 0 end
  for name, member in pairs(members) do
    for_cells(name, function(cell) hold_cell(cell, 1) end)
    for _, grant in ipairs(member[OUTBOX]) do hold_cell(cell_of(grant), 1) end
  end
end

-- Everything that the replica has replaces everything that was known of it.
local function take_statement()
  take_rules(call[C_RULES])
  local member = members[who] or { 0, 0, -1, call[C_KNEW] == 0, false, 0, -1, {}, {}, true, {}, 0 }
  members[who] = member
  drop_bids(who)
  drop_outbox(member)
  if state[IS_EMPTY] and now < state[EPOCH] + DEAD_US then state[EXPECTED] = max(state[EXPECTED], call[C_KNEW]) end
  member[STATED], member[SEEN], member[IS_FOREIGN], member[IS_LINE_NEW] = state[EPOCH], -1, not has_tiers(call[C_RULES]), true
  for i = 1, member[IS_FOREIGN] and 0 or min(#tiers, #call[C_VIRTUAL]) do
    tiers[i][VIRTUAL] = max(tiers[i][VIRTUAL], call[C_VIRTUAL][i])
  end
  return member
end
