-- What seldom happens to replicas: they join, die, lose their engine, and state what they have after the store was lost or
-- silent. Defined when a function of it is first asked for.

-- An empty store admits nothing before `replicas` have stated their leases, or have had the time of a heartbeat for it.
function pool.expect(replicas, from)
  meta[HOLD_SINCE], meta[HOLD_FOR] = meta[BIRTH], replicas
  meta[HOLD_UNTIL], meta[ABSENT_UNTIL] = from + BEAT_US, from + SILENCE_US
end

-- The same in a store that was silent: its records are older than the leases that the replicas run.
function pool.wait_for_all()
  local expected = pool.expected()
  if now < meta[ABSENT_UNTIL] then meta[ABSENT_UNTIL] = now + SILENCE_US end
  meta[HOLD_SINCE], meta[HOLD_UNTIL], meta[HOLD_FOR] = now, now + BEAT_US, expected
end

function pool.is_dead(owner)
  if meta[DEAD] == 0 then return false end
  if pool.dead[owner] == nil then pool.dead[owner] = call('HEXISTS', prefix .. 'd', owner) == 1 end
  return pool.dead[owner]
end

function pool.mark_cut_off(owner, is_cut_off)
  local changed = call(is_cut_off and 'SADD' or 'SREM', prefix .. 'h', owner)
  if changed == 1 then meta[CUT_OFF], pool.cut_off, heads = meta[CUT_OFF] + (is_cut_off and 1 or -1), {}, {} end
end

function pool.is_away(owner) return pool.is_dead(owner) or pool.is_cut_off(owner) end

-- Ends a record of a replica, and corrects its charge.
function pool.lose(owner, id, record)
  local charges = prefix .. 'm:' .. owner
  local charge = call('HGET', charges, id)
  if charge then
    call('HDEL', charges, id)
    pool.rate_limits().correct_lost(charge, record)
  end
  call('HDEL', pool.replica_key(owner), id)
  pool.end_record(owner, id, record)
end

function pool.discard(ticket)
  pool.discarded = pool.discarded + 1
  local record = call('HGET', pool.replica_key(ticket.owner), ticket.id)
  if not record then return pool.damaged() end
  if pool.is_dead(ticket.owner) then
    pool.lose(ticket.owner, ticket.id, record)
  else
    pool.park(pool.read_ticket(ticket.owner, ticket.id, record), record)
  end
end

-- Ends some of the records of a replica, but for those that it has stated under the fence `spared`. PHASE is 1 for leases, 2
-- for every record, 3 for charges without a record, 4 for what it has stated. A phase is repeated until it finds nothing.
-- Returns where to go on, nil at the end. It ends one at least: a server may hand over a whole hash, and reading that takes
-- the whole slice.
function pool.end_some(replica, text, spared)
  local phase, cursor, ended_before = match(text, '^(%d) (%d+) (%d+)$')
  local of_phase = {['3'] = prefix .. 'm:' .. replica, ['4'] = pool.stated_key(replica)}
  local key, before = of_phase[phase] or pool.replica_key(replica), tonumber(ended_before)
  local count = before
  local found = call('HSCAN', key, cursor, 'COUNT', phase == '2' and SEEN_WITH_TICKETS or SEEN)
  local entries = found[2]
  pool.slice_us = pool.slice_us - #entries / 2 * SEEN_US - LOOKED_UP_US
  for index = 1, #entries, 2 do
    local id, record = entries[index], entries[index + 1]
    local is_of_phase = id ~= '#' and (phase ~= '1' or string.sub(record, 1, 1) == 'L')
    if is_of_phase and spared then pool.slice_us = pool.slice_us - LOOKED_UP_US end
    if is_of_phase and (phase == '4' or not spared or call('HGET', pool.stated_key(replica), id) ~= spared) then
      if pool.slice_us <= 0 and count > before then return concat({phase, cursor, pool.int(count)}, ' ') end
      count = count + 1
      pool.end_one(replica, phase, id, record)
    end
  end
  if found[1] ~= '0' then return concat({phase, found[1], pool.int(count)}, ' ') end
  if count > 0 then return phase .. ' 0 0' end
  return phase ~= '4' and tonumber(phase) + 1 .. ' 0 0' or nil
end

function pool.end_one(replica, phase, id, record)
  if phase == '4' then
    pool.slice_us = pool.slice_us - LOOKED_UP_US
    call('HDEL', pool.stated_key(replica), id)
  elseif phase == '3' then
    pool.slice_us = pool.slice_us - LEASE_US
    call('HDEL', prefix .. 'm:' .. replica, id)
    pool.rate_limits().correct_lost(record, nil)
  else
    pool.slice_us = pool.slice_us - (pool.is_lease_record(record) and LEASE_US or TICKET_US)
    pool.lose(replica, id, record)
  end
end

