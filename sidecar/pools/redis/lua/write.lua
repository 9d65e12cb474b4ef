-- The end of a call: what it changed is written.

local function write()
  local put, gone = {}, {}
  local function add(name, value)
    if value then
      put[#put + 1], put[#put + 2] = name, value
    elseif fields[name] ~= nil then -- else nobody looked for it, because there is none
      gone[#gone + 1] = name
    end
    fields[name] = value
  end
  for name in pairs(changed) do
    local tier, value = name:match('^q:(%d+)$'), fields[name]
    if tier then value = packed_queue(tonumber(tier)) end
    if name == 'line' then value = #line > 0 and pack(packed_tickets(line)) end
    add(name, value)
  end
  local packed_heads = {}
  for tier = 1, #heads do packed_heads[tier] = heads[tier] and packed_ticket(heads[tier]) end
  for name in pairs(changed_members) do member_texts[name] = members[name] and pack(members[name]) end
  add('state', pack(state, packed_heads, member_texts))
  add('held', held_text or pack(held, tiers))
  if is_config_new then
    add('layout', call[C_LAYOUT])
    add('config', pack(config))
  end
  write_limits()
  for i = 1, #put, MOST_AT_ONCE do redis_call('HSET', root, unpack(put, i, min(#put, i + MOST_AT_ONCE - 1))) end
  for i = 1, #gone, MOST_AT_ONCE do redis_call('HDEL', root, unpack(gone, i, min(#gone, i + MOST_AT_ONCE - 1))) end
  if call[C_WHOLE] then redis_call('PEXPIRE', root, HOUR_MS) end -- the pool vanishes an hour after the last heartbeat
  pools = pools + (known.state and 0 or 1)
  if pools > MOST_KEPT then kept, pools = {}, 1 end
  kept[root], known.state, known.held, known.config = known, { fields.state, state, heads, member_texts, members }, { fields.held, held, tiers }, { fields.config, config }
  if line then known.line = { fields.line, line } end
  for tier, queue in pairs(queues) do known['q:' .. tier] = { fields['q:' .. tier], queue } end
end
