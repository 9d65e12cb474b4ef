-- The operations and the records of a pool of several engines. It replaces parts of the files before it.
--
-- A lease's record is that of `tickets.lua` with 'ENGINE PREFILL UNPREFILLED EXCESS_PREFILL' before its grant; ENGINE is
-- '-' for a lease without one.
--
-- then, beside the operations of `admission.lua`:
--            w PLACING                                  of the next e, E, m, M, p, r or t: the tokens of its prompt, or
--                                                       [PROMPT, {ENGINE: HIT, ...}, [BARRED, ...]]; of the next l:
--                                                       [ENGINE, UNPREFILLED]
--            g OFFERS                                   all engines that the replica knows: see `state_engines`
--            i ID                                       the first byte of a lease came: nothing of it is un-prefilled
--            c ENGINE REFUSED MICROSECONDS              an engine runs no more than now, less REFUSED, for so long
--            j ENGINE REQUESTS                          a capped engine may run so many more
--            o NAME 1 | 0                               an engine drains, or does not any more
-- and in the reply
--            engines  'ENGINE [ledger]' of every engine whose ledger changed, or of all in a beat or a sync; 'ENGINE' alone
--                     of one that is gone
--            named    in a beat or a sync where replicas name different engines: 'REPLICA NAME NAME ...'
--            claims   [claims of the first engine that takes new work, ...]
--            blocked  for how many microseconds, in all, a ticket has waited that fitted the pool and not its engine
-- The text of a grant ends with 'fTOKENS,REQUESTS,HELD_TOKENS,HELD_REQUESTS,UNPREFILLED @ENGINE', the engine's ledger
-- without the ticket, its capacity the effective one; for one that had claimed an engine ',CLAIMED_US' follows the figures.
-- That of a stated lease ends with '@ENGINE'.

function pool.lease_record(level, tokens, requests, excess, admitted, sequence, arrived, grant, on_engine)
  local engine, prefill, unprefilled, excess_prefill = unpack(on_engine)
  return fmt('L %d %d %d %d %d %d %d %s %d %d %d ', level, tokens, requests, excess, admitted, sequence,
    arrived, engine, prefill, unprefilled, excess_prefill) .. (grant or '')
end

function pool.read_lease(record)
  local level, tokens, requests, excess, admitted, sequence, arrived, engine, prefill, unprefilled, excess_prefill, grant =
    match(record, '^L (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%S+) (%d+) (%d+) (%d+) (.*)$')
  if not level then return nil end
  return tonumber(level), tonumber(tokens), tonumber(requests), grant, tonumber(excess), tonumber(admitted),
    tonumber(sequence), tonumber(arrived),
    {engine, tonumber(prefill), tonumber(unprefilled), tonumber(excess_prefill)}
end

-- -- tickets of replicas that are away

local mark_cut_off, park, restore, withdraw = pool.mark_cut_off, pool.park, pool.restore, pool.withdraw

function pool.mark_cut_off(owner, is_cut_off)
  mark_cut_off(owner, is_cut_off)
  fleet[SAME_UNTIL], pool.claimant_list = 0, nil
end

function pool.park(ticket, record)
  pool.refund(ticket)
  fleet[SAME_UNTIL] = 0
  pool.leave_queue(ticket)
  local tier = tiers[ticket.level]
  tier[PARKED], tier[PARKED_TOKENS] = tier[PARKED] + 1, tier[PARKED_TOKENS] + ticket.tokens
  ticket.is_claimant, ticket.is_back, ticket.charge = false, false, nil
  call('HSET', pool.replica_key(ticket.owner), ticket.id, 'P' .. string.sub(pool.ticket_text(ticket, ticket.written), 2))
end

local restore = pool.restore

function pool.restore(ticket, record)
  fleet[SAME_UNTIL] = 0
  restore(ticket, record)
end

function pool.withdraw(ticket, is_parked)
  fleet[SAME_UNTIL] = 0
  if not is_parked then pool.refund(ticket) end
  return withdraw(ticket, is_parked)
end

-- -- operations

local enter, free, state_one, state_lease = pool.enter, pool.free, pool.state_one, pool.state_lease

function pool.enter(id, level, tenant, weight, tokens, requests, promised)
  pool.refresh()
  enter(id, level, tenant, weight, tokens, requests, promised)
  pool.stated_placing = nil
end

-- The part of a lease that is over with its first byte.
function pool.give_prefill_back(level, on_engine, admitted)
  pool.book_engine(level, on_engine[1], 0, 0, -on_engine[2], -on_engine[3])
  if on_engine[4] > 0 then pool.owe(level, on_engine[4], admitted) end
