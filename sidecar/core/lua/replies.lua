-- The records of `calls.py` that are told: packed as msgspec packs them, maps and sets in order.

local function head_of(count, small, large) -- of an array or a map
  return count < 16 and char(small + count) or char(large, floor(count / 256), count % 256)
end

local function packed_list(packed) return head_of(#packed, 144, 220) .. table.concat(packed) end

local function packed_float(number) return '\203' .. struct_pack('>d', number) end

local function packed_map(of, packed_value)
  local found = {}
  for i, name in ipairs(sorted_keys(of)) do found[i] = pack(name) .. packed_value(of[name]) end
  return head_of(#found, 128, 222) .. table.concat(found)
end

local function packed_cell(cell) return '\153' .. pack(unpack(cell, 1, CELL_FIGURES + FIGURES)) end

local function packed_grant(grant)
  local g = unpacked(grant)
  g[GRANT_COUNTED] = now - g[GRANT_COUNTED]
  return pack(g)
end

local function packed_grants(grants)
  local found = {}
  for i = 1, #grants do found[i] = packed_grant(grants[i]) end
  return packed_list(found)
end

-- A ticket for a replica that is asked. It needs no hint, and of its gain the place in order alone.
local function packed_bid(ticket)
  local barred = {}
  for _, name in ipairs(ticket[BARRED]) do barred[name] = true end
  return '\158' .. pack(ticket[ID], tiers[ticket[TIER]][NAME], unpack(ticket, TENANT, WEIGHT)) .. packed_map(ticket[HITS], pack)
    .. pack(sorted_keys(barred), now - ticket[ARRIVED], ticket[NUMBER], nil, ticket[HAS_RETURNED], nil)
end

local function packed_bids(tickets)
  local found = {}
  for i = 1, #tickets do found[i] = packed_bid(tickets[i]) end
  return packed_list(found)
end

local function packed_shortage(found)
  local closed = {}
  for tier in pairs(found.closed) do closed[tiers[tier][NAME]] = true end
  local place = found.place
  return '\152' .. pack(found.engine, place.class, place.before, place.key) .. packed_bid(found.served) .. packed_bids(found.before)
    .. packed_bids(found.burst) .. pack(sorted_keys(closed))
end

local function packed_wake_up(wake_up)
  return '\147' .. pack(wake_up[1]) .. packed_grants(wake_up.grants or {}) .. pack(wake_up.is_asked or false)
end

-- A reply that tells nothing of the pool.
local function short_reply(kind)
  return '\220\0\16' .. pack(call.number, kind, {}, 0, false, false, 0, nil, {}, {}, {}, nil, nil, nil, {}, {})
end
