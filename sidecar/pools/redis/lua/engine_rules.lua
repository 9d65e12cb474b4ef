-- The rules of a pool of some size: the twin of `policy.rules.pool_rules`.

-- The whole part of whole * numerator / denominator, and the rest: both of the fraction are at most 2^40.
local function share_of(whole, numerator, denominator)
  local product = whole * numerator
  if product < UNLIMITED then
    local rest = math.fmod(product, denominator)
    return (product - rest) / denominator, rest
  end
  local digits, found, rest = {}, 0, 0
  while whole > 0 do
    digits[#digits + 1] = math.fmod(whole, 1024)
    whole = (whole - digits[#digits]) / 1024
  end
  for place = #digits, 1, -1 do
    local part = rest * 1024 + digits[place] * numerator
    rest = math.fmod(part, denominator)
    found = found * 1024 + (part - rest) / denominator
  end
  return found, rest
end

-- Reserve, headroom and limit of a tier in one dimension.
local function bounds_of(rule, whole)
  local reserve, lent, limit = rule[SHARES + 1], rule[SHARES + 3], rule[SHARES + 5]
  if whole == UNLIMITED then return reserve > 0 and UNLIMITED or 0, 0, UNLIMITED end
  local reserved, rest = share_of(whole, reserve, rule[SHARES + 2])
  return rest > 0 and reserved + 1 or reserved, (share_of(whole, lent, rule[SHARES + 4])),
    (share_of(whole, limit, rule[SHARES + 6]))
end

-- The size limit of a tier in un-prefilled prompt tokens: see `policy.rules.largest_prefill`.
local function largest_prefill(all, level, whole)
  local own, highest, kept, reserved = all[FIRST_RULE + level], level, 0, 0
  if all[PROMOTE_AFTER] > 0 then highest = math.min(level, all[CEILING]) end
  for other = 0, levels - 1 do
    local rule = all[FIRST_RULE + other]
    if other < highest then kept = kept + rule[HEADROOM_PREFILL] end
    reserved = reserved + (other < level and math.max(rule[RESERVE_PREFILL], rule[HEADROOM_PREFILL]) or rule[RESERVE_PREFILL])
  end
  local beside = UNLIMITED
  if whole ~= UNLIMITED and own[RESERVE_PREFILL] > 0 then beside = whole - reserved + own[RESERVE_PREFILL] end
  return math.min(own[LIMIT_PREFILL], whole - kept, math.max(own[RESERVE_PREFILL], beside))
end

function pool.resize_pool(sorts_all)
  local before, all = rules, cjson.decode(rules_text)
  local sizes = {fleet[POOL_TOKENS], fleet[POOL_REQUESTS], fleet[POOL_PREFILL]}
  fleet[SIZED_TOKENS], fleet[SIZED_REQUESTS], fleet[SIZED_PREFILL] = unpack(sizes)
  fleet[SIZED_LARGEST], fleet[SAME_UNTIL], fleet[WEIGHT] = fleet[LARGEST_PREFILL], 0, all[CAPACITY_TOKENS]
  all[CAPACITY_TOKENS], all[CAPACITY_REQUESTS] = sizes[1], sizes[2]
  for level = 0, levels - 1 do
    local rule = all[FIRST_RULE + level]
    rule[RESERVE_TOKENS], rule[HEADROOM_TOKENS], rule[LIMIT_TOKENS] = bounds_of(rule, sizes[1])
    rule[RESERVE_REQUESTS], rule[HEADROOM_REQUESTS], rule[LIMIT_REQUESTS] = bounds_of(rule, sizes[2])
    rule[RESERVE_PREFILL], rule[HEADROOM_PREFILL], rule[LIMIT_PREFILL] = bounds_of(rule, sizes[3])
  end
  for level = 0, levels - 1 do
    local rule = all[FIRST_RULE + level]
    rule[MOST_PREFILL] = math.min(fleet[LARGEST_PREFILL], largest_prefill(all, level, sizes[3]))
    rule[SMALL_PREFILL] = rule[MOST_PREFILL] > rule[RESERVE_PREFILL] and rule[RESERVE_PREFILL] or UNLIMITED
  end
  rules = all
  for level = 0, levels - 1 do
    local rule, old = rules[FIRST_RULE + level], before[FIRST_RULE + level]
    if sorts_all or rule[RESERVE_TOKENS] ~= old[RESERVE_TOKENS] or rule[RESERVE_REQUESTS] ~= old[RESERVE_REQUESTS]
      or rule[SMALL_PREFILL] ~= old[SMALL_PREFILL] then
      pool.sort_heads(level)
    end
  end
  pool.save_rules(all)
  pool.spare_pool()
end

function pool.save_rules(all)
  local texts = {'["' .. concat(all[NAMES], '","') .. '"]'}
  for place = CAPACITY_TOKENS, FIRST_RULE - 1 do texts[place] = pool.int(all[place]) end
  for level = 0, levels - 1 do
    local figures = {}
    for place = 1, SMALL_PREFILL do figures[place] = pool.int(all[FIRST_RULE + level][place]) end
    texts[#texts + 1] = '[' .. concat(figures, ',') .. ']'
  end
  pool.sized_text = '[' .. concat(texts, ',') .. ']'
end
