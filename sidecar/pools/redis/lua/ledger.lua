-- One call, from the first to the last (`ledger.py`).

local function acknowledge(member)
  local acked, kept = acks(), {}
  for _, grant in ipairs(member[OUTBOX]) do
    if acked[grant[1]] then hold_cell(cell_of(grant), -1) else kept[#kept + 1] = grant end
  end
  member[OUTBOX] = kept
end

-- Absolute: what was stated of these cells before is taken off.
local function take_cells(member)
  if call[C_WHOLE] then drop_cells(who) end
  for _, cell in ipairs(call[C_CELLS]) do
    local name, any = cell_field(who, cell[CELL_TIER], cell[CELL_ENGINE]), false
    if field(name) then hold_cell(unpacked(field(name)), -1) end
    for i = 1, FIGURES do any = any or cell[CELL_FIGURES + i] ~= 0 end
    if any then hold_cell(cell, 1) end
    set_cell(who, name, any and pack(cell))
  end
  if call[C_LEAVING] then
    if pack(call[C_LEAVING]) ~= pack(member[LEAVING]) then state[ASKED_BEFORE] = {} end
    member[LEAVING] = call[C_LEAVING]
  end
end

local function take_views()
  if call[C_ENGINES] then
    local before = field('v:' .. who)
    if pack(before and unpacked(before)[3] or NOBODY) ~= pack(call[C_ENGINES]) then
      state[VIEWS] = state[VIEWS] + 1
      set_field('v:' .. who, pack({ state[VIEWS], now, call[C_ENGINES] }))
    end
  end
  for _, drain in ipairs(call[C_DRAINS]) do
    local engine, is_drained, at_us = unpack(drain)
    if at_us == 0 then at_us = now end
    local known = config.drained[engine]
    if not known or at_us >= known[2] then config.drained[engine] = { is_drained, at_us } end
  end
  if call[C_ENGINES] or #call[C_DRAINS] > 0 then combine_views() end
end

local function withdraw(member, id, tier)
  for _, ticket in ipairs(tier and bids_of(who, tier) or NOBODY) do
    if ticket[ID] == id and ticket[TIER] == tier then
      remove(ticket)
      member[BIDS] = member[BIDS] - 1
    end
  end
end

local function add_bid(member, bid)
  local tier = tier_of(bid[TIER])
  if not tier then return end
  bid[USER], bid[PLACE], bid[COST] = bid[BID_USER], 0, bid[BID_COST]
  bid[TIER], bid[ARRIVED], bid[OWNER], bid[START], bid[ENGINE] = tier, max(0, now - bid[ARRIVED]), who, false, false
  bid[IN_LINE_SINCE], bid[COUNT], bid[COUNTED], bid[ADMISSION], bid[EXCESS], bid[EXCESS_PROMPT] = false, 0, 0, 0, 0, 0
  bid[IS_IN_FLOOR], bid[STAYS] = false, false
  member[BIDS] = member[BIDS] + 1
  queue_add(bid)
end

-- Rule 10: what replicas decided and saw (`guards.py`). One decision counts: that of who made it first.
local function take_guards(last_number)
  for _, it in ipairs(call[C_GUARDS]) do
    local name, since, share, met, missed, its_state = unpack(it)
    local tier = tier_of(name)
    local guard = tier and tiers[tier][GUARD]
    if guard and guard[G_DECIDED] == since then
      met, missed = max(0, guard[G_MET] - met), max(0, guard[G_MISSED] - missed)
      tiers[tier][GUARD], state[NEXT] = { share, max(1, now), met, missed, false, its_state }, false
    end
  end
  for _, seen in ipairs(call[C_SEEN]) do
    local tier = tier_of(seen[1])
    local guard = tier and tiers[tier][GUARD]
    if guard and guard[G_SHARE] and seen[4] > last_number then
      guard[G_MET], guard[G_MISSED] = guard[G_MET] + seen[2], guard[G_MISSED] + seen[3]
    end
  end
end

local function take_changes(member, last_number)
  acknowledge(member)
  take_views()
  take_cells(member)
  for _, cap in ipairs(call[C_CAPS]) do
    local slot = slot_of(cap[1])
    if slot then set_cap(slot, cap[2], now + cap[3]) end
  end
  for _, charge in ipairs(call[C_CHARGES]) do
    local tier, tenant, tokens, weight, first_call, user = unpack(charge)
    if first_call > last_number then queue_charge(tier_of(tier), tenant, tokens, weight, user) end
  end
  for _, owed in ipairs(call[C_OWES]) do
    if owed[3] > last_number then owe(tier_of(owed[1]), owed[2]) end
  end
  take_guards(last_number)
  for _, bid in ipairs(member[IS_FOREIGN] and NOBODY or call[C_BIDS]) do add_bid(member, bid) end
  for _, gone in ipairs(call[C_WITHDRAWN]) do withdraw(member, gone[1], tier_of(gone[2])) end
end

-- Replicas of a layout before the ledger would admit all of the capacity beside it: meanwhile nothing is granted.
-- `meta` is doubles: the 2nd their last call, the 3rd the offset of their clock, the 13th how many they are.
local function is_beside_old()
  if not keys[2] or redis_call('EXISTS', unpack(keys, 2)) == 0 then return false end
  for i = 2, #keys do
    local meta = redis_call('HGET', keys[i], 'meta')
    if meta and #meta >= 13 * 8 then
      local last_call, offset = struct_unpack('<dd', meta, 9)
      if struct_unpack('<d', meta, 97) > 0 and server_us + offset - last_call < DEAD_US then return true end
    end
  end
  return false
end

-- How many bids there are.
local function count_bids()
  local bids = 0
  for _, t in ipairs(tiers) do bids = bids + t[QUEUED] + t[LINED] end
  return bids
end

local function grant_all()
  local waiting, of_owner = count_bids(), {}
  if waiting > 0 or call[C_WHOLE] then state[IS_BESIDE_OLD] = is_beside_old() end
  if waiting == 0 or state[IS_BESIDE_OLD] or state[HOLD_UNTIL] ~= 0 then return end
  granted = {}
  decide(waiting)
  for _, it in ipairs(granted) do
    local owner, grant = it[1], it[2]
    local member = change_member(owner)
    member[BIDS] = member[BIDS] - 1
    table.insert(member[OUTBOX], grant)
    if owner ~= who and not of_owner[owner] then
      of_owner[owner] = {}
      wake_ups[#wake_ups + 1] = { owner, of_owner[owner], false, now }
    end
    if owner ~= who then table.insert(of_owner[owner], grant) end
  end
end

-- When time alone changes something (`time_alone.py`), UNBOUNDED if nothing does. By gain each lost token may change the order:
-- then it is looked at every 100 ms (`next_change`).
local function find_next()
  local soonest = UNBOUNDED
  local function consider(at)
    if at > now then soonest = min(soonest, at) end
  end
  local promote_after, ceiling = rules[R_PROMOTE], rules[R_CEILING]
  local function consider_ticket(tier, arrived) -- it reaches another level (rule 3), or may take room back (rule 7)
    local after = rules[R_TIERS][tier][T_PREEMPT_AFTER]
    if promote_after and tier - 1 > ceiling then
      local rises = floor((now - arrived) / promote_after) + 1
      if rises <= tier - 1 - ceiling then consider(arrived + rises * promote_after) end
    end
    if after and rules[R_PREEMPTIONS] > 0 then consider(arrived + after) end
  end
  for tier, t in ipairs(tiers) do
    if t[QUEUED] > 0 or t[LINED] > 0 then consider(t[OWES_UNTIL]) end
    for _, head in ipairs(heads_of(tier)) do consider_ticket(tier, head[ARRIVED]) end
  end
  for _, ticket in ipairs(load_line()) do
    consider(ticket[IN_LINE_SINCE] + PATIENCE_US)
    consider_ticket(ticket[TIER], ticket[ARRIVED])
  end
  for slot, engine in ipairs(config.engines) do
    consider(held[slot][H_CAP_UNTIL])
    local tenths = tenths_now(engine)
    if tenths < 10 then consider(engine[E_SINCE] + ceil(tenths * engine[E_RAMP] / 10)) end
  end
  return soonest
end

local function next_change(waiting)
  local at = state[HOLD_UNTIL]
  if at == 0 and waiting == 0 then return nil end
  if at == 0 then
    if not needs then look() end
    if not state[NEXT] or state[NEXT] <= now then state[NEXT] = find_next() end
    at = state[NEXT]
    for _, t in ipairs(tiers) do
      if rules[R_BY_GAIN] and (t[QUEUED] > 0 or t[LINED] > 0) then at = min(at, now + LOOK_AGAIN_US) end
      local decide_at = t[GUARD][G_KEPT_OUT] and t[GUARD][G_DECIDED] + DECIDE_EVERY_US
      if decide_at and decide_at > now then at = min(at, decide_at) end
    end
  end
  return at < UNBOUNDED and max(1000, at - now) or nil
end

-- The tags that are beyond the virtual time, of the tenants of this call's bids.
local function tags()
  local found, seen = {}, {}
  for _, bid in ipairs(call[C_BIDS]) do
    local name, tenant = unpack(bid, TIER, TENANT)
    local tier = type(name) == 'number' and name or tier_of(name) -- a name where the bid was not taken
    local finish = tier and tiers[tier][QUEUED] > 0 and queue_of(tier).finish[tenant]
    if finish and finish > tiers[tier][VIRTUAL] and not seen[tier .. tenant] then
      seen[tier .. tenant], found[#found + 1] = true, { tiers[tier][NAME], tenant, finish }
    end
  end
  return found
end

-- How many members there are, and the sums of leases that they take back.
local function survey()
  local alive, found, leaving = 0, {}, {}
  for name, member in pairs(members) do
    alive = alive + 1
    if #member[LEAVING] > 0 then leaving[name] = member[LEAVING] end
  end
  for _, name in ipairs(sorted_keys(leaving)) do
    for _, cell in ipairs(leaving[name]) do found[#found + 1] = cell end
  end
  return alive, found
end

local function lined_of_caller()
  local found = {}
  for _, it in ipairs(load_line()) do
    if it[OWNER] == who then found[#found + 1] = { it[ID], it[ENGINE] or '', it[IN_LINE_SINCE] } end
  end
  return found
end

local function engines_and_drained()
  local engines, drained = {}, {}
  for slot, e in ipairs(config.engines) do
    engines[slot] = { e[E_ID], e[E_TOKENS], e[E_REQUESTS], e[E_PREFILL], e[E_SPEED], is_ready(e), e[E_SINCE], e[E_RAMP] }
  end
  for i, engine in ipairs(sorted_keys(config.drained)) do drained[i] = { engine, unpack(config.drained[engine]) } end
  return engines, drained
end

-- Packed parts, in the order of `calls.Reply`.
local function reply(member)
  local waiting, alive, leaving = count_bids(), survey()
  local engines, drained, own_lined
  local latest = state[LATEST_CAME] > 0 and state[LATEST_OWNER] ~= who and { state[LATEST_CAME], state[LATEST_GRANTED] } or nil
  if now < state[EPOCH] + DEAD_US then alive = max(alive, state[EXPECTED]) end
  local on_hold = state[IS_BESIDE_OLD] or state[HOLD_UNTIL] ~= 0
  local first = pack(call[C_NUMBER], 'ok', now, member[OUTBOX], max(alive, 1), on_hold, member[IS_FOREIGN], waiting, next_change(waiting), latest)
  held_text = pack(held, tiers)
  local found = not state[IS_BESIDE_OLD] and shortage_for_caller() or nil
  if member[SEEN] ~= state[VERSION] then
    member[SEEN] = state[VERSION]
    engines, drained = engines_and_drained()
  end
  if member[IS_LINE_NEW] then member[IS_LINE_NEW], own_lined = false, lined_of_caller() end
  return '\220\0\19' .. first .. held_text .. pack(tags(), leaving, found, engines, drained, own_lined)
    .. '\220\0' .. string.char(#verdicts) .. table.concat(verdicts)
end

-- Time never goes back, whichever server answers. Returns for how long the store was silent, nil where another layout is in force.
local function begin()
  local names = { 'layout', 'state', 'held', 'config' }
  verdicts, accounts, counts, forgotten = {}, {}, {}, {}
  fields, changed, changed_members, all_fields, queues, wake_ups, is_config_new = {}, {}, {}, nil, {}, {}, false
  line, needs, held_text, known, kept[root] = nil, nil, nil, kept[root] or {}, nil -- a call that fails may have changed it
  for i, cell in ipairs(call[C_CELLS]) do names[4 + i] = cell_field(who, cell[CELL_TIER], cell[CELL_ENGINE]) end
  read_fields(names)
  if not fields.layout then
    now = server_us
    create(0)
    return 0
  end
  load()
  local before = state[LAST_CALL]
  state[OFFSET] = max(state[OFFSET], before - server_us)
  now = server_us + state[OFFSET]
  state[LAST_CALL] = now
  if tonumber(fields.layout) == call[C_LAYOUT] then return now - before end
  for _, member in pairs(members) do
    if now - max(member[MEMBER_CALL], state[EPOCH]) < DEAD_US then return nil end
  end
  create(state[OFFSET])
  return 0
end

local function answer()
  local silent_for = begin()
  if not silent_for then return pack({ call[C_NUMBER], 'wait' }) end
  if silent_for >= LOST_US and next(members) then begin_epoch() end
  local member = members[who]
  local is_next = is_next_of(member)
  drop_dead(is_next and (call[C_KIND] == 'call' or call[C_KIND] == 'bye') and who or nil)
  member = members[who]
  if call[C_KIND] == 'bye' then
    if is_next and member then
      drop(who)
      if not member[IS_NEW] then state[EXPECTED] = state[EXPECTED] - 1 end
      grant_all()
    end
    return pack({ call[C_NUMBER], 'ok' })
  end
  if not is_accepted(member) then return pack({ call[C_NUMBER], 'unknown' }) end
  local last_number = member and member[LATEST_NUMBER] or 0
  if call[C_KIND] == 'state' then member = take_statement() end
  take_limits(member, last_number)
  change_member(who)
  member[MEMBER_CALL], member[LATEST_NUMBER] = now, call[C_NUMBER]
  take_changes(member, last_number)
  end_hold()
  grant_all()
  return reply(member)
end

local function execute(its_keys, arguments)
  redis_call, pack, unpacked, struct_unpack = redis.call, cmsgpack.pack, cmsgpack.unpack, struct.unpack
  max, min, floor, ceil = math.max, math.min, math.floor, math.ceil
  keys, root = its_keys, its_keys[1]
  local is_read, read = pcall(read_call, arguments[1])
  if not is_read then return redis.error_reply('ERR this is no call of the ledger: ' .. tostring(read)) end
  call, who, server_us = read, read[C_WHO], tonumber(arguments[2])
  if not server_us then
    local time = redis_call('TIME')
    server_us = time[1] * 1000000 + time[2]
  end
  local answered = answer()
  write()
  for _, wake_up in ipairs(wake_ups) do redis_call('PUBLISH', wake_up[1] == '' and root or root .. ':' .. wake_up[1], pack(wake_up)) end
  return answered
end
