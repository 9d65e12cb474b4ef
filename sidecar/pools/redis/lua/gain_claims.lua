-- Tickets and claimants of several engines by gain: the twin of `scheduling/gain_claims.py`. It replaces parts of `claims.lua`
-- and `gain_tickets.lua`.
--
-- A ticket's member and record are those of `claims.lua` with the figures of its gain before its tenant. 'r' before them
-- says that it stands in no lane. The text of a claimant ends with the figures, and 1 where it is urgent. A calm claimant is
-- in `due` still.

function pool.member_of(ticket)
  if not ticket.member then
    ticket.member = fmt('%016d %s %s %d %d %d %d %d %s %s', ticket.sequence, ticket.owner, ticket.id, ticket.tokens,
      ticket.requests, ticket.arrived, ticket.weight, ticket.uncached, ticket.gain_text, ticket.tenant)
  end
  return ticket.member
end

function pool.new_of_member(level, member)
  local sequence, owner, id, tokens, requests, arrived, weight, uncached, text, tenant =
    match(member, '^(%d+) (%S+) (%S+) (%d+) (%d+) (%d+) (%d+) (%d+) (%S+) (.*)$')
  local ticket = {
    id = id, owner = owner, level = level, tokens = tonumber(tokens), requests = tonumber(requests),
    sequence = tonumber(sequence), arrived = tonumber(arrived), weight = tonumber(weight), tenant = tenant,
    uncached = tonumber(uncached), is_stored = true, member = member,
  }
  pool.set_gain(ticket, text)
  ticket.is_outside = ticket.is_apart
  return ticket
end

-- A lease's note ends with the tokens of its prompt that no engine was predicted to have.
local note_for = pool.note_for

function pool.note_for(ticket) return note_for(ticket) .. ' ' .. pool.int(ticket.uncached) end

-- What comes may be the best of its tier, and let no earlier walk stand.
local push, note_largest, charge_more = pool.push, pool.note_largest, pool.charge_more

function pool.push(ticket, tenant, weight)
  push(ticket, tenant, weight)
  if not ticket.is_stored or now >= fleet[SAME_UNTIL] then return end
  local best = pool.densest(ticket.level) or pool.earliest(ticket.level)
  if best and best.sequence == ticket.sequence then fleet[SAME_UNTIL] = 0 end
end

function pool.note_largest(level, tokens)
  fleet[SAME_UNTIL] = 0
  note_largest(level, tokens)
end

function pool.charge_more(level, tenant, weight, tokens)
  fleet[SAME_UNTIL] = 0
  charge_more(level, tenant, weight, tokens)
end

-- -- claimants

local claimant_text, read_claimant = pool.claimant_text, pool.read_claimant

function pool.claimant_text(ticket)
  return string.sub(claimant_text(ticket), 1, -2) .. fmt(',"%s",%d]', ticket.gain_text, ticket.is_urgent and 1 or 0)
end

function pool.read_claimant(member, figures)
  local ticket = read_claimant(member, figures)
  ticket.is_urgent = figures[17] == 1
  pool.set_gain(ticket, figures[16])
  return ticket
end

-- The start of a ticket that stands in no lane.
function pool.start_apart(ticket)
  if ticket.charge and ticket.charge > 0 then return ticket.charged_from end
  local level, member = ticket.level, pool.member_of(ticket)
  local start = call('ZSCORE', pool.queue_key(level), member) or call('ZSCORE', pool.large_key(level), member)
  return start and tonumber(start) or pool.damaged()
end

