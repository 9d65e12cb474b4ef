-- The admission script for many replicas: the twin of `sidecar/scheduling`, which states the rules and the reasons.
--
-- KEYS[1]  the root of the pool, `admission:<layout>:{<pool>}`: a hash, the only key that must survive. Without it the
--          pool is lost, and every replica must state what it has (a sync). All other keys begin with the root, so one
--          hash tag keeps them on one node. They contain the birth of the root, so none of them is read after the root
--          is lost:
--          Its fields: 'meta' and 'tiers', the figures of the pool and of its tiers (see `read_root`); 'rules', as in ARGV[5],
--          and 'figures', some of theirs (see `keep_rules`); 'went' and 'sorts' (see `save`).
--   <root>:<birth>:beats       zset  replica -> its last heartbeat
--   <root>:<birth>:r:<replica> hash  '#' -> its fence, and what it is stating (see `begin`); id -> its ticket or lease, as
--                                    `ticket_record`, `lease_record`
--   <root>:<birth>:o:<replica> list  grants that no reply has reported to it
--   <root>:<birth>:q:<level>   zset  the first ticket of every tenant of a tier that is no larger than its reserve, and
--                                    every ticket that was preempted, by start tag, then by sequence
--   <root>:<birth>:g:<level>   zset  the same of those that are larger
--   <root>:<birth>:l:<level>   zset  'TENANT TICKET' of all other tickets of a tier, by name
--   <root>:<birth>:f:<level>   hash  tenant -> 'FINISH WAITING WEIGHT FIRST', its finish tag, how many of its tickets
--                                    wait, the weight of the latest, and the first as it stands in `q` or `g`
--   <root>:<birth>:t:<level>   zset  'WEIGHT REST TENANT' of all tenants that wait, by name. REST is MOST_WAITING less how
--                                    many of its tickets do
--   <root>:<birth>:w           zset  the sequence numbers of all tickets that wait
--   <root>:<birth>:s           zset  'MOMENT SEQUENCE' of the admissions by which some ticket was first overtaken
--   <root>:<birth>:v           hash  'REPLICA ID' -> 'SEQUENCE ARRIVED TIMES OVERTAKEN SERVED...' of the leases of
--                                    preemptible tiers: how they had waited, how often they were preempted before
--   <root>:<birth>:p:<level>   zset  those of them that may be preempted, in order of admission
--   <root>:<birth>:a           hash  tenant -> its buckets, see `save_accounts`
--   <root>:<birth>:m:<replica> hash  id -> the charge to its tenant, see `charge`
--   <root>:<birth>:c           hash  victims that have not released their room -> their level
--   <root>:<birth>:k:<replica> hash  id -> the fence under which it has stated that, until it has stated all
--   <root>:<birth>:h           set   replicas that cannot reach the engine
--   <root>:<birth>:d           hash  dead replica -> 'PHASE CURSOR ENDED': how much of what it had is ended
--          Grants for other replicas are published on the channel <root>:grants:<replica>, one line each. An empty
--          message follows a beat of the replica itself: it then knows that its subscription works.
--
-- No call takes long. What a dead replica had is ended by many calls, for some SLICE_US each. A replica states what it
-- has by many calls, its leases first. Nothing is admitted before all leases are stated. Where more tickets can be admitted
-- than in ADMIT_US, other calls admit the rest. Heads are sorted by another reserve in as many calls as that needs.
--
-- ARGV[1]  call | beat | begin | sync | bye. A sync states everything; a begin states the first part, calls the rest
-- ARGV[2]  the replica
-- ARGV[3]  its fence: a call with another fence than that of its last sync is late, and does nothing
-- ARGV[4]  call, beat: how many grants of its list the replica has read
--          begin, sync: how many replicas it knew last, 0 for none: it is new
-- ARGV[5]  begin, sync: the rules (`protocol.rules_text`)
-- ARGV[6]  begin, sync: 1 where these rules replace others, 0 where they do not; 2 where they also replace those of
--          another ladder of tiers: the pool is made anew. -1: as 1, but it makes no pool where there is none
-- ARGV[7]  begin, sync: how many leases it ended before without being able to report them
-- then     call, beat: operations, each but q idempotent by its id
--            e ID LEVEL TENANT WEIGHT TOKENS REQUESTS   asks for a lease
--            E ... HELD, M ... HELD                     as e and m, where the free places of the queue are promised to
--                                                       other requests, HELD of them to its own tenant: refused unless
--                                                       its tenant is within its share of all places with them
--            m ID LEVEL TENANT WEIGHT TOKENS REQUESTS RPM TPM MOST BURST_US LOWER
--                                                       the same within the limits of its tenant: per minute and at
--                                                       once, -1 for none. A request over them enters at the level
--                                                       LOWER; where that is -1, it is refused
--            y TOKENS                                   of the next m or M: it counts for so many tokens in these limits.
--                                                       Without it, it counts for those that it asks for
--            x ID                                       ends it, waiting or held
--            u ID TOKENS                                the same of one that entered by `m`: it used so many tokens, -1
--                                                       where the number is not known, -2 where it does not count
--                                                       in its tenant's limits at all
--            z ID TOKENS                                sets the tokens that it holds. The next operation admits what has
--                                                       room now, or the end of the call
--            q LEVEL TENANT WEIGHT TOKENS               leases of the tenant use so many tokens more than it was charged
--                                                       for: its next tickets start later
--            k ID LEVEL                                 its first byte goes out: it is never preempted
--            p ID LEVEL TENANT WEIGHT TOKENS REQUESTS WAITED_US TIMES
--                                                       its engine has released it: it waits again, for the TIMES-th
--                                                       time. The rest is for a store that does not know the lease
--            r ID LEVEL TENANT WEIGHT TOKENS REQUESTS WAITED_US TIMES
--                                                       as p of a lease whose request no engine has taken: it was not
--                                                       overtaken by others that were admitted before it returns
--            h                                          it cannot reach the engine: none of its tickets is admitted
--                                                       before its next statement. That may have this, too
--            b MICROSECONDS                             holds the pool back for so long: one ticket at a time is
--                                                       admitted. 0 ends it, and the last call counts
--          begin, sync, and calls after a begin: all that the replica has. The rest of its records are ended at last
--            l ID LEVEL TOKENS REQUESTS TIMES           a lease that it runs. It may have sent its first byte, so it is
--                                                       never preempted again
--            t ID LEVEL TENANT WEIGHT TOKENS REQUESTS WAITED_US TIMES
--                                                       a ticket that waits. TIMES: how often it was preempted so far
--            a ID TENANT                                after one of these: it counts among its tenant's concurrent
--            f ID                                       entered by `m`, and its answer was lost: it asks again, and any
--                                                       charge for it is taken back
--            n                                          all its leases are stated, and all of `f`
--            d                                          everything is stated: some of the rest is ended. The replica
--                                                       repeats it until the reply reports that nothing is left
--
-- RETURN   {'ok', {replicas, us until time alone may change something or -1, grants listed, waiting, leases,
--                  late ends, tokens held, requests held, us since the arrival of the latest ticket admitted so far or -1,
--                  replicas that may be alive, 1 where nothing is admitted until replicas have stated their leases,
--                  how many of those are missing in the figures, 1 where not all that this one had is stated or ended},
--           tiers, grants, ended, refused, verdicts}
--            tiers    LEVEL, FIGURES of every tier that changed, or of all in a beat or a sync. FIGURES are those that the root
--                     keeps: doubles, in little endian
--            grants   'ID PASSED' of a ticket that was admitted as it came, or
--                     'ID WAIT_US STARVED_US ENGINE_LEVEL SERVED_AHEAD... PASSED', -1 where it was not overtaken.
--                     PASSED is left out where no head of another tier had arrived earlier. Else it is 'p', then for
--                     every level the rule by which it was admitted before that head: a always_first, r reserve, t turn,
--                     l level, x limit, o passed over, or . for none;
--                     then 'rTIMES' of a ticket that was preempted so often before.
--                     '!ID TIMES': the lease of that grant is a victim, its engine must release it. '-ID': the ticket
--                     gave its place in a full queue to a tenant below its share
--            ended    of the tickets that were ended, as they had waited: 'ID WAIT_US STARVED_US LEVEL SERVED_AHEAD...'
--            refused  the ids for which the queue of their tier had no place
--            verdicts 'ID w LEVEL LEFT' of a request by `m` within the limits, 'ID d LEVEL LEFT' of one that entered at
--                     the lower level, 'ID o LIMIT AFTER_US LEFT' of one that was refused: LIMIT is t, r or c, for
--                     tokens, requests or concurrent, AFTER_US -1 for never. LEFT: 'REQUESTS RESET_US TOKENS RESET_US',
--                     -1 for no limit
--          or, of a call that found no one waiting and did nothing but operations, the same as one text: see
--          `plain_calls.lua`. To make tables of it takes the server a fifth as long as all of the rest,
--          or {'unknown'} (this replica must sync), {'stale'} (a late call), {'foreign', the pool's tiers} (replicas with
--          another ladder live), {'absent'} (there is no pool, and this replica must not make it).
--
-- Numbers are whole and below 2^53. Tags are doubles. So Lua and Python compute the very same figures. Time is that of
-- the Redis server. Lua writes numbers with 14 digits: every larger one goes through `int` or `tag`.

