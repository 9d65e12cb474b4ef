-- The ledger of a pool in the store: one call of one replica (`calls.Call`), as `sidecar/core/ledger.py` executes it.
--
-- KEYS[1]: the root; KEYS[2] and so on: pools of the layouts before. ARGV[1]: the call. ARGV[2]: the time, for tests.
-- Answers a packed `calls.Reply`. Publishes each `calls.WakeUp`: to all at the root's name, to one at `ROOT:WHO`.
--
-- The root is a hash: `layout`, `state`, `held` and `config` (all in this file), `line`, the tickets in line, and `q:TIER`,
-- what waits in the tier's queue (queue.lua). Beside it, with the moment of the root in their names: `c:WHO`, a replica's cells, and `v`, its view.
-- All is read as it is needed, changed in memory, and written at the end: a call that fails has written nothing.

-- Set by each call: while a function is loaded the server has no libraries.
local redis_call, pack, unpacked, struct_pack, struct_unpack, max, min, floor, ceil, char

local LOST_US = 2200000
local HOLD_US = 2200000
local DEAD_US = 10000000
local PATIENCE_US = 5000000
local ASKED_FOR_US = 1000000
local LOOK_AGAIN_US = 100000
local UNBOUNDED, MOST_EXCESS, PPM, HOUR_MS, MOST_AT_ONCE = 9007199254740991, 1000, 1000000, 3600000, 1000

-- Positions in packed arrays. `state`: these, then the tiers, the members, and of each in line, as they joined, what is in `lined_now`.
local OFFSET, LAST_CALL, EPOCH, HOLD_UNTIL, EXPECTED, IS_EMPTY, VIEWS, VERSION = 1, 2, 3, 4, 5, 6, 7, 8
local ASKED, ASKED_UNTIL, ADMISSIONS, MADE, CHOOSES, LEAST = 9, 10, 11, 12, 13, 14 -- CHOOSES: those in line look at their engines again; LEAST: none of them has fewer tokens
-- A tier: of its queue the figures and the head; what it holds in three dimensions, at the name plus 1, 2 and 3; SMALLEST: none in its queue has fewer tokens.
local NAME, VIRTUAL, AFRESH, LARGEST, QUEUED, HEAD, OWES_UNTIL, LATEST, LINED = 1, 2, 3, 4, 5, 6, 7, 8, 9
local ON_ENGINES, IN_LINE, ON_FLOOR, IN_LINE_ON_FLOOR, MOST_TAGS, SMALLEST = 9, 12, 15, 18, 22, 23
-- A member. Its outbox has packed grants, its sums of leases that are taken back are cells as it told them.
local LATEST_NUMBER, MEMBER_CALL, STATED, IS_NEW, IS_FOREIGN, BIDS, SEEN, OUTBOX, LEAVING, CHARGED = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 -- CHARGED: verdicts of the last call
-- A ticket: what its replica said (`calls.Bid`), then what the ledger adds.
local ID, TIER, TENANT, TOKENS, REQUESTS, PROMPT, WEIGHT, HITS, BARRED = 1, 2, 3, 4, 5, 6, 7, 8, 9
local ARRIVED, NUMBER, GAIN, HAS_RETURNED, HINT, OWNER, START = 10, 11, 12, 13, 14, 15, 16
local ENGINE, IN_LINE_SINCE, COUNT, COUNTED, ADMISSION, EXCESS, EXCESS_PROMPT, IS_IN_FLOOR = 17, 18, 19, 20, 21, 22, 23, 24
local GAIN_WEIGHT, GAIN_TOKENS, GAIN_COST, GAIN_START_BY, GAIN_SLACK = 1, 2, 3, 4, 5
-- A grant in an outbox: `calls.Granted`, but for when it began to count.
local GRANT_BID, GRANT_TIER, GRANT_ENGINE, GRANT_COUNTED = 1, 2, 3, 11
-- A cell, as it is told.
local CELL_TIER, CELL_ENGINE, CELL_FIGURES, FIGURES = 1, 2, 2, 7
-- An engine in `config`, sorted by name and incarnation, and the words in `held`, as many of each engine.
local E_ID, E_TOKENS, E_REQUESTS, E_PREFILL, E_SPEED, E_TAKES_NEW, E_SINCE, E_RAMP, E_KNOWN, E_UNREACHABLE = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10
local H_TOKENS, H_REQUESTS, H_PROMPT, H_SENT, H_LINED, H_CAP, H_CAP_UNTIL, HELD = 1, 2, 3, 4, 5, 6, 7, 7
-- The rules of a pool and of a tier, as they are told.
local R_TIERS, R_PROMOTE, R_CEILING, R_PREEMPTIONS, R_AFFINITY, R_BY_GAIN, R_FAIR = 1, 2, 3, 4, 5, 6, 7
local T_NAME, T_RESERVE, T_LEND, T_LIMIT, T_FIRST, T_PREEMPTIBLE, T_PREEMPT_AFTER = 1, 2, 3, 4, 5, 6, 7