-- A waiting ticket becomes a claimant. Its tenant is charged from the start of its first ticket: that is its own from now on.
function pool.claim(ticket)
  local list, level = pool.claimants(), ticket.level
  if not ticket.is_stored then pool.store(ticket) end
  pool.fill(ticket)
  pool.look_up(ticket)
  tiers[level][VIRTUAL] = pool.virtual_now(level)
  if ticket.is_apart then
    ticket.start = pool.start_apart(ticket)
  else
    local lane = pool.lane_of(level, ticket.tenant)
    ticket.charged_from = math.max(lane.finish, lane.start)
    ticket.charge = ticket.charged_from + ticket.tokens / ticket.weight
    ticket.start, lane.finish = ticket.charged_from, ticket.charge
  end
  ticket.charge, ticket.charged_from = ticket.charge or 0, ticket.charged_from or 0
  ticket.patient_until = ticket.patient_until or now + pool.patience_of(ticket)
  pool.leave_lane(ticket)
  ticket.is_urgent = ticket.was_urgent
  if ticket.gain and not ticket.is_urgent then pool.await_deadline(ticket) end
  pool.count_claimant(ticket, 1)
  ticket.is_claimant = true
  list[#list + 1] = ticket
  pool.save_claimant(ticket)
  call('HSET', pool.replica_key(ticket.owner), ticket.id, pool.ticket_text(ticket, ticket.written))
  pool.refresh_densities()
end

local forget_claimant = pool.forget_claimant

function pool.forget_claimant(ticket)
  for _, claimant in ipairs(pool.claimants()) do
    if claimant.id == ticket.id and claimant.owner == ticket.owner then
      if claimant.gain and not claimant.is_urgent then pool.forget_deadline(claimant) end
      ticket.was_urgent = claimant.is_urgent
      break
    end
  end
  forget_claimant(ticket)
end

-- A claimant stands in the queue again, in no lane, with its start.
function pool.go_back(ticket)
  pool.fill(ticket)
  local start = ticket.charge > 0 and ticket.charged_from or pool.start_of_return(ticket.level)
  pool.forget_claimant(ticket)
  ticket.start, ticket.is_claimant, ticket.is_back, ticket.kept = start, false, true, nil
  pool.set_gain(ticket, 'r' .. string.gsub(ticket.gain_text, '^r', ''))
  ticket.member, ticket.is_outside = nil, true
  pool.store_head(ticket)
  pool.enter_gain(ticket, ticket.is_urgent, ticket.density)
  heads[ticket.level] = nil
  call('HSET', pool.replica_key(ticket.owner), ticket.id, pool.ticket_text(ticket, ticket.written))
end

-- The lane is not ahead any more, where the claim had made it so.
function pool.refund(ticket)
  local level, tenant = ticket.level, ticket.tenant
  local lane = pool.lane_of(level, tenant)
  if not ticket.charge or ticket.charge == 0 or lane.finish ~= ticket.charge then return end
  lane.finish = ticket.charged_from
  pool.forget_best(level)
  local start = math.max(tiers[level][VIRTUAL], lane.finish)
  if lane.waiting > 0 and start < lane.start then pool.start_at(level, tenant, lane, start) end
  pool.save_lane(level, tenant, lane)
  if tiers[level][ASIDE] > 0 then pool.bring_back(level, tenant) end
end

local park = pool.park

-- A ticket that is parked claims nothing, and stands in its lane when it comes back.
function pool.park(ticket, record)
  park(ticket, record)
  if ticket.times or not ticket.is_apart then return end
  pool.set_gain(ticket, string.sub(ticket.gain_text, 2))
  call('HSET', pool.replica_key(ticket.owner), ticket.id, 'P' .. string.sub(pool.ticket_text(ticket, ticket.written), 2))
end

function pool.charge_for_admission(ticket)
  if ticket.is_stored and not ticket.is_claimant then pool.charge_tenant(ticket) end
end

-- -- by gain

local look_up, is_ahead, make_one_urgent = pool.look_up, pool.is_ahead, pool.make_one_urgent
local refresh_densities, is_any_urgent = pool.refresh_densities, pool.is_any_urgent

function pool.look_up(ticket)
  if not ticket.is_claimant then return look_up(ticket) end
  ticket.is_calm = not ticket.is_urgent
  if ticket.is_urgent and ticket.gain then ticket.density = ticket.density or pool.density(ticket.gain, ticket.arrived) end
end

function pool.is_ahead(level, ticket) return not ticket.is_claimant and is_ahead(level, ticket) end

function pool.make_one_urgent(level, member)
  for _, claimant in ipairs(pool.claimants()) do
    if claimant.level == level and pool.member_of(claimant) == member then
      claimant.is_urgent, claimant.density = true, nil
      return pool.save_claimant(claimant)
    end
  end
  make_one_urgent(level, member)
end

function pool.note_refreshed()
  fleet[SAME_UNTIL] = 0
  pool.forget_orders()
end

-- Those of claimants are brought up to date, too.
function pool.refresh_densities(lone)
  for _, claimant in ipairs(pool.claimants()) do
    if claimant.is_urgent and claimant.gain then
      local density = pool.density(claimant.gain, claimant.arrived)
      local before = claimant.density or pool.density(claimant.gain, claimant.arrived, meta[REFRESHED])
      if density ~= before then pool.note_refreshed() end
      claimant.density = density
    end
  end
  local left = meta[REFRESHED] == now and meta[REFRESHES] or MOST_REFRESHED
  local found = refresh_densities(lone)
  if meta[REFRESHES] < left then pool.note_refreshed() end
  return found
end

function pool.is_any_urgent()
  for _, claimant in ipairs(pool.claimants()) do
    if claimant.is_urgent and claimant.gain then return true end
  end
  return is_any_urgent()
end

function pool.engines_that_work() return math.max(1, #pool.taking()) end
