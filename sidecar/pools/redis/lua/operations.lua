-- The operations of a call, and the call itself.

function pool.load_preemption()
  if not pool.preempt then define_preemptible() end
end

function pool.apply_rules()
  levels, preempts = #rules - FIRST_RULE + 1, false
  for level = 0, levels - 1 do
    if rules[FIRST_RULE + level][PREEMPTIBLE] > 0 then preempts = true end
  end
  if preempts then pool.load_preemption() end
end

function pool.rate_limits()
  if not pool.enter_limited then define_rate_limits() end
  return pool
end

function pool.next_sequence()
  meta[SEQUENCE] = meta[SEQUENCE] + 1
  return meta[SEQUENCE]
end

-- Whether a newcomer finds a place. `promised`: the free places are promised to other requests, so many to its tenant.
function pool.finds_place(level, tenant, weight, places, promised)
  local is_full = tiers[level][QUEUED] + tiers[level][PARKED] >= places
  if not is_full and not promised then return true end
  local waiting, weights = pool.weights_with(level, tenant, weight)
  if (waiting + (is_full and 0 or promised) + 1) * weights > places * weight then return false end
  if not is_full then return true end
  local above = pool.furthest_above(level, weights, places)
  if above then pool.displace(level, above) end
  return above ~= nil
end

