-- The ledger of a pool in the store: one call of one replica (`calls.Call`), as `sidecar/pools/ledger.py` executes it.
--
-- KEYS[1]: the root; KEYS[2] and so on: pools of the layouts before. ARGV[1]: the call. ARGV[2]: the time, for tests.
-- Answers a packed `calls.Reply`. Publishes each `calls.WakeUp`: to all at the root's name, to one at `ROOT:WHO`.
--
-- The root is a hash, and all that there is but for tenants' limits (limits.lua): `layout`, `state`, `held` and `config` (all in this file), `line`, the tickets in
-- line, `q:TIER`, what waits in the tier's queue (queue.lua), `c:WHO\0TIER\0ENGINE`, a cell, and `v:WHO`, a replica's view. It is read
-- as it is needed, changed in memory, and written at the end: a call that fails has changed nothing of this layout.

-- Set by each call: while a function is loaded the server has no libraries.
local redis_call, pack, unpacked, struct_unpack, max, min, floor, ceil

local LOST_US = 2200000
local HOLD_US = 2200000
local DEAD_US = 10000000
local PATIENCE_US = 5000000
local ASKED_FOR_US = 2000000
local LOOK_AGAIN_US = 100000
local DECIDE_EVERY_US, FIRST_SHARE = 2000000, 100000
local UNBOUNDED, MOST_EXCESS, PPM, HOUR_MS, MOST_AT_ONCE, MOST_KEPT = 9007199254740991, 1000, 1000000, 3600000, 1000, 32
local MOST_AHEAD = 256

-- Positions in packed arrays. `state` begins with these. CHOOSES: those in line look at their engines again; LEAST, MOST: what those
-- in line need at least (tokens) and at most; NEXT: when time alone changes something, false while that is not known.
local OFFSET, LAST_CALL, EPOCH, HOLD_UNTIL, EXPECTED, IS_EMPTY, VIEWS, VERSION = 1, 2, 3, 4, 5, 6, 7, 8
local ASKED, ASKED_UNTIL, ADMISSIONS, NEXT, CHOOSES, LEAST, MOST, IS_BESIDE_OLD = 9, 10, 11, 12, 13, 14, 15, 16
local LATEST_CAME, LATEST_OWNER, LATEST_GRANTED = 17, 18, 19 -- of all that were granted the one that came last
local ASKED_BEFORE = 20 -- those that were asked for room since something left for it, or one was served
-- A tier: `calls.TierHeld`, then figures of its queue and line. SMALLEST: none in its queue has fewer tokens.
local NAME, VIRTUAL, AFRESH, OWES_UNTIL, ON_ENGINES, IN_LINE, ON_FLOOR, IN_LINE_ON_FLOOR = 1, 2, 3, 4, 5, 6, 7, 8
local SERVED, GUARD, LARGEST, QUEUED, LATEST, LINED, MOST_TAGS, SMALLEST = 9, 10, 11, 12, 13, 14, 15, 16
-- A guarded tier (`calls.GuardHeld`); one that is not has none of these.
local G_SHARE, G_DECIDED, G_MET, G_MISSED, G_KEPT_OUT, G_STATE = 1, 2, 3, 4, 5, 6
-- A member. Its outbox has grants, CHARGED the verdicts of its last call (packed), its sums of leases that are taken back are cells as it told them.
-- CELLS: how many of its cells are stored.
local LATEST_NUMBER, MEMBER_CALL, STATED, IS_NEW, IS_FOREIGN, BIDS, SEEN, OUTBOX, LEAVING, IS_LINE_NEW, CHARGED, CELLS = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12
-- A ticket: what its replica said (`calls.Bid`), then what the ledger adds.
local ID, TIER, TENANT, TOKENS, REQUESTS, PROMPT, WEIGHT, HITS, BARRED = 1, 2, 3, 4, 5, 6, 7, 8, 9
local ARRIVED, NUMBER, GAIN, HAS_RETURNED, HINT, OWNER, START = 10, 11, 12, 13, 14, 15, 16
local ENGINE, IN_LINE_SINCE, COUNT, COUNTED, ADMISSION, EXCESS, EXCESS_PROMPT, IS_IN_FLOOR, STAYS = 17, 18, 19, 20, 21, 22, 23, 24, 25
local USER, PLACE, BID_USER = 26, 27, 15 -- within its tenant, whose users take turns, or false; in a bid where its owner is then
local COST, BID_COST = 28, 16 -- what its tenant is charged for, false for its tokens; in a bid where its start is then
local GAIN_WEIGHT, GAIN_TOKENS, GAIN_COST, GAIN_START_BY, GAIN_SLACK = 1, 2, 3, 4, 5
local C_LAYOUT, C_WHO, C_NUMBER, C_KIND, C_CELLS, C_WHOLE, C_BID_COUNT, C_LEAVING, C_ACKS, C_BIDS = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10
local C_WITHDRAWN, C_CHARGES, C_OWES, C_ENGINES, C_CAPS, C_DRAINS, C_RULES, C_REPLACES = 11, 12, 13, 14, 15, 16, 17, 18
local C_TAKES_OVER, C_KNEW, C_VIRTUAL, C_METERED, C_SETTLED, C_RUNNING, C_SEEN, C_GUARDS = 19, 20, 21, 22, 23, 24, 25, 26
local CELL_TIER, CELL_ENGINE, CELL_FIGURES, FIGURES = 1, 2, 2, 7
-- An engine in `config`, sorted by name and incarnation; and, as it is told, what it holds.
local E_ID, E_TOKENS, E_REQUESTS, E_PREFILL, E_SPEED, E_TAKES_NEW, E_SINCE, E_RAMP, E_KNOWN, E_UNREACHABLE = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10
local H_ID, H_TOKENS, H_REQUESTS, H_PROMPT, H_SENT, H_LINED, H_CAP, H_CAP_UNTIL = 1, 2, 3, 4, 5, 6, 7, 8
-- The rules of a pool and of a tier, as they are told.
local R_TIERS, R_PROMOTE, R_CEILING, R_PREEMPTIONS, R_AFFINITY, R_BY_GAIN, R_FAIR = 1, 2, 3, 4, 5, 6, 7
local T_NAME, T_RESERVE, T_LEND, T_LIMIT, T_FIRST, T_PREEMPTIBLE, T_PREEMPT_AFTER, T_HOLD = 1, 2, 3, 4, 5, 6, 7, 8

-- Of one call:
local keys, root, call, who, now, server_us
local state, members, heads, held, tiers, config, rules -- heads: of each tier the next ticket in fair order, or false
local member_texts, changed_members -- each member as it is packed; the names of those that are to be packed anew
local line -- the tickets in line, once they were looked for
local fields, changed, all_fields -- what was read of the root, and what of it is to be written
local queues, wake_ups, is_config_new
local kept, pools, known = {}, 0, nil -- where the script is a function: what was written of each pool, as it was unpacked
local held_text -- `held` as it is told and written
local figures, largest_prefill, places, total, is_divided -- of a decision (rule 1); is_divided: replicas see different engines
local guards, kept_out -- of a decision: each guarded tier, the tiers below it and the most that these hold; which tiers it kept out (rule 10)
local verdicts, accounts, counts, forgotten -- of tenants' limits: packed answers; what was read or changed; replicas whose counts go
local needs, granted -- ticket -> what it needs; what is admitted, in order
local NOBODY = {}
