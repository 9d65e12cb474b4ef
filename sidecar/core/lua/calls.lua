-- The records of `calls.py` that are read: a call is checked before anything happens.

local read_call

do -- a script has at most 200 locals

local is_record, is_list

local function is_whole(value, least, most)
  return type(value) == 'number' and value >= least and value <= most and value % 1 == 0
end

local function is_text(value) return type(value) == 'string' and not value:find('%z') end

-- Whether a field is of its kind, one letter each; a capital: it may be missing, and is false then.
local IS = {
  n = function(value) return is_whole(value, 0, UNBOUNDED) end,
  p = function(value) return is_whole(value, 1, UNBOUNDED) end,
  m = function(value) return is_whole(value, 0, PPM) end,
  a = function(value) return is_whole(value, -UNBOUNDED, UNBOUNDED) end,
  f = function(value) return type(value) == 'number' and value >= 0 and value < 1 / 0 end,
  b = function(value) return type(value) == 'boolean' end,
  t = is_text,
  k = function(value) return value == 'ask' or value == 'state' or value == 'call' or value == 'bye' end,
  e = function(value) -- an engine: NAME#NUMBER
    local number = is_text(value) and value:match('#(%d+)$')
    return number and not number:find('^0%d') and tonumber(number) <= UNBOUNDED
  end,
  h = function(value) -- tokens by engine
    if type(value) ~= 'table' then return false end
    for id, tokens in pairs(value) do
      if not is_text(id) or not is_whole(tokens, 0, UNBOUNDED) then return false end
    end
    return true
  end,
  l = function(value) return is_list(value, 't') end,
  g = function(value) return is_record(value, 'nppnp') end,
  r = function(value)
    local list, names = type(value) == 'table' and value[R_TIERS], {}
    if not is_list(list, 'tmmmbbN') or not is_record(value, 'lPnnnbm', R_PROMOTE) then return false end
    for _, tier in ipairs(list) do names[tier[T_NAME]] = true end
    return #list > 0 and #sorted_keys(names) == #list and value[R_CEILING] < #list
  end,
}

function is_record(value, kinds, first)
  if type(value) ~= 'table' then return false end
  for i = first or 1, #kinds do
    local kind = kinds:sub(i, i)
    local is_right = IS[kind]
    if not is_right then
      value[i], is_right = value[i] or false, IS[kind:lower()]
      if value[i] and not is_right(value[i]) then return false end
    elseif not is_right(value[i]) then
      return false
    end
  end
  return true
end

function is_list(value, kinds)
  if type(value) ~= 'table' then return false end
  local count, is_right = 0, #kinds == 1 and IS[kinds]
  for _ in pairs(value) do count = count + 1 end
  for i = 1, count do
    if is_right and not is_right(value[i]) or not is_right and not is_record(value[i], kinds) then return false end
  end
  return count == #value
end

-- The fields of a call; lists by their letters.
local KINDS = 'ntnkxbNxxxxxxxxxRbbnx'
local NAMES = { 'layout', 'who', 'number', 'kind', 'cells', 'whole', 'bid_count', 'leaving', 'acks', 'bids', 'withdrawn', 'charges', 'owes',
  'engines', 'caps', 'drains', 'rules', 'replaces', 'takes_over', 'knew', 'virtual' }
local LISTS = { cells = 'tennnnnnn', leaving = 'tennnnnnn', acks = 'n', bids = 'nttnpnphlnnGbF', withdrawn = 'nt', charges = 'ttnp',
  owes = 'tn', engines = 'ennnpban', caps = 'enn', drains = 'tbn', virtual = 'f' }
local MAY_BE_MISSING = { leaving = true, engines = true }
IS.x = function() return true end

-- `calls.Call`, by name.
function read_call(packed)
  local values, read = { unpacked(packed) }, {}
  local told = values[1]
  if #values ~= 1 or not is_record(told, KINDS) then error('a call', 0) end
  for i, name in ipairs(NAMES) do
    local value = told[i]
    read[name] = value
    if LISTS[name] and not (value == nil and MAY_BE_MISSING[name]) and not is_list(value, LISTS[name]) then error(name, 0) end
  end
  if read.kind == 'state' and not read.rules then error('rules', 0) end
  return read
end

end
