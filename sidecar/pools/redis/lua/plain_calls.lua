-- A call that finds no one waiting, and has to do nothing but operations: most calls of a pool with room. What the
-- functions of the other files do then stands here without one, because to make them takes longer than the rest of such a
-- call. The first operation that needs more, and all after it, are left to `operate`. Random programs compare both. Only
-- the order by level is known here: a script with another order leaves this file out.
--
-- The answer is one text: how many replicas there are, how many grants of its list follow, leases, late ends, tokens held,
-- requests held, us since the arrival of the latest ticket admitted so far or -1, and how many tiers follow, as doubles;
-- those that changed, each a double for its level and its figures; the grants, a line each. All other figures of an answer
-- say here that no one waits.

local record -- what there is under the id of the first operation, read with the fence
local capacity_tokens, capacity_requests, some_are_preemptible, first_rule

if kind == 'call' and read_root() and meta[WAITING] == 0 and meta[HOLD_UNTIL] == 0 and meta[DEAD] == 0 and meta[CUT_OFF] == 0
  and not held_back_lease then
  prefix = root .. ':' .. fmt('%d', meta[BIRTH]) .. ':'
  mine = prefix .. 'r:' .. me
  now = clock_us() + meta[OFFSET]
  local known = call('HMGET', mine, '#', ARGV[6] or '#')
  record = known[2]
  if tonumber(known[1]) == fence and now >= meta[NOW] and now - meta[NOW] <= LOST_US
    and now >= meta[ABSENT_UNTIL] and now >= meta[BACK_UNTIL] and (now < meta[GRACE] or now < meta[SWEEP]) then
    meta[NOW] = now
    if ARGV[4] ~= '0' then call('LTRIM', prefix .. 'o:' .. me, ARGV[4], -1) end
    unfinished = 5
    capacity_tokens, capacity_requests, some_are_preemptible, first_rule = struct.unpack('<ddd', rules_kept)
  end
end