function pool.enter(id, level, tenant, weight, tokens, requests, promised)
  local places = rules[FIRST_RULE + level][MAX_WAITING]
  pool.to_admit_us = pool.to_admit_us + ADMISSION_US
  if call('HEXISTS', mine, id) == 1 then return end
  if stage ~= '' then pool.note_stated(id) end
  if places > 0 and not pool.finds_place(level, tenant, weight, places, promised) then
    refused[#refused + 1] = id
    return
  end
  if next(served_since) then served_since = {} end
  local is_cut_off = pool.is_cut_off(me)
  if is_cut_off and places == 0 then
    refused[#refused + 1] = id
    return
  end
  local ticket = {
    id = id, owner = me, level = level, tokens = tokens, requests = requests, sequence = pool.next_sequence(), arrived = now,
  }
  pool.push(ticket, tenant, weight)
  if is_cut_off then
    if not ticket.is_stored then pool.store(ticket) end
    heads[level] = nil
    return pool.dispatch()
  end
  local to_admit_us = pool.to_admit_us
  if places == 0 then pool.to_admit_us = LATEST_US end
  pool.dispatch()
  if places == 0 then pool.to_admit_us = to_admit_us end
  if ticket.is_admitted then return end
  if places == 0 then -- a tier without a queue: the ticket is admitted at once or refused
    if ticket.is_stored then
      -- After a request that returned, the heads are read anew: it may have been admitted as another table, or claim an engine.
      local record = call('HGET', mine, id)
      if string.sub(record, 1, 1) == 'L' then return end
      call('HDEL', mine, id)
      pool.withdraw(pool.read_ticket(me, id, record))
    else
      local overtaken = pool.overtaken_at(ticket.sequence)
      pool.remove(ticket)
      pool.settle_steps(ticket, overtaken)
    end
    refused[#refused + 1] = id
    pool.dispatch()
  elseif not ticket.is_stored then
    pool.store(ticket)
  end
end

-- A lease has ended: its tier owes for the excess.
function pool.free(owner, id, record)
  local level, tokens, requests, _, excess, admitted = pool.read_lease(record)
  pool.book(level, -tokens, -requests)
  meta[LEASES] = meta[LEASES] - 1
  if excess > 0 then pool.owe(level, excess, admitted) end
  if held_back_lease == owner .. ' ' .. id then held_back_lease = false end
  return level
end

-- Ends a record of some replica. Returns the wait of a ticket, nil for a lease.
function pool.end_record(owner, id, record)
  if string.sub(record, 1, 1) == 'L' then
    local level = pool.free(owner, id, record)
    if preempts then pool.forget_preemption(owner, id, level) end
    return nil
  end
  return pool.withdraw(pool.read_ticket(owner, id, record), pool.is_parked(record))
end

function pool.finish(id)
  local record = call('HGET', mine, id)
  if not record then
    meta[LATE] = meta[LATE] + 1
    return
  end
  call('HDEL', mine, id)
  local figures = pool.end_record(me, id, record)
  if figures then ended[#ended + 1] = id .. ' ' .. figures end
  pool.to_admit_us = pool.to_admit_us + ADMISSION_US
  pool.dispatch()
end

-- Many leases change their size in one call. The next operation decides about their room, or the end of the call.
function pool.resize(id, tokens)
  local record = call('HGET', mine, id)
  local level, held, requests, text, excess, admitted, sequence, arrived = pool.read_lease(record or '')
  if not level then return end
  pool.book(level, tokens - held, 0)
  call('HSET', mine, id, pool.lease_record(level, tokens, requests, excess, admitted, sequence, arrived, text))
end

function pool.operate(index)
  while ARGV[index] do
    local operation, id = ARGV[index], ARGV[index + 1]
    if operation == 'e' or operation == 'E' then
      pool.enter(id, tonumber(ARGV[index + 2]), ARGV[index + 3], tonumber(ARGV[index + 4]), tonumber(ARGV[index + 5]),
        tonumber(ARGV[index + 6]), operation == 'E' and tonumber(ARGV[index + 7]))
      index = index + (operation == 'E' and 8 or 7)
    elseif operation == 'm' or operation == 'M' then
      pool.rate_limits().enter_limited(index, operation == 'M' and tonumber(ARGV[index + 12]))
      index = index + (operation == 'M' and 13 or 12)
    elseif operation == 'q' then
      pool.charge_more(tonumber(id), ARGV[index + 2], tonumber(ARGV[index + 3]), tonumber(ARGV[index + 4]))
      index = index + 5
    elseif operation == 'y' then
      pool.charged = tonumber(id)
      index = index + 2
    elseif operation == 'u' then
      pool.rate_limits().correct_own(id, tonumber(ARGV[index + 2]))
      pool.finish(id)
      index = index + 3
    elseif operation == 'x' then
      pool.finish(id)
      index = index + 2
    elseif operation == 'k' then
      if preempts then pool.keep(id, tonumber(ARGV[index + 2])) end
      index = index + 3
    elseif operation == 'p' or operation == 'r' then
      pool.load_preemption()
      pool.requeue(index, operation == 'r')
      index = index + 9
    elseif operation == 'h' then
      pool.mark_cut_off(me, true)
      index = index + 1
    elseif operation == 'b' then
      meta[BACK_UNTIL] = now + tonumber(id)
      pool.dispatch()
      index = index + 2
    elseif operation ~= 'z' then
      index = pool.state_one(operation, index)
    else
      pool.resize(id, tonumber(ARGV[index + 2]))
      index = index + 3
    end
  end
end

-- -- one call

-- The time until time alone may change something. That happens through aging, when a tier owes nothing more, when a
-- head has waited long enough to preempt, when the pool is on hold or held back no longer, and when another replica may
-- have died: its room is then free.
function pool.next_change()
  local change = pool.next_change_of_waiting()
  if not pool.may_discard() and (change < 0 or change > PAUSE_US) then change = PAUSE_US end
  if pool.is_unfinished() and (change < 0 or change > SOON_US) then change = SOON_US end
  if meta[DEAD] == 0 then return change end
  local slice = math.max(0, meta[SLICE_AT] - now)
  return change >= 0 and math.min(change, slice) or slice
end

-- Whether more tickets could be admitted now, or heads are left to sort.
function pool.is_unfinished() return meta[WAITING] > 0 and (pool.to_admit_us <= 0 or next(sorts) ~= nil) end

function pool.next_change_of_waiting()
  if meta[WAITING] == 0 then return -1 end
  local soonest = meta[HOLD_UNTIL] > now and meta[HOLD_UNTIL] - now or -1
  local back = meta[BACK_UNTIL] - now
  if back > 0 and (soonest < 0 or back < soonest) then soonest = back end
  local absent = meta[ABSENT_UNTIL] - now
  if absent > 0 and (soonest < 0 or absent < soonest) and pool.unheard() > 0 then soonest = absent end
  if meta[REPLICAS] > 1 then
    local look = math.max(meta[GRACE], meta[SWEEP]) - now
    if soonest < 0 or look < soonest then soonest = look end
  end
  for level = 0, levels - 1 do
    local owes = tiers[level][OWES_UNTIL] - now
    if owes > 0 and tiers[level][QUEUED] > 0 and (soonest < 0 or owes < soonest) then soonest = owes end
  end
  if preempts then soonest = pool.next_preemption(soonest) end
  return pool.next_rise(soonest)
end

function pool.reply(is_complete)
  local after = pool.next_change()
  local listed = call('LRANGE', pool.outbox_key(me), 0, -1)
  for _, text in ipairs(listed) do grants[#grants + 1] = text end
  local figures = {meta[REPLICAS], after, #listed, meta[WAITING], meta[LEASES], meta[LATE], all_tokens, all_requests,
    meta[LATEST_ARRIVED] == 0 and -1 or now - meta[LATEST_ARRIVED], pool.expected(), pool.is_on_hold() and 1 or 0,
    pool.unheard(), stage == '' and 0 or 1}
  if pool.save_accounts then pool.save_accounts() end
  return {'ok', figures, pool.save(is_complete), grants, ended, refused, pool.verdicts}
end

function pool.main()
  local first = 5 -- the position of the first operation
  if kind == 'sync' or kind == 'begin' then
    local refusal = pool.agree_on_rules()
    if refusal then return refusal end
    pool.read_time()
    if not pool.begin() then return {'stale'} end
    first = 8
  else
    if not pool.load() then return {'unknown'} end
    if unfinished then
      first = unfinished
    else
      local known, states = pool.read_fence(call('HGET', mine, '#'))
      if not known then
        if call('ZSCORE', beats, me) then return pool.damaged() end
        return {'unknown'}
      end
      if known ~= fence then return {'stale'} end
      stage = states
      pool.read_time()
      if kind == 'beat' or meta[HOLD_UNTIL] > 0 or stage ~= '' then pool.beat() end
      if ARGV[4] ~= '0' then call('LTRIM', pool.outbox_key(me), ARGV[4], -1) end
    end
  end
  pool.drop_silent()
  if kind == 'bye' then
    if meta[HOLD_FOR] > 0 then meta[HOLD_FOR] = meta[HOLD_FOR] - 1 end
    pool.drop(me)
    stage = ''
  end
  pool.end_dead()
  pool.spare_parts()
  for level in pairs(sorts) do pool.sort_some(level) end
  pool.to_admit_us = math.max(ADMISSION_US, ADMIT_US - (#ARGV - first + 1) * ARGUMENT_US)
  if kind ~= 'bye' then pool.operate(first) end
  if kind == 'sync' then
    pool.leases_stated()
    pool.all_stated()
  end
  pool.hold_for_leases()
  pool.dispatch()
  if preempts and pool.to_admit_us > 0 and not pool.is_engine_gone() and not pool.is_any_head_away() then pool.preempt() end
  pool.publish()
  if kind ~= 'call' then pool.renew_keys() end
  if kind == 'beat' then
    local tenants = call('HRANDFIELD', prefix .. 'a', LOOKED_AT)
    if tenants and tenants[1] then pool.rate_limits().forget_accounts(tenants) end
    call('PUBLISH', root .. ':grants:' .. me, '')
  end
  return pool.reply(kind ~= 'call')
end
