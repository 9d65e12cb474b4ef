-- The end of a call: what it changed is written.

local function write()
  local put, gone = {}, {}
  local function add(name, value, is_stored)
    if value then
      put[#put + 1], put[#put + 2] = name, value
    elseif is_stored then
      gone[#gone + 1] = name
    end
  end
  for name, was_stored in pairs(changed) do
    local tier = name:match('^q:(%d+)$')
    if tier then
      add(name, packed_queue(tonumber(tier)), fields[name])
    elseif name == 'line' then
      for i = 1, #line do line[i] = packed_ticket(line[i]) end
      add(name, #line > 0 and pack(lined, line), fields.line)
    else
      add(name, fields[name], was_stored)
    end
  end
  for tier = 1, #heads do heads[tier] = heads[tier] and packed_ticket(heads[tier]) end
  add('state', pack(state, members, heads))
  add('held', held_text or pack(held, tiers))
  if is_config_new then
    fields.config = pack(config)
    add('layout', call.layout)
    add('config', fields.config)
  end
  if is_made then redis_call('DEL', root) end
  for i = 1, #put, MOST_AT_ONCE do redis_call('HSET', root, unpack(put, i, min(#put, i + MOST_AT_ONCE - 1))) end
  for i = 1, #gone, MOST_AT_ONCE do redis_call('HDEL', root, unpack(gone, i, min(#gone, i + MOST_AT_ONCE - 1))) end
  kept_text, kept_config = fields.config, config
  if call.whole then redis_call('PEXPIRE', root, HOUR_MS) end -- the pool vanishes an hour after the last heartbeat
end
