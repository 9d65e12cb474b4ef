-- Rules 6 and 8: the engines, what they hold, and which of them a ticket wants (`engines.py`). A slot is an engine's place.

local function slot_of(id)
  for slot, engine in ipairs(config.engines) do
    if engine[E_ID] == id then return slot end
  end
end

local function split(id) -- its name, and its incarnation
  local name, incarnation = id:match('^(.*)#(%d+)$')
  return name, tonumber(incarnation)
end

local function is_engine_before(a, b)
  local name, incarnation = split(a[E_ID])
  local other, other_incarnation = split(b[E_ID])
  if name ~= other then return is_less(name, other) end
  return incarnation < other_incarnation
end

local function set_table(engines, held_of)
  table.sort(engines, is_engine_before)
  config.engines, held = engines, {}
  for slot, engine in ipairs(engines) do held[slot] = held_of[engine[E_ID]] or { engine[E_ID], 0, 0, 0, 0, 0, UNBOUNDED, 0 } end
  is_config_new, state[CHOOSES], state[NEXT] = true, true, false
end

-- An engine that nobody sees, but on which somebody holds something.
local function add_unknown(id)
  local found = {}
  for _, it in ipairs(held) do found[it[H_ID]] = it end
  config.engines[#config.engines + 1] = { id, UNBOUNDED, UNBOUNDED, UNBOUNDED, 1000, true, 0, 0, false, false }
  set_table(config.engines, found)
  return slot_of(id)
end

-- The engines from now on. What others hold still counts; a cap ends with its engine (rule 8).
local function set_engines(offers)
  local found, engines = {}, {}
  for slot, old in ipairs(config.engines) do
    local id, own = old[E_ID], held[slot]
    local holds_something = own[H_TOKENS] ~= 0 or own[H_REQUESTS] ~= 0 or own[H_PROMPT] ~= 0
    if holds_something and not offers[id] then old[E_KNOWN], offers[id] = false, old end
    if holds_something or old[E_KNOWN] then found[id] = own end
  end
  for _, engine in pairs(offers) do engines[#engines + 1] = engine end
  set_table(engines, found)
  for _, ticket in ipairs(load_line()) do
    if ticket[ENGINE] and not offers[ticket[ENGINE]] then
      ticket[ENGINE] = false
      moved(ticket)
      change_line(ticket)
    end
  end
end

local function is_ready(engine) return engine[E_KNOWN] and engine[E_TAKES_NEW] end

-- How many tenths of its size it may hold now. Less than 10: in slow start.
local function tenths_now(engine)
  return engine[E_RAMP] > 0 and min(10, 1 + floor(max(0, now - engine[E_SINCE]) * 10 / engine[E_RAMP])) or 10
end

local function tenths_of(size, tenths) return size == UNBOUNDED and size or floor(size * tenths / 10) end

-- What it may hold now, at least one request.
local function size_of(engine)
  local tokens, requests, prefill, tenths = engine[E_TOKENS], engine[E_REQUESTS], engine[E_PREFILL], tenths_now(engine)
  if tenths < 10 then
    tokens, requests, prefill = tenths_of(tokens, tenths), tenths_of(requests, tenths), tenths_of(prefill, tenths)
  end
  return tokens, max(1, requests), prefill
end

-- Rule 8: the most requests that it may run now.
local function cap_of(slot) return now < held[slot][H_CAP_UNTIL] and held[slot][H_CAP] or UNBOUNDED end

-- Rule 8: a cap in force only falls, and lasts on.
local function set_cap(slot, requests, until_us)
  local it = held[slot]
  if now < it[H_CAP_UNTIL] then requests, until_us = min(requests, it[H_CAP]), max(until_us, it[H_CAP_UNTIL]) end
  it[H_CAP], it[H_CAP_UNTIL], state[CHOOSES], state[NEXT] = requests, until_us, true, false
end

-- Whether it is ready, not barred, large enough, and its cap is not reached by the ticket.
local function could_take(ticket, slot)
  local engine = config.engines[slot]
  if not is_ready(engine) or ticket[TOKENS] > engine[E_TOKENS] or ticket[REQUESTS] > engine[E_REQUESTS] then return false end
  if held[slot][H_REQUESTS] + ticket[REQUESTS] > cap_of(slot) then return false end
  for _, barred in ipairs(ticket[BARRED]) do
    if barred == split(engine[E_ID]) then return false end
  end
  return not (engine[E_UNREACHABLE] and engine[E_UNREACHABLE][ticket[OWNER]])
end

-- The prompt tokens that an engine has to prefill of it.
local function sent_to(ticket, id) return max(1, ticket[PROMPT] - (ticket[HITS][id] or 0)) end

-- Tokens, requests, and the prompt's turn: one prompt of any size, or several within `prefill`.
-- As if `freed` were taken off and those `before` the ticket had entered.
local function has_room(ticket, slot, before, freed)
  local engine = config.engines[slot]
  local tokens, requests = held[slot][H_TOKENS] + ticket[TOKENS], held[slot][H_REQUESTS] + ticket[REQUESTS]
  local sent = held[slot][H_SENT]
  if freed then tokens, requests, sent = tokens - freed[1], requests - freed[2], sent - freed[4] end
  for _, other in ipairs(before) do
    tokens, requests, sent = tokens + other[TOKENS], requests + other[REQUESTS], sent + sent_to(other, engine[E_ID])
  end
  local most_tokens, most_requests, prefill = size_of(engine)
  if tokens > most_tokens or requests > min(most_requests, cap_of(slot)) then return false end
  return sent == 0 or sent + sent_to(ticket, engine[E_ID]) <= prefill
end

-- How late it would begin with a ticket: the smallest is wanted.
local function score(ticket, slot)
  local engine = config.engines[slot]
  local id, lined = engine[E_ID], held[slot][H_LINED]
  if ticket[ENGINE] == id then lined = lined - ticket[PROMPT] end
  local work = held[slot][H_SENT] + lined + ticket[PROMPT] - floor(rules[R_AFFINITY] * (ticket[HITS][id] or 0) / 100)
  return floor((work * 50 + held[slot][H_TOKENS]) * 1000 / engine[E_SPEED])
end

-- The slot of the smallest score, of those that may take it; ties by name, then incarnation.
local function best_of(ticket, may_take)
  local found, least
  for slot = 1, #config.engines do
    if may_take(slot) then
      local points = score(ticket, slot)
      if not least or points < least then found, least = slot, points end
    end
  end
  return found
end

-- The engine with the smallest score. One in line keeps to the engine that it waits for.
local function wanted(ticket)
  local own = ticket[ENGINE] and slot_of(ticket[ENGINE])
  if own and could_take(ticket, own) then return own end
  return best_of(ticket, function(slot) return could_take(ticket, slot) end)
end