function pool.drop(replica)
  local key = pool.replica_key(replica)
  local _, states = pool.read_fence(call('HGET', key, '#'))
  if states == 'l' then meta[STATING] = meta[STATING] - 1 end
  call('HDEL', key, '#')
  call('UNLINK', pool.outbox_key(replica))
  call('ZREM', beats, replica)
  meta[REPLICAS] = call('ZCARD', beats)
  if meta[CUT_OFF] > 0 then pool.mark_cut_off(replica, false) end
  call('HSET', prefix .. 'd', replica, '1 0 0')
  meta[DEAD], meta[SLICE_AT], pool.dead, heads = meta[DEAD] + 1, 0, {}, {}
end

function pool.renew_keys()
  call('PEXPIRE', root, KEPT_MS)
  for _, name in ipairs({'beats', 'w', 's', 'v', 'c', 'a', 'd', 'h', 'k:' .. me, 'r:' .. me, 'o:' .. me, 'm:' .. me}) do
    call('PEXPIRE', prefix .. name, KEPT_MS)
  end
  for level = 0, levels - 1 do
    call('PEXPIRE', pool.queue_key(level), KEPT_MS)
    call('PEXPIRE', pool.large_key(level), KEPT_MS)
    call('PEXPIRE', pool.lane_key(level), KEPT_MS)
    call('PEXPIRE', pool.finish_key(level), KEPT_MS)
    call('PEXPIRE', pool.use_key(level), KEPT_MS)
    if preempts then call('PEXPIRE', pool.preemptible_key(level), KEPT_MS) end
  end
end

-- -- the owners of the pool

-- Beside the text stand those of its figures that `plain_calls.lua` reads: three, and nine of each tier.
function pool.keep_rules()
  local kept = {struct.pack('<ddd', rules[CAPACITY_TOKENS], rules[CAPACITY_REQUESTS], preempts and 1 or 0)}
  for level = 0, levels - 1 do
    local rule = rules[FIRST_RULE + level]
    kept[level + 2] = struct.pack(RULE_FORMAT, rule[HEADROOM_TOKENS], rule[HEADROOM_REQUESTS], rule[RESERVE_TOKENS],
      rule[RESERVE_REQUESTS], rule[LIMIT_TOKENS], rule[LIMIT_REQUESTS], rule[LIMITED], rule[ALWAYS_FIRST], rule[PREEMPTIBLE])
  end
  call('HSET', root, 'rules', rules_text, 'figures', concat(kept))
end

function pool.create(expected)
  meta = {}
  for field = 1, META_FIELDS do meta[field] = 0 end
  meta[BIRTH] = clock_us()
  meta[NOW], held_back_lease = meta[BIRTH], false
  rules_text, rules, tiers, heads, lanes = ARGV[5], cjson.decode(ARGV[5]), {}, {}, {}
  all_tokens, all_requests, sorts = 0, 0, {}
  pool.apply_rules()
  for level = 0, levels - 1 do tiers[level] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0} end
  if expected > 0 then pool.expect(expected, meta[BIRTH]) end
  call('DEL', root)
  pool.keep_rules()
  pool.name_keys()
end

-- Whether any replica lives. A silence of the store is not a silence of the replicas.
function pool.is_inhabited()
  if call('ZCARD', beats) == 0 then return false end
  pool.read_time()
  return now < meta[GRACE] or call('ZCOUNT', beats, '(' .. pool.int(now - SILENCE_US), '+inf') > 0
end

-- nil, or the answer to a replica that cannot share the pool: it has another ladder of tiers, while replicas live.
function pool.agree_on_rules()
  local brings = tonumber(ARGV[6])
  if not pool.load() then
    if brings < 0 then return {'absent'} end
    return pool.create(tonumber(ARGV[4]))
  end
  if rules_text == ARGV[5] then return nil end
  local theirs = cjson.decode(ARGV[5])
  if concat(theirs[NAMES], ' ') ~= concat(rules[NAMES], ' ') then
    if brings == 2 then return pool.create(meta[REPLICAS]) end
    if not pool.is_inhabited() then return pool.create(0) end
    pool.save(false)
    return {'foreign', concat(rules[NAMES], ' ')}
  end
  if brings ~= 0 then
    local before = rules
    rules_text, rules = ARGV[5], theirs
    pool.apply_rules()
    for level = 0, levels - 1 do
      local rule, old = rules[FIRST_RULE + level], before[FIRST_RULE + level]
      if rule[RESERVE_TOKENS] ~= old[RESERVE_TOKENS] or rule[RESERVE_REQUESTS] ~= old[RESERVE_REQUESTS] then pool.sort_heads(level) end
    end
    if not preempts then
      pool.load_preemption()
      pool.forget_all_preemption()
    end
    pool.keep_rules()
  end
end

-- -- statements: a replica states its leases, then its tickets, in any number of calls

function pool.set_stage(states)
  if stage == 'l' then meta[STATING] = meta[STATING] - 1 end
  if states == 'l' then meta[STATING] = meta[STATING] + 1 end
  stage = states
  call('HSET', mine, '#', states == '' and pool.int(fence) or pool.int(fence) .. ' ' .. states)
end

function pool.stated_key(replica) return prefix .. 'k:' .. replica end

function pool.note_stated(id) call('HSET', pool.stated_key(me), id, pool.int(fence)) end

