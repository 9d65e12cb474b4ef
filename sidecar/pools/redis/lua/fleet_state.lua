-- The state of a pool of several engines: its figures, and what a reply says of them. It replaces parts of `state.lua`.

local LEDGER_TEXT, FLEET_FIELDS = '[' .. string.rep('%d,', 20) .. '%d]', 22
local FLEET_TEXT = '[' .. string.rep('%d,', FLEET_FIELDS - 1) .. '%d]'

function pool.empty_fleet()
  fleet, loads, claims, ledgers, changed_ledgers, all_prefill = {}, {}, {}, {}, {}, 0
  for field = 1, FLEET_FIELDS do fleet[field] = 0 end
  fleet[CHANGES], fleet[REACH], fleet[IS_STALE] = -1, 1, 1
  pool.taking_text, pool.taking_ids, pool.place_of, pool.claimant_list = '[]', nil, nil, nil
end

function pool.load()
  if not read_root() then return false end
  local kept = call('HMGET', root, 'rules', 'sized', 'fleet', 'loads', 'taking', 'claims')
  rules_text, rules, fleet, loads = kept[1], cjson.decode(kept[2]), cjson.decode(kept[3]), cjson.decode(kept[4])
  pool.taking_text, claims_before = kept[5], kept[6] or ''
  pool.read_tiers()
  for _, tier in pairs(tiers) do all_prefill = all_prefill + tier[HELD_PREFILL] end
  held_back_until = meta[BACK_UNTIL]
  pool.apply_rules()
  pool.name_keys()
  return true
end

local create, agree_on_rules = pool.create, pool.agree_on_rules

function pool.create(expected)
  pool.empty_fleet()
  create(expected)
  for level = 0, levels - 1 do tiers[level][HELD_PREFILL], tiers[level][CLAIMANTS] = 0, 0 end
  pool.resize_pool()
end

function pool.agree_on_rules()
  local refusal = agree_on_rules()
  if not refusal and #rules[FIRST_RULE] > SMALL_PREFILL then pool.resize_pool(true) end -- those of a text, not of a size
  return refusal
end

local save = pool.save

function pool.save(is_complete)
  if pool.has_too_many then fleet[SAME_UNTIL] = 0 end -- there are other candidates in the next call
  local fields = {'fleet', fmt(FLEET_TEXT, unpack(fleet)), 'loads', '[]'}
  if loads[1] then fields[4] = fmt('[' .. string.rep('%d,', #loads - 1) .. '%d]', unpack(loads)) end
  if pool.is_taking_new then fields[#fields + 1], fields[#fields + 2] = 'taking', pool.taking_text end
  if pool.sized_text then fields[#fields + 1], fields[#fields + 2] = 'sized', pool.sized_text end
  local counts = {}
  if fleet[ALL_CLAIMANTS] > 0 then
    for place = 1, #loads do counts[place] = claims[place] or 0 end
  end
  pool.claims_text = pool.has_walked and concat(counts, ',') or claims_before
  if pool.claims_text ~= claims_before then fields[#fields + 1], fields[#fields + 2] = 'claims', pool.claims_text end
  call('HSET', root, unpack(fields))
  pool.engine_texts = pool.save_ledgers(is_complete)
  return save(is_complete)
end

function pool.save_ledgers(is_complete)
  local texts, written = {}, {}
  if is_complete then pool.load_ledgers() end
  for id, ledger in pairs(ledgers) do
    if changed_ledgers[id] or (is_complete and ledger) then
      local text = ledger and fmt(LEDGER_TEXT, unpack(ledger))
      if not text then
        call('HDEL', pool.engines_key(), id)
      elseif changed_ledgers[id] then
        written[#written + 1], written[#written + 2] = id, text
      end
      texts[#texts + 1] = text and id .. ' ' .. text or id
    end
  end
  if written[1] then call('HSET', pool.engines_key(), unpack(written)) end
  return texts
end

local reply = pool.reply

function pool.reply(is_complete)
  pool.refresh()
  local found, named = reply(is_complete), {}
  if is_complete and fleet[DIFFER] == 1 then
    for place, statement in ipairs(pool.statements()) do named[place] = statement.replica .. ' ' .. pool.names_text(statement) end
  end
  found[8], found[9], found[10], found[11] = pool.engine_texts, named, pool.claims_text, pool.blocked_us()
  return found
end

-- For how long, in all, a ticket has waited that fitted the pool, because the engine that it claimed had no room for it.
function pool.blocked_us() return fleet[BLOCKED_US] + (fleet[BLOCKED_SINCE] > 0 and now - fleet[BLOCKED_SINCE] or 0) end

function pool.note_blocked(is_blocked)
  if is_blocked == (fleet[BLOCKED_SINCE] > 0) then return end
  fleet[BLOCKED_US], fleet[BLOCKED_SINCE] = pool.blocked_us(), is_blocked and now or 0
end

local spare_parts, renew_keys, drop = pool.spare_parts, pool.renew_keys, pool.drop

-- The parts of unknown replicas stay free, in the pool and on each engine.
function pool.spare_parts()
  spare = pool.unheard()
  pool.refresh()
  pool.spare_pool()
end

function pool.spare_pool()
  if spare > 0 then spare_parts() end
end

function pool.renew_keys()
  renew_keys()
  for _, name in ipairs({'e', 'n', 'i', 'y'}) do call('PEXPIRE', prefix .. name, KEPT_MS) end
end

function pool.drop(replica)
  drop(replica)
  pool.forget_statement(replica)
  fleet[SAME_UNTIL], pool.claimant_list = 0, nil
end