local call, fmt, concat, match = redis.call, string.format, table.concat, string.match

local BEAT_US = 2000000     -- the time between two heartbeats of a replica
local SILENCE_US = 10000000 -- a replica silent for so long is dead: the next call of another frees what it has
local KEPT_MS = 3600000     -- a pool without a call for so long vanishes
local LOST_US = 2200000     -- a store silent for so long may be lost to replicas: each admits to its part alone
local SLICE_US = 1000       -- the time that one call takes for what dead replicas had, by the three figures that follow
local LEASE_US, TICKET_US = 30, 100 -- the time to end a lease, or a charge, and a ticket
local SEEN_US, LOOKED_UP_US = 1, 1 -- the time to read a record, and to look up or forget whether it was stated
local SEEN, SEEN_WITH_TICKETS = 200, 50 -- the records that are read at a time, and where tickets are among them
local DISCARDED = 8         -- the most that one call ends because they are first in order
local HEADS_SEEN = 64       -- the most heads read to find a live ticket after dead ones
local PAUSE_US = 10000      -- the time between two such calls: the store needs it for others
local ADMIT_US = 2000       -- the time that a call takes to admit tickets, beside one for each that enters or ends
local ADMISSION_US = 125    -- the time to admit one
local ARGUMENT_US = 10      -- the time that each argument of the call's operations takes of that
local SORTED = 128          -- the most heads that one call sorts anew because of another reserve: some 6 us each
local SOON_US = 1000        -- the time until the next call of those that admit or sort the rest
local LOOKED_AT = 16        -- tenants that every beat checks for being back at rest

