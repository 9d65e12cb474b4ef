-- The state of the pool: its keys, its figures, its time.

function pool.int(number) return fmt('%d', number) end
function pool.tag(number) return fmt('%.17g', number) end

function pool.replica_key(replica) return prefix .. 'r:' .. replica end
function pool.outbox_key(replica) return prefix .. 'o:' .. replica end

-- An inconsistent pool was lost in part (evicted, or deleted by hand). Its root is deleted, and the replicas state all anew.
function pool.damaged()
  is_damaged = true
  error('damaged')
end

-- -- the figures of the pool: read once and written once a call

function pool.name_keys()
  prefix = root .. ':' .. pool.int(meta[BIRTH]) .. ':'
  mine, beats, waiting_key, steps_key = pool.replica_key(me), prefix .. 'beats', prefix .. 'w', prefix .. 's'
end

function pool.load()
  if not meta and not read_root() then return false end
  rules_text = call('HGET', root, 'rules')
  rules = cjson.decode(rules_text)
  pool.read_tiers()
  pool.apply_rules()
  pool.name_keys()
  return true
end

-- Those that `plain_calls.lua` has read may have changed.
function pool.read_tiers()
  for level = 0, #tiers_kept / TIER_BYTES - 1 do
    tiers[level] = tiers[level] or {struct.unpack(TIER_FORMAT, tiers_kept, 1 + level * TIER_BYTES)}
  end
end

function pool.save(is_complete)
  local kept, changed = {}, {}
  for level = 0, levels - 1 do
    local figures = struct.pack(TIER_FORMAT, unpack(tiers[level]))
    kept[level + 1] = figures
    if is_complete or is_changed[level] then changed[#changed + 1], changed[#changed + 2] = level, figures end
  end
  local fields = {'meta', struct.pack(META_FORMAT, unpack(meta)), 'tiers', concat(kept)}
  if held_back_lease and held_back_lease ~= held_back_lease_before then fields[#fields + 1], fields[#fields + 2] = 'went', held_back_lease end
  local sorting = {}
  for level, place in pairs(sorts) do sorting[#sorting + 1] = level .. ' ' .. place end
  sorting = concat(sorting, ',')
  if sorting ~= '' and sorting ~= sorts_before then fields[#fields + 1], fields[#fields + 2] = 'sorts', sorting end
  call('HSET', root, unpack(fields))
  if sorts_before ~= '' and sorting == '' then call('HDEL', root, 'sorts') end
  if held_back_lease_before and not held_back_lease then call('HDEL', root, 'went') end
  return changed
end

-- The time never runs backwards, whichever server answers.
function pool.read_time()
  now = clock_us() + meta[OFFSET]
  if now < meta[NOW] then
    meta[OFFSET], now = meta[OFFSET] + meta[NOW] - now, meta[NOW]
  elseif now - meta[NOW] > LOST_US then
    -- The store was silent, not the replicas: they get time to call, and first state what they have run meanwhile.
    if now - meta[NOW] > 2 * BEAT_US then meta[GRACE] = now + 2 * BEAT_US end
    pool.wait_for_all()
  end
  meta[NOW] = now
end
