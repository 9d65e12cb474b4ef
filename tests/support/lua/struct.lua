-- The part of the library `struct` of every Redis server that the scripts use: doubles, many in little endian, or one in big
-- endian. fakeredis has no such library.

local struct = {}

local function packed(number)
  if number == 0 then return string.rep('\0', 8) end
  local fraction, exponent = math.frexp(math.abs(number))
  local rest, bytes = (fraction * 2 - 1) * 2 ^ 52, {}
  for place = 1, 6 do
    bytes[place] = rest % 256
    rest = (rest - bytes[place]) / 256
  end
  exponent = exponent + 1022
  bytes[7] = rest + exponent % 16 * 16
  bytes[8] = math.floor(exponent / 16) + (number < 0 and 128 or 0)
  return string.char(unpack(bytes))
end

local function read(text, position)
  local bytes = {string.byte(text, position, position + 7)}
  assert(#bytes == 8, 'data string too short')
  local exponent = bytes[8] % 128 * 16 + math.floor(bytes[7] / 16)
  if exponent == 0 then return 0 end
  local fraction = bytes[7] % 16
  for place = 6, 1, -1 do fraction = fraction * 256 + bytes[place] end
  return (bytes[8] > 127 and -1 or 1) * (1 + fraction / 2 ^ 52) * 2 ^ (exponent - 1023)
end

local function count_of(format)
  assert(string.find(format, '^<d+$'), 'only doubles in little endian are known here')
  return #format - 1
end

function struct.pack(format, ...)
  if format == '>d' then return string.reverse(packed((...))) end
  local texts = {}
  for place = 1, count_of(format) do texts[place] = packed((select(place, ...))) end
  return table.concat(texts)
end

function struct.unpack(format, text, position)
  if format == '>d' then return read(string.reverse(text), 1), 9 end
  local found, from = {}, position or 1
  for place = 1, count_of(format) do found[place] = read(text, from + (place - 1) * 8) end
  found[#found + 1] = from + #found * 8
  return unpack(found)
end

return struct
