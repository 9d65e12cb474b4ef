-- Placement: the engines' ledgers, and the choice of an engine. The twin of `scheduling/placement.py`.

-- The most tickets that a walk places, and the most claimants. More where replicas reach different engines: the tickets of
-- one whose engines are full would else keep those of another from an engine that has room.
local MOST_LOOKED_AT, MOST_WHERE_REACH_DIFFERS = 16, 128
local PATIENCE_US, PATIENCE_US_PER_HIT = 5000000, 500 -- as in `scheduling/placement.py`

function pool.engines_key() return prefix .. 'e' end

function pool.ledger(id)
  local found = ledgers[id]
  if found == nil then
    local text = call('HGET', pool.engines_key(), id)
    found = text and cjson.decode(text)
    if found then found.id = id end
    ledgers[id] = found
  end
  return found
end

-- The ledger of an engine that a lease names, made where there is none: it takes no new work.
function pool.ledger_of_lease(id)
  local found = pool.ledger(id)
  if not found then
    found = {0, 0, 0, 0, UNLIMITED, 1000, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, id = id}
    ledgers[id], changed_ledgers[id] = found, true
  end
  return found
end

function pool.load_ledgers()
  local entries = call('HGETALL', pool.engines_key())
  for index = 1, #entries, 2 do
    local id = entries[index]
    if ledgers[id] == nil then
      ledgers[id] = cjson.decode(entries[index + 1])
      ledgers[id].id = id
    end
  end
  for _, id in ipairs(pool.taking()) do
    if ledgers[id] == nil then return pool.damaged() end -- else what it holds would be forgotten
  end
end

-- The ids of the engines that take new work, in order of name and incarnation; and the place of each.
function pool.taking()
  if not pool.taking_ids then pool.taking_ids = cjson.decode(pool.taking_text) end
  return pool.taking_ids
end

function pool.places()
  if not pool.place_of then
    pool.place_of = {}
    for place, id in ipairs(pool.taking()) do pool.place_of[id] = place end
  end
  return pool.place_of
end

function pool.ledger_at(place) return pool.ledger(pool.taking()[place]) or pool.damaged() end