-- The rules: {names, capacity tokens, capacity requests, promote_after or 0, ceiling, tier, tier, ...}. The positions in a
-- tier have the names of `protocol.TIER_FIELDS`, which declares them before this text.
local NAMES, CAPACITY_TOKENS, CAPACITY_REQUESTS, PROMOTE_AFTER, CEILING, FIRST_RULE = 1, 2, 3, 4, 5, 6
-- The figures of the pool
local BIRTH, NOW, OFFSET, GRACE, HOLD_SINCE, HOLD_UNTIL, HOLD_FOR, SEQUENCE, LATEST, WAITING, LEASES, LATE, REPLICAS,
  SWEEP, BACK_UNTIL, LATEST_ARRIVED = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16
-- NEWCOMERS: replicas that joined since the birth and knew of no pool. STATING: those that are stating their leases.
-- DEAD: those with records left to end, from SLICE_AT on. ADMISSIONS numbers the admissions. CUT_OFF: replicas in `h`.
local ABSENT_UNTIL, NEWCOMERS, STATING, DEAD, SLICE_AT, ADMISSIONS, CUT_OFF = 17, 18, 19, 20, 21, 22, 23
local META_FIELDS = CUT_OFF
-- The figures of a tier. It has no turn before OWES_UNTIL. LATEST_ADMISSION numbers its latest admission. LARGE counts
-- the tickets in `g`. WEIGHTS is the sum of the weights of the tenants that wait. PARKED counts the tickets that wait
-- outside the queue: see `park`.
local HELD_TOKENS, HELD_REQUESTS, QUEUED_TOKENS, QUEUED, VIRTUAL, SERVED, ADMITTED, OWES_UNTIL, LATEST_ADMISSION, LARGE,
  WEIGHTS, PARKED, PARKED_TOKENS, QUEUED_REQUESTS = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14
-- The classes of rule 1
local CLASS_ALWAYS_FIRST, CLASS_INSIDE, CLASS_TURN, CLASS_OTHER = 0, 1, 2, 3
local TIER_FIGURES = QUEUED_REQUESTS
local RULE_FORMAT, RULE_BYTES = '<ddddddddd', 72 -- see `keep_rules`
local MOST_EXCESS, LATEST_US, MOST_WAITING = 1000, 9007199254740991, 1000000000000

local root, kind, me, fence = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3])
local meta, rules, rules_text, now, prefix, mine
local tiers, is_changed, grants = {}, {}, {}
local tiers_kept, rules_kept -- the figures of all tiers and of their rules, as the root keeps them
local all_tokens, all_requests = 0, 0
local held_back_lease = false -- the lease that was admitted while the pool was held back: 'REPLICA ID'
local held_back_lease_before = false
local sorts, sorts_before = {}, '' -- level -> where its heads are being sorted: see `sort_heads`
local unfinished -- where the operations begin that `plain_calls.lua` has left; nil where it has done nothing

