-- Tickets that wait: their records, the queue of a tier as it is stored, which is the twin of `scheduling/fair_queue.py`, and
-- overtaking. Defined when a function of it is first asked for.

function pool.queue_key(level) return prefix .. 'q:' .. level end

function pool.large_key(level) return prefix .. 'g:' .. level end

function pool.lane_key(level) return prefix .. 'l:' .. level end

function pool.finish_key(level) return prefix .. 'f:' .. level end

function pool.member_of(ticket)
  return fmt('%016d %s %s %d %d %d %d %s', ticket.sequence, ticket.owner, ticket.id, ticket.tokens,
    ticket.requests, ticket.arrived, ticket.weight, ticket.tenant)
end

function pool.read_member(level, member)
  local sequence, owner, id, tokens, requests, arrived, weight, tenant =
    match(member, '^(%d+) (%S+) (%S+) (%d+) (%d+) (%d+) (%d+) (.*)$')
  return {
    id = id, owner = owner, level = level, tokens = tonumber(tokens), requests = tonumber(requests),
    sequence = tonumber(sequence), arrived = tonumber(arrived), weight = tonumber(weight), tenant = tenant,
    is_stored = true,
  }
end

-- SERVED is followed by ';TIMES OVERTAKEN' where the ticket returned. OVERTAKEN is -AFTER where it was not overtaken yet:
-- a later sequence than AFTER overtakes it. A ticket that is parked has 'P' in place of 'W'.
function pool.ticket_text(ticket, served)
  return fmt('W %d %d %d %d %d %d ', ticket.level, ticket.tokens, ticket.requests, ticket.sequence,
    ticket.arrived, ticket.weight) .. served .. '|' .. ticket.tenant
end

function pool.ticket_record(ticket)
  local served = {}
  for level = 0, levels - 1 do served[level + 1] = pool.int(tiers[level][SERVED] - (served_since[level] or 0)) end
  return pool.ticket_text(ticket, concat(served, ' '))
end

function pool.read_ticket(owner, id, record)
  local level, tokens, requests, sequence, arrived, weight, served, tenant =
    match(record, '^[WP] (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) ([^|]*)|(.*)$')
  local ticket = {
    id = id, owner = owner, level = tonumber(level), tokens = tonumber(tokens), requests = tonumber(requests),
    sequence = tonumber(sequence), arrived = tonumber(arrived), weight = tonumber(weight), tenant = tenant,
    served = served, is_stored = true,
  }
  local before, times, overtaken = match(served, '^([^;]*);(%d+) (%-?%d+)$')
  if before then -- it returned
    ticket.served, ticket.times, overtaken = before, tonumber(times), tonumber(overtaken)
    if overtaken < 0 then ticket.after = -overtaken else ticket.overtaken = overtaken end
  end
  return ticket
end

function pool.read_lane(text)
  local finish, waiting, weight, first = match(text, '^(%S+) (%d+) (%d+) ?(.*)$')
  return {finish = tonumber(finish), waiting = tonumber(waiting), weight = tonumber(weight), first = first}
end

-- The lane of a tenant: its finish tag, how many of its tickets wait that were never preempted, and the first of them.
function pool.lane_of(level, tenant)
  local of_tier = lanes[level]
  if not of_tier then
    of_tier = {}
    lanes[level] = of_tier
  end
  local lane = of_tier[tenant]
  if not lane then
    lane = pool.read_lane(call('HGET', pool.finish_key(level), tenant) or '0 0 0')
    lane.in_use = pool.use_text(tenant, lane)
    of_tier[tenant] = lane
  end
  return lane
end

function pool.save_lane(level, tenant, lane)
  pool.note_use(level, tenant, lane)
  if lane.waiting == 0 and lane.finish <= tiers[level][VIRTUAL] then
    call('HDEL', pool.finish_key(level), tenant)
  else
    local first = lane.waiting > 0 and ' ' .. lane.first or ''
    call('HSET', pool.finish_key(level), tenant, fmt('%.17g %d %d', lane.finish, lane.waiting, lane.weight) .. first)
  end
end

-- -- the tenants that wait, by weight, and those of a weight by how many of their tickets do, the most first

function pool.use_key(level) return prefix .. 't:' .. level end

function pool.use_text(tenant, lane)
  return lane.waiting > 0 and fmt('%016d %016d ', lane.weight, MOST_WAITING - lane.waiting) .. tenant
end

