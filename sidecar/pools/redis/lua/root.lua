-- The root's fields, and what is in them.

-- Whether a text comes before another, byte by byte: the server's own order is that of its locale.
local function is_less(a, b)
  if a == b then return false end
  for i = 1, min(#a, #b) do
    local x, y = a:byte(i), b:byte(i)
    if x ~= y then return x < y end
  end
  return #a < #b
end

local function sorted_keys(of)
  local names = {}
  for name in pairs(of) do names[#names + 1] = name end
  table.sort(names, is_less)
  return names
end

local function take_from(list, it)
  for i = 1, #list do
    if list[i] == it then return table.remove(list, i) end
  end
end

local function tier_of(name)
  for i = 1, #tiers do
    if tiers[i][NAME] == name then return i end
  end
end

local function field(name)
  if fields[name] == nil then fields[name] = redis_call('HGET', root, name) end
  return fields[name]
end

local function set_field(name, value) fields[name], changed[name] = value or false, true end

local function read_fields(names)
  for i = 1, #names, MOST_AT_ONCE do
    local part = { unpack(names, i, min(#names, i + MOST_AT_ONCE - 1)) }
    for j, value in ipairs(redis_call('HMGET', root, unpack(part))) do fields[part[j]] = value end
  end
end

-- What was there is of a layout that nobody uses.
local function create(offset)
  redis_call('DEL', root)
  state = { offset, now, now, now + HOLD_US, 0, true, 0, 0, false, 0, 0, false, false, UNBOUNDED, { 0, 0, 0 }, false, 0, '', 0, {} }
  members, member_texts, heads, held, tiers, config, rules = {}, {}, {}, {}, {}, { engines = {}, drained = {} }, nil
  fields, changed, is_config_new, wake_ups[#wake_ups + 1] = {}, {}, true, { '', {}, false, 0 }
end

-- The parts of a field.
local function parts_of(name)
  local text, it = field(name), known[name]
  if it and it[1] == text then return unpack(it, 2) end
  return unpacked(text)
end

local function load()
  if known.state and known.state[1] ~= fields.state then known = {} end -- it is of another moment
  state, heads, member_texts, members = parts_of('state')
  if not members then
    members = {}
    for name, text in pairs(member_texts) do members[name] = unpacked(text) end
  end
  held, tiers = parts_of('held')
  config = parts_of('config')
  rules = config.rules
end

local function cell_field(name, tier, id) return 'c:' .. name .. '\0' .. tier .. '\0' .. id end

-- The cells of a replica, with the names of their fields. Most often its call has told all of them.
local function for_cells(name, each)
  local prefix, names, missing = cell_field(name, '', ''):sub(1, -2), {}, {}
  for it, value in pairs(fields) do
    if value and it:sub(1, #prefix) == prefix then names[#names + 1] = it end
  end
  if #names < members[name][CELLS] then
    all_fields = all_fields or redis_call('HKEYS', root)
    for _, it in ipairs(all_fields) do
      if fields[it] == nil and it:sub(1, #prefix) == prefix then missing[#missing + 1] = it end
    end
    read_fields(missing)
    for _, it in ipairs(missing) do names[#names + 1] = it end
  end
  for _, it in ipairs(names) do each(unpacked(fields[it]), it) end
end

local function set_cell(name, field_name, value)
  local member = members[name]
  member[CELLS] = member[CELLS] + (value and 1 or 0) - (field(field_name) and 1 or 0)
  set_field(field_name, value)
end

local function packed_ticket(ticket)
  if type(ticket) == 'string' then return ticket end
  ticket.packed = ticket.packed or pack(ticket)
  return ticket.packed
end

-- The ticket at a place of a list: each stays packed as long as nobody looks at it.
local function ticket_at(list, i)
  local ticket = list[i]
  if type(ticket) == 'string' then
    list[i] = unpacked(ticket)
    list[i].packed, ticket = ticket, list[i]
  end
  return ticket
end

local function packed_tickets(tickets)
  local found = {}
  for i = 1, #tickets do found[i] = packed_ticket(tickets[i]) end
  return found
end

local function is_before(a, b) -- by arrival
  if a[ARRIVED] ~= b[ARRIVED] then return a[ARRIVED] < b[ARRIVED] end
  if a[OWNER] ~= b[OWNER] then return is_less(a[OWNER], b[OWNER]) end
  return a[NUMBER] < b[NUMBER]
end

local function load_line()
  if not line then
    line = field('line') and parts_of('line') or {}
    for i = 1, #line do ticket_at(line, i) end
  end
  return line
end

-- One in line is another than it was.
local function change_line(ticket) ticket.packed, state[NEXT], changed.line = nil, false, true end

-- A member that will be another than it was.
local function change_member(name)
  changed_members[name] = true
  return members[name]
end

local function moved(ticket) change_member(ticket[OWNER])[IS_LINE_NEW] = true end
