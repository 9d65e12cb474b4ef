-- The records of `calls.py` that are read: a call is checked before anything happens.

local read_call

do -- a script has at most 200 locals

local function wrong(where, what) error(where .. ' is not ' .. what, 0) end

local function is_whole(value, least, most)
  return type(value) == 'number' and value == floor(value) and value >= least and value <= (most or UNBOUNDED)
end

local function is_text(value) return type(value) == 'string' and not value:find('%z') end

local function is_engine(value)
  if not is_text(value) or value:find('#0%d') then return false end
  local _, incarnation = split(value)
  return incarnation ~= nil and incarnation <= UNBOUNDED
end

-- The kinds of fields, one letter each; a capital: it may be missing, and is false then, or 0 (N, A).
local function is_of_kind(kind, value)
  if kind == 'n' or kind == 'o' then return is_whole(value, 0), 'a whole number' end
  if kind == 'p' then return is_whole(value, 1), 'a whole number above 0' end
  if kind == 'm' then return is_whole(value, 0, PPM), 'a share in millionths' end
  if kind == 'a' then return is_whole(value, -UNBOUNDED), 'a time' end
  if kind == 't' then return is_text(value), 'a text without NUL' end
  if kind == 'e' then return is_engine(value), 'an engine, NAME#NUMBER' end
  if kind == 'x' then return true end -- it is looked at by itself
  if kind == 'b' then return type(value) == 'boolean', 'true or false' end
  return type(value) == 'number' and value >= 0 and value < math.huge, 'a tag'
end

local function check_record(value, kinds, where)
  if type(value) ~= 'table' then wrong(where, 'a record') end
  for i = 1, #kinds do
    local kind = kinds:sub(i, i)
    local known = kind:lower()
    if value[i] == nil and known ~= kind then
      value[i] = (known == 'n' or known == 'a') and 0
    elseif not (value[i] == false and known ~= kind and known ~= 'n') then
      local is_right, what = is_of_kind(known, value[i])
      if not is_right then wrong(where .. '[' .. i .. ']', what) end
    end
  end
end

-- A list of records, or of texts or numbers where `kinds` is one letter; of nothing an empty one.
local function checked_list(value, kinds, where)
  if value == nil then return {} end
  local count = 0
  if type(value) ~= 'table' then wrong(where, 'a list') end
  for _ in pairs(value) do count = count + 1 end
  if count ~= #value then wrong(where, 'a list') end
  for i = 1, count do
    if #kinds > 1 then
      check_record(value[i], kinds, where .. '[' .. i .. ']')
    else
      local is_right, what = is_of_kind(kinds, value[i])
      if not is_right then wrong(where .. '[' .. i .. ']', what) end
    end
  end
  return value
end

local function check_bid(bid, where)
  if type(bid[HITS]) ~= 'table' then wrong(where .. '.hits', 'a map') end
  for id, tokens in pairs(bid[HITS]) do
    if not is_text(id) or not is_whole(tokens, 0) then wrong(where .. '.hits', 'engines with tokens') end
  end
  bid[BARRED] = checked_list(bid[BARRED], 't', where .. '.barred')
  if bid[GAIN] then check_record(bid[GAIN], 'nppnp', where .. '.gain') end
  bid[GAIN] = bid[GAIN] or false
end

local function check_rules(stated)
  check_record(stated, 'xPnnnbm', 'rules')
  local names = {}
  for _, tier in ipairs(checked_list(stated[R_TIERS], 'tmmmbbO', 'rules.tiers')) do names[tier[T_NAME]] = true end
  if #stated[R_TIERS] == 0 or #sorted_keys(names) ~= #stated[R_TIERS] then wrong('rules.tiers', 'tiers of different names') end
  if stated[R_CEILING] >= #stated[R_TIERS] then wrong('rules.ceiling', 'a level') end
end

-- `calls.Call`, by name.
function read_call(packed)
  local values = { unpacked(packed) }
  local f = values[1]
  if #values ~= 1 then wrong('a call', 'one record') end
  check_record({ f[1], f[2], f[3], f[4], f[6], f[7], f[18], f[19], f[20] }, 'ntntBNBBN', 'a call')
  if not (f[4] == 'ask' or f[4] == 'state' or f[4] == 'call' or f[4] == 'bye') then wrong('kind', 'ask, state, call or bye') end
  local read = {
    layout = f[1], who = f[2], number = f[3], kind = f[4], whole = f[6], bid_count = f[7], replaces = f[18], takes_over = f[19],
    knew = f[20] or 0, virtual = checked_list(f[21], 'f', 'virtual'), rules = f[17],
    cells = checked_list(f[5], 'teNNNNNNN', 'cells'), leaving = f[8] and checked_list(f[8], 'teNNNNNNN', 'leaving'),
    acks = checked_list(f[9], 'n', 'acks'), bids = checked_list(f[10], 'nttnpnpxxnnxBF', 'bids'),
    withdrawn = checked_list(f[11], 'nt', 'withdrawn'), charges = checked_list(f[12], 'ttnp', 'charges'),
    owes = checked_list(f[13], 'tn', 'owes'), engines = f[14] and checked_list(f[14], 'ennnpbAN', 'engines'),
    caps = checked_list(f[15], 'enn', 'caps'), drains = checked_list(f[16], 'tbN', 'drains'),
    metered = checked_list(f[22], 'ntnbOOOn', 'metered'), settled = checked_list(f[23], 'nxObb', 'settled'),
    running = checked_list(f[24], 'tn', 'running'),
  }
  for i, settled in ipairs(read.settled) do check_record(settled[2], 'tnnnnnnnn', 'settled[' .. i .. '].charge') end
  for i, bid in ipairs(read.bids) do check_bid(bid, 'bids[' .. i .. ']') end
  if read.rules or read.kind == 'state' then check_rules(read.rules) end
  return read
end

end