function pool.note_use(level, tenant, lane)
  local text, before = pool.use_text(tenant, lane), lane.in_use
  if text == before then return end
  if before then call('ZREM', pool.use_key(level), before) end
  if text then call('ZADD', pool.use_key(level), 0, text) end
  lane.in_use = text
end

-- A ticket becomes the first of its tenant, or returns.
function pool.store_head(ticket)
  local is_small = pool.is_small(ticket)
  if not is_small then
    tiers[ticket.level][LARGE] = tiers[ticket.level][LARGE] + 1
    is_changed[ticket.level] = true
  end
  call('ZADD', is_small and pool.queue_key(ticket.level) or pool.large_key(ticket.level), pool.tag(ticket.start),
    pool.member_of(ticket))
end

function pool.store(ticket)
  pool.join_lane(ticket)
  call('ZADD', waiting_key, pool.int(ticket.sequence), pool.int(ticket.sequence))
  call('HSET', pool.replica_key(ticket.owner), ticket.id, pool.ticket_record(ticket))
  ticket.is_stored = true
end

-- A ticket that is not the first of its tenant stands in the lane by its sequence.
function pool.join_lane(ticket)
  local lane = pool.lane_of(ticket.level, ticket.tenant)
  if lane.waiting == 0 then
    pool.store_head(ticket)
    lane.first = pool.member_of(ticket)
  else
    call('ZADD', pool.lane_key(ticket.level), 0, ticket.tenant .. ' ' .. pool.member_of(ticket))
  end
  local tier = tiers[ticket.level]
  tier[WEIGHTS] = tier[WEIGHTS] + ticket.weight - (lane.waiting > 0 and lane.weight or 0)
  lane.waiting, lane.weight = lane.waiting + 1, ticket.weight
  pool.save_lane(ticket.level, ticket.tenant, lane)
end

-- The first of the heads of a tier under one key. A ticket of a dead replica, or of one that is cut off, counts only where
-- there are no others.
function pool.read_head(level, key)
  local found = call('ZRANGE', key, 0, 0, 'WITHSCORES')
  if not found[1] then return nil end
  local is_away = pool.is_any_away() and pool.is_away(pool.owner_of(found[1]))
  if is_away then
    local others, before = call('ZRANGE', key, 1, HEADS_SEEN, 'WITHSCORES'), nil
    for index = 1, #others, 2 do
      local owner = pool.owner_of(others[index])
      if owner ~= before and not pool.is_away(owner) then
        is_away, found[1], found[2] = false, others[index], others[index + 1]
        break
      end
      before = owner
    end
  end
  local ticket = pool.read_member(level, found[1])
  ticket.start, ticket.is_away = tonumber(found[2]), is_away or nil
  return ticket
end

function pool.owner_of(member) return match(member, '^%d+ (%S+)') end

function pool.starts_earlier(ticket, other)
  if ticket.is_away ~= other.is_away then return other.is_away end
  return ticket.start < other.start or (ticket.start == other.start and ticket.sequence < other.sequence)
end

-- -- overtaking, and leaving the queue

-- When the ticket was first overtaken, nil where it was not. A step is kept while some ticket waits that it overtook
-- first, so there are never more steps than tickets that wait.
function pool.overtaken_at(sequence)
  if sequence >= meta[LATEST] then return nil end
  local found = call('ZRANGEBYSCORE', steps_key, '(' .. pool.int(sequence), '+inf', 'LIMIT', 0, 1)
  return found[1] and tonumber(match(found[1], '^(%d+)'))
end

