-- The end of a call: what it changed is written.

-- Writes the changed fields of a hash; those without a value go.
local function write_fields(of, changed, value_of)
  local put, gone = {}, {}
  for field in pairs(changed) do
    local value = value_of(field)
    if value then
      put[#put + 1], put[#put + 2] = field, value
    else
      gone[#gone + 1] = field
    end
  end
  for i = 1, #put, MOST_AT_ONCE do redis_call('HSET', of, unpack(put, i, min(#put, i + MOST_AT_ONCE - 1))) end
  for i = 1, #gone, MOST_AT_ONCE do redis_call('HDEL', of, unpack(gone, i, min(#gone, i + MOST_AT_ONCE - 1))) end
end

local function write()
  lined = lined_now()
  for i = 1, is_line_written and #line or 0 do line[i] = packed_ticket(line[i]) end
  if is_config_new then packed_config = pack(config) end
  for tier, head in pairs(heads) do tiers[tier][HEAD] = packed_ticket(head) end
  local fields = { state = pack(state, tiers, members, lined), held = pack(held, told), layout = is_config_new and call.layout,
    config = is_config_new and packed_config, line = is_line_written and #line > 0 and pack(line) }
  local changed = { state = true, held = true, layout = is_config_new or nil, config = is_config_new or nil, line = is_line_written or nil }
  for tier, queue in pairs(queues) do
    local packed = queue.is_changed and packed_queue(tier)
    fields['q:' .. tier] = packed
    changed['q:' .. tier] = packed or (queue.is_changed and queue.is_stored) or nil
  end
  if is_made then redis_call('DEL', root) end
  write_fields(root, changed, function(field) return fields[field] end)
  for name, row in pairs(rows) do
    write_fields(key('c:' .. name), row.changed, function(field) return row.cells[field] end)
  end
  limits.write()
  write_fields(key('v'), changed_views, function(name) return views[name] and pack(views[name]) end)
  kept_text, kept_config = packed_config, config
  if call.whole then -- the pool vanishes an hour after the last heartbeat
    for _, name in ipairs({ root, key('c:' .. who), key('v') }) do redis_call('PEXPIRE', name, HOUR_MS) end
  end
end