local is_plain = unfinished ~= nil
while is_plain and ARGV[unfinished] do
  local operation, id = ARGV[unfinished], ARGV[unfinished + 1]
  if unfinished > 5 and (operation == 'e' or operation == 'x' or operation == 'z') then record = call('HGET', mine, id) end
  if operation == 'e' then -- as `enter`
    local level, tokens, requests = tonumber(ARGV[unfinished + 2]), tonumber(ARGV[unfinished + 5]), tonumber(ARGV[unfinished + 6])
    local tier = tiers[level] or {struct.unpack(TIER_FORMAT, tiers_kept, 1 + level * TIER_BYTES)}
    local _, _, reserve_tokens, reserve_requests, limit_tokens, limit_requests, is_limited, is_always_first, preemptible =
      struct.unpack(RULE_FORMAT, rules_kept, first_rule + level * RULE_BYTES)
    local held_tokens, held_requests = tier[HELD_TOKENS] + tokens, tier[HELD_REQUESTS] + requests
    local free_tokens, free_requests = capacity_tokens - all_tokens, capacity_requests - all_requests
    is_plain = free_tokens > 0 and free_requests > 0 and preemptible == 0
      and (is_limited == 0 or (held_tokens <= limit_tokens and held_requests <= limit_requests))
    for other = 0, level - 1 do
      local headroom_tokens, headroom_requests = struct.unpack('<dd', rules_kept, first_rule + other * RULE_BYTES)
      local above = tiers[other] or {struct.unpack('<dd', tiers_kept, 1 + other * TIER_BYTES)}
      free_tokens = free_tokens - math.max(0, headroom_tokens - above[HELD_TOKENS])
      free_requests = free_requests - math.max(0, headroom_requests - above[HELD_REQUESTS])
    end
    is_plain = is_plain and free_tokens >= tokens and free_requests >= requests
    if is_plain and not record then
      local excess = 0
      if is_always_first == 0 and now >= tier[OWES_UNTIL] and tier[HELD_TOKENS] < reserve_tokens
        and tier[HELD_REQUESTS] < reserve_requests then
        excess = math.min(MOST_EXCESS, math.max(0, math.floor((held_tokens - reserve_tokens) / reserve_tokens),
          math.floor((held_requests - reserve_requests) / reserve_requests)))
      end
      local sequence = meta[SEQUENCE] + 1
      tiers[level] = tier
      meta[SEQUENCE], meta[LATEST], meta[LATEST_ARRIVED] = sequence, sequence, now
      meta[ADMISSIONS], meta[LEASES] = meta[ADMISSIONS] + 1, meta[LEASES] + 1
      tier[LATEST_ADMISSION], tier[HELD_TOKENS], tier[HELD_REQUESTS] = meta[ADMISSIONS], held_tokens, held_requests
      tier[SERVED], tier[ADMITTED] = tier[SERVED] + tokens, tier[ADMITTED] + 1
      all_tokens, all_requests, is_changed[level] = all_tokens + tokens, all_requests + requests, true
      call('HSET', mine, id, fmt('L %d %d %d %d %d %d %d ', level, tokens, requests, excess, excess > 0 and now or 0, sequence, now))
      grants[#grants + 1] = id
    end
    if is_plain then unfinished = unfinished + 7 end
  elseif operation == 'x' or operation == 'z' then -- as `finish` and `resize`
    local level, tokens, requests, excess, admitted, rest =
      match(record or '', '^L (%d+) (%d+) (%d+) (%d+) (%d+) (.*)$')
    level = tonumber(level)
    local tier = level and (tiers[level] or {struct.unpack(TIER_FORMAT, tiers_kept, 1 + level * TIER_BYTES)})
    if not level then
      if operation == 'x' then meta[LATE] = meta[LATE] + 1 end
    elseif operation == 'z' then
      local change = tonumber(ARGV[unfinished + 2]) - tokens
      tier[HELD_TOKENS], all_tokens, tiers[level], is_changed[level] = tier[HELD_TOKENS] + change, all_tokens + change, tier, true
      call('HSET', mine, id, concat({'L', level, fmt('%d', tokens + change), requests, excess, admitted, rest}, ' '))
    else
      call('HDEL', mine, id)
      tier[HELD_TOKENS], tier[HELD_REQUESTS] = tier[HELD_TOKENS] - tokens, tier[HELD_REQUESTS] - requests
      all_tokens, all_requests, tiers[level], is_changed[level] = all_tokens - tokens, all_requests - requests, tier, true
      meta[LEASES] = meta[LEASES] - 1
      if excess ~= '0' then
        tier[OWES_UNTIL] = math.min(LATEST_US, math.max(now, tier[OWES_UNTIL]) + excess * math.max(0, now - admitted))
      end
      local member = me .. ' ' .. id
      if some_are_preemptible > 0 and call('HDEL', prefix .. 'v', member) == 1 then
        call('ZREM', prefix .. 'p:' .. level, member)
        call('HDEL', prefix .. 'c', member)
      end
    end
    unfinished = unfinished + (operation == 'x' and 2 or 3)
  else
    is_plain = false
  end
end

if is_plain then
  local listed, changed, count = call('LRANGE', prefix .. 'o:' .. me, 0, -1), {}, 0
  for _, text in ipairs(listed) do grants[#grants + 1] = text end
  for level = 0, #tiers_kept / TIER_BYTES - 1 do
    if is_changed[level] then
      local figures = struct.pack(TIER_FORMAT, unpack(tiers[level]))
      tiers_kept = string.sub(tiers_kept, 1, level * TIER_BYTES) .. figures .. string.sub(tiers_kept, 1 + (level + 1) * TIER_BYTES)
      changed[#changed + 1], changed[#changed + 2], count = struct.pack('<d', level), figures, count + 1
    end
  end
  call('HSET', root, 'meta', struct.pack(META_FORMAT, unpack(meta)), 'tiers', tiers_kept)
  return struct.pack('<dddddddd', meta[REPLICAS], #listed, meta[LEASES], meta[LATE], all_tokens, all_requests,
    meta[LATEST_ARRIVED] == 0 and -1 or now - meta[LATEST_ARRIVED], count) .. concat(changed) .. concat(grants, '\n')
end
