-- Replicas: which are alive, and which can reach the engine. `statements.lua` has what seldom happens.

-- How many replicas may be alive. One that an empty store does not know yet counts for as long as a silent one.
function pool.expected()
  return now < meta[ABSENT_UNTIL] and math.max(meta[HOLD_FOR], meta[REPLICAS]) or meta[REPLICAS]
end

-- How many of those the store knows nothing of.
function pool.unheard()
  if now >= meta[ABSENT_UNTIL] then return 0 end
  return math.max(0, meta[HOLD_FOR] - call('ZCOUNT', beats, pool.int(meta[HOLD_SINCE]), '+inf'))
end

function pool.is_on_hold()
  if meta[HOLD_UNTIL] == 0 then return false end
  if now >= meta[HOLD_UNTIL] or (meta[STATING] == 0
    and call('ZCOUNT', beats, pool.int(meta[HOLD_SINCE]), '+inf') >= meta[HOLD_FOR]) then
    meta[HOLD_UNTIL] = 0
    return false
  end
  return true
end

-- The parts of the unknown replicas stay free, because they may admit to them.
function pool.spare_parts()
  local unheard = pool.unheard()
  if unheard == 0 then return end
  for _, dimension in ipairs({CAPACITY_TOKENS, CAPACITY_REQUESTS}) do
    rules[dimension] = rules[dimension] - unheard * math.floor(rules[dimension] / meta[HOLD_FOR])
  end
end

function pool.is_cut_off(owner)
  if meta[CUT_OFF] == 0 then return false end
  if pool.cut_off[owner] == nil then pool.cut_off[owner] = call('SISMEMBER', prefix .. 'h', owner) == 1 end
  return pool.cut_off[owner]
end

-- Whether no replica can reach the engine: then every ticket keeps its place in the queue.
function pool.is_engine_gone() return meta[CUT_OFF] > 0 and meta[CUT_OFF] >= meta[REPLICAS] end

-- Whether some tickets are not to be admitted, but others are.
function pool.is_any_away() return meta[DEAD] > 0 or (meta[CUT_OFF] > 0 and not pool.is_engine_gone()) end

-- Whether a head is that of a replica that is away: the other tickets of its tenant are known only once it is gone.
function pool.is_any_head_away()
  if not pool.is_any_away() then return false end
  for level = 0, levels - 1 do
    if tiers[level][QUEUED] > 0 and pool.head_of(level).is_away then return true end
  end
  return false
end

-- A call that has ended a slice of what dead replicas had ends no more of it.
function pool.may_discard() return pool.discarded < DISCARDED end

-- A dead replica, or one that ended with `bye`, has no fence any more. What it had is ended in slices: its leases, then
-- its tickets, then its other charges. A ticket of it that becomes first in order is ended at once.
function pool.end_dead()
  if meta[DEAD] == 0 or now < meta[SLICE_AT] then return end
  local key = prefix .. 'd'
  while meta[DEAD] > 0 and pool.slice_us > 0 do
    local replica = call('HRANDFIELD', key, 1)[1]
    if not replica then return pool.damaged() end
    local text = call('HGET', key, replica)
    while text and pool.slice_us > 0 do text = pool.end_some(replica, text) end
    if text then
      call('HSET', key, replica, text)
    else
      call('HDEL', key, replica)
      call('UNLINK', pool.outbox_key(replica))
      meta[DEAD] = meta[DEAD] - 1
      pool.dead = {}
    end
  end
  meta[SLICE_AT], pool.discarded = now + PAUSE_US, DISCARDED
end

-- Notes that this replica lives. Its beats do so. A plain call does while the pool waits for all replicas.
function pool.beat()
  call('ZADD', beats, pool.int(now), me)
  meta[REPLICAS] = call('ZCARD', beats)
end

-- Drops silent replicas. It looks for them only when the longest silence, as last seen, would have lasted too long.
function pool.drop_silent()
  while now >= meta[GRACE] and now >= meta[SWEEP] do
    local oldest = call('ZRANGE', beats, 0, 0, 'WITHSCORES')
    if not oldest[1] or oldest[1] == me then
      pool.beat()
      oldest = call('ZRANGE', beats, 0, 0, 'WITHSCORES')
    end
    meta[SWEEP] = tonumber(oldest[2]) + SILENCE_US
    if now >= meta[SWEEP] then pool.drop(oldest[1]) end
  end
end

function pool.publish()
  for owner, texts in pairs(outbox) do
    for index = 1, #texts, 1000 do -- `unpack` has a limit
      call('RPUSH', pool.outbox_key(owner), unpack(texts, index, math.min(#texts, index + 999)))
    end
    call('PUBLISH', root .. ':grants:' .. owner, concat(texts, '\n'))
  end
end

-- The fence of a replica, and what it is stating: 'l' leases, 't' tickets, 'd PHASE CURSOR ENDED' nothing more, while the
-- records that it did not state are ended. Until then the ids that it stated, or that entered meanwhile, are kept.
function pool.read_fence(text)
  local number = tonumber(text)
  if number then return number, '' end
  local fence_text, states = match(text or '', '^(%d+) (.*)$')
  return tonumber(fence_text), states or ''
end

-- The pool is on hold while a replica states its leases by several calls.
function pool.hold_for_leases()
  if stage ~= 'l' or meta[HOLD_UNTIL] > now then return end
  if now >= meta[ABSENT_UNTIL] then meta[HOLD_SINCE], meta[HOLD_FOR] = now, 0 end
  meta[HOLD_UNTIL] = now + BEAT_US
end
