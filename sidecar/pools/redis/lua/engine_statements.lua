-- What replicas state of the engines: which they know, and which of them they can use.
--
--   <root>:<birth>:n           hash  replica -> 'NUMBER [[id, tokens, requests, prefill, speed, takes_new, ramp, since,
--                                    draining], ...]', its latest statement; NUMBER counts all statements
--   <root>:<birth>:i           hash  name of an engine -> 'INCARNATION DRAINED', DRAINED is the incarnation that drains
--
-- The figures of an engine are those of the newest statement that names it, as the pool's size follows the latest reading.
-- It takes new work where some replica can use it, it does not drain, and it is the latest incarnation of its name. What
-- a replica cannot use, its tickets never get (`reach_of`).

local SAME_START_US = 1000000 -- replicas that state the same start of an engine differ by less

function pool.read_statement(text) return cjson.decode(match(text, '^%d+ (.*)$')) end

-- An operation: all engines that this replica knows. The eighth figure is the age of the start, because clocks differ.
function pool.state_engines(text)
  local texts = {}
  for place, offer in ipairs(cjson.decode(text)) do
    offer[8] = offer[7] > 0 and now - offer[8] or 0
    offer[1] = cjson.encode(offer[1]) -- a text that cannot be read again would end every call of every replica
    texts[place] = fmt('[%s,%d,%d,%d,%d,%d,%d,%d,%d]', unpack(offer))
  end
  fleet[STATEMENTS] = fleet[STATEMENTS] + 1
  call('HSET', prefix .. 'n', me, pool.int(fleet[STATEMENTS]) .. ' [' .. concat(texts, ',') .. ']')
  pool.merge_statements()
end

function pool.forget_statement(replica)
  if call('HDEL', prefix .. 'n', replica) == 1 then pool.merge_statements() end
end

-- The statements, the newest last.
function pool.statements()
  local found, entries = {}, call('HGETALL', prefix .. 'n')
  for index = 1, #entries, 2 do
    local number = match(entries[index + 1], '^%d+')
    found[#found + 1] = {replica = entries[index], number = tonumber(number), offers = pool.read_statement(entries[index + 1])}
  end
  table.sort(found, function(one, other) return one.number < other.number end)
  return found
end

-- The latest incarnation of each name that is stated: a statement raises it, where the pool's is lower. So two replicas that
-- see one restart, and state the number after the same one, raise it once. A new incarnation does not drain. A pool that
-- does not know a name takes from the statements whether it drains.
function pool.latest_incarnations(statements)
  local latest, drained, entries = {}, {}, call('HGETALL', prefix .. 'i')
  local known = {}
  for index = 1, #entries, 2 do
    local incarnation, drains = match(entries[index + 1], '^(%d+) (%d+)$')
    known[entries[index]] = {tonumber(incarnation), tonumber(drains)}
  end
  for _, statement in ipairs(statements) do
    for _, offer in ipairs(statement.offers) do
      local name, incarnation = match(offer[1], '^(.*)#(%d+)$')
      incarnation = tonumber(incarnation)
      local before = known[name] or {0, 0}
      latest[name] = math.max(latest[name] or before[1], incarnation)
      if known[name] then
        drained[name] = before[2]
      elseif offer[9] == 1 then
        drained[name] = math.max(drained[name] or 0, incarnation)
      end
    end
  end
  for name in pairs(known) do
    if not latest[name] then call('HDEL', prefix .. 'i', name) end
  end
  for name, incarnation in pairs(latest) do
    local before = known[name]
    if not before or before[1] ~= incarnation then
      call('HSET', prefix .. 'i', name, pool.int(incarnation) .. ' ' .. pool.int(drained[name] or 0))
    end
  end
  return latest, drained
end

function pool.merge_statements()
  local statements = pool.statements()
  local latest, drained = pool.latest_incarnations(statements)
  local offers, takers = {}, {}
  for _, statement in ipairs(statements) do
    for _, offer in ipairs(statement.offers) do
      offers[offer[1]] = offer
      if offer[6] == 1 then takers[offer[1]] = (takers[offer[1]] or 0) + 1 end
    end
  end
  pool.load_ledgers()
  for id, ledger in pairs(ledgers) do
    if ledger and ledger[KNOWN] == 1 and not offers[id] then ledger[KNOWN], changed_ledgers[id] = 0, true end
  end
  local is_whole = 1
  for id, offer in pairs(offers) do
    local name, incarnation = match(id, '^(.*)#(%d+)$')
    local drains = drained[name] == tonumber(incarnation)
    pool.apply_offer(offer, takers[id] and not drains and latest[name] == tonumber(incarnation), drains)
    if takers[id] and takers[id] < #statements then is_whole = 0 end
  end
  fleet[REACH], fleet[DIFFER], fleet[IS_STALE], pool.reaches = is_whole, pool.do_names_differ(statements), 1, nil
  pool.refresh()
end

function pool.apply_offer(offer, takes_new, drains)
  local ledger = pool.ledger_of_lease(offer[1])
  local is_same_start = ledger[RAMP] == offer[7] and math.abs(ledger[SINCE] - offer[8]) < SAME_START_US
  ledger[KNOWN], ledger[TAKES_NEW], ledger[DRAINING] = 1, takes_new and 1 or 0, drains and 1 or 0
  for place = 2, 5 do ledger[ENGINE_TOKENS + place - 2] = offer[place] end
  ledger[RAMP] = offer[7]
  if not is_same_start then ledger[SINCE] = offer[8] end
  changed_ledgers[offer[1]] = true
end

function pool.names_text(statement)
  local names = {}
  for place, offer in ipairs(statement.offers) do names[place] = match(offer[1], '^(.*)#') end
  table.sort(names)
  return concat(names, ' ')
end

function pool.do_names_differ(statements)
  for place = 2, #statements do
    if pool.names_text(statements[place]) ~= pool.names_text(statements[1]) then return 1 end
  end
  return 0
end

-- An operation: an engine takes no new work until it is resumed or is a new incarnation.
function pool.drain_engine(name, drains)
  local incarnation = match(call('HGET', prefix .. 'i', name) or '', '^(%d+)')
  if not incarnation then return end
  call('HSET', prefix .. 'i', name, incarnation .. ' ' .. (drains and incarnation or '0'))
  pool.merge_statements()
end

-- An operation: an engine runs no more requests for so long than now, less those that it refused. A cap in force only
-- falls, and lasts on.
function pool.cap_engine(id, refused_requests, for_us)
  local ledger = pool.ledger(id)
  if not ledger then return end
  local most, till = math.max(0, ledger[ON_REQUESTS] - refused_requests), now + for_us
  if now < ledger[CAPPED_UNTIL] then
    most, till = math.min(most, ledger[CAPPED_REQUESTS]), math.max(till, ledger[CAPPED_UNTIL])
  end
  ledger[CAPPED_REQUESTS], ledger[CAPPED_UNTIL], changed_ledgers[id] = most, till, true
  fleet[IS_STALE] = 1
end

-- A capped engine may run so many requests more: it has answered one that it got since.
function pool.raise_cap(id, requests)
  local ledger = pool.ledger(id)
  if not ledger or now >= ledger[CAPPED_UNTIL] then return end
  ledger[CAPPED_REQUESTS], changed_ledgers[id] = ledger[CAPPED_REQUESTS] + requests, true
  fleet[IS_STALE] = 1
end