end

function pool.free(owner, id, record)
  local level, tokens, requests, _, _, admitted, _, _, on_engine = pool.read_lease(record)
  pool.give_prefill_back(level, on_engine, admitted)
  pool.book_engine(level, on_engine[1], -tokens, -requests, 0, 0)
  return free(owner, id, record)
end

function pool.resize(id, tokens)
  local record = call('HGET', mine, id)
  local level, held, requests, text, owed, admitted, sequence, arrived, on_engine = pool.read_lease(record or '')
  if not level then return end
  pool.book(level, tokens - held, 0)
  pool.book_engine(level, on_engine[1], tokens - held, 0, 0, 0)
  call('HSET', mine, id, pool.lease_record(level, tokens, requests, owed, admitted, sequence, arrived, text, on_engine))
end

function pool.prefilled(id)
  local level, tokens, requests, text, owed, admitted, sequence, arrived, on_engine =
    pool.read_lease(call('HGET', mine, id) or '')
  if not level or on_engine[3] == 0 then return end
  pool.give_prefill_back(level, on_engine, admitted)
  on_engine[2], on_engine[3], on_engine[4] = 0, 0, 0
  call('HSET', mine, id, pool.lease_record(level, tokens, requests, owed, admitted, sequence, arrived, text, on_engine))
  pool.dispatch()
end

function pool.state_one(operation, index)
  local first = ARGV[index + 1]
  if operation == 'w' then
    pool.stated_placing = first
    return index + 2
  elseif operation == 'g' then
    pool.state_engines(first)
    if stage == '' then pool.dispatch() end -- else a ticket could be admitted that this statement still calls waiting
    return index + 2
  elseif operation == 'i' then
    pool.prefilled(first)
    return index + 2
  elseif operation == 'c' then
    pool.cap_engine(first, tonumber(ARGV[index + 2]), tonumber(ARGV[index + 3]))
    pool.dispatch()
    return index + 4
  elseif operation == 'j' then
    pool.raise_cap(first, tonumber(ARGV[index + 2]))
    pool.dispatch()
    return index + 3
  elseif operation == 'o' then
    pool.drain_engine(first, ARGV[index + 2] == '1')
    pool.dispatch()
    return index + 3
  end
  local after = state_one(operation, index)
  pool.stated_placing = nil
  return after
end

-- The replica states the engine, and what it knows to be un-prefilled there now.
function pool.state_lease(index, old)
  local id, level = ARGV[index + 1], tonumber(ARGV[index + 2])
  local tokens, requests = tonumber(ARGV[index + 3]), tonumber(ARGV[index + 4])
  local stated = pool.stated_placing and cjson.decode(pool.stated_placing) or {'-', 0}
  local engine, unprefilled = stated[1], stated[2]
  local owed, admitted, sequence, arrived, text, owed_prefill = 0, 0, 0, 0, id .. ' @' .. engine, 0
  local prefill = math.min(unprefilled, rules[FIRST_RULE + level][MOST_PREFILL])
  if pool.is_lease_record(old) then -- the lease goes on, so nothing is owed for it yet
    local old_level, held, old_requests, on_engine
    old_level, held, old_requests, text, owed, admitted, sequence, arrived, on_engine = pool.read_lease(old)
    pool.book(old_level, -held, -old_requests)
    pool.book_engine(old_level, on_engine[1], -held, -old_requests, -on_engine[2], -on_engine[3])
    if unprefilled > 0 then
      prefill, owed_prefill = on_engine[2], on_engine[4]
    elseif on_engine[4] > 0 then
      pool.owe(old_level, on_engine[4], admitted)
    end
    meta[LEASES] = meta[LEASES] - 1
    if preempts then pool.forget_preemption(me, id, old_level) end
  elseif old then
    pool.end_record(me, id, old)
  end
  pool.book(level, tokens, requests)
  pool.book_engine(level, engine, tokens, requests, prefill, unprefilled)
  meta[LEASES] = meta[LEASES] + 1
  call('HSET', mine, id, pool.lease_record(level, tokens, requests, owed, admitted, sequence, arrived, text,
    {engine, prefill, unprefilled, owed_prefill}))
  if preempts and rules[FIRST_RULE + level][PREEMPTIBLE] > 0 then
    pool.remember({owner = me, id = id, sequence = 0, arrived = 0}, tonumber(ARGV[index + 5]), nil, '')
  end
end

function pool.load_preemption()
  if not pool.preempt then
    define_preemptible()
    define_preemption()
    pool.define_fleet_preemption()
  end
end
