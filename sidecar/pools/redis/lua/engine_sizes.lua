-- The sizes of the engines and of their pool: what changes by time, by statements, and in engines that take no new work.

local RAMP_STEPS = 10

-- Sets the effective capacity. Returns when it changes next by time alone, nil where it does not.
function pool.ramp(ledger)
  local step, change = RAMP_STEPS, nil
  if ledger[RAMP] > 0 then
    step = math.min(RAMP_STEPS, 1 + math.floor(math.max(0, now - ledger[SINCE]) * RAMP_STEPS / ledger[RAMP]))
    if step < RAMP_STEPS then change = ledger[SINCE] + math.ceil(step * ledger[RAMP] / RAMP_STEPS) end
  end
  for place = 0, 2 do
    local whole = ledger[ENGINE_TOKENS + place]
    ledger[EFFECTIVE_TOKENS + place] = whole == UNLIMITED and whole or math.floor(whole * step / RAMP_STEPS)
  end
  ledger[EFFECTIVE_REQUESTS] = math.max(1, ledger[EFFECTIVE_REQUESTS])
  ledger[OPEN_REQUESTS], ledger[IS_CAPPED] = ledger[EFFECTIVE_REQUESTS], now < ledger[CAPPED_UNTIL] and 1 or 0
  if ledger[IS_CAPPED] == 1 then
    ledger[OPEN_REQUESTS] = math.min(ledger[OPEN_REQUESTS], ledger[CAPPED_REQUESTS])
    change = math.min(change or LATEST_US, ledger[CAPPED_UNTIL])
  end
  return change
end

-- Whether an engine comes before another: by the bytes of its name, which no locale changes, then by its incarnation.
function pool.is_engine_before(id, other)
  local name, incarnation = match(id, '^(.*)#(%d+)$')
  local other_name, other_incarnation = match(other, '^(.*)#(%d+)$')
  for place = 1, math.min(#name, #other_name) do
    local one, two = string.byte(name, place), string.byte(other_name, place)
    if one ~= two then return one < two end
  end
  if #name ~= #other_name then return #name < #other_name end
  return tonumber(incarnation) < tonumber(other_incarnation)
end

-- Applies what has changed, and the present size of the pool.
function pool.refresh()
  if fleet[IS_STALE] == 1 or (fleet[CHANGES] >= 0 and now >= fleet[CHANGES]) then
    fleet[IS_STALE], fleet[CHANGES], fleet[SAME_UNTIL] = 0, -1, 0
    pool.load_ledgers()
    pool.summarize()
  end
  if fleet[SIZED_TOKENS] ~= fleet[POOL_TOKENS] or fleet[SIZED_REQUESTS] ~= fleet[POOL_REQUESTS]
    or fleet[SIZED_PREFILL] ~= fleet[POOL_PREFILL] or fleet[SIZED_LARGEST] ~= fleet[LARGEST_PREFILL] then
    pool.resize_pool()
  end
end

local function added(sum, figure) return (sum == UNLIMITED or figure == UNLIMITED) and UNLIMITED or sum + figure end

function pool.summarize()
  local taking, size = {}, {0, 0, 0}
  for id, ledger in pairs(ledgers) do
    if ledger and ledger[KNOWN] == 0 and ledger[ON_REQUESTS] == 0 then
      ledgers[id], changed_ledgers[id] = false, true
    elseif ledger then
      local before = concat({unpack(ledger, PLACE, IS_CAPPED)}, ' ')
      local change = pool.ramp(ledger)
      if change and (fleet[CHANGES] < 0 or change < fleet[CHANGES]) then fleet[CHANGES] = change end
      local is_taking = ledger[KNOWN] == 1 and ledger[TAKES_NEW] == 1
      if is_taking then taking[#taking + 1] = id end
      ledger[PLACE] = 0
      ledger.before = before
      for place = 1, 3 do
        size[place] = added(size[place], is_taking and ledger[EFFECTIVE_TOKENS + place - 1] or ledger[ON_TOKENS + place - 1])
      end
    end
  end
  table.sort(taking, pool.is_engine_before)
  fleet[POOL_TOKENS], fleet[POOL_REQUESTS], fleet[POOL_PREFILL] = size[1], size[2], size[3]
  pool.summarize_taking(taking)
  for id, ledger in pairs(ledgers) do
    if ledger and ledger.before then
      if ledger.before ~= concat({unpack(ledger, PLACE, IS_CAPPED)}, ' ') then changed_ledgers[id] = true end
      ledger.before = nil
    end
  end
end

function pool.summarize_taking(taking)
  local open, largest, is_uniform, least_tokens, least_requests = 0, 0, 1, nil, nil
  loads, claims = {}, {}
  for place, id in ipairs(taking) do
    local ledger = ledgers[id]
    ledger[PLACE] = place
    loads[place] = ledger[UNPREFILLED] * HELD_PER_PREFILL + ledger[ON_TOKENS]
    if pool.has_any_engine_room(ledger) then open = open + 1 end
    if ledger[SPEED] ~= 1000 or ledger[IS_CAPPED] == 1 then is_uniform = 0 end
    largest = math.max(largest, ledger[EFFECTIVE_PREFILL])
    least_tokens = math.min(least_tokens or UNLIMITED, ledger[ENGINE_TOKENS])
    least_requests = math.min(least_requests or UNLIMITED, ledger[ENGINE_REQUESTS])
  end
  fleet[OPEN], fleet[LARGEST_PREFILL], fleet[IS_UNIFORM] = open, largest, is_uniform
  fleet[LEAST_TOKENS], fleet[LEAST_REQUESTS] = least_tokens or 0, least_requests or 0
  pool.taking_ids, pool.place_of = taking, nil
  pool.taking_text = taking[1] and cjson.encode(taking) or '[]'
  pool.is_taking_new, pool.has_walked = true, true
end
