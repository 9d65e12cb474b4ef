-- Preemption: the twin of `scheduling/preemption.py`. Defined where a ticket may preempt, or a lease returns.

-- Reads how a lease of a preemptible tier had waited. A sequence of 0: it was stated, and its wait is not known.
function pool.recall(lease)
  local text = call('HGET', prefix .. 'v', lease.owner .. ' ' .. lease.id)
  if not text then return false end
  local sequence, arrived, times, overtaken, served = match(text, '^(%d+) (%d+) (%d+) (%-?%d+) ?(.*)$')
  lease.sequence, lease.arrived, lease.times = tonumber(sequence), tonumber(arrived), tonumber(times)
  lease.served = served
  if overtaken ~= '-1' then lease.overtaken = tonumber(overtaken) end
  return true
end

function pool.forget_all_preemption()
  call('UNLINK', prefix .. 'v', prefix .. 'c')
  for level = 0, levels - 1 do call('UNLINK', pool.preemptible_key(level)) end
end

-- Whether the store does not know yet that this lease was preempted for the `times`-th time.
function pool.is_before_return(id, record, times)
  local lease = {owner = me, id = id}
  return string.sub(record, 1, 1) == 'L' and (not pool.recall(lease) or lease.times < times)
end

-- How the lease of a tier that is not preemptible had waited, by its record: nothing is remembered of it.
function pool.recall_record(lease, record)
  local _, _, _, text, _, _, sequence, arrived = pool.read_lease(record or '')
  if not sequence or sequence == 0 then return false end
  local wait, starved, ahead = match(text, '^%S+ (%d+) (%-?%d+) %d+ ([%d ]*)')
  local since, served = string.gmatch(ahead or '', '%d+'), {}
  for level = 0, levels - 1 do served[level + 1] = pool.int(tiers[level][SERVED] - tonumber(since() or 0)) end
  lease.sequence, lease.arrived, lease.served = sequence, arrived, concat(served, ' ')
  if starved and starved ~= '-1' then lease.overtaken = arrived + tonumber(wait) - tonumber(starved) end
  return true
end

-- An operation, or a statement: a lease gives its room back and waits again, first in its tier. The replica states what the
-- store does not know of it. `is_handed_back`: it was no victim, but no engine has taken its request.
function pool.requeue(index, is_handed_back)
  local id, level, times = ARGV[index + 1], tonumber(ARGV[index + 2]), tonumber(ARGV[index + 8])
  local record = call('HGET', mine, id)
  if record and not pool.is_before_return(id, record, times) then return end
  local ticket = {
    id = id, owner = me, level = level, tokens = tonumber(ARGV[index + 5]), requests = tonumber(ARGV[index + 6]),
    tenant = ARGV[index + 3], weight = tonumber(ARGV[index + 4]),
  }
  if (not pool.recall(ticket) or ticket.sequence == 0) and not pool.recall_record(ticket, record) then
    local served = {}
    for other = 0, levels - 1 do served[other + 1] = pool.int(tiers[other][SERVED]) end
    ticket.sequence, ticket.arrived = pool.next_sequence(), now - tonumber(ARGV[index + 7])
    ticket.served = concat(served, ' ')
  end
  if record then pool.end_record(me, id, record) end
  ticket.times = times
  if is_handed_back then
    ticket.after = not ticket.overtaken and math.max(ticket.sequence, meta[LATEST])
  else
    ticket.overtaken = ticket.overtaken or now
  end
  pool.put_back(ticket)
end

function pool.put_back(ticket)
  local level, tier = ticket.level, tiers[ticket.level]
  ticket.start = pool.start_of_return(level)
  pool.count_queued(tier, ticket, 1)
  meta[WAITING] = meta[WAITING] + 1
  is_changed[level], heads[level] = true, nil
  pool.store_head(ticket)
  if ticket.after then call('ZADD', waiting_key, pool.int(ticket.after) .. '.5', pool.int(ticket.sequence)) end
  call('HSET', mine, ticket.id,
    pool.ticket_text(ticket, ticket.served .. fmt(';%d %d', ticket.times, ticket.overtaken or -ticket.after)))