-- Of one call:
local root, call, who, now
local state, tiers, members, lined, held, config, rules
local told -- of each engine what a reply says of `held`, packed, or false
local line, is_line_changed, is_line_written -- the tickets in line, once they were looked for
local is_config_new, is_made, packed_config
local kept_text, kept_config -- where the script is a function: the config of the call before
local queues, rows, views, changed_views -- what was read of the other fields and keys
local wake_ups

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
  local keys = {}
  for name in pairs(of) do keys[#keys + 1] = name end
  table.sort(keys, is_less)
  return keys
end

local function key(kind) return root .. ':' .. state[MADE] .. ':' .. kind end

local function tier_of(name)
  for i = 1, #tiers do
    if tiers[i][NAME] == name then return i end
  end
end

local function create(offset)
  state = { offset, now, now, now + HOLD_US, 0, true, 0, 0, false, 0, 0, now, false, UNBOUNDED }
  tiers, members, lined, held, told, config = {}, {}, {}, {}, {}, { engines = {}, drained = {} }
  queues, rows, views, changed_views, rules, is_config_new, is_made = {}, {}, {}, {}, nil, true, true
  wake_ups[#wake_ups + 1] = { '' }
end

local function load(found)
  state, tiers, members, lined = unpacked(found[2])
  held, told = unpacked(found[3])
  packed_config = found[4]
  config = kept_text == packed_config and kept_config or unpacked(packed_config)
  rules, kept_text = config.rules, nil -- a call that fails may have changed it
end

-- ---- cells: what a replica states -------------------------------------------------------------------------------------

local function row_of(name)
  local row = rows[name]
  if not row then
    row = { cells = {}, changed = {} }
    rows[name] = row
  end
  return row
end

local function cell_at(name, field)
  local row = row_of(name)
  if row.cells[field] == nil and not row.is_whole then row.cells[field] = redis_call('HGET', key('c:' .. name), field) end
  return row.cells[field]
end

local function set_cell(name, field, packed)
  local row = row_of(name)
  row.cells[field], row.changed[field] = packed, true
end

-- Each cell of a replica, as it was told.
local function for_cells(name, each)
  local row = row_of(name)
  if not row.is_whole then
    local found = redis_call('HGETALL', key('c:' .. name))
    for i = 1, #found, 2 do
      if row.cells[found[i]] == nil then row.cells[found[i]] = found[i + 1] end
    end
    row.is_whole = true
  end
  for _, packed in pairs(row.cells) do
    if packed then each(unpacked(packed)) end
  end
end

local function views_of_all()
  if not views then
    views = {}
    local found = redis_call('HGETALL', key('v'))
    for i = 1, #found, 2 do views[found[i]] = unpacked(found[i + 1]) end
  end
  return views
end

-- ---- tickets, packed as long as nobody looks at them ------------------------------------------------------------------

local function packed_ticket(ticket)
  if type(ticket) == 'string' then return ticket end
  ticket.packed = ticket.packed or pack(ticket)
  local packed = ticket.packed
  return packed
end

-- The ticket at a place of a list.
local function ticket_at(list, i)
  local ticket = list[i]
  if type(ticket) == 'string' then
    local packed = ticket
    ticket = unpacked(packed)
    ticket.packed = packed
    list[i] = ticket
  end
  return ticket
end

local LINED_OWNER, LINED_BID, LINED_ENGINE, LINED_SINCE, LINED_ARRIVED, LINED_TIER, LINED_WORDS = 1, 2, 3, 4, 5, 6, 6

local function load_line()
  line = line or (#lined > 0 and unpacked(redis_call('HGET', root, 'line')) or {})
  return line
end

-- `lined`, as it is now.
local function lined_now()
  if not is_line_changed then return lined end
  lined, is_line_changed = {}, false
  for i = 1, #line do
    local ticket, at = ticket_at(line, i), (i - 1) * LINED_WORDS
    lined[at + LINED_OWNER], lined[at + LINED_BID] = ticket[OWNER], ticket[ID]
    lined[at + LINED_ENGINE], lined[at + LINED_SINCE] = ticket[ENGINE] or '', ticket[IN_LINE_SINCE]
    lined[at + LINED_ARRIVED], lined[at + LINED_TIER] = ticket[ARRIVED], ticket[TIER]
  end
  return lined
end

-- Whether a replica has a bid in line; `id`: this one.
local function stands_in_line(name, id)
  local now_lined = lined_now()
  for at = 0, #now_lined - LINED_WORDS, LINED_WORDS do
    if now_lined[at + LINED_OWNER] == name and (not id or now_lined[at + LINED_BID] == id) then return true end
  end
end

local function is_before(a, b) -- by arrival
  if a[ARRIVED] ~= b[ARRIVED] then return a[ARRIVED] < b[ARRIVED] end
  if a[OWNER] ~= b[OWNER] then return is_less(a[OWNER], b[OWNER]) end
  return a[NUMBER] < b[NUMBER]
end
