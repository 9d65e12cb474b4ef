-- Claimants, and tickets that know their prompts: the twin of `scheduling/claims.py`. It replaces parts of `tickets.lua`.
--
--   <root>:<birth>:y           hash  'REPLICA ID' -> its ticket, of every claimant
--
-- The text of a claimant ends with START, its place in fair order, and the engine that it keeps.
--
-- A ticket's record is 'W ... SERVED|CLAIM|TENANT PLACING', 'C ...' where it is a claimant. CLAIM is 'UNTIL CHARGE FROM':
-- its patience ends at UNTIL, and its tenant was charged for it up to the finish tag CHARGE, from the start tag FROM, 0
-- where it was not. It is 'UNTIL' where it is no claimant any more because it was parked, and empty where it never was one.
-- The member of a head is that of `tickets.lua` with UNCACHED and OUTSIDE before the tenant: OUTSIDE is 1
-- for a ticket that stands in no lane, because it returned, or was a claimant before.

function pool.claims_key() return prefix .. 'y' end

function pool.member_of(ticket)
  return fmt('%016d %s %s %d %d %d %d %d %d %s', ticket.sequence, ticket.owner, ticket.id, ticket.tokens,
    ticket.requests, ticket.arrived, ticket.weight, ticket.uncached, (ticket.is_outside or ticket.times or ticket.is_back) and 1 or 0,
    ticket.tenant)
end

function pool.read_member(level, member)
  local sequence, owner, id, tokens, requests, arrived, weight, uncached, outside, tenant =
    match(member, '^(%d+) (%S+) (%S+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d) (.*)$')
  return {
    id = id, owner = owner, level = level, tokens = tonumber(tokens), requests = tonumber(requests),
    sequence = tonumber(sequence), arrived = tonumber(arrived), weight = tonumber(weight), tenant = tenant,
    uncached = tonumber(uncached), is_outside = outside == '1', is_stored = true,
  }
end

function pool.ticket_text(ticket, served)
  local claim = ticket.patient_until and pool.int(ticket.patient_until) or ''
  if ticket.charge then claim = claim .. fmt(' %.17g %.17g', ticket.charge, ticket.charged_from) end
  return fmt('%s %d %d %d %d %d %d ', ticket.is_claimant and 'C' or 'W', ticket.level, ticket.tokens,
    ticket.requests, ticket.sequence, ticket.arrived, ticket.weight)
    .. served .. '|' .. claim .. '|' .. ticket.tenant .. ' ' .. ticket.placing
end

function pool.read_ticket(owner, id, record)
  local state, level, tokens, requests, sequence, arrived, weight, served, claim, tenant, placing =
    match(record, '^([WPC]) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) ([^|]*)|([^|]*)|(%S*) (.*)$')
  local ticket = {
    id = id, owner = owner, level = tonumber(level), tokens = tonumber(tokens), requests = tonumber(requests),
    sequence = tonumber(sequence), arrived = tonumber(arrived), weight = tonumber(weight), tenant = tenant,
    served = served, written = served, placing = placing, is_stored = true,
  }
  local till, charge, charged_from = match(claim, '^(%d+) ?(%S*) ?(%S*)$')
  ticket.patient_until = tonumber(till)
  if charge and charge ~= '' then
    ticket.charge, ticket.charged_from = tonumber(charge), tonumber(charged_from)
    ticket.is_back = state ~= 'C'
  end
  ticket.is_claimant = state == 'C'
  local before, times, overtaken = match(served, '^([^;]*);(%d+) (%-?%d+)$')
  if before then -- it returned
    ticket.served, ticket.times, overtaken = before, tonumber(times), tonumber(overtaken)
    if overtaken < 0 then ticket.after = -overtaken else ticket.overtaken = overtaken end
  end
  ticket.uncached = pool.uncached_of(ticket)
  return ticket
end

-- Reads the part of a stored ticket that stands in its record alone.
function pool.fill(ticket)
  if ticket.written or not ticket.is_stored then return end
  local record = call('HGET', pool.replica_key(ticket.owner), ticket.id)
  if not record then return pool.damaged() end
  local read = pool.read_ticket(ticket.owner, ticket.id, record)
  for name, figure in pairs(read) do
    if ticket[name] == nil then ticket[name] = figure end
  end
end

-- An entering ticket, or one that returns, has the placing that was stated just before.
function pool.attach_placing(ticket)
  ticket.placing, pool.stated_placing = pool.stated_placing or '0', nil
  ticket.uncached = pool.uncached_of(ticket)