end

-- Books leases in (1) or out (-1), to see what would be without them.
function pool.book_all(leases, sign)
  for _, lease in ipairs(leases) do
    local tier, tokens, requests = tiers[lease.level], sign * lease.tokens, sign * lease.requests
    tier[HELD_TOKENS], tier[HELD_REQUESTS] = tier[HELD_TOKENS] + tokens, tier[HELD_REQUESTS] + requests
    all_tokens, all_requests = all_tokens + tokens, all_requests + requests
  end
end

function pool.lease_of(member)
  local owner, id = match(member, '^(%S+) (%S+)$')
  local level, tokens, requests = pool.read_lease(call('HGET', pool.replica_key(owner), id) or '')
  if not level then return pool.damaged() end
  return {owner = owner, id = id, member = member, level = level, tokens = tokens, requests = requests}
end

function pool.victims()
  local found = {}
  for _, member in ipairs(call('HKEYS', prefix .. 'c')) do found[#found + 1] = pool.lease_of(member) end
  return found
end

-- The most that a ticket of a tier could ever be given.
function pool.largest(level)
  local rule, highest = rules[FIRST_RULE + level], level
  if rules[PROMOTE_AFTER] > 0 then highest = math.min(level, rules[CEILING]) end
  local tokens, requests = rules[CAPACITY_TOKENS], rules[CAPACITY_REQUESTS]
  for other = 0, highest - 1 do
    tokens, requests = tokens - rules[FIRST_RULE + other][HEADROOM_TOKENS], requests - rules[FIRST_RULE + other][HEADROOM_REQUESTS]
  end
  return math.min(rule[LIMIT_TOKENS], tokens), math.min(rule[LIMIT_REQUESTS], requests)
end

function pool.is_tier_eligible(level, served)
  if rules[FIRST_RULE + level][PREEMPTIBLE] == 0 then return false end
  if tiers[level][QUEUED] == 0 then return true end
  local second = pool.second_head(level)
  return not pool.comes_before(pool.head_of(level), served)
    and not (second and pool.comes_before(second, served))
end

function pool.is_eligible(lease, most_tokens, most_requests, served)
  local rule, tier = rules[FIRST_RULE + lease.level], tiers[lease.level]
  local has_its_reserve = rule[ALWAYS_FIRST] == 0 and (tier[HELD_TOKENS] - lease.tokens >= rule[RESERVE_TOKENS]
    or tier[HELD_REQUESTS] - lease.requests >= rule[RESERVE_REQUESTS])
  if not has_its_reserve or lease.tokens > most_tokens or lease.requests > most_requests then return false end
  if not pool.recall(lease) then return pool.damaged() end
  return lease.times < rule[PREEMPTIBLE] and not pool.comes_before(lease, served)
end

-- Whether the last of the candidates is admitted, and no candidate before it holds its place without fitting.
function pool.all_fit(order)
  local admitted, is_in = {}, false
  for _, candidate in ipairs(order) do
    is_in = pool.fits(candidate)
    if is_in then
      admitted[#admitted + 1] = candidate.ticket
      pool.book_all({candidate.ticket}, 1)
    elseif pool.holds_its_place(candidate) then
      break
    end
  end
  pool.book_all(admitted, -1)
  return is_in and admitted[#admitted] == order[#order].ticket
end

-- Books out the leases that the candidates need. Returns them, and whether they are enough.
function pool.enough(order)
  local chosen, served = {}, order[#order]
  for level = levels - 1, served.ticket.level + 1, -1 do
    if pool.is_tier_eligible(level, served) then
      local most_tokens, most_requests = pool.largest(level)
      for _, member in ipairs(call('ZREVRANGE', pool.preemptible_key(level), 0, -1)) do
        local lease = pool.lease_of(member)
        if pool.is_eligible(lease, most_tokens, most_requests, served) then
          chosen[#chosen + 1] = lease
          pool.book_all({lease}, -1)
          if pool.all_fit(order) then return chosen, true end
        end
      end
    end
  end
  return chosen, false
end

-- Spares the leases without which the candidates fit as well, the last chosen first. Books the others in again.
function pool.needed(chosen, order)
  local needed = {}
  for index = #chosen, 1, -1 do
    local lease = chosen[index]
    pool.book_all({lease}, 1)
    if not pool.all_fit(order) then
      pool.book_all({lease}, -1)
      table.insert(needed, 1, lease)
    end
  end
  pool.book_all(needed, 1)
  return needed
end

-- So many of the mean size, rounded up, where `count` are `sum` together.
function pool.of_mean(sum, number, count)
  local rest = sum * number % count
  return (sum * number - rest) / count + (rest > 0 and 1 or 0)
end

-- As `Burst.is_whole`: whether `number` tickets are all that wait in the tier, or all that its limit admits. It makes the
-- burst one ticket larger than that.
function pool.is_whole(burst, number)
  local ticket, tier = burst.ticket, tiers[burst.ticket.level]
  ticket.tokens = pool.of_mean(tier[QUEUED_TOKENS], number + 1, tier[QUEUED])
  ticket.requests = pool.of_mean(tier[QUEUED_REQUESTS], number + 1, tier[QUEUED])
  return number >= tier[QUEUED] or pool.is_at_limit(ticket.level, ticket)
end

-- How many tickets of the burst fit beside what is booked now, `number` at least, and whether they are all.
function pool.grow(burst, number)
  local is_whole = pool.is_whole(burst, number)
  while not is_whole and pool.fits(burst) do
    number = number + 1
    is_whole = pool.is_whole(burst, number)
  end
  return number, is_whole
end

-- The served candidate with a copy of its ticket.
function pool.burst_of(served)
  local burst, ticket = {}, {}
  for key, value in pairs(served) do burst[key] = value end
  for key, value in pairs(served.ticket) do ticket[key] = value end
  burst.ticket = ticket
  return burst
end

-- Adds leases to those that are taken, for the other tickets that wait in the tier of the last candidate.
function pool.add_for_burst(order, taken)
  local served = order[#order]
  local burst, is_taken, spare = pool.burst_of(served), {}, {}
  local number, is_whole = pool.grow(burst, 1)
  for _, lease in ipairs(taken) do is_taken[lease.member] = true end
  for level = levels - 1, served.ticket.level + 1, -1 do
    if is_whole then break end
    if pool.is_tier_eligible(level, served) then
      local most_tokens, most_requests = pool.largest(level)
      for _, member in ipairs(call('ZREVRANGE', pool.preemptible_key(level), 0, -1)) do
        local lease = not is_taken[member] and pool.lease_of(member)
        if lease and pool.is_eligible(lease, most_tokens, most_requests, served) then
          spare[#spare + 1] = lease
          pool.book_all({lease}, -1)
          local before = number
          number, is_whole = pool.grow(burst, before)
          if number > before then
            for _, one in ipairs(spare) do taken[#taken + 1] = one end
            spare = {}
          end
          if is_whole then break end
        end
      end
    end
  end
  pool.book_all(spare, 1)
end

function pool.choose(order)
  local victims, needed, served = pool.victims(), {}, order[#order]
  pool.book_all(victims, -1)
  local is_enough = pool.all_fit(order)
  if not is_enough then
    local chosen
    chosen, is_enough = pool.enough(order)
    if is_enough then needed = pool.needed(chosen, order) else pool.book_all(chosen, 1) end
  end
  if is_enough and served.order_class == CLASS_ALWAYS_FIRST then
    pool.book_all(needed, -1)
    pool.add_for_burst(order, needed)
    pool.book_all(needed, 1)
  end
  pool.book_all(victims, 1)
  return needed
end

pool.in_order_of_turn = pool.in_order

-- The candidates up to the first that has waited long enough, nil where there is none.
function pool.up_to_served()
  local order = {}
  for _, candidate in ipairs(pool.in_order_of_turn()) do
    order[#order + 1] = candidate
    local after = rules[FIRST_RULE + candidate.ticket.level][PREEMPT_AFTER_US]
    if after >= 0 and now - candidate.ticket.arrived >= after then return order end
  end
end