-- All ledgers of engines that take new work, by one command.
function pool.load_taking()
  local missing = {}
  for _, id in ipairs(pool.taking()) do
    if not ledgers[id] then missing[#missing + 1] = id end
  end
  if not missing[1] then return end
  for place, text in ipairs(call('HMGET', pool.engines_key(), unpack(missing))) do
    if not text then return pool.damaged() end
    local found = cjson.decode(text)
    found.id = missing[place]
    ledgers[found.id] = found
  end
end

-- R2'. While replicas are missing that may admit to their parts of the engines, those parts stay free: see `spare_parts`.
function pool.has_engine_room(ledger, ticket)
  local tokens, requests = ledger[EFFECTIVE_TOKENS], ledger[OPEN_REQUESTS]
  if spare > 0 then
    tokens, requests = tokens - spare * math.floor(tokens / meta[HOLD_FOR]), requests - spare * math.floor(requests / meta[HOLD_FOR])
  end
  return ledger[ON_TOKENS] + ticket.tokens <= tokens and ledger[ON_REQUESTS] + ticket.requests <= requests
    and (ledger[UNPREFILLED] == 0
      or ledger[UNPREFILLED] + pool.unprefilled_on(ticket, ledger.id) <= ledger[EFFECTIVE_PREFILL])
end

-- Whether it has room for the smallest ticket.
function pool.has_any_engine_room(ledger)
  return ledger[ON_TOKENS] < ledger[EFFECTIVE_TOKENS] and ledger[ON_REQUESTS] < ledger[OPEN_REQUESTS]
    and (ledger[UNPREFILLED] == 0 or ledger[UNPREFILLED] < ledger[EFFECTIVE_PREFILL])
end

function pool.book_ledger(ledger, tokens, requests, prefill, unprefilled)
  local place = ledger[PLACE]
  local was_open = place > 0 and pool.has_any_engine_room(ledger)
  ledger[ON_TOKENS], ledger[ON_REQUESTS] = ledger[ON_TOKENS] + tokens, ledger[ON_REQUESTS] + requests
  ledger[ON_PREFILL], ledger[UNPREFILLED] = ledger[ON_PREFILL] + prefill, ledger[UNPREFILLED] + unprefilled
  changed_ledgers[ledger.id] = true
  if place == 0 then
    fleet[IS_STALE] = 1 -- the pool's size is what it holds
    return
  end
  loads[place] = loads[place] + unprefilled * HELD_PER_PREFILL + tokens
  if was_open ~= pool.has_any_engine_room(ledger) then fleet[OPEN] = fleet[OPEN] + (was_open and -1 or 1) end
end

-- Books amounts of either sign of a lease's engine. `prefill` is what it counts for in its tier.
function pool.book_engine(level, id, tokens, requests, prefill, unprefilled)
  local tier = tiers[level]
  tier[HELD_PREFILL], all_prefill, is_changed[level] = tier[HELD_PREFILL] + prefill, all_prefill + prefill, true
  fleet[SAME_UNTIL] = 0
  if id == '-' then return end
  local ledger = pool.ledger_of_lease(id)
  pool.book_ledger(ledger, tokens, requests, prefill, unprefilled)
  if ledger[ON_REQUESTS] < 0 or ledger[UNPREFILLED] < 0 then return pool.damaged() end -- it lost what it held
end

-- -- the placing of a ticket: its prompt, the predicted hits, and the names of engines that must not have it

-- The text is the prompt's tokens, or [PROMPT, {ID: HIT}, [NAME, ...]].
function pool.read_placing(ticket)
  if ticket.prompt then return end
  local placing = tonumber(ticket.placing)
  if placing then
    ticket.prompt = placing
    return
  end
  placing = cjson.decode(ticket.placing)
  ticket.prompt, ticket.hits = placing[1], next(placing[2]) and placing[2]
  if placing[3][1] then
    ticket.barred = {}
    for _, name in ipairs(placing[3]) do ticket.barred[name] = true end
  end
end

function pool.largest_hit(ticket)
  pool.read_placing(ticket)
  local most = 0
  for _, hit in pairs(ticket.hits or {}) do most = math.max(most, hit) end
  return most
end

-- The tokens of its prompt that no engine is predicted to have, at least 1.
function pool.uncached_of(ticket)
  local hit = pool.largest_hit(ticket)
  return math.max(1, ticket.prompt - hit)
end

-- For how long it waits for its best engine beside engines with room.
function pool.patience_of(ticket) return PATIENCE_US + PATIENCE_US_PER_HIT * pool.largest_hit(ticket) end

function pool.unprefilled_on(ticket, id)
  pool.read_placing(ticket)
  return math.max(1, ticket.prompt - (ticket.hits and ticket.hits[id] or 0))
end

-- What it counts for in its tier and the pool.
function pool.prefill_of(ticket)
  return math.min(ticket.uncached, rules[FIRST_RULE + ticket.level][MOST_PREFILL])
end

-- The engine's ledger as the ticket finds it, and for how long it had claimed one that had no room.
function pool.found_text(ledger, ticket)
  local claimed = ticket.patient_until and fmt(',%d', now - ticket.patient_until + pool.patience_of(ticket)) or ''
  return fmt(' f%d,%d,%d,%d,%d%s @%s', ledger[EFFECTIVE_TOKENS], ledger[EFFECTIVE_REQUESTS], ledger[ON_TOKENS],
    ledger[ON_REQUESTS], ledger[UNPREFILLED], claimed, ledger.id)
end

-- -- the choice

-- The engines that a replica can use, nil where each can use all.
function pool.reach_of(owner)
  if fleet[REACH] == 1 then return nil end
  pool.reaches = pool.reaches or {}
  local found = pool.reaches[owner]
  if not found then
    found = {}
    for _, offer in ipairs(pool.read_statement(call('HGET', prefix .. 'n', owner) or '0 []')) do
      if offer[6] == 1 then found[offer[1]] = true end
    end
    pool.reaches[owner] = found
  end
  return found
end

-- The places of the engines that could ever hold a ticket, and are not at their caps.
function pool.usable(ticket)
  pool.load_taking()
  local found, reach = {}, pool.reach_of(ticket.owner)
  for place, id in ipairs(pool.taking()) do
    local ledger = ledgers[id]
    if ticket.tokens <= ledger[ENGINE_TOKENS] and ticket.requests <= ledger[ENGINE_REQUESTS]
      and not (ticket.barred and ticket.barred[match(id, '^(.*)#')]) and not (reach and not reach[id])
      and not (ledger[IS_CAPPED] == 1 and ledger[ON_REQUESTS] + ticket.requests > ledger[CAPPED_REQUESTS]) then
      found[#found + 1] = place
    end
  end
  return found
end

function pool.gain_of(hit) return math.floor(fleet[WEIGHT] * hit / 100) * HELD_PER_PREFILL end

-- The place of the engine with the smallest score, busy or not; nil where none that takes new work could ever hold this.
function pool.best(ticket)
  pool.read_placing(ticket)
  if fleet[IS_UNIFORM] == 0 or ticket.barred or fleet[REACH] == 0 or ticket.tokens > fleet[LEAST_TOKENS]
    or ticket.requests > fleet[LEAST_REQUESTS] or not loads[1] then
    return pool.best_of(pool.usable(ticket), ticket)
  end
  local found, least = 1, loads[1]
  for place = 2, #loads do
    if loads[place] < least then found, least = place, loads[place] end
  end
  if ticket.hits then
    local places = pool.places()
    for id, hit in pairs(ticket.hits) do
      local place = places[id]
      if place then
        local load = loads[place] - pool.gain_of(hit)
        if load < least or (load == least and place < found) then found, least = place, load end
      end
    end
  end
  return found
end

function pool.best_of(usable, ticket)
  local found, least
  for _, place in ipairs(usable) do
    local ledger = pool.ledger_at(place)
    local hit = ticket.hits and ticket.hits[ledger.id]
    local load = loads[place] + ticket.prompt * HELD_PER_PREFILL - (hit and pool.gain_of(hit) or 0)
    local score = math.floor(load * 1000 / ledger[SPEED])
    if not found or score < least then found, least = place, score end
  end
  return found
end

-- The place of the engine with the smallest score of those that have room for it and were not claimed in this walk.
function pool.best_with_room(ticket)
  local found = {}
  for _, place in ipairs(pool.usable(ticket)) do
    if not claims[place] and pool.has_engine_room(pool.ledger_at(place), ticket) then found[#found + 1] = place end
  end
  return pool.best_of(found, ticket)
end

-- Whether an engine has more of a ticket's prompt than any other.
function pool.has_most(ledger, hits)
  local most = hits[ledger.id] or 0
  if most == 0 then return false end
  for id, hit in pairs(hits) do
    if hit >= most and id ~= ledger.id then return false end
  end
  return true
end

-- The place of the engine that a ticket enters now: its best, or another where that has no less of its prompt and is no
-- slower, or where it has no patience, or is the last that the walk places. nil: it claims its best.
function pool.taken_by(ticket, best)
  if not claims[best] and pool.has_engine_room(pool.ledger_at(best), ticket) then return best end
  local is_patient = (not ticket.patient_until or now < ticket.patient_until) and pool.placed < pool.most_looked_at() - 1
  if pool.unclaimed == 0 then return nil end
  local hits, ledger = ticket.hits or {}, pool.ledger_at(best)
  if is_patient and pool.has_most(ledger, hits) then return nil end
  local found = pool.best_with_room(ticket)
  if not found or not is_patient then return found end
  local other = pool.ledger_at(found)
  if (hits[ledger.id] or 0) > (hits[other.id] or 0) or ledger[SPEED] > other[SPEED] then return nil end
  return found
end

-- -- one walk: what was claimed in it

function pool.most_looked_at() return fleet[REACH] == 0 and MOST_WHERE_REACH_DIFFERS or MOST_LOOKED_AT end

function pool.begin_walk()
  claims, pool.placed, pool.unclaimed, pool.claimed = {}, 0, fleet[OPEN], {}
end

-- A ticket claims an engine. Returns whether the walk is over with that.
function pool.claim_engine(place, prompt)
  claims[place] = (claims[place] or 0) + 1
  pool.claimed[place] = (pool.claimed[place] or 0) + prompt
  loads[place] = loads[place] + prompt * HELD_PER_PREFILL
  pool.placed = pool.placed + 1
  if claims[place] == 1 and pool.has_any_engine_room(pool.ledger_at(place)) then pool.unclaimed = pool.unclaimed - 1 end
  return pool.placed == pool.most_looked_at() or pool.unclaimed == 0
end

function pool.end_walk()
  for place, prompt in pairs(pool.claimed) do loads[place] = loads[place] - prompt * HELD_PER_PREFILL end
end
