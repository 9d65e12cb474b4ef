-- The part of the library `cmsgpack` of every Redis server that the ledger uses. fakeredis has no such library.

local struct = require('struct')
local floor, char = math.floor, string.char
local cmsgpack = {}

local function big_endian(number, bytes)
  local found = {}
  for place = bytes, 1, -1 do
    found[place] = char(number % 256)
    number = floor(number / 256)
  end
  return table.concat(found)
end

local function packed_number(n)
  if n ~= floor(n) or n >= 2 ^ 63 or n < -2 ^ 63 then return char(203) .. struct.pack('>d', n) end
  if n >= 0 then
    if n < 128 then return char(n) end
    for size, first in pairs({ [1] = 204, [2] = 205 }) do
      if n < 256 ^ size and (size == 1 or n >= 256) then return char(first) .. big_endian(n, size) end
    end
    return n < 2 ^ 32 and char(206) .. big_endian(n, 4) or char(207) .. big_endian(n, 8)
  end
  if n >= -32 then return char(256 + n) end
  if n >= -128 then return char(208) .. big_endian(n + 256, 1) end
  if n >= -2 ^ 15 then return char(209) .. big_endian(n + 2 ^ 16, 2) end
  if n >= -2 ^ 31 then return char(210) .. big_endian(n + 2 ^ 32, 4) end
  local high = floor(n / 2 ^ 32)
  return char(211) .. big_endian(high + 2 ^ 32, 4) .. big_endian(n - high * 2 ^ 32, 4)
end

local function head(count, small, most, firsts)
  if count < most then return char(small + count) end
  if firsts[1] and count < 256 then return char(firsts[1]) .. big_endian(count, 1) end
  return count < 65536 and char(firsts[2]) .. big_endian(count, 2) or char(firsts[3]) .. big_endian(count, 4)
end

local packed

local function packed_table(of)
  local count, most, parts = 0, 0, {}
  for key in pairs(of) do
    count = count + 1
    if type(key) == 'number' and key > 0 and key == floor(key) then most = math.max(most, key) else most = math.huge end
  end
  if most == count then
    for place = 1, count do parts[place] = packed(of[place]) end
    return head(count, 144, 16, { nil, 220, 221 }) .. table.concat(parts)
  end
  for key, value in pairs(of) do parts[#parts + 1] = packed(key) .. packed(value) end
  return head(count, 128, 16, { nil, 222, 223 }) .. table.concat(parts)
end

function packed(value)
  local kind = type(value)
  if kind == 'number' then return packed_number(value) end
  if kind == 'string' then return head(#value, 160, 32, { 217, 218, 219 }) .. value end
  if kind == 'table' then return packed_table(value) end
  return char(value == nil and 192 or value and 195 or 194)
end

function cmsgpack.pack(...)
  local parts = {}
  for place = 1, select('#', ...) do parts[place] = packed((select(place, ...))) end
  return table.concat(parts)
end

local read

local function number_at(text, at, bytes)
  assert(#text >= at + bytes - 1, 'Missing bytes in input.')
  local number = 0
  for place = at, at + bytes - 1 do number = number * 256 + text:byte(place) end
  return number, at + bytes
end

local function text_at(text, at, count)
  assert(#text >= at + count - 1, 'Missing bytes in input.')
  return text:sub(at, at + count - 1), at + count
end

local function list_at(text, at, count)
  local found = {}
  for place = 1, count do found[place], at = read(text, at) end
  return found, at
end

local function map_at(text, at, count)
  local found, key = {}, nil
  for _ = 1, count do
    key, at = read(text, at)
    found[key], at = read(text, at)
  end
  return found, at
end

function read(text, at)
  local first
  first, at = number_at(text, at, 1)
  if first < 128 then return first, at end
  if first < 144 then return map_at(text, at, first - 128) end
  if first < 160 then return list_at(text, at, first - 144) end
  if first < 192 then return text_at(text, at, first - 160) end
  if first >= 224 then return first - 256, at end
  if first == 192 then return nil, at end
  if first == 194 or first == 195 then return first == 195, at end
  if first == 203 then
    local bytes
    bytes, at = text_at(text, at, 8)
    return struct.unpack('>d', bytes), at
  end
  local size = ({ [204] = 1, [205] = 2, [206] = 4, [207] = 8, [208] = 1, [209] = 2, [210] = 4, [211] = 8, [217] = 1, [218] = 2,
    [219] = 4, [220] = 2, [221] = 4, [222] = 2, [223] = 4 })[first]
  assert(size, 'Bad data format in input.')
  local number
  number, at = number_at(text, at, size)
  if first < 208 then return number, at end
  if first < 212 then return number >= 256 ^ size / 2 and number - 256 ^ size or number, at end
  if first < 220 then return text_at(text, at, number) end
  if first < 222 then return list_at(text, at, number) end
  return map_at(text, at, number)
end

function cmsgpack.unpack(text)
  local found, count, at = {}, 0, 1
  while at <= #text do
    count = count + 1
    found[count], at = read(text, at)
  end
  return unpack(found, 1, count)
end

return cmsgpack
