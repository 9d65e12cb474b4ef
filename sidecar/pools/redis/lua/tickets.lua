-- Leases, and tickets that are admitted as they come: what every call needs. `waiting.lua` has the rest.

-- EXCESS and ADMITTED are 0 for a lease without an excess, SEQUENCE and ARRIVED for one that was stated.
function pool.lease_record(level, tokens, requests, excess, admitted, sequence, arrived, grant)
  return fmt('L %d %d %d %d %d %d %d ', level, tokens, requests, excess, admitted, sequence, arrived)
    .. (grant or '')
end

function pool.read_lease(record)
  local level, tokens, requests, excess, admitted, sequence, arrived, grant =
    match(record, '^L (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (.*)$')
  return tonumber(level), tonumber(tokens), tonumber(requests), grant, tonumber(excess), tonumber(admitted),
    tonumber(sequence), tonumber(arrived)
end

function pool.book(level, tokens, requests)
  local tier = tiers[level]
  tier[HELD_TOKENS], tier[HELD_REQUESTS] = tier[HELD_TOKENS] + tokens, tier[HELD_REQUESTS] + requests
  all_tokens, all_requests = all_tokens + tokens, all_requests + requests
  is_changed[level] = true
end

function pool.is_small(ticket)
  local rule = rules[FIRST_RULE + ticket.level]
  return ticket.tokens <= rule[RESERVE_TOKENS] and ticket.requests <= rule[RESERVE_REQUESTS]
end

-- {first, small}: the head of a tier with waiting tickets, and the next ticket no larger than its reserve.
function pool.heads_of(level)
  local found = heads[level]
  if not found then
    local tier, small, large = tiers[level], nil, nil
    if tier[LARGE] > 0 then
      large = pool.read_head(level, pool.large_key(level))
      if not large then return pool.damaged() end
    end
    local rule = rules[FIRST_RULE + level]
    if sorts[level] or (rule[RESERVE_TOKENS] > 0 and rule[RESERVE_REQUESTS] > 0) then -- else every ticket is large
      small = pool.read_head(level, pool.queue_key(level))
    end
    if not small and not large then return pool.damaged() end
    found = {first = large, small = small}
    if not large or (small and pool.starts_earlier(small, large)) then found.first = small end
    if sorts[level] then found.small = nil end -- it is not known yet
    heads[level] = found
  end
  return found
end

function pool.head_of(level) return pool.heads_of(level).first end

-- While the tier owes and its head is larger than the reserve: the next ticket that is not.
function pool.second_head(level)
  local found = pool.heads_of(level)
  if now >= tiers[level][OWES_UNTIL] or pool.is_small(found.first) then return nil end
  return found.small
end

function pool.count_queued(tier, ticket, sign)
  tier[QUEUED], tier[QUEUED_TOKENS] = tier[QUEUED] + sign, tier[QUEUED_TOKENS] + sign * ticket.tokens
  tier[QUEUED_REQUESTS] = tier[QUEUED_REQUESTS] + sign * ticket.requests
end

-- A ticket enters its queue. The first in an empty queue need not be stored yet.
function pool.push(ticket, tenant, weight)
  local tier = tiers[ticket.level]
  ticket.start, ticket.tenant, ticket.weight = 0, tenant, weight
  local head = tier[QUEUED] > 0 and pool.head_of(ticket.level)
  if head then
    if not head.is_stored then pool.store(head) end
    local lane = pool.lane_of(ticket.level, tenant)
    ticket.start = math.max(tier[VIRTUAL], lane.finish)
    if lane.waiting == 0 then heads[ticket.level] = nil end
    pool.store(ticket)
  else
    heads[ticket.level] = {first = ticket, small = pool.is_small(ticket) and ticket or nil}
  end
  pool.count_queued(tier, ticket, 1)
  meta[WAITING] = meta[WAITING] + 1
  is_changed[ticket.level] = true
end

function pool.note_overtaking(sequence, arrived)
  if sequence <= meta[LATEST] then return end
  if meta[WAITING] > 0 then
    local between = call('ZRANGEBYSCORE', waiting_key, '(' .. pool.int(meta[LATEST]), '(' .. pool.int(sequence), 'LIMIT', 0, 1)
    if between[1] then call('ZADD', steps_key, pool.int(sequence), pool.int(now) .. ' ' .. pool.int(sequence)) end
  end
  meta[LATEST], meta[LATEST_ARRIVED] = sequence, arrived
end

-- Takes a ticket out of its queue. The caller changes the record of its replica.
function pool.remove(ticket)
  meta[WAITING] = meta[WAITING] - 1
  if ticket.is_stored then call('ZREM', waiting_key, pool.int(ticket.sequence)) end
  pool.leave_queue(ticket)
end

function pool.leave_queue(ticket)
  local level = ticket.level
  local tier = tiers[level]
  pool.count_queued(tier, ticket, -1)
  is_changed[level], heads[level] = true, nil
  if ticket.is_stored then
    pool.leave_lane(ticket)
    if tier[QUEUED] == 0 then
      call('UNLINK', pool.finish_key(level))
      tier[VIRTUAL], tier[WEIGHTS], lanes[level] = 0, 0, nil
    end
  end
end

-- Forgets the step that a ticket needed. A ticket that keeps its own moment needs none.
function pool.settle_steps(ticket, was_overtaken)
  if meta[WAITING] == 0 then
    call('UNLINK', steps_key)
  elseif was_overtaken and not ticket.overtaken then
    pool.forget_step(ticket.after or ticket.sequence)
  end
end

function pool.grant(owner, text)
  local texts = grants
  if owner ~= me then
    outbox[owner] = outbox[owner] or {}
    texts = outbox[owner]
  end
  texts[#texts + 1] = text
end