local function clock_us() local time = redis.call('TIME') return time[1] * 1000000 + time[2] end

-- with engines: include engine_fields.lua

-- with gain: include gain_fields.lua

-- with gain and engines: include gain_engines_fields.lua

-- Figures are kept as doubles, because to read and write text takes ten times as long. Behind the figures,
-- `struct.unpack` returns a position: no figure has its number.
local META_FORMAT, TIER_FORMAT, TIER_BYTES = '<' .. string.rep('d', META_FIELDS), '<' .. string.rep('d', TIER_FIGURES), 8 * TIER_FIGURES

-- Reads the root, without its tiers. False where there is none.
local function read_root()
  local kept = call('HMGET', root, 'meta', 'tiers', 'figures', 'went', 'sorts')
  if not kept[1] then return false end
  meta, tiers_kept, rules_kept = {struct.unpack(META_FORMAT, kept[1])}, kept[2], kept[3]
  held_back_lease, held_back_lease_before = kept[4], kept[4]
  if kept[5] then
    for level, place in string.gmatch(kept[5], '(%d+) (%a %d+)') do sorts[tonumber(level)] = place end
    sorts_before = kept[5]
  end
  for position = 1, #tiers_kept, TIER_BYTES do
    local tokens, requests = struct.unpack('<dd', tiers_kept, position) -- HELD_TOKENS, HELD_REQUESTS
    all_tokens, all_requests = all_tokens + tokens, all_requests + requests
  end
  return true
end

-- with neither: include plain_calls.lua

local beats, waiting_key, steps_key
local levels, heads, lanes, outbox = 0, {}, {}, {}
local ended, refused = {}, {}
local served_since = {} -- level -> tokens admitted since the newest ticket arrived
local preempts = false -- whether any tier is preemptible
local is_damaged = false
local stage = '' -- what this replica is stating: see `begin`
local pool = {
  verdicts = {}, dead = {}, cut_off = {}, slice_us = SLICE_US, discarded = 0, to_admit_us = 0, to_sort = SORTED,
  preempt = false, enter_limited = false, save_accounts = false, charged = false, -- until they are defined, or set
}

-- `protocol.joined` puts a file in place of each include. The functions are fields of a table inside of `define_*`
-- functions, because every call makes all functions anew. A function that captures a local of the chunk walks a list
-- (`luaF_findupval`). One that captures what its surrounding function has captured copies a pointer. That is a third of
-- the cost of a short call. No function may capture more than 60 locals, so there are several surrounding ones. Those of
-- which a short call needs nothing are called when a function of theirs is first asked for.

local function define_tickets()
-- include state.lua
-- include tickets.lua
end

local function define_rules()
-- include ordering.lua
-- include scheduler.lua
end

-- Called only where some tier is preemptible, or was. No other call pays for it.
local function define_preemptible()
-- include preemptible.lua
end

-- Called only where an operation concerns the limits of a tenant.
local function define_rate_limits()
-- include rate_limits.lua
end

local function define_replicas()
-- include replicas.lua
end

local function define_operations()
-- include operations.lua
end

local function define_waiting()
-- include waiting.lua
end

local function define_statements()
-- include statements.lua
end

local function define_preemption()
-- include preemption.lua
end

-- with engines: include define_engines.lua

-- with gain: include define_gain.lua

-- with gain and engines: include define_gain_engines.lua

define_tickets()
define_rules()
define_replicas()
define_operations()
-- Each is called when a function is asked for that is not defined yet: then the files before have it not.
local undefined = {define_waiting, define_statements, define_preemption}
setmetatable(pool, {__index = function(_, name)
  while undefined[1] do
    table.remove(undefined, 1)()
    local found = rawget(pool, name)
    if found then return found end
  end
end})
-- Their files replace functions of these, which are defined before. `load_preemption` defines the last.
-- with engines: while undefined[2] do table.remove(undefined, 1)() end
-- with gain: while undefined[2] do table.remove(undefined, 1)() end
-- with engines: undefined[1] = nil
-- with gain: undefined[1] = nil
-- with engines: pool.define_engines()
-- with gain: pool.define_gain()
-- with gain and engines: pool.define_gain_engines()
local is_done, result = pcall(pool.main)
if is_done then return result end
if not is_damaged then return error(result) end
call('DEL', root)
return {'unknown'}