-- A replica joins that the pool does not know. In a young store it may know of more replicas than the store. An older
-- store has had the time to hear of all.
function pool.join()
  local knew = tonumber(ARGV[4])
  if knew == 0 then
    meta[NEWCOMERS] = meta[NEWCOMERS] + 1
    if now < meta[ABSENT_UNTIL] then meta[HOLD_FOR] = meta[HOLD_FOR] + 1 end
  elseif now - meta[BIRTH] < SILENCE_US and knew + meta[NEWCOMERS] > meta[HOLD_FOR] then
    pool.expect(knew + meta[NEWCOMERS], now)
  end
end

-- False for a late call. Its records stay as they are until it has stated them, or everything.
function pool.begin()
  local before, states = pool.read_fence(call('HGET', mine, '#'))
  if before and before >= fence then return false end
  if not before then
    meta[LATE] = meta[LATE] + tonumber(ARGV[7])
    if call('HDEL', prefix .. 'd', me) == 1 then meta[DEAD], pool.dead, heads = meta[DEAD] - 1, {}, {} end
    pool.join()
  end
  call('UNLINK', pool.outbox_key(me))
  if meta[CUT_OFF] > 0 then pool.mark_cut_off(me, false) end
  stage = states
  pool.set_stage('l')
  pool.beat()
  return true
end

function pool.leases_stated()
  if stage == 'l' then pool.set_stage('t') end
end

function pool.all_stated()
  if stage == '' then return end
  local text = match(stage, '^d (.*)$') or '2 0 0'
  while text and pool.slice_us > 0 do text = pool.end_some(me, text, pool.int(fence)) end
  pool.set_stage(text and 'd ' .. text or '')
end

-- Returns the position of the next operation.
function pool.state_one(operation, index)
  local id = ARGV[index + 1]
  if operation == 'n' then
    pool.leases_stated()
    return index + 1
  elseif operation == 'd' then
    pool.all_stated()
    return index + 1
  elseif operation == 'f' then
    pool.state_unanswered(id)
    return index + 2
  elseif operation == 'a' then
    pool.rate_limits().restate(id, ARGV[index + 2])
    return index + 3
  end
  pool.note_stated(id)
  local old = call('HGET', mine, id) or nil
  if operation == 'l' then
    pool.state_lease(index, old)
    return index + 6
  end
  pool.state_ticket(index, old)
  return index + 9
end

-- The replica asks again for this request, as if it had never entered.
function pool.state_unanswered(id)
  local charges = prefix .. 'm:' .. me
  local charge, record = call('HGET', charges, id), call('HGET', mine, id)
  if charge then
    call('HDEL', charges, id)
    pool.rate_limits().correct_lost(charge, nil)
  end
  if record then
    call('HDEL', mine, id)
    pool.end_record(me, id, record)
  end
end

function pool.is_lease_record(record) return record ~= nil and string.sub(record, 1, 1) == 'L' end

function pool.state_lease(index, old)
  local id, level = ARGV[index + 1], tonumber(ARGV[index + 2])
  local tokens, requests = tonumber(ARGV[index + 3]), tonumber(ARGV[index + 4])
  local excess, admitted, sequence, arrived, text = 0, 0, 0, 0, ''
  if pool.is_lease_record(old) then -- the lease goes on, so nothing is owed for it yet
    local old_level, held, old_requests
    old_level, held, old_requests, text, excess, admitted, sequence, arrived = pool.read_lease(old)
    pool.book(old_level, -held, -old_requests)
    meta[LEASES] = meta[LEASES] - 1
    if preempts then pool.forget_preemption(me, id, old_level) end
  elseif old then
    pool.end_record(me, id, old)
  end
  pool.book(level, tokens, requests)
  meta[LEASES] = meta[LEASES] + 1
  call('HSET', mine, id, pool.lease_record(level, tokens, requests, excess, admitted, sequence, arrived, text))
  if preempts and rules[FIRST_RULE + level][PREEMPTIBLE] > 0 then
    pool.remember({owner = me, id = id, sequence = 0, arrived = 0}, tonumber(ARGV[index + 5]), nil, '')
  end
end

function pool.state_ticket(index, old)
  local id, level = ARGV[index + 1], tonumber(ARGV[index + 2])
  local times = tonumber(ARGV[index + 8])
  if times > 0 then pool.load_preemption() end
  if old and pool.is_parked(old) then return pool.restore(pool.read_ticket(me, id, old), old) end
  if old and not (times > 0 and pool.is_before_return(id, old, times)) then
    -- it keeps its place, or the lease whose grant was lost
    local _, _, _, text = pool.read_lease(old)
    if text then grants[#grants + 1] = text ~= '' and text or id end
    return
  end
  if times > 0 then return pool.requeue(index) end
  pool.push({
    id = id, owner = me, level = level, tokens = tonumber(ARGV[index + 5]), requests = tonumber(ARGV[index + 6]),
    sequence = pool.next_sequence(), arrived = now - tonumber(ARGV[index + 7]),
  }, ARGV[index + 3], tonumber(ARGV[index + 4]))
  local head = pool.head_of(level)
  if not head.is_stored then pool.store(head) end
end
