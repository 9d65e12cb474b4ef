-- Preemption in a pool of several engines: the twin of `scheduling/fleet_preemption.py`. It replaces parts of
-- `preemption.lua`.

local put_back = pool.put_back

function pool.put_back(ticket)
  pool.attach_placing(ticket)
  fleet[SAME_UNTIL] = 0
  put_back(ticket)
end

function pool.book_all(leases, sign)
  for _, lease in ipairs(leases) do
    local tier, tokens, requests = tiers[lease.level], sign * lease.tokens, sign * lease.requests
    tier[HELD_TOKENS], tier[HELD_REQUESTS] = tier[HELD_TOKENS] + tokens, tier[HELD_REQUESTS] + requests
    all_tokens, all_requests = all_tokens + tokens, all_requests + requests
    pool.book_engine(lease.level, lease.engine, tokens, requests, sign * lease.prefill, sign * lease.unprefilled)
  end
end

function pool.lease_of(member)
  local owner, id = match(member, '^(%S+) (%S+)$')
  local level, tokens, requests, _, _, _, _, _, on_engine = pool.read_lease(call('HGET', pool.replica_key(owner), id) or '')
  if not level then return pool.damaged() end
  return {
    owner = owner, id = id, member = member, level = level, tokens = tokens, requests = requests, engine = on_engine[1],
    prefill = on_engine[2], unprefilled = on_engine[3],
  }
end

function pool.is_eligible(lease, most_tokens, most_requests, served)
  local rule, tier = rules[FIRST_RULE + lease.level], tiers[lease.level]
  local has_its_reserve = rule[ALWAYS_FIRST] == 0 and (tier[HELD_TOKENS] - lease.tokens >= rule[RESERVE_TOKENS]
    or tier[HELD_REQUESTS] - lease.requests >= rule[RESERVE_REQUESTS]
    or tier[HELD_PREFILL] - lease.prefill >= rule[RESERVE_PREFILL])
  if lease.engine ~= pool.target or not has_its_reserve then return false end
  if lease.tokens > most_tokens or lease.requests > most_requests then return false end
  if not pool.recall(lease) then return pool.damaged() end
  return lease.times < rule[PREEMPTIBLE] and not pool.comes_before(lease, served)
end

function pool.comes_before(ticket, candidate)
  local place = pool.candidate(ticket.level, {
    level = ticket.level, tokens = ticket.tokens, requests = ticket.requests, uncached = 1, arrived = ticket.arrived,
    sequence = ticket.sequence, owner = ticket.owner, id = ticket.id,
  })
  place.order_class, place.turn = CLASS_OTHER, 0
  return pool.is_before(place, candidate)
end

function pool.is_tier_eligible(level, served)
  if rules[FIRST_RULE + level][PREEMPTIBLE] == 0 then return false end
  for _, first in ipairs(pool.firsts_of(level)) do
    if pool.comes_before(first, served) then return false end
  end
  return true
end

-- The ticket that a walk over these alone admits, and its engine.
function pool.first_admitted(rest)
  for _, candidate in ipairs(rest) do
    local ticket = candidate.ticket
    if not pool.fits(candidate) then
      if pool.holds_its_place(candidate) then return nil end
    else
      pool.know_placing(ticket)
      local place = pool.best(ticket)
      if place then
        local taking = pool.taken_by(ticket, place)
        if taking then return candidate, pool.ledger_at(taking) end
        if pool.claim_engine(place, ticket.prompt) then return nil end
      end
    end
  end
end

-- Whether walks over these candidates alone, one after the other, admit the last of them.
function pool.all_fit(order)
  local rest, admitted, last = {unpack(order)}, {}, order[#order]
  local found, ledger, is_in = nil, nil, false
  repeat
    pool.begin_walk()
    found, ledger = pool.first_admitted(rest)
    pool.end_walk()
    if found then
      local ticket = found.ticket
      local held = {
        level = ticket.level, tokens = ticket.tokens, requests = ticket.requests, engine = ledger.id,
        prefill = pool.prefill_of(ticket), unprefilled = pool.unprefilled_on(ticket, ledger.id),
      }
      pool.book_all({held}, 1)
      admitted[#admitted + 1], is_in = held, found == last
      for place, candidate in ipairs(rest) do
        if candidate == found then
          table.remove(rest, place)
          break
        end
      end
    end
  until is_in or not found
  pool.book_all(admitted, -1)
  return is_in
end

-- The engine that the served ticket would claim if all before it claimed theirs.
function pool.claimed_by_last(order)
  pool.begin_walk()
  for index = 1, #order - 1 do
    local ticket = order[index].ticket
    pool.know_placing(ticket)
    local place = pool.best(ticket)
    if place and pool.fits(order[index]) then pool.claim_engine(place, ticket.prompt) end
  end
  pool.know_placing(order[#order].ticket)
  local target = pool.best(order[#order].ticket)
  pool.end_walk()
  return target and pool.taking()[target]
end

local enough = pool.enough

function pool.enough(order)
  pool.target = pool.claimed_by_last(order)
  return enough(order)
end

local add_for_burst = pool.add_for_burst

function pool.add_for_burst(order, taken)
  if #taken == 0 then pool.target = pool.claimed_by_last(order) end
  add_for_burst(order, taken)
end

pool.in_order_of_turn = pool.in_order_of_walk

function pool.next_preemption(soonest)
  if now < fleet[SAME_UNTIL] then return soonest end
  for level = 0, levels - 1 do
    local after = rules[FIRST_RULE + level][PREEMPT_AFTER_US]
    if after >= 0 then
      for _, first in ipairs(pool.firsts_of(level)) do
        local change = first.arrived + after - now
        if change > 0 and (soonest < 0 or change < soonest) then soonest = change end
      end
    end
  end
  return soonest
end
