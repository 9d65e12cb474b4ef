-- One call, from the first to the last (`ledger.py`).

-- ---- what a call says -------------------------------------------------------------------------------------------------

local function acknowledge(member)
  if #call.acks == 0 then return end
  local acked, kept = {}, {}
  for _, id in ipairs(call.acks) do acked[id] = true end
  for _, packed in ipairs(member[OUTBOX]) do
    if acked[unpacked(packed)[GRANT_BID]] then hold_grant(packed, -1) else kept[#kept + 1] = packed end
  end
  member[OUTBOX] = kept
end

-- Absolute: what was stated of these cells before is taken off.
local function take_cells(member)
  if call.whole then drop_cells(who) end
  for _, cell in ipairs(call.cells) do
    local field, any = field_of(cell[CELL_TIER], cell[CELL_ENGINE]), false
    local old = cell_at(who, field)
    if old then hold_cell(unpacked(old), -1) end
    for i = 1, FIGURES do any = any or cell[CELL_FIGURES + i] ~= 0 end
    if any then hold_cell(cell, 1) end
    if any or old then set_cell(who, field, any and pack(cell)) end
  end
  if call.leaving then
    member[LEAVING] = call.leaving
    if state[ASKED] == who then state[ASKED] = false end
  end
end

local function take_views()
  if call.engines then
    state[VIEWS] = state[VIEWS] + 1
    views_of_all()[who], changed_views[who] = { state[VIEWS], now, call.engines }, true
  end
  for _, drain in ipairs(call.drains) do
    local engine, is_drained, at_us = unpack(drain)
    if at_us == 0 then at_us = now end
    local known = config.drained[engine]
    if not known or at_us >= known[2] then config.drained[engine] = { is_drained, at_us } end
  end
  if call.engines or #call.drains > 0 then combine_views() end
end

local function withdraw(member, id, tier_name)
  local found
  local function look_at(ticket)
    if ticket[OWNER] == who and ticket[ID] == id then found = ticket end
  end
  local tier = tier_of(tier_name)
  if not tier then return end
  for i = 1, stands_in_line(who, id) and #load_line() or 0 do look_at(ticket_at(line, i)) end
  if not found then for_queue(tier, look_at) end
  if found and found[TIER] == tier then
    remove(found)
    member[BIDS] = member[BIDS] - 1
  end
end

local function add_bid(member, bid)
  local tier = tier_of(bid[TIER])
  if not tier then return end
  bid[TIER], bid[ARRIVED], bid[OWNER], bid[START], bid[ENGINE] = tier, max(0, now - bid[ARRIVED]), who, false, false
  bid[IN_LINE_SINCE], bid[COUNT], bid[COUNTED], bid[ADMISSION], bid[EXCESS], bid[EXCESS_PROMPT] = false, 0, 0, 0, 0, 0
  bid[IS_IN_FLOOR] = false
  member[BIDS] = member[BIDS] + 1
  queue_add(bid)
end

local function take_changes(member)
  acknowledge(member)
  take_views()
  take_cells(member)
  for _, cap in ipairs(call.caps) do
    local slot = slot_of(cap[1])
    if slot then set_cap(slot, cap[2], now + cap[3]) end
  end
  for _, charge in ipairs(call.charges) do
    local tier = tier_of(charge[1])
    if tier then queue_charge(tier, charge[2], charge[3], charge[4]) end
  end
  for _, owed in ipairs(call.owes) do
    local tier = tier_of(owed[1])
    if tier then owe(tier, owed[2]) end
  end
  if not member[IS_FOREIGN] then
    for _, bid in ipairs(call.bids) do add_bid(member, bid) end
  end
  for _, gone in ipairs(call.withdrawn) do withdraw(member, gone[1], gone[2]) end
end

-- ---- what it decides, and the reply -----------------------------------------------------------------------------------

-- Replicas of a layout before the ledger would admit all of the capacity beside it: meanwhile nothing is granted.
-- `meta` is doubles: the 2nd their last call, the 3rd the offset of their clock, the 13th how many they are.
local function is_beside_old(keys, server_us)
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

local function grant_all()
  granted = {}
  local waits = false
  for _, member in pairs(members) do waits = waits or member[BIDS] > 0 end
  if state[HOLD_UNTIL] > 0 or not waits then return end
  decide()
  local of_owner = {}
  for _, it in ipairs(granted) do
    local ticket = it.ticket
    local member, owner = members[ticket[OWNER]], ticket[OWNER]
    local packed = pack({ ticket[ID], tiers[ticket[TIER]][NAME], it.engine, ticket[TOKENS], ticket[REQUESTS], ticket[COUNT], it.sent,
      ticket[EXCESS], ticket[EXCESS_PROMPT], ticket[IS_IN_FLOOR], ticket[COUNTED] })
    member[BIDS], member[OUTBOX][#member[OUTBOX] + 1] = member[BIDS] - 1, packed
    local wake_up = of_owner[owner]
    if not wake_up and owner ~= who then
      wake_up = { owner, grants = {} }
      of_owner[owner], wake_ups[#wake_ups + 1] = wake_up, wake_up
    end
    if wake_up then wake_up.grants[#wake_up.grants + 1] = packed end
  end
end

-- When time alone changes something (`time_alone.py`), at least a millisecond from now. By gain each lost token may change
-- the order: then it is looked at every 100 ms.
local function next_change(waiting)
  if waiting == 0 then return nil end
  local soonest
  local function consider(at)
    if at > now and not (soonest and soonest <= at) then soonest = at end
  end
  local promote_after, ceiling = rules[R_PROMOTE], rules[R_CEILING]
  local function consider_ticket(tier, arrived) -- it reaches another level (rule 3), or may take room back (rule 7)
    local after = rules[R_TIERS][tier][T_PREEMPT_AFTER]
    if promote_after then
      local rises = floor((now - arrived) / promote_after) + 1
      if rises <= tier - 1 - ceiling then consider(arrived + rises * promote_after) end
    end
    if after and rules[R_PREEMPTIONS] > 0 then consider(arrived + after) end
  end
  if state[HOLD_UNTIL] > 0 then
    consider(state[HOLD_UNTIL])
    return soonest and max(1000, soonest - now)
  end
  if not needs then look() end
  for tier, t in ipairs(tiers) do
    if t[QUEUED] > 0 or t[LINED] > 0 then consider(t[OWES_UNTIL]) end
    local first, small = heads_of(tier)
    if first then consider_ticket(tier, first[ARRIVED]) end
    if small then consider_ticket(tier, small[ARRIVED]) end
    if rules[R_BY_GAIN] and first then consider(now + LOOK_AGAIN_US) end
  end
  local now_lined = lined_now()
  for at = 0, #now_lined - LINED_WORDS, LINED_WORDS do
    consider(now_lined[at + LINED_SINCE] + PATIENCE_US)
    consider_ticket(now_lined[at + LINED_TIER], now_lined[at + LINED_ARRIVED])
  end
  for slot, engine in ipairs(config.engines) do
    consider(held_at(slot, H_CAP_UNTIL))
    if engine[E_RAMP] > 0 then -- the end of this tenth of its slow start
      local tenths = 1 + floor(max(0, now - engine[E_SINCE]) * 10 / engine[E_RAMP])
      if tenths < 10 then consider(engine[E_SINCE] + ceil(tenths * engine[E_RAMP] / 10)) end
    end
  end
  return soonest and max(1000, soonest - now)
end

local function engines_held()
  local found = {}
  for slot, engine in ipairs(config.engines) do
    found[slot] = told[slot]
    if not found[slot] then
      local at = (slot - 1) * HELD
      local cap_for_us = max(0, held[at + H_CAP_UNTIL] - now)
      found[slot] = '\152' .. pack(engine[E_ID], unpack(held, at + 1, at + H_CAP)) .. pack(cap_for_us)
      told[slot] = cap_for_us == 0 and found[slot] -- else it changes with time
    end
  end
  return packed_list(found)
end

local function tiers_held()
  local tenants, found = {}, {}
  for _, bid in ipairs(call.bids) do
    local tier = type(bid[TIER]) == 'number' and bid[TIER] or tier_of(bid[TIER])
    if tier then
      tenants[tier] = tenants[tier] or {}
      tenants[tier][bid[TENANT]] = true
    end
  end
  for tier, t in ipairs(tiers) do
    local finish = {}
    if tenants[tier] and t[QUEUED] > 0 then
      for tenant in pairs(tenants[tier]) do
        local tag = queue_of(tier).finish[tenant]
        if tag and tag > t[VIRTUAL] then finish[tenant] = tag end
      end
    end
    found[tier] = '\155' .. pack(t[NAME], used(tier, 1), used(tier, 2), used(tier, 3), on_floor(tier, 1), on_floor(tier, 2),
      on_floor(tier, 3), max(0, t[OWES_UNTIL] - now)) .. packed_float(t[VIRTUAL]) .. pack(t[AFRESH]) .. packed_map(finish, packed_float)
  end
  return packed_list(found)
end

local function leaving_of_all()
  local found = {}
  for _, name in ipairs(sorted_keys(members)) do
    local cells = {}
    for _, cell in ipairs(members[name][LEAVING]) do cells[field_of(cell[CELL_TIER], cell[CELL_ENGINE])] = cell end
    for _, field in ipairs(sorted_keys(cells)) do found[#found + 1] = packed_cell(cells[field]) end
  end
  return packed_list(found)
end

local function lined_of_caller()
  local found = {}
  local now_lined = lined_now()
  for at = 0, #now_lined - LINED_WORDS, LINED_WORDS do
    if now_lined[at + LINED_OWNER] == who then
      found[#found + 1] = '\147' .. pack(now_lined[at + LINED_BID], now_lined[at + LINED_ENGINE], now - now_lined[at + LINED_SINCE])
    end
  end
  return packed_list(found)
end

local function engine_states()
  local found = {}
  for slot, e in ipairs(config.engines) do
    found[slot] = '\152' .. pack(e[E_ID], e[E_TOKENS], e[E_REQUESTS], e[E_PREFILL], e[E_SPEED], is_ready(e), now - e[E_SINCE], e[E_RAMP])
  end
  return packed_list(found)
end

local function drained_of_all()
  local found = {}
  for i, engine in ipairs(sorted_keys(config.drained)) do
    found[i] = '\147' .. pack(engine, config.drained[engine][1], config.drained[engine][2])
  end
  return packed_list(found)
end

local function reply(member, is_paused)
  local alive, waiting = 0, 0
  for _, other in pairs(members) do alive, waiting = alive + 1, waiting + other[BIDS] end
  if now < state[EPOCH] + DEAD_US then alive = max(alive, state[EXPECTED]) end
  local parts = {
    '\220\0\16', pack(call.number, 'ok'), packed_grants(member[OUTBOX]),
    pack(max(alive, 1), is_paused or state[HOLD_UNTIL] > 0, member[IS_FOREIGN], waiting, next_change(waiting)),
    engines_held(), tiers_held(), leaving_of_all(),
  }
  local found = not is_paused and shortage_for_caller()
  parts[8] = found and packed_shortage(found) or '\192'
  if member[SEEN] ~= state[VERSION] then
    member[SEEN] = state[VERSION]
    parts[9], parts[10] = engine_states(), drained_of_all()
  else
    parts[9] = '\192\192'
  end
  parts[#parts + 1] = lined_of_caller()
  parts[#parts + 1] = packed_list(limits.verdicts)
  return table.concat(parts)
end

-- ---- one call ---------------------------------------------------------------------------------------------------------

-- Time never goes back, whichever server answers. Returns for how long the store was silent.
local function begin(server_us)
  limits.begin()
  queues, rows, heads, views, changed_views, wake_ups, is_config_new, is_made = {}, {}, {}, nil, {}, {}, false, false
  line, is_line_changed, is_line_written, needs = nil, false, false, nil
  local found = redis_call('HMGET', root, 'layout', 'state', 'held', 'config')
  if not found[1] then
    now = server_us
    create(0)
    return 0
  end
  load(found)
  local before = state[LAST_CALL]
  state[OFFSET] = max(state[OFFSET], before - server_us)
  now = server_us + state[OFFSET]
  state[LAST_CALL] = now
  if tonumber(found[1]) == call.layout then return now - before end
  for _, member in pairs(members) do
    if now - max(member[MEMBER_CALL], state[EPOCH]) < DEAD_US then return nil end
  end
  create(state[OFFSET])
  return 0
end

local function answer_to(is_paused)
  local member = members[who]
  local is_next = member and member[STATED] == state[EPOCH] and call.number == member[LATEST_NUMBER] + 1
  drop_dead(is_next and (call.kind == 'call' or call.kind == 'bye') and who or nil)
  member = members[who]
  if call.kind == 'bye' then
    if is_next and member then
      drop(who)
      if not member[IS_NEW] then state[EXPECTED] = state[EXPECTED] - 1 end
      if not is_paused then grant_all() end
    end
    return short_reply('ok')
  end
  if not is_accepted(member) then return short_reply('unknown') end
  local last_number = member and member[LATEST_NUMBER] or 0
  if call.kind == 'state' then take_statement() end
  member = members[who]
  limits.take(member, last_number)
  member[MEMBER_CALL], member[LATEST_NUMBER] = now, call.number
  take_changes(member)
  end_hold()
  if not is_paused then grant_all() end
  return reply(member, is_paused)
end

local function execute(keys, arguments)
  redis_call, pack, unpacked, struct_pack, struct_unpack = redis.call, cmsgpack.pack, cmsgpack.unpack, struct.pack, struct.unpack
  max, min, floor, ceil, char = math.max, math.min, math.floor, math.ceil, string.char
  root = keys[1]
  local is_read, read = pcall(read_call, arguments[1])
  if not is_read then return redis.error_reply('ERR this is no call of the ledger: ' .. tostring(read)) end
  call, who = read, read.who
  local server_us = tonumber(arguments[2])
  if not server_us then
    local time = redis_call('TIME')
    server_us = time[1] * 1000000 + time[2]
  end
  local silent_for = begin(server_us)
  local answer
  if silent_for then
    if silent_for >= LOST_US then begin_epoch() end
    answer = answer_to(is_beside_old(keys, server_us))
  else
    answer = short_reply('wait')
  end
  write()
  for _, wake_up in ipairs(wake_ups) do
    redis_call('PUBLISH', wake_up[1] == '' and root or root .. ':' .. wake_up[1], packed_wake_up(wake_up))
  end
  return answer
end