end

function pool.is_small(ticket)
  local rule = rules[FIRST_RULE + ticket.level]
  return ticket.tokens <= rule[RESERVE_TOKENS] and ticket.requests <= rule[RESERVE_REQUESTS]
    and ticket.uncached <= rule[SMALL_PREFILL]
end

-- -- the queue of a tier, of which claimants are no heads

local heads_of = pool.heads_of

function pool.heads_of(level)
  local tier = tiers[level]
  if not heads[level] and tier[QUEUED] == tier[CLAIMANTS] then heads[level] = {} end
  return heads_of(level)
end

function pool.second_head(level)
  local found = pool.heads_of(level)
  if not found.first or now >= tiers[level][OWES_UNTIL] or pool.is_small(found.first) then return nil end
  return found.small
end

-- The tickets of a tier that may be next: claimants, the head, and the second head.
function pool.firsts_of(level)
  local found = {}
  if tiers[level][QUEUED] == 0 then return found end
  if tiers[level][CLAIMANTS] > 0 then
    for _, ticket in ipairs(pool.claimants()) do
      if ticket.level == level then found[#found + 1] = ticket end
    end
  end
  found[#found + 1] = pool.head_of(level)
  found[#found + 1] = pool.second_head(level)
  return found
end

function pool.push(ticket, tenant, weight)
  local level, tier = ticket.level, tiers[ticket.level]
  ticket.start, ticket.tenant, ticket.weight = 0, tenant, weight
  pool.attach_placing(ticket)
  if tier[QUEUED] > 0 then
    local head = pool.head_of(level)
    if head and not head.is_stored then pool.store(head) end
    local lane = pool.lane_of(level, tenant)
    ticket.start = math.max(tier[VIRTUAL], lane.finish)
    if lane.waiting == 0 then heads[level], fleet[SAME_UNTIL] = nil, 0 end
    pool.store(ticket)
  else
    heads[level] = {first = ticket, small = pool.is_small(ticket) and ticket or nil}
    fleet[SAME_UNTIL] = 0
  end
  pool.count_queued(tier, ticket, 1)
  meta[WAITING] = meta[WAITING] + 1
  is_changed[level] = true
end

function pool.start_of_return(level)
  local virtual, head = tiers[level][VIRTUAL], pool.head_of(level)
  return head and math.min(virtual, head.start) or virtual
end

local leave_lane, leave_queue, sort_some = pool.leave_lane, pool.leave_queue, pool.sort_some

function pool.leave_lane(ticket)
  if (ticket.is_outside or ticket.is_back) and not ticket.times then
    if not pool.remove_head(ticket, pool.member_of(ticket)) then return pool.damaged() end
    return
  end
  leave_lane(ticket)
end

function pool.leave_queue(ticket)
  if not ticket.is_claimant then return leave_queue(ticket) end
  local level, tier = ticket.level, tiers[ticket.level]
  pool.forget_claimant(ticket)
  pool.count_queued(tier, ticket, -1)
  if tier[QUEUED] == 0 then
    call('UNLINK', pool.finish_key(level))
    tier[VIRTUAL], tier[WEIGHTS], lanes[level] = 0, 0, nil
  end
end

function pool.sort_some(level)
  fleet[SAME_UNTIL], is_changed[level] = 0, true
  sort_some(level)
end

-- -- claimants

function pool.claimants()
  if not pool.claimant_list then
    pool.claimant_list = {}
    if fleet[ALL_CLAIMANTS] > 0 then
      local entries = call('HGETALL', pool.claims_key())
      for index = 1, #entries, 2 do
        pool.claimant_list[#pool.claimant_list + 1] = pool.read_claimant(entries[index], cjson.decode(entries[index + 1]))
      end
      if #pool.claimant_list ~= fleet[ALL_CLAIMANTS] then return pool.damaged() end
    end
  end
  return pool.claimant_list
end

function pool.claimant_text(ticket)
  return fmt('[%d,%d,%d,%d,%d,%d,%d,%.17g,%.17g,%d,%d,"%s",%s,%.17g,%s]', ticket.level, ticket.tokens,
    ticket.requests, ticket.sequence, ticket.arrived, ticket.weight, ticket.uncached, ticket.charge, ticket.charged_from,
    ticket.times or -1, ticket.patient_until, ticket.tenant, ticket.placing, ticket.start, cjson.encode(ticket.kept or ''))
end

function pool.save_claimant(ticket)
  pool.fill(ticket)
  call('HSET', pool.claims_key(), ticket.owner .. ' ' .. ticket.id, pool.claimant_text(ticket))
end

function pool.read_claimant(member, figures)
  local owner, id = match(member, '^(%S+) (%S+)$')
  local placing = figures[13]
  local ticket = {
    owner = owner, id = id, level = figures[1], tokens = figures[2], requests = figures[3], sequence = figures[4],
    arrived = figures[5], weight = figures[6], uncached = figures[7], charge = figures[8], charged_from = figures[9],
    times = figures[10] >= 0 and figures[10] or nil, patient_until = figures[11], tenant = figures[12], is_stored = true,
    is_claimant = true, start = figures[14], kept = figures[15] ~= '' and figures[15] or nil,
  }
  if type(placing) == 'number' then
    ticket.prompt = placing
  else
    ticket.prompt, ticket.hits = placing[1], next(placing[2]) and placing[2]
    for _, name in ipairs(placing[3]) do
      ticket.barred = ticket.barred or {}
      ticket.barred[name] = true
    end
  end
  if pool.is_any_away() and pool.is_away(owner) then ticket.is_away = true end
  return ticket
end

function pool.count_claimant(ticket, sign)
  local tier = tiers[ticket.level]
  tier[CLAIMANTS], fleet[ALL_CLAIMANTS] = tier[CLAIMANTS] + sign, fleet[ALL_CLAIMANTS] + sign
  is_changed[ticket.level], heads[ticket.level] = true, nil
  if pool.orders then pool.orders[ticket.level] = nil end
end

-- A waiting ticket becomes a claimant.
function pool.claim(ticket)
  local list = pool.claimants()
  if not ticket.is_stored then pool.store(ticket) end
  pool.fill(ticket)
  local tier, lane = tiers[ticket.level], pool.lane_of(ticket.level, ticket.tenant)
  tier[VIRTUAL] = math.max(tier[VIRTUAL], ticket.start)
  if not ticket.times and not ticket.is_back then
    ticket.charged_from = math.max(lane.finish, ticket.start)
    ticket.charge = ticket.charged_from + ticket.tokens / ticket.weight
    lane.finish = ticket.charge
  end
  ticket.charge, ticket.charged_from = ticket.charge or 0, ticket.charged_from or 0
  ticket.patient_until = ticket.patient_until or now + pool.patience_of(ticket)
  pool.leave_lane(ticket)
  pool.count_claimant(ticket, 1)
  ticket.is_claimant = true
  list[#list + 1] = ticket
  pool.save_claimant(ticket)
  call('HSET', pool.replica_key(ticket.owner), ticket.id, pool.ticket_text(ticket, ticket.written))
end

function pool.forget_claimant(ticket)
  for place, claimant in ipairs(pool.claimants()) do
    if claimant.id == ticket.id and claimant.owner == ticket.owner then
      table.remove(pool.claimant_list, place)
      break
    end
  end
  if call('HDEL', pool.claims_key(), ticket.owner .. ' ' .. ticket.id) == 0 then return pool.damaged() end
  pool.count_claimant(ticket, -1)
end

-- A claimant stands in the queue again.
function pool.go_back(ticket)
  pool.fill(ticket)
  ticket.start = pool.start_of_return(ticket.level)
  pool.forget_claimant(ticket)
  ticket.is_claimant, ticket.is_back, ticket.kept = false, true, nil
  pool.store_head(ticket)
  heads[ticket.level] = nil
  call('HSET', pool.replica_key(ticket.owner), ticket.id, pool.ticket_text(ticket, ticket.written))
end

-- A ticket that leaves has cost its tenant nothing: the lane's finish falls back, and so does the start of its first.
function pool.refund(ticket)
  local level, lane = ticket.level, pool.lane_of(ticket.level, ticket.tenant)
  if not ticket.charge or ticket.charge == 0 or lane.finish ~= ticket.charge then return end
  lane.finish = ticket.charged_from
  pool.save_lane(level, ticket.tenant, lane)
  if lane.waiting == 0 then return end
  local start = math.max(tiers[level][VIRTUAL], lane.finish)
  for _, key in ipairs({pool.queue_key(level), pool.large_key(level)}) do
    local before = call('ZSCORE', key, lane.first)
    if before and start < tonumber(before) then
      call('ZADD', key, pool.tag(start), lane.first)
      heads[level] = nil
    end
  end
end
