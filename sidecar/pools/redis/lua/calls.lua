-- The records of `calls.py` that are read: a call is checked before anything happens.

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
  w = function(value) return is_whole(value, 1, PPM) end,
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
  s = function(value) return is_list(value, 'd') end,
  d = function(value) return type(value) == 'number' and value > -1 / 0 and value < 1 / 0 end,
  g = function(value) return is_record(value, 'nppnp') end,
  c = function(value) return is_record(value, 'tnnnnnnnn') end, -- a charge
  r = function(value)
    local list, names = type(value) == 'table' and value[R_TIERS], {}
    if not is_list(list, 'tmmmbbNm') or not is_record(value, 'lPnnnbm', R_PROMOTE) then return false end
    for _, tier in ipairs(list) do names[tier[T_NAME]] = true end
    return #list > 0 and #sorted_keys(names) == #list and value[R_CEILING] < #list
  end,
}

local function or_none(is_right) return function(value) return not value or is_right(value) end end

local checks = {}

-- The checks of a record's fields, by its kinds.
local function checks_of(kinds)
  if not checks[kinds] then
    checks[kinds] = {}
    for i = 1, #kinds do
      local kind = kinds:sub(i, i)
      checks[kinds][i] = IS[kind] or or_none(IS[kind:lower()])
    end
  end
  return checks[kinds]
end

function is_record(value, kinds, first)
  if type(value) ~= 'table' then return false end
  local is_right = checks_of(kinds)
  for i = first or 1, #kinds do
    local of = value[i]
    if not is_right[i](of) then return false end
    if of == nil then value[i] = false end
  end
  return true
end

-- A list of records; of what is no record where it is one kind.
function is_list(value, kinds)
  if type(value) ~= 'table' then return false end
  local count, is_right = 0, IS[kinds] or is_record
  for _ in pairs(value) do count = count + 1 end
  for i = 1, count do
    if not is_right(value[i], kinds) then return false end
  end
  return true
end

local function list(kinds) return function(value) return is_list(value, kinds) end end

local CALL = { IS.n, IS.t, IS.n, IS.k, list('tennnnnnn'), IS.b, or_none(IS.n), or_none(list('tennnnnnn')), list('n'), list('nttnpnphlnnGbFTN'),
  list('nt'), list('ttapnT'), list('tnn'), or_none(list('ennnpban')), list('enn'), list('tbn'), or_none(IS.r), IS.b, IS.b, IS.n, list('f'),
  list('ntnbNNNnN'), list('ncNbb'), list('tn'), list('tnnn'), list('tnwnns') }

-- The call; else an error names its first field that is wrong.
local function read_call(packed)
  local record, more = unpacked(packed)
  if type(record) ~= 'table' or more ~= nil then error('not one record', 0) end
  for i = 1, #CALL do
    if not CALL[i](record[i]) then error('field ' .. i, 0) end
  end
  if record[C_KIND] == 'state' and not record[C_RULES] then error('no rules', 0) end
  return record
end