function pool.forget_step(sequence)
  local step = call('ZRANGEBYSCORE', steps_key, '(' .. pool.int(sequence), '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
  if not step[1] then return end
  local before = call('ZREVRANGEBYSCORE', steps_key, pool.int(sequence), '-inf', 'WITHSCORES', 'LIMIT', 0, 1)
  local from = before[1] and '(' .. before[2] or '-inf'
  if not call('ZRANGEBYSCORE', waiting_key, from, '(' .. step[2], 'LIMIT', 0, 1)[1] then
    call('ZREM', steps_key, step[1])
  end
end

-- Takes a ticket that is first of its tenant, or returned, out of the heads of the tier. Returns whether it was there.
function pool.remove_head(ticket, member)
  local level = ticket.level
  if call('ZREM', pool.queue_key(level), member) == 1 then return true end
  if tiers[level][LARGE] > 0 and call('ZREM', pool.large_key(level), member) == 1 then
    tiers[level][LARGE] = tiers[level][LARGE] - 1
    return true
  end
  return false
end

-- The next ticket of a tenant becomes its first.
function pool.advance(level, tenant, lane)
  local found = call('ZRANGEBYLEX', pool.lane_key(level), '[' .. tenant .. ' ', '(' .. tenant .. '!', 'LIMIT', 0, 1)
  if not found[1] then return pool.damaged() end
  call('ZREM', pool.lane_key(level), found[1])
  local first = pool.read_member(level, string.sub(found[1], #tenant + 2))
  first.start = math.max(tiers[level][VIRTUAL], lane.finish)
  pool.store_head(first)
  lane.first = pool.member_of(first)
end

function pool.leave_lane(ticket)
  local level, tenant, member = ticket.level, ticket.tenant, pool.member_of(ticket)
  if ticket.times then
    if not pool.remove_head(ticket, member) then return pool.damaged() end
    return
  end
  local lane = pool.lane_of(level, tenant)
  lane.waiting = lane.waiting - 1
  if lane.waiting == 0 then tiers[level][WEIGHTS] = tiers[level][WEIGHTS] - lane.weight end
  if pool.remove_head(ticket, member) then
    if lane.waiting > 0 then pool.advance(level, tenant, lane) end
  elseif call('ZREM', pool.lane_key(level), tenant .. ' ' .. member) == 0 then
    return pool.damaged()
  end
  pool.save_lane(level, tenant, lane)
end

-- A ticket that returns starts at the tier's virtual time, or with the head, which small ones may have passed.
function pool.start_of_return(level)
  local tier = tiers[level]
  return tier[QUEUED] > 0 and math.min(tier[VIRTUAL], pool.head_of(level).start) or tier[VIRTUAL]
end

-- -- tickets of a replica that cannot reach the engine

-- A ticket that is first in order leaves the queue, and waits outside: others may be admitted meanwhile. It keeps its
-- record, and counts among the tickets that wait, so its figures go on.
function pool.park(ticket, record)
  local tier = tiers[ticket.level]
  pool.leave_queue(ticket)
  tier[PARKED], tier[PARKED_TOKENS] = tier[PARKED] + 1, tier[PARKED_TOKENS] + ticket.tokens
  call('HSET', pool.replica_key(ticket.owner), ticket.id, 'P' .. string.sub(record, 2))
end

function pool.is_parked(record) return string.sub(record, 1, 1) == 'P' end

-- A ticket that was parked is no longer.
function pool.unpark(ticket)
  local tier = tiers[ticket.level]
  tier[PARKED], tier[PARKED_TOKENS] = tier[PARKED] - 1, tier[PARKED_TOKENS] - ticket.tokens
  is_changed[ticket.level] = true
end

-- It takes its place in the queue again: by its sequence in its tenant's lane, but never before the one that is first there
-- now, which would have to be searched for.
function pool.restore(ticket, record)
  local level, tier = ticket.level, tiers[ticket.level]
  local head = tier[QUEUED] > 0 and pool.head_of(level)
  if head and not head.is_stored then pool.store(head) end
  pool.unpark(ticket)
  if ticket.times then ticket.start = pool.start_of_return(level) end
  pool.count_queued(tier, ticket, 1)
  if ticket.times then
    pool.store_head(ticket)
  else
    ticket.start = math.max(tier[VIRTUAL], pool.lane_of(level, ticket.tenant).finish)
    pool.join_lane(ticket)
  end
  heads[level] = nil
  call('HSET', mine, ticket.id, 'W' .. string.sub(record, 2))
end

-- -- charges, waits, and places in a full queue

-- Charges the tenant for a ticket. The virtual time of the tier moves on to its start.
function pool.charge_tenant(ticket)
  local tier = tiers[ticket.level]
  tier[VIRTUAL] = math.max(tier[VIRTUAL], ticket.start)
  if not ticket.times then
    local lane = pool.lane_of(ticket.level, ticket.tenant)
    lane.finish = math.max(lane.finish, ticket.start) + ticket.tokens / ticket.weight
  end
end

-- Sorts the first tickets of a tier with another reserve anew into small and large ones: some in this call, the rest in
-- the next ones. Until then the head is the first of both kinds, and no small ticket goes before a larger head.
function pool.sort_heads(level)
  sorts[level] = 'q 0'
  pool.sort_some(level)
end

-- A scan returns every member that stays from its begin to its end. One that came since stands where it belongs.
function pool.sort_some(level)
  local kind, cursor = match(sorts[level], '^(%a) (%d+)$')
  heads[level] = nil
  while pool.to_sort > 0 do
    local key = kind == 'q' and pool.queue_key(level) or pool.large_key(level)
    local found = call('ZSCAN', key, cursor, 'COUNT', SORTED)
    pool.to_sort = pool.to_sort - #found[2] / 2 - 1
    for index = 1, #found[2], 2 do pool.sort_one(level, kind == 'q', found[2][index], tonumber(found[2][index + 1])) end
    cursor = found[1]
    if cursor == '0' then
      if kind == 'g' then
        sorts[level] = nil
        return
      end
      kind = 'g'
    end
  end
  sorts[level] = kind .. ' ' .. cursor
end

function pool.sort_one(level, is_among_small, member, start)
  local ticket = pool.read_member(level, member)
  if pool.is_small(ticket) == is_among_small then return end
  pool.remove_head(ticket, member)
  ticket.start = start
  pool.store_head(ticket)
end

-- The wait of the ticket so far, as text after its id, and whether it was overtaken.
function pool.wait_text(ticket, aged_level)
  local overtaken = ticket.overtaken or pool.overtaken_at(ticket.after or ticket.sequence)
  local parts = {pool.int(now - ticket.arrived), overtaken and pool.int(now - overtaken) or '-1', pool.int(aged_level)}
  local level = 0
  for served in string.gmatch(ticket.served, '%d+') do
    parts[#parts + 1] = pool.int(tiers[level][SERVED] - tonumber(served))
    level = level + 1
  end
  return concat(parts, ' '), overtaken
end

-- How many tickets of a tenant wait, and the sum of the weights of this and of all tenants that wait.
function pool.weights_with(level, tenant, weight)
  local lane = pool.lane_of(level, tenant)
  return lane.waiting, tiers[level][WEIGHTS] + weight - (lane.waiting > 0 and lane.weight or 0)
end

-- The tenant that is furthest above its share of the places of a queue. Of equals it is the first by name. Of one weight it
-- has the most tickets, so one tenant of each weight is looked at.
function pool.furthest_above(level, weights, places)
  local most, found, after = 0, nil, '-'
  repeat
    local first = call('ZRANGEBYLEX', pool.use_key(level), after, '+', 'LIMIT', 0, 1)[1]
    if first then
      local weight, rest, tenant = match(first, '^(%d+) (%d+) (.*)$')
      local excess = (MOST_WAITING - rest) * weights - places * weight
      if excess > most or (found and excess == most and tenant < found) then most, found = excess, tenant end
      after = '(' .. weight .. '!' -- a heavier tenant
    end
  until not first
  return found
end

-- The newest ticket of a tenant that was never preempted.
function pool.newest_of(level, tenant)
  local lane = pool.lane_of(level, tenant)
  if lane.waiting == 1 then return pool.read_member(level, lane.first) end
  local found = call('ZREVRANGEBYLEX', pool.lane_key(level), '(' .. tenant .. '!', '[' .. tenant .. ' ', 'LIMIT', 0, 1)
  return found[1] and pool.read_member(level, string.sub(found[1], #tenant + 2)) or pool.damaged()
end

-- Takes the place of the newest ticket of a tenant in a full queue.
function pool.displace(level, tenant)
  local ticket = pool.newest_of(level, tenant)
  local key, charges = pool.replica_key(ticket.owner), prefix .. 'm:' .. ticket.owner
  local record, charge = call('HGET', key, ticket.id), call('HGET', charges, ticket.id)
  if not record then return pool.damaged() end
  call('HDEL', key, ticket.id)
  pool.withdraw(pool.read_ticket(ticket.owner, ticket.id, record))
  if charge then
    call('HDEL', charges, ticket.id)
    pool.rate_limits().correct_lost(charge, nil)
  end
  pool.grant(ticket.owner, '-' .. ticket.id)
end

function pool.withdraw(ticket, is_parked)
  local figures, overtaken = pool.wait_text(ticket, ticket.level)
  if is_parked then
    pool.unpark(ticket)
    meta[WAITING] = meta[WAITING] - 1
    call('ZREM', waiting_key, pool.int(ticket.sequence))
  else
    pool.remove(ticket)
  end
  pool.settle_steps(ticket, overtaken)
  return figures
end

-- A lease of a tenant uses more than its tenant was charged for: the twin of `FairQueue.charge`.
function pool.charge_more(level, tenant, weight, tokens)
  local tier = tiers[level]
  if tier[QUEUED] == 0 then return end
  local head = pool.head_of(level)
  if head and not head.is_stored then pool.store(head) end
  local lane = pool.lane_of(level, tenant)
  lane.finish = math.max(tier[VIRTUAL], lane.finish) + tokens / weight
  pool.save_lane(level, tenant, lane)
end
