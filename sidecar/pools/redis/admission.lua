-- The admission rules for many replicas: the twin of `sidecar/scheduling`, which says what the rules are and why.
--
-- KEYS[1]  the pool's root, `admission:<layout>:{<pool>}`: a hash, the only key that must survive. Without it the pool
--          is lost, and every replica is asked to state what it has (a sync). All other keys begin with it, so one hash
--          tag keeps them on one node; they carry the root's birth, so that none outlives it unnoticed:
--   <root>:<birth>:beats       zset  replica -> its last heartbeat
--   <root>:<birth>:r:<replica> hash  '#' -> its fence, and what it is stating (see `begin`); id -> its ticket or lease, as
--                                    `ticket_record`, `lease_record`
--   <root>:<birth>:o:<replica> list  grants that it has not been told in a reply
--   <root>:<birth>:q:<level>   zset  the first ticket of every tenant of a tier that is no larger than its reserve, and
--                                    whatever was preempted, by start tag, then by sequence
--   <root>:<birth>:g:<level>   zset  the same of those that are larger
--   <root>:<birth>:l:<level>   zset  'TENANT TICKET' of all other tickets of a tier, by name
--   <root>:<birth>:f:<level>   hash  tenant -> 'FINISH WAITING WEIGHT', its finish tag, how many of its tickets
--                                    wait, and the weight of the latest
--   <root>:<birth>:w           zset  the sequence numbers of all tickets that wait
--   <root>:<birth>:s           zset  'MOMENT SEQUENCE' of the admissions by which somebody was first overtaken
--   <root>:<birth>:v           hash  'REPLICA ID' -> 'SEQUENCE ARRIVED TIMES OVERTAKEN SERVED...' of the leases of
--                                    preemptible tiers: how they had waited, how often they were preempted before
--   <root>:<birth>:p:<level>   zset  those of them that may be preempted, in order of admission
--   <root>:<birth>:a           hash  tenant -> 'REQUESTS TOKENS MOMENT CONCURRENT REFUNDED MEAN_US RPM TPM': its buckets
--   <root>:<birth>:m:<replica> hash  id -> 'TENANT TOKENS MOMENT TPM LEVEL REFUNDED': what was charged to a tenant
--   <root>:<birth>:c           hash  those that were chosen and have not let go -> their level
--   <root>:<birth>:k:<replica> set   the ids that it has stated, until it has stated all
--   <root>:<birth>:d           hash  dead replica -> 'PHASE CURSOR ENDED': how far what it had is ended
--          Grants for other replicas are published on the channel <root>:grants:<replica>, a line each; an empty message is
--          the replica's own beat, by which it knows that its subscription lives.
--
-- No call takes long, whatever there is to do: what a dead replica had is ended by many calls, LEFT records each, and a
-- replica states what it has by many calls, its leases first. Nothing is admitted before all of them are stated.
--
-- ARGV[1]  call | beat | begin | sync | bye. A sync states everything; a begin the first part, calls the rest
-- ARGV[2]  the replica
-- ARGV[3]  its fence: a call with another one than its last sync's is a late one, and does nothing
-- ARGV[4]  call, beat: how many grants of its list the replica has read
--          begin, sync: how many replicas it knew last, 0 for none: it is new
-- ARGV[5]  begin, sync: the rules (`script.rules_text`)
-- ARGV[6]  begin, sync: 1 where these rules replace others, 0 where they do not; 2 where they replace those of another
--          ladder of tiers, too: the pool is made anew. -1: as 1, but it does not make a pool where there is none
-- ARGV[7]  begin, sync: how many leases it ended that it could not say before
-- then     call, beat: operations, each idempotent by its id
--            e ID LEVEL TENANT WEIGHT TOKENS REQUESTS   asks for a lease
--            E ... HELD, M ... HELD                     as e and m, where the free places of the queue are promised to
--                                                       other requests, HELD of them to its own tenant: refused unless
--                                                       its tenant is within its share of all places with them
--            m ID LEVEL TENANT WEIGHT TOKENS REQUESTS RPM TPM MOST BURST_US LOWER
--                                                       the same within its tenant's limits by the minute and at once, -1
--                                                       for none; what is over them enters at the level LOWER, or, where
--                                                       that is -1, not at all
--            x ID                                       ends it, waiting or held
--            u ID TOKENS                                the same of one that came by `m`: it used so many tokens, -1
--                                                       where nobody knows
--            z ID TOKENS                                sets what it holds
--            k ID LEVEL                                 its first byte goes out: it is never preempted
--            p ID LEVEL TENANT WEIGHT TOKENS REQUESTS WAITED_US TIMES
--                                                       its engine has let go: it waits again, for the TIMES-th time.
--                                                       The rest is for a store that does not know it as a lease
--            b MICROSECONDS                             holds the pool back for so long: nobody is admitted while
--                                                       anything is held; 0 ends it, and the last call counts
--          begin, sync, and calls after a begin: everything the replica has; what it does not name is ended at last
--            l ID LEVEL TOKENS REQUESTS TIMES           a lease that it runs. Whether its first byte has gone out is not
--                                                       said: it is never preempted any more
--            t ID LEVEL TENANT WEIGHT TOKENS REQUESTS WAITED_US TIMES
--                                                       TIMES: how often it was preempted so far
--            a ID TENANT                                behind one of these: it counts among its tenant's concurrent
--            f ID                                       came by `m`, and was not told what became of it: it asks again,
--                                                       and what it may have been charged comes back
--            n                                          all its leases are stated, and all of `f`
--            d                                          everything is: some of the rest is ended. To be repeated until
--                                                       the reply says that nothing is left
--
-- RETURN   {'ok', {replicas, us until time alone may change something or -1, grants listed, waiting, leases,
--                  late ends, tokens held, requests held, us since the latest arrival admitted so far came or -1,
--                  replicas that may be alive, 1 where nothing is admitted until replicas have stated their leases,
--                  how many of those have not that the figures lack, 1 where not all that this one had is stated or ended},
--           tiers, grants, ended, refused, verdicts}
--            tiers    'LEVEL [held tokens, held requests, queued tokens, queued requests, start tag, served, admitted]'
--                     for every tier that changed, or for all in a beat or a sync
--            grants   'ID PASSED' of what was admitted as it came, or
--                     'ID WAIT_US STARVED_US AGED_LEVEL SERVED_AHEAD... PASSED', where -1 says that it was not overtaken.
--                     PASSED is left out where nobody was: 'p', then for every level the rule by which it went before that
--                     tier's head, which had come first: a always_first, r reserve, t turn, l level, x limit, o passed
--                     over, or . for none;
--                     behind it 'rTIMES' of one that was preempted so often before.
--                     '!ID TIMES' tells the lease of that grant to let its engine go, '-ID' a ticket that it gave its
--                     place in a full queue to a tenant below its share
--            ended    of the tickets that were ended, as they had waited: 'ID WAIT_US STARVED_US LEVEL SERVED_AHEAD...'
--            refused  the ids that their tier's queue had no place for
--            verdicts 'ID w LEVEL LEFT' of what came by `m` within the limits, 'ID d LEVEL LEFT' of what came in at the
--                     lower level, 'ID o LIMIT AFTER_US LEFT' of what did not: LIMIT is t, r or c, for tokens, requests
--                     or concurrent, AFTER_US -1 for never. LEFT: 'REQUESTS RESET_US TOKENS RESET_US', -1 for no limit
--          or {'unknown'} (this replica must sync), {'stale'} (a late call), {'foreign', the pool's tiers} (replicas with
--          another ladder live), {'absent'} (there is no pool, and this replica must not make it).
--
-- Numbers are whole and below 2^53, but for tags, which are doubles: so Lua and Python compute the very same ones. Time
-- is Redis's own. Lua writes numbers with 14 digits: every larger one goes through `int` or `tag`.

local call, fmt, concat, match = redis.call, string.format, table.concat, string.match

local BEAT_US = 2000000     -- how often a replica says that it lives
local SILENCE_US = 10000000 -- silent for so long it is dead: what it has is freed by whoever calls next
local KEPT_MS = 3600000     -- a pool that nobody calls any more vanishes
local LOST_US = 2200000     -- silent for so long, the store may be lost to replicas: they admit to their parts
local LEFT = 100            -- records that one call ends at most of a dead replica's: some 30 us each
local SEEN = 1000           -- records that one call looks at for that
local DISCARDED = 50        -- the same of those that stand before others in a queue
local HEADS_SEEN = 64       -- tenants that a live ticket is looked for among, where those before it are dead
local PAUSE_US = 15000      -- between two such calls: the store has as much time for others
local LOOKED_AT = 16        -- tenants that may be back at rest, at every beat

-- rules: {names, capacity tokens, capacity requests, promote_after or 0, ceiling, tier, tier, ...}; a tier is
local R_TOKENS, R_REQUESTS, H_TOKENS, H_REQUESTS, L_TOKENS, L_REQUESTS, LIMITED, ALWAYS_FIRST, PLACES =
  1, 2, 3, 4, 5, 6, 7, 8, 9
local PREEMPTIONS, PREEMPT_AFTER = 10, 11 -- how often one is preempted at most, 0 for never; -1: it preempts nobody
local NAMES, CAPACITY_TOKENS, CAPACITY_REQUESTS, PROMOTE_AFTER, CEILING, FIRST_RULE = 1, 2, 3, 4, 5, 6
-- meta
local BIRTH, NOW, OFFSET, GRACE, HOLD_SINCE, HOLD_UNTIL, HOLD_FOR, SEQUENCE, LATEST, WAITING, LEASES, LATE, REPLICAS,
  SWEEP, BACK_UNTIL, LATEST_ARRIVED = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16
-- NEWCOMERS: replicas that came since the birth and knew of no pool. STATING: those that are stating their leases. DEAD:
-- those of which something is left to end, from SLICE_AT on. ADMISSIONS numbers the admissions.
local ABSENT_UNTIL, NEWCOMERS, STATING, DEAD, SLICE_AT, ADMISSIONS = 17, 18, 19, 20, 21, 22
local META_FIELDS = ADMISSIONS
local META_TEXT = '[' .. string.rep('%.0f,', META_FIELDS - 1) .. '%.0f]'
-- a tier's figures: it has no turn before OWES_UNTIL, LAST numbers its latest admission, LARGE counts what is in `g`,
-- WEIGHTS sums those of the tenants that wait
local HELD_TOKENS, HELD_REQUESTS, QUEUED_TOKENS, QUEUED, VIRTUAL, SERVED, ADMITTED, OWES_UNTIL, LAST, LARGE,
  WEIGHTS = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11
-- the classes of rule 1
local RANK_ALWAYS_FIRST, RANK_INSIDE, RANK_TURN, RANK_OTHER = 0, 1, 2, 3
local MOST_EXCESS, LATEST_US = 1000, 9007199254740991

local root, kind, me, fence = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3])
local meta, rules, rules_text, now, prefix, mine, beats, waiting_key, steps_key
local tiers, is_changed, levels = {}, {}, 0
local all_tokens, all_requests = 0, 0
local heads, lanes, outbox = {}, {}, {}
local went = false -- the lease that was admitted while the pool is held back: 'REPLICA ID'
local went_before = false
local grants, ended, refused = {}, {}, {}
local served_since = {} -- level -> tokens admitted since the newest ticket came
local preempts = false -- whether any tier is preemptible
local is_damaged = false
local stage = '' -- what this replica is stating: see `begin`
local pool = {verdicts = {}, dead = {}, left = LEFT, discarded = 0}

local function clock_us() local time = redis.call('TIME') return time[1] * 1000000 + time[2] end

-- The functions are fields of a table, and are made inside of others, because a script makes all of them anew in every
-- call: a function that captures a local of the chunk walks a list (`luaF_findupval`), one that captures what the
-- function around it has captured copies a pointer. That is a third of what a short call costs. No function may capture
-- more than 60, so there are several around.
local function define_tickets()

function pool.int(number) return fmt('%.0f', number) end
function pool.tag(number) return fmt('%.17g', number) end

function pool.queue_key(level) return prefix .. 'q:' .. level end
function pool.large_key(level) return prefix .. 'g:' .. level end
function pool.lane_key(level) return prefix .. 'l:' .. level end
function pool.finish_key(level) return prefix .. 'f:' .. level end
function pool.replica_key(replica) return prefix .. 'r:' .. replica end
function pool.outbox_key(replica) return prefix .. 'o:' .. replica end

-- What is inconsistent was lost in part (evicted, deleted by hand): the root goes, and the replicas state it all anew.
function pool.damaged()
  is_damaged = true
  error('damaged')
end

-- -- the pool's figures, read once and written once a call

function pool.name_keys()
  prefix = root .. ':' .. pool.int(meta[BIRTH]) .. ':'
  mine, beats, waiting_key, steps_key = pool.replica_key(me), prefix .. 'beats', prefix .. 'w', prefix .. 's'
end

function pool.load()
  local fields = call('HGETALL', root)
  for index = 1, #fields, 2 do
    local field, value = fields[index], fields[index + 1]
    if field == 'meta' then
      meta = cjson.decode(value)
    elseif field == 'rules' then
      rules_text, rules = value, cjson.decode(value)
    elseif field == 'went' then
      went, went_before = value, value
    else
      local tier = cjson.decode(value)
      tiers[tonumber(field)] = tier
      all_tokens, all_requests = all_tokens + tier[HELD_TOKENS], all_requests + tier[HELD_REQUESTS]
    end
  end
  if not meta then return false end
  pool.heed_rules()
  pool.name_keys()
  return true
end

function pool.tier_text(tier)
  return fmt('[%.0f,%.0f,%.0f,%.0f,%.17g,%.0f,%.0f,%.0f,%.0f,%.0f,%.0f]', unpack(tier))
end

function pool.save(tells_all)
  local fields, texts = {'meta', fmt(META_TEXT, unpack(meta))}, {}
  for level = 0, levels - 1 do
    if tells_all or is_changed[level] then
      local text = pool.tier_text(tiers[level])
      fields[#fields + 1], fields[#fields + 2] = level, text
      texts[#texts + 1] = level .. ' ' .. text
    end
  end
  if went and went ~= went_before then fields[#fields + 1], fields[#fields + 2] = 'went', went end
  call('HSET', root, unpack(fields))
  if went_before and not went then call('HDEL', root, 'went') end
  return texts
end

-- Time never runs backwards, whatever server answers; where nobody called for long, nobody could.
function pool.tell_time()
  now = clock_us() + meta[OFFSET]
  if now < meta[NOW] then
    meta[OFFSET], now = meta[OFFSET] + meta[NOW] - now, meta[NOW]
  elseif now - meta[NOW] > LOST_US then
    -- The store's silence is not the replicas': they get time to call, and what they ran meanwhile is stated first.
    if now - meta[NOW] > 2 * BEAT_US then meta[GRACE] = now + 2 * BEAT_US end
    pool.wait_for_all()
  end
  meta[NOW] = now
end

-- -- tickets and leases

function pool.member_of(ticket)
  return fmt('%016.0f %s %s %.0f %.0f %.0f %.0f %s', ticket.sequence, ticket.owner, ticket.id, ticket.tokens,
    ticket.requests, ticket.arrived, ticket.weight, ticket.tenant)
end

function pool.read_member(level, member)
  local sequence, owner, id, tokens, requests, arrived, weight, tenant =
    match(member, '^(%d+) (%S+) (%S+) (%d+) (%d+) (%d+) (%d+) (.*)$')
  return {
    id = id, owner = owner, level = level, tokens = tonumber(tokens), requests = tonumber(requests),
    sequence = tonumber(sequence), arrived = tonumber(arrived), weight = tonumber(weight), tenant = tenant,
    is_stored = true,
  }
end

-- SERVED is followed by ';TIMES OVERTAKEN' where it was preempted.
function pool.ticket_text(ticket, served)
  return fmt('W %d %.0f %.0f %.0f %.0f %.0f ', ticket.level, ticket.tokens, ticket.requests, ticket.sequence,
    ticket.arrived, ticket.weight) .. served .. '|' .. ticket.tenant
end

function pool.ticket_record(ticket)
  local served = {}
  for level = 0, levels - 1 do served[level + 1] = pool.int(tiers[level][SERVED] - (served_since[level] or 0)) end
  return pool.ticket_text(ticket, concat(served, ' '))
end

-- EXCESS and ADMITTED are 0 where nothing is owed for it.
function pool.lease_record(level, tokens, requests, excess, admitted, grant)
  return fmt('L %d %.0f %.0f %.0f %.0f ', level, tokens, requests, excess, admitted) .. (grant or '')
end

function pool.read_lease(record)
  local level, tokens, requests, excess, admitted, grant = match(record, '^L (%d+) (%d+) (%d+) (%d+) (%d+) (.*)$')
  return tonumber(level), tonumber(tokens), tonumber(requests), grant, tonumber(excess), tonumber(admitted)
end

function pool.read_ticket(owner, id, record)
  local level, tokens, requests, sequence, arrived, weight, served, tenant =
    match(record, '^W (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) ([^|]*)|(.*)$')
  local ticket = {
    id = id, owner = owner, level = tonumber(level), tokens = tonumber(tokens), requests = tonumber(requests),
    sequence = tonumber(sequence), arrived = tonumber(arrived), weight = tonumber(weight), tenant = tenant,
    served = served, is_stored = true,
  }
  local before, times, overtaken = match(served, '^([^;]*);(%d+) (%d+)$')
  if before then -- it was preempted
    ticket.served, ticket.times, ticket.overtaken = before, tonumber(times), tonumber(overtaken)
  end
  return ticket
end

function pool.hold(level, tokens, requests)
  local tier = tiers[level]
  tier[HELD_TOKENS], tier[HELD_REQUESTS] = tier[HELD_TOKENS] + tokens, tier[HELD_REQUESTS] + requests
  all_tokens, all_requests = all_tokens + tokens, all_requests + requests
  is_changed[level] = true
end

-- -- the queue of a tier: the twin of `scheduling/fair_queue.py`

function pool.is_small(ticket)
  local rule = rules[FIRST_RULE + ticket.level]
  return ticket.tokens <= rule[R_TOKENS] and ticket.requests <= rule[R_REQUESTS]
end

function pool.read_lane(text)
  local finish, waiting, weight = match(text, '^(%S+) (%d+) (%d+)$')
  return {finish = tonumber(finish), waiting = tonumber(waiting), weight = tonumber(weight)}
end

-- A tenant: its finish tag, and how many of its tickets wait that were never preempted.
function pool.lane_of(level, tenant)
  local of_tier = lanes[level]
  if not of_tier then
    of_tier = {}
    lanes[level] = of_tier
  end
  local lane = of_tier[tenant]
  if not lane then
    lane = pool.read_lane(call('HGET', pool.finish_key(level), tenant) or '0 0 0')
    of_tier[tenant] = lane
  end
  return lane
end

function pool.save_lane(level, tenant, lane)
  if lane.waiting == 0 and lane.finish <= tiers[level][VIRTUAL] then
    call('HDEL', pool.finish_key(level), tenant)
  else
    call('HSET', pool.finish_key(level), tenant, fmt('%.17g %.0f %.0f', lane.finish, lane.waiting, lane.weight))
  end
end

-- A ticket becomes the first of its tenant, or returns.
function pool.store_head(ticket)
  local is_small = pool.is_small(ticket)
  if not is_small then
    tiers[ticket.level][LARGE] = tiers[ticket.level][LARGE] + 1
    is_changed[ticket.level] = true
  end
  call('ZADD', is_small and pool.queue_key(ticket.level) or pool.large_key(ticket.level), pool.tag(ticket.start),
    pool.member_of(ticket))
end

function pool.store(ticket)
  local lane = pool.lane_of(ticket.level, ticket.tenant)
  if lane.waiting == 0 then
    pool.store_head(ticket)
  else
    call('ZADD', pool.lane_key(ticket.level), 0, ticket.tenant .. ' ' .. pool.member_of(ticket))
  end
  local tier = tiers[ticket.level]
  tier[WEIGHTS] = tier[WEIGHTS] + ticket.weight - (lane.waiting > 0 and lane.weight or 0)
  lane.waiting, lane.weight = lane.waiting + 1, ticket.weight
  pool.save_lane(ticket.level, ticket.tenant, lane)
  call('ZADD', waiting_key, pool.int(ticket.sequence), pool.int(ticket.sequence))
  call('HSET', pool.replica_key(ticket.owner), ticket.id, pool.ticket_record(ticket))
  ticket.is_stored = true
end

-- The first of a tier's heads, but one of a dead replica only where there are no others.
function pool.read_head(level, key)
  local found = call('ZRANGE', key, 0, meta[DEAD] > 0 and HEADS_SEEN or 0, 'WITHSCORES')
  local first
  for index = 1, #found, 2 do
    local ticket = pool.read_member(level, found[index])
    ticket.start = tonumber(found[index + 1])
    if meta[DEAD] == 0 or not pool.is_dead(ticket.owner) then return ticket end
    ticket.is_dead = true
    first = first or ticket
  end
  return first
end

function pool.stands_earlier(ticket, other)
  if ticket.is_dead ~= other.is_dead then return other.is_dead end
  return ticket.start < other.start or (ticket.start == other.start and ticket.sequence < other.sequence)
end

-- {first, small}: the head of a tier in which something waits, and the next of those no larger than its reserve.
function pool.heads_of(level)
  local found = heads[level]
  if not found then
    local tier, small, large = tiers[level], nil, nil
    if tier[LARGE] > 0 then
      large = pool.read_head(level, pool.large_key(level))
      if not large then return pool.damaged() end
    end
    local rule = rules[FIRST_RULE + level]
    if rule[R_TOKENS] > 0 and rule[R_REQUESTS] > 0 then -- else every ticket is large
      small = pool.read_head(level, pool.queue_key(level))
    end
    if not small and not large then return pool.damaged() end
    found = {first = large, small = small}
    if not large or (small and pool.stands_earlier(small, large)) then found.first = small end
    heads[level] = found
  end
  return found
end

function pool.head_of(level) return pool.heads_of(level).first end

-- While the tier owes: the next ticket no larger than its reserve, where the head is larger.
function pool.second_head(level)
  local found = pool.heads_of(level)
  if now >= tiers[level][OWES_UNTIL] or pool.is_small(found.first) then return nil end
  return found.small
end

-- The ticket waits. One that is first in an empty queue need not be stored yet.
function pool.push(ticket, tenant, weight)
  local tier = tiers[ticket.level]
  ticket.start, ticket.tenant, ticket.weight = 0, tenant, weight
  local head = tier[QUEUED] > 0 and pool.head_of(ticket.level)
  if head then
    if not head.is_stored then pool.store(head) end
    local lane = pool.lane_of(ticket.level, tenant)
    ticket.start = math.max(tier[VIRTUAL], lane.finish)
    if lane.waiting == 0 then heads[ticket.level] = nil end
    pool.store(ticket)
  else
    heads[ticket.level] = {first = ticket, small = pool.is_small(ticket) and ticket or nil}
  end
  tier[QUEUED], tier[QUEUED_TOKENS] = tier[QUEUED] + 1, tier[QUEUED_TOKENS] + ticket.tokens
  meta[WAITING] = meta[WAITING] + 1
  is_changed[ticket.level] = true
end

-- When the ticket was first overtaken, nil where it was not. A step is kept for as long as somebody waits whom it
-- overtook first, so there are never more steps than tickets that wait.
function pool.overtaken_at(sequence)
  if sequence >= meta[LATEST] then return nil end
  local found = call('ZRANGEBYSCORE', steps_key, '(' .. pool.int(sequence), '+inf', 'LIMIT', 0, 1)
  return found[1] and tonumber(match(found[1], '^(%d+)'))
end

function pool.note_overtaking(sequence, arrived)
  if sequence <= meta[LATEST] then return end
  if meta[WAITING] > 0 then
    local between = call('ZRANGEBYSCORE', waiting_key, '(' .. pool.int(meta[LATEST]), '(' .. pool.int(sequence), 'LIMIT', 0, 1)
    if between[1] then call('ZADD', steps_key, pool.int(sequence), pool.int(now) .. ' ' .. pool.int(sequence)) end
  end
  meta[LATEST], meta[LATEST_ARRIVED] = sequence, arrived
end

function pool.forget_step(sequence)
  local step = call('ZRANGEBYSCORE', steps_key, '(' .. pool.int(sequence), '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
  if not step[1] then return end
  local before = call('ZREVRANGEBYSCORE', steps_key, pool.int(sequence), '-inf', 'WITHSCORES', 'LIMIT', 0, 1)
  local from = before[1] and '(' .. before[2] or '-inf'
  if not call('ZRANGEBYSCORE', waiting_key, from, '(' .. step[2], 'LIMIT', 0, 1)[1] then
    call('ZREM', steps_key, step[1])
  end
end

-- Takes one that is first of its tenant, or returned, out of the tier's heads. Whether it was there.
function pool.remove_head(ticket, member)
  local level = ticket.level
  if call('ZREM', pool.queue_key(level), member) == 1 then return true end
  if tiers[level][LARGE] > 0 and call('ZREM', pool.large_key(level), member) == 1 then
    tiers[level][LARGE] = tiers[level][LARGE] - 1
    return true
  end
  return false
end

-- The next of a tenant's tickets becomes its first.
function pool.advance(level, tenant, lane)
  local found = call('ZRANGEBYLEX', pool.lane_key(level), '[' .. tenant .. ' ', '(' .. tenant .. '!', 'LIMIT', 0, 1)
  if not found[1] then return pool.damaged() end
  call('ZREM', pool.lane_key(level), found[1])
  local first = pool.read_member(level, string.sub(found[1], #tenant + 2))
  first.start = math.max(tiers[level][VIRTUAL], lane.finish)
  pool.store_head(first)
end

function pool.leave_lane(ticket)
  local level, tenant, member = ticket.level, ticket.tenant, pool.member_of(ticket)
  if ticket.times then
    if not pool.remove_head(ticket, member) then return pool.damaged() end
    return
  end
  local lane = pool.lane_of(level, tenant)
  lane.waiting = lane.waiting - 1
  if lane.waiting == 0 then tiers[level][WEIGHTS] = tiers[level][WEIGHTS] - lane.weight end
  if pool.remove_head(ticket, member) then
    if lane.waiting > 0 then pool.advance(level, tenant, lane) end
  elseif call('ZREM', pool.lane_key(level), tenant .. ' ' .. member) == 0 then
    return pool.damaged()
  end
  pool.save_lane(level, tenant, lane)
end

-- Takes a ticket out of its queue. Its replica's record is the caller's to change.
function pool.remove(ticket)
  local level = ticket.level
  local tier = tiers[level]
  tier[QUEUED], tier[QUEUED_TOKENS] = tier[QUEUED] - 1, tier[QUEUED_TOKENS] - ticket.tokens
  meta[WAITING] = meta[WAITING] - 1
  is_changed[level], heads[level] = true, nil
  if ticket.is_stored then
    pool.leave_lane(ticket)
    call('ZREM', waiting_key, pool.int(ticket.sequence))
    if tier[QUEUED] == 0 then
      call('DEL', pool.finish_key(level))
      tier[VIRTUAL], tier[WEIGHTS], lanes[level] = 0, 0, nil
    end
  end
end

-- Its tenant is charged for a ticket, and the tier's virtual time moves on to its start.
function pool.charge_tenant(ticket)
  local tier = tiers[ticket.level]
  tier[VIRTUAL] = math.max(tier[VIRTUAL], ticket.start)
  if not ticket.times then
    pool.lane_of(ticket.level, ticket.tenant).finish = ticket.start + ticket.tokens / ticket.weight
  end
end

-- Where a tier has another reserve, its first tickets are sorted anew into small and large ones.
function pool.sort_heads(level)
  local small, large = pool.queue_key(level), pool.large_key(level)
  local found = {call('ZRANGE', small, 0, -1, 'WITHSCORES'), call('ZRANGE', large, 0, -1, 'WITHSCORES')}
  call('DEL', small, large)
  tiers[level][LARGE], heads[level] = 0, nil
  for _, entries in ipairs(found) do
    for index = 1, #entries, 2 do
      local ticket = pool.read_member(level, entries[index])
      ticket.start = tonumber(entries[index + 1])
      pool.store_head(ticket)
    end
  end
end

-- How the ticket has waited so far, as text behind its id, and whether it was overtaken.
function pool.wait_text(ticket, aged_level)
  local overtaken = ticket.overtaken or pool.overtaken_at(ticket.sequence)
  local parts = {pool.int(now - ticket.arrived), overtaken and pool.int(now - overtaken) or '-1', pool.int(aged_level)}
  local level = 0
  for served in string.gmatch(ticket.served, '%d+') do
    parts[#parts + 1] = pool.int(tiers[level][SERVED] - tonumber(served))
    level = level + 1
  end
  return concat(parts, ' '), overtaken
end

-- Steps belong to those whom they overtook first, and are not for one that was preempted: it knows its own moment.
function pool.settle_steps(sequence, was_overtaken)
  if meta[WAITING] == 0 then
    call('DEL', steps_key)
  elseif was_overtaken then
    pool.forget_step(sequence)
  end
end

function pool.grant(owner, text)
  local texts = grants
  if owner ~= me then
    outbox[owner] = outbox[owner] or {}
    texts = outbox[owner]
  end
  texts[#texts + 1] = text
end

end

local function define_rules()

-- -- the rules

function pool.aged_score(rule_level, ticket)
  local promote_after = rules[PROMOTE_AFTER]
  if promote_after == 0 then return rule_level end
  local score = rule_level * promote_after
  if rule_level <= rules[CEILING] then return score end
  return math.max(rules[CEILING] * promote_after, score - (now - ticket.arrived))
end

function pool.is_below_reserve(level)
  local rule, tier = rules[FIRST_RULE + level], tiers[level]
  return tier[HELD_TOKENS] < rule[R_TOKENS] and tier[HELD_REQUESTS] < rule[R_REQUESTS]
end

function pool.rank(level, ticket)
  local rule, tier = rules[FIRST_RULE + level], tiers[level]
  if rule[ALWAYS_FIRST] == 1 then return RANK_ALWAYS_FIRST end
  if tier[HELD_TOKENS] + ticket.tokens <= rule[R_TOKENS] and tier[HELD_REQUESTS] + ticket.requests <= rule[R_REQUESTS] then
    return RANK_INSIDE
  end
  if now >= tier[OWES_UNTIL] and pool.is_below_reserve(level) then return RANK_TURN end
  return RANK_OTHER
end

-- A ticket's place in order.
function pool.candidate(level, ticket)
  local rank = pool.rank(level, ticket)
  return {
    rank = rank, turn = rank == RANK_TURN and tiers[level][LAST] or 0, score = pool.aged_score(level, ticket),
    ticket = ticket,
  }
end

function pool.is_at_limit(level, ticket)
  local rule, tier = rules[FIRST_RULE + level], tiers[level]
  return rule[LIMITED] == 1 and (tier[HELD_TOKENS] + ticket.tokens > rule[L_TOKENS]
    or tier[HELD_REQUESTS] + ticket.requests > rule[L_REQUESTS])
end

function pool.is_before(one, other)
  if one.rank ~= other.rank then return one.rank < other.rank end
  if one.turn ~= other.turn then return one.turn < other.turn end
  if one.score ~= other.score then return one.score < other.score end
  if one.ticket.arrived ~= other.ticket.arrived then return one.ticket.arrived < other.ticket.arrived end
  return one.ticket.sequence < other.ticket.sequence
end

-- Rule 1: the candidates, the first first.
function pool.in_order()
  local found = {}
  for level = 0, levels - 1 do
    if tiers[level][QUEUED] > 0 then
      local head, second = pool.head_of(level), pool.second_head(level)
      if not pool.is_at_limit(level, head) then found[#found + 1] = pool.candidate(level, head) end
      if second and not pool.is_at_limit(level, second) then found[#found + 1] = pool.candidate(level, second) end
    end
  end
  if found[2] then table.sort(found, pool.is_before) end
  return found
end

-- The candidates while the pool is held back: the tier that was longest without an admission is next.
function pool.one_at_a_time()
  local found = {}
  if went then return found end
  for place, candidate in ipairs(pool.in_order()) do
    if candidate.rank < RANK_OTHER or all_requests == 0 then
      candidate.place = place
      candidate.claim = candidate.rank == RANK_ALWAYS_FIRST and 0 or candidate.rank == RANK_OTHER and 2 or 1
      found[#found + 1] = candidate
    end
  end
  table.sort(found, function(one, other)
    local last, other_last = tiers[one.ticket.level][LAST], tiers[other.ticket.level][LAST]
    if one.claim ~= other.claim then return one.claim < other.claim end
    if last ~= other_last then return last < other_last end
    return one.place < other.place
  end)
  return found
end

-- Rule 3: whether it would fit once everything after it had released what it holds beyond its reserve.
function pool.holds_its_place(candidate)
  if candidate.rank == RANK_ALWAYS_FIRST then return true end
  local unit = rules[PROMOTE_AFTER] == 0 and 1 or rules[PROMOTE_AFTER]
  local tokens = rules[CAPACITY_TOKENS] - candidate.ticket.tokens
  local requests = rules[CAPACITY_REQUESTS] - candidate.ticket.requests
  for level = 0, levels - 1 do
    if level ~= candidate.ticket.level then
      local rule, tier, is_better = rules[FIRST_RULE + level], tiers[level], level * unit < candidate.score
      local kept_tokens, kept_requests = tier[HELD_TOKENS], tier[HELD_REQUESTS]
      if rule[ALWAYS_FIRST] == 0 and not (candidate.rank == RANK_OTHER and is_better) then
        kept_tokens, kept_requests = math.min(kept_tokens, rule[R_TOKENS]), math.min(kept_requests, rule[R_REQUESTS])
      end
      if is_better then
        kept_tokens, kept_requests = math.max(kept_tokens, rule[H_TOKENS]), math.max(kept_requests, rule[H_REQUESTS])
      end
      tokens, requests = tokens - kept_tokens, requests - kept_requests
    end
  end
  return tokens >= 0 and requests >= 0
end

function pool.is_held_back() return now < meta[BACK_UNTIL] end

-- The ticket that is admitted next: the first in order that fits, unless one before it holds its place. A dead replica's
-- is to be ended instead, and holds nothing up where this call has ended as many as it may.
function pool.next_admission()
  for _, candidate in ipairs(pool.is_held_back() and pool.one_at_a_time() or pool.in_order()) do
    if candidate.ticket.is_dead then
      if pool.may_discard() then return candidate end
    elseif pool.fits(candidate.ticket, candidate.score) then
      return candidate
    elseif pool.holds_its_place(candidate) then
      return nil
    end
  end
end

function pool.fits(ticket, score)
  local unit = rules[PROMOTE_AFTER] == 0 and 1 or rules[PROMOTE_AFTER]
  local tokens = rules[CAPACITY_TOKENS] - all_tokens - ticket.tokens
  local requests = rules[CAPACITY_REQUESTS] - all_requests - ticket.requests
  for level = 0, levels - 1 do
    if level * unit >= score then break end
    if level ~= ticket.level then
      local rule, tier = rules[FIRST_RULE + level], tiers[level]
      tokens = tokens - math.max(0, rule[H_TOKENS] - tier[HELD_TOKENS])
      requests = requests - math.max(0, rule[H_REQUESTS] - tier[HELD_REQUESTS])
    end
  end
  return tokens >= 0 and requests >= 0
end

function pool.rule_code(candidate, head)
  if pool.is_held_back() then return candidate.rank == RANK_ALWAYS_FIRST and 'a' or 't' end
  if pool.is_before(head, candidate) then return 'o' end
  if candidate.rank == RANK_TURN then return 't' end
  if candidate.rank == head.rank then return 'l' end
  return candidate.rank == RANK_ALWAYS_FIRST and 'a' or 'r'
end

-- The tiers whose head had come before the ticket, as text after its figures; what is held is as it was decided on.
function pool.passed_text(candidate)
  local codes, is_any, ticket = {}, false, candidate.ticket
  for level = 0, levels - 1 do
    codes[level + 1] = '.'
    if level ~= ticket.level and tiers[level][QUEUED] > 0 then
      local head = pool.head_of(level)
      if head.arrived < ticket.arrived or (head.arrived == ticket.arrived and head.sequence < ticket.sequence) then
        codes[level + 1] = pool.is_at_limit(level, head) and 'x'
          or pool.rule_code(candidate, pool.candidate(level, head))
        is_any = true
      end
    end
  end
  return is_any and ' p' .. concat(codes) or ''
end

-- How many whole reserves too much the tier, which is below its reserve, would hold.
function pool.excess(ticket)
  local rule, tier = rules[FIRST_RULE + ticket.level], tiers[ticket.level]
  local tokens = math.floor((tier[HELD_TOKENS] + ticket.tokens - rule[R_TOKENS]) / rule[R_TOKENS])
  local requests = math.floor((tier[HELD_REQUESTS] + ticket.requests - rule[R_REQUESTS]) / rule[R_REQUESTS])
  return math.min(MOST_EXCESS, math.max(0, tokens, requests))
end

-- How a ticket has waited that is admitted as it came, at its tier's level.
function pool.served_text(level)
  local parts = {'0', '-1', pool.int(level)}
  for other = 0, levels - 1 do parts[#parts + 1] = pool.int(served_since[other] or 0) end
  return concat(parts, ' ')
end

function pool.admit(candidate)
  local ticket, score = candidate.ticket, candidate.score
  local level, text, overtaken = ticket.level, ticket.id, nil
  local is_takeable = rules[FIRST_RULE + level][PREEMPTIONS] > 0
  if ticket.is_stored then
    if not ticket.served then
      local record = call('HGET', pool.replica_key(ticket.owner), ticket.id)
      if not record then return pool.damaged() end
      local read = pool.read_ticket(ticket.owner, ticket.id, record)
      ticket.served, ticket.times, ticket.overtaken = read.served, read.times, read.overtaken
    end
    local unit = rules[PROMOTE_AFTER] == 0 and 1 or rules[PROMOTE_AFTER]
    local figures
    figures, overtaken = pool.wait_text(ticket, math.ceil(score / unit))
    text = ticket.id .. ' ' .. figures
    pool.charge_tenant(ticket)
  elseif next(served_since) then -- others were admitted first in the very call that it came with
    text = ticket.id .. ' ' .. pool.served_text(level)
  end
  if meta[WAITING] > 1 then text = text .. pool.passed_text(candidate) end
  if ticket.times then text = text .. ' r' .. ticket.times end
  if is_takeable then pool.may_return(ticket, overtaken) end
  local excess = candidate.rank == RANK_TURN and pool.excess(ticket) or 0
  if pool.is_held_back() then went = ticket.owner .. ' ' .. ticket.id end
  meta[ADMISSIONS] = meta[ADMISSIONS] + 1
  tiers[level][LAST] = meta[ADMISSIONS]
  pool.remove(ticket)
  pool.hold(level, ticket.tokens, ticket.requests)
  tiers[level][SERVED], tiers[level][ADMITTED] = tiers[level][SERVED] + ticket.tokens, tiers[level][ADMITTED] + 1
  served_since[level] = (served_since[level] or 0) + ticket.tokens
  meta[LEASES] = meta[LEASES] + 1
  pool.note_overtaking(ticket.sequence, ticket.arrived)
  if ticket.is_stored then pool.settle_steps(ticket.sequence, not ticket.times and overtaken) end
  call('HSET', pool.replica_key(ticket.owner), ticket.id,
    pool.lease_record(level, ticket.tokens, ticket.requests, excess, excess > 0 and now or 0, ticket.is_stored and text))
  ticket.is_admitted = true
  pool.grant(ticket.owner, text)
end

end

-- Made where some tier is preemptible: else no call pays for it.
local function define_preemption()

-- -- preemption: the twin of `scheduling/preemption.py`

function pool.takeable_key(level) return prefix .. 'p:' .. level end

-- How a lease of a preemptible tier had waited. A sequence of 0: it was stated, and the store does not know.
function pool.recall(lease)
  local text = call('HGET', prefix .. 'v', lease.owner .. ' ' .. lease.id)
  if not text then return false end
  local sequence, arrived, times, overtaken, served = match(text, '^(%d+) (%d+) (%d+) (%-?%d+) ?(.*)$')
  lease.sequence, lease.arrived, lease.times = tonumber(sequence), tonumber(arrived), tonumber(times)
  lease.served = served
  if overtaken ~= '-1' then lease.overtaken = tonumber(overtaken) end
  return true
end

function pool.remember(lease, times, overtaken, served)
  call('HSET', prefix .. 'v', lease.owner .. ' ' .. lease.id,
    fmt('%.0f %.0f %.0f %.0f ', lease.sequence, lease.arrived, times, overtaken or -1) .. served)
end

-- A lease of a preemptible tier begins: its wait goes on where it was if it is preempted, and it was not served before
-- itself.
function pool.may_return(ticket, overtaken)
  local level, served = ticket.level, {}
  if ticket.served then
    for text in string.gmatch(ticket.served, '%d+') do served[#served + 1] = text end
  else
    for other = 0, levels - 1 do served[other + 1] = pool.int(tiers[other][SERVED] - (served_since[other] or 0)) end
  end
  served[level + 1] = pool.int(tonumber(served[level + 1]) + ticket.tokens)
  pool.remember(ticket, ticket.times or 0, overtaken, concat(served, ' '))
  call('ZADD', pool.takeable_key(level), pool.int(tiers[level][ADMITTED]), ticket.owner .. ' ' .. ticket.id)
end

function pool.keep_lease(id, level)
  local member = me .. ' ' .. id
  call('ZREM', pool.takeable_key(level), member)
  call('HDEL', prefix .. 'c', member)
end

-- A lease is over.
function pool.forget_preemption(owner, id, level)
  local member = owner .. ' ' .. id
  if call('HDEL', prefix .. 'v', member) == 1 then
    call('ZREM', pool.takeable_key(level), member)
    call('HDEL', prefix .. 'c', member)
  end
end

function pool.forget_all_preemption()
  call('DEL', prefix .. 'v', prefix .. 'c')
  for level = 0, levels - 1 do call('DEL', pool.takeable_key(level)) end
end

-- Whether the store has not heard yet that this lease was preempted for the so-many-th time.
function pool.is_before_return(id, record, times)
  local lease = {owner = me, id = id}
  return string.sub(record, 1, 1) == 'L' and (not pool.recall(lease) or lease.times < times)
end

-- An operation, or a statement: a lease gives its room back and waits again, at the front of its tier. What the store
-- does not know of it the replica says.
function pool.requeue(index)
  local id, level, times = ARGV[index + 1], tonumber(ARGV[index + 2]), tonumber(ARGV[index + 8])
  local record = call('HGET', mine, id)
  if record and not pool.is_before_return(id, record, times) then return end
  local ticket = {
    id = id, owner = me, level = level, tokens = tonumber(ARGV[index + 5]), requests = tonumber(ARGV[index + 6]),
    tenant = ARGV[index + 3], weight = tonumber(ARGV[index + 4]),
  }
  if not pool.recall(ticket) or ticket.sequence == 0 then
    local served = {}
    for other = 0, levels - 1 do served[other + 1] = pool.int(tiers[other][SERVED]) end
    ticket.sequence, ticket.arrived = pool.next_sequence(), now - tonumber(ARGV[index + 7])
    ticket.served = concat(served, ' ')
  end
  if record then pool.end_record(me, id, record) end
  ticket.times, ticket.overtaken = times, ticket.overtaken or now
  pool.put_back(ticket)
end

function pool.put_back(ticket)
  local level, tier = ticket.level, tiers[ticket.level]
  tier[QUEUED], tier[QUEUED_TOKENS] = tier[QUEUED] + 1, tier[QUEUED_TOKENS] + ticket.tokens
  meta[WAITING] = meta[WAITING] + 1
  is_changed[level], heads[level] = true, nil
  ticket.start = tier[VIRTUAL]
  pool.store_head(ticket)
  call('HSET', mine, ticket.id,
    pool.ticket_text(ticket, ticket.served .. fmt(';%.0f %.0f', ticket.times, ticket.overtaken)))
end

-- Books leases out (-1) or in: what would be if they were gone.
function pool.book(leases, sign)
  for _, lease in ipairs(leases) do
    local tier, tokens, requests = tiers[lease.level], sign * lease.tokens, sign * lease.requests
    tier[HELD_TOKENS], tier[HELD_REQUESTS] = tier[HELD_TOKENS] + tokens, tier[HELD_REQUESTS] + requests
    all_tokens, all_requests = all_tokens + tokens, all_requests + requests
  end
end

function pool.lease_of(member)
  local owner, id = match(member, '^(%S+) (%S+)$')
  local level, tokens, requests = pool.read_lease(call('HGET', pool.replica_key(owner), id) or '')
  if not level then return pool.damaged() end
  return {owner = owner, id = id, member = member, level = level, tokens = tokens, requests = requests}
end

function pool.leaving()
  local found = {}
  for _, member in ipairs(call('HKEYS', prefix .. 'c')) do found[#found + 1] = pool.lease_of(member) end
  return found
end

-- Whether a ticket of a tier that has its reserve comes before the ticket that is served.
function pool.stands_before(level, ticket, served)
  return pool.is_before({rank = RANK_OTHER, turn = 0, score = pool.aged_score(level, ticket), ticket = ticket}, served)
end

-- The most that one of a tier could ever be given.
function pool.largest(level)
  local rule, highest = rules[FIRST_RULE + level], level
  if rules[PROMOTE_AFTER] > 0 then highest = math.min(level, rules[CEILING]) end
  local tokens, requests = rules[CAPACITY_TOKENS], rules[CAPACITY_REQUESTS]
  for other = 0, highest - 1 do
    tokens, requests = tokens - rules[FIRST_RULE + other][H_TOKENS], requests - rules[FIRST_RULE + other][H_REQUESTS]
  end
  return math.min(rule[L_TOKENS], tokens), math.min(rule[L_REQUESTS], requests)
end

function pool.gives(level, served)
  if rules[FIRST_RULE + level][PREEMPTIONS] == 0 then return false end
  if tiers[level][QUEUED] == 0 then return true end
  local second = pool.second_head(level)
  return not pool.stands_before(level, pool.head_of(level), served)
    and not (second and pool.stands_before(level, second, served))
end

function pool.is_takeable(lease, most_tokens, most_requests, served)
  local rule, tier = rules[FIRST_RULE + lease.level], tiers[lease.level]
  local has_its_reserve = rule[ALWAYS_FIRST] == 0 and (tier[HELD_TOKENS] - lease.tokens >= rule[R_TOKENS]
    or tier[HELD_REQUESTS] - lease.requests >= rule[R_REQUESTS])
  if not has_its_reserve or lease.tokens > most_tokens or lease.requests > most_requests then return false end
  if not pool.recall(lease) then return pool.damaged() end
  return lease.times < rule[PREEMPTIONS] and not pool.stands_before(lease.level, lease, served)
end

-- Whether the last of the candidates would be admitted, and those before it that would not be hold nothing up.
function pool.all_fit(order)
  local admitted, is_in = {}, false
  for _, candidate in ipairs(order) do
    is_in = pool.fits(candidate.ticket, candidate.score)
    if is_in then
      admitted[#admitted + 1] = candidate.ticket
      pool.book({candidate.ticket}, 1)
    elseif pool.holds_its_place(candidate) then
      break
    end
  end
  pool.book(admitted, -1)
  return is_in and admitted[#admitted] == order[#order].ticket
end

-- Books out the leases that the candidates need. Returns them, and whether they are enough.
function pool.take(order)
  local chosen, served = {}, order[#order]
  for level = levels - 1, served.ticket.level + 1, -1 do
    if pool.gives(level, served) then
      local most_tokens, most_requests = pool.largest(level)
      for _, member in ipairs(call('ZREVRANGE', pool.takeable_key(level), 0, -1)) do
        local lease = pool.lease_of(member)
        if pool.is_takeable(lease, most_tokens, most_requests, served) then
          chosen[#chosen + 1] = lease
          pool.book({lease}, -1)
          if pool.all_fit(order) then return chosen, true end
        end
      end
    end
  end
  return chosen, false
end

-- Spares those without whom the candidates fit as well, the last chosen first. None of them is booked out any more.
function pool.needed(chosen, order)
  local needed = {}
  for index = #chosen, 1, -1 do
    local lease = chosen[index]
    pool.book({lease}, 1)
    if not pool.all_fit(order) then
      pool.book({lease}, -1)
      table.insert(needed, 1, lease)
    end
  end
  pool.book(needed, 1)
  return needed
end

function pool.choose(order)
  local leaving, needed = pool.leaving(), {}
  pool.book(leaving, -1)
  if not pool.all_fit(order) then
    local chosen, is_enough = pool.take(order)
    if is_enough then needed = pool.needed(chosen, order) else pool.book(chosen, 1) end
  end
  pool.book(leaving, 1)
  return needed
end

-- Whether any head waits that could preempt, before the order is looked at.
function pool.may_preempt()
  if meta[WAITING] == 0 or (now < meta[BACK_UNTIL] and all_requests > 0) or pool.is_on_hold() then return false end
  for level = 0, levels - 1 do
    if tiers[level][QUEUED] > 0 and rules[FIRST_RULE + level][PREEMPT_AFTER] >= 0 then return true end
  end
  return false
end

-- The candidates up to the first that has waited long enough, nil where there is none.
function pool.up_to_the_served()
  local order = {}
  for _, candidate in ipairs(pool.in_order()) do
    order[#order + 1] = candidate
    local after = rules[FIRST_RULE + candidate.ticket.level][PREEMPT_AFTER]
    if after >= 0 and now - candidate.ticket.arrived >= after then return order end
  end
end

-- The first in order that has waited long enough is given the room of others, with every ticket before it: the leases
-- are told, and hold their room until they say that their engines have released them.
function pool.preempt()
  if not pool.may_preempt() then return end
  local order = pool.up_to_the_served()
  if not order then return end
  for _, lease in ipairs(pool.choose(order)) do
    call('ZREM', pool.takeable_key(lease.level), lease.member)
    call('HSET', prefix .. 'c', lease.member, lease.level)
    pool.grant(lease.owner, '!' .. lease.id .. ' ' .. pool.int(lease.times))
  end
end

function pool.next_preemption(soonest)
  for level = 0, levels - 1 do
    local after = rules[FIRST_RULE + level][PREEMPT_AFTER]
    if after >= 0 and tiers[level][QUEUED] > 0 then
      for _, head in ipairs({pool.head_of(level), pool.second_head(level)}) do
        local change = head.arrived + after - now
        if change > 0 and (soonest < 0 or change < soonest) then soonest = change end
      end
    end
  end
  return soonest
end

end

-- -- tenants' own limits: the twin of `scheduling/allowance.py`. Made only where a call has to do with them.

local function define_limits()

local UNIT, FULLEST = 60000000, 9007199254740991
local accounts_key, accounts = prefix .. 'a', {}

-- Of a limit that there is none of, nothing stays.
function pool.drain(account)
  local elapsed = math.max(0, now - account.at)
  account.requests = math.max(0, account.requests - elapsed * (account.rpm > 0 and account.rpm or FULLEST))
  account.tokens = math.max(0, account.tokens - elapsed * (account.tpm > 0 and account.tpm or FULLEST))
  account.at = math.max(account.at, now)
end

function pool.account(tenant)
  local account = accounts[tenant]
  if not account then
    local figures = {}
    for figure in string.gmatch(call('HGET', accounts_key, tenant) or '', '%S+') do
      figures[#figures + 1] = tonumber(figure)
    end
    account = {
      requests = figures[1] or 0, tokens = figures[2] or 0, at = figures[3] or now, concurrent = figures[4] or 0,
      refunded = figures[5] or 0, mean = figures[6] or 0, rpm = figures[7] or -1, tpm = figures[8] or -1,
    }
    accounts[tenant] = account
    pool.drain(account)
  end
  return account
end

function pool.is_at_rest(account)
  return account.concurrent == 0 and account.requests == 0 and account.tokens == 0
end

function pool.save_accounts()
  for tenant, account in pairs(accounts) do
    if account.is_forgotten or (pool.is_at_rest(account) and account.mean == 0 and account.refunded == 0) then
      call('HDEL', accounts_key, tenant)
    else
      call('HSET', accounts_key, tenant, fmt('%.0f %.0f %.0f %.0f %.0f %.0f %.0f %.0f', account.requests, account.tokens,
        account.at, account.concurrent, account.refunded, account.mean, account.rpm, account.tpm))
    end
  end
end

-- Some of those that may be back at rest, at every beat: so memory is bounded, and no call looks at all of them.
function pool.forget_accounts(tenants)
  for _, tenant in ipairs(tenants) do
    local account = pool.account(tenant)
    account.is_forgotten = pool.is_at_rest(account)
  end
end

-- Microseconds until it conforms, -1 for never, nil where it does now.
function pool.wait_for(per_minute, capacity, level, cost)
  if per_minute < 0 or level <= capacity - cost then return nil end
  if cost > capacity then return -1 end
  return math.ceil((level - (capacity - cost)) / per_minute)
end

-- What it is over for longest: t, r or c, and for how long.
function pool.over(account, tokens, most, burst)
  local worst, after
  local function consider(limit, us)
    if us and (not after or (us < 0 and FULLEST or us) > (after < 0 and FULLEST or after)) then worst, after = limit, us end
  end
  consider('t', pool.wait_for(account.tpm, account.tpm * burst, account.tokens, tokens * UNIT))
  consider('r', pool.wait_for(account.rpm, math.max(UNIT, account.rpm * burst), account.requests, UNIT))
  if most >= 0 and account.concurrent >= most then consider('c', math.floor(account.mean / most)) end
  return worst, after
end

function pool.left_text(account, burst)
  local function left(per_minute, capacity, level)
    if per_minute < 0 then return '-1 -1' end
    return fmt('%.0f %.0f', math.floor(math.max(0, capacity - level) / UNIT), math.ceil(level / per_minute))
  end
  return left(account.rpm, math.max(UNIT, account.rpm * burst), account.requests) .. ' '
    .. left(account.tpm, account.tpm * burst, account.tokens)
end

function pool.charge(account, tenant, tokens)
  account.concurrent = account.concurrent + 1
  if account.rpm > 0 then account.requests = math.min(FULLEST, account.requests + UNIT) end
  if account.tpm > 0 then account.tokens = math.min(FULLEST, account.tokens + tokens * UNIT) end
  return fmt('%s %.0f %.0f %.0f %.0f %.0f', tenant, tokens, account.at, math.max(0, account.tpm), account.tokens,
    account.refunded)
end

-- In the very call that charged it.
function pool.undo(account, tokens)
  account.concurrent = account.concurrent - 1
  if account.rpm > 0 then account.requests = math.max(0, account.requests - UNIT) end
  if account.tpm > 0 then account.tokens = math.max(0, account.tokens - tokens * UNIT) end
end

function pool.settle_tokens(account, tokens, used, drained_since, level, refunded, rate)
  local over = math.min(used, math.floor(FULLEST / UNIT)) - tokens
  if over >= 0 then
    account.tokens = math.min(FULLEST, account.tokens + over * UNIT)
    return
  end
  local drained = rate * math.max(0, account.at - drained_since)
  local refund = math.min(-over * UNIT, level - (account.refunded - refunded) * UNIT - drained, account.tokens)
  if refund > 0 then
    account.tokens, account.refunded = account.tokens - refund, account.refunded + math.ceil(refund / UNIT)
  end
end

-- `used` is -1 where nobody knows: the estimate stands.
function pool.correct(charge, used, was_held)
  local tenant, tokens, at, per_minute, level, refunded = match(charge, '^(%S+) (%d+) (%d+) (%d+) (%d+) (%d+)$')
  local account = pool.account(tenant)
  tokens, at, per_minute = tonumber(tokens), tonumber(at), tonumber(per_minute)
  account.concurrent = math.max(0, account.concurrent - 1)
  if was_held then
    local took = math.max(0, now - at)
    account.mean = account.mean > 0 and account.mean + math.floor((took - account.mean) / 8) or took
  end
  if account.tpm > 0 and per_minute > 0 then
    pool.settle_tokens(account, tokens, used < 0 and tokens or used, at, tonumber(level), tonumber(refunded),
      math.max(per_minute, account.tpm))
  end
  if pool.is_at_rest(account) then account.mean, account.refunded = 0, 0 end
end

function pool.correct_own(id, used)
  local key = prefix .. 'm:' .. me
  local charge = call('HGET', key, id)
  if not charge then return end
  local is_lease = pool.is_lease_record(call('HGET', mine, id) or nil)
  call('HDEL', key, id)
  pool.correct(charge, is_lease and used or 0, is_lease)
end

function pool.correct_lost(charge, record)
  local is_lease = pool.is_lease_record(record)
  pool.correct(charge, is_lease and -1 or 0, is_lease)
end

-- It counts as one of its tenant's that run or wait; what it was charged is known here, or lost with the store.
function pool.restate(id, tenant)
  local key = prefix .. 'm:' .. me
  if call('HEXISTS', key, id) == 1 then return end
  local account = pool.account(tenant)
  account.concurrent = account.concurrent + 1
  call('HSET', key, id, fmt('%s 0 %.0f 0 0 0', tenant, now))
end

function pool.meter(index, promised)
  local id, tenant = ARGV[index + 1], ARGV[index + 3]
  if call('HEXISTS', mine, id) == 1 then return end
  local figure = {}
  for place = 2, 11 do figure[place] = tonumber(ARGV[index + place]) end
  local level, tokens, burst, lower = figure[2], figure[5], figure[10], figure[11]
  local account = pool.account(tenant)
  account.rpm, account.tpm = figure[7], figure[8]
  local over, after = pool.over(account, tokens, figure[9], burst)
  if over and lower < 0 then
    pool.verdicts[#pool.verdicts + 1] = fmt('%s o %s %.0f ', id, over, after) .. pool.left_text(account, burst)
    return
  end
  local charge, before = nil, #refused
  if over then level = math.max(level, lower) else charge = pool.charge(account, tenant, tokens) end
  pool.enter(id, level, tenant, figure[4], tokens, figure[6], promised)
  if #refused > before then
    if charge then pool.undo(account, tokens) end
  elseif charge then
    call('HSET', prefix .. 'm:' .. me, id, charge)
  end
  pool.verdicts[#pool.verdicts + 1] = fmt('%s %s %d ', id, over and 'd' or 'w', level) .. pool.left_text(account, burst)
end

end

local function define_operations()

function pool.know_preemption()
  if not pool.preempt then define_preemption() end
end

function pool.heed_rules()
  levels, preempts = #rules - FIRST_RULE + 1, false
  for level = 0, levels - 1 do
    if rules[FIRST_RULE + level][PREEMPTIONS] > 0 then preempts = true end
  end
  if preempts then pool.know_preemption() end
end

function pool.limits()
  if not pool.meter then define_limits() end
  return pool
end

-- -- replicas that are still to say what they hold, after the store was lost or silent

-- How many replicas may be alive: one that an empty store has not heard of counts as long as one that is silent.
function pool.expected()
  return now < meta[ABSENT_UNTIL] and math.max(meta[HOLD_FOR], meta[REPLICAS]) or meta[REPLICAS]
end

-- How many of those the store knows nothing of.
function pool.unheard()
  if now >= meta[ABSENT_UNTIL] then return 0 end
  return math.max(0, meta[HOLD_FOR] - call('ZCOUNT', beats, pool.int(meta[HOLD_SINCE]), '+inf'))
end

-- An empty store admits nothing before `replicas` have stated their leases, or had a heartbeat's time for it.
function pool.expect(replicas, from)
  meta[HOLD_SINCE], meta[HOLD_FOR] = meta[BIRTH], replicas
  meta[HOLD_UNTIL], meta[ABSENT_UNTIL] = from + BEAT_US, from + SILENCE_US
end

-- The same in one that was silent: what it has of the replicas is older than what they run.
function pool.wait_for_all()
  local expected = pool.expected()
  if now < meta[ABSENT_UNTIL] then meta[ABSENT_UNTIL] = now + SILENCE_US end
  meta[HOLD_SINCE], meta[HOLD_UNTIL], meta[HOLD_FOR] = now, now + BEAT_US, expected
end

function pool.is_on_hold()
  if meta[HOLD_UNTIL] == 0 then return false end
  if now >= meta[HOLD_UNTIL] or (meta[STATING] == 0
    and call('ZCOUNT', beats, pool.int(meta[HOLD_SINCE]), '+inf') >= meta[HOLD_FOR]) then
    meta[HOLD_UNTIL] = 0
    return false
  end
  return true
end

-- The parts of those that were not heard of stay free: they may admit to them.
function pool.spare_parts()
  local unheard = pool.unheard()
  if unheard == 0 then return end
  for _, dimension in ipairs({CAPACITY_TOKENS, CAPACITY_REQUESTS}) do
    rules[dimension] = rules[dimension] - unheard * math.floor(rules[dimension] / meta[HOLD_FOR])
  end
end

function pool.dispatch()
  if meta[WAITING] == 0 or pool.is_on_hold() then return end
  while meta[WAITING] > 0 and all_tokens < rules[CAPACITY_TOKENS] and all_requests < rules[CAPACITY_REQUESTS] do
    local candidate = pool.next_admission()
    if not candidate then return end
    if candidate.ticket.is_dead then
      pool.discard(candidate.ticket)
    else
      pool.admit(candidate)
    end
  end
end

-- -- operations

function pool.next_sequence()
  meta[SEQUENCE] = meta[SEQUENCE] + 1
  return meta[SEQUENCE]
end

-- How many tickets of a tenant wait, and the weights of all tenants that wait and of this one.
function pool.weights_with(level, tenant, weight)
  local lane = pool.lane_of(level, tenant)
  return lane.waiting, tiers[level][WEIGHTS] + weight - (lane.waiting > 0 and lane.weight or 0)
end

-- The tenant that is furthest above its share of a queue's places, the first by name of those equally far.
function pool.furthest_above(level, weights, places)
  local most, found, lane_found = 0, nil, nil
  local entries = call('HGETALL', pool.finish_key(level))
  for index = 1, #entries, 2 do
    local tenant, lane = entries[index], pool.read_lane(entries[index + 1])
    local excess = lane.waiting * weights - places * lane.weight
    if lane.waiting > 0 and excess > 0 and (excess > most or (excess == most and tenant < found)) then
      most, found, lane_found = excess, tenant, lane
    end
  end
  return found, lane_found
end

-- The newest ticket of a tenant, but for those that were preempted.
function pool.newest_of(level, tenant, lane)
  if lane.waiting > 1 then
    local found = call('ZREVRANGEBYLEX', pool.lane_key(level), '(' .. tenant .. '!', '[' .. tenant .. ' ', 'LIMIT', 0, 1)
    return found[1] and pool.read_member(level, string.sub(found[1], #tenant + 2)) or pool.damaged()
  end
  for _, key in ipairs({pool.queue_key(level), pool.large_key(level)}) do
    for _, member in ipairs(call('ZRANGE', key, 0, -1)) do
      local ticket = pool.read_member(level, member)
      if ticket.tenant == tenant then
        local record = call('HGET', pool.replica_key(ticket.owner), ticket.id)
        if not record then return pool.damaged() end
        if not pool.read_ticket(ticket.owner, ticket.id, record).times then return ticket end
      end
    end
  end
  return pool.damaged()
end

-- Takes a place in a full queue from a tenant.
function pool.displace(level, tenant, lane)
  local ticket = pool.newest_of(level, tenant, lane)
  local key, charges = pool.replica_key(ticket.owner), prefix .. 'm:' .. ticket.owner
  local record, charge = call('HGET', key, ticket.id), call('HGET', charges, ticket.id)
  if not record then return pool.damaged() end
  call('HDEL', key, ticket.id)
  pool.withdraw(pool.read_ticket(ticket.owner, ticket.id, record))
  if charge then
    call('HDEL', charges, ticket.id)
    pool.limits().correct_lost(charge, nil)
  end
  pool.grant(ticket.owner, '-' .. ticket.id)
end

-- Whether a newcomer finds a place. `promised`: the free places are promised to other requests, so many to its tenant.
function pool.finds_place(level, tenant, weight, places, promised)
  local is_full = tiers[level][QUEUED] >= places
  if not is_full and not promised then return true end
  local waiting, weights = pool.weights_with(level, tenant, weight)
  if (waiting + (is_full and 0 or promised) + 1) * weights > places * weight then return false end
  if not is_full then return true end
  local above, lane = pool.furthest_above(level, weights, places)
  if above then pool.displace(level, above, lane) end
  return above ~= nil
end

function pool.enter(id, level, tenant, weight, tokens, requests, promised)
  local places = rules[FIRST_RULE + level][PLACES]
  if call('HEXISTS', mine, id) == 1 then return end
  if stage ~= '' then pool.note_stated(id) end
  if places > 0 and not pool.finds_place(level, tenant, weight, places, promised) then
    refused[#refused + 1] = id
    return
  end
  if next(served_since) then served_since = {} end
  local ticket = {
    id = id, owner = me, level = level, tokens = tokens, requests = requests, sequence = pool.next_sequence(), arrived = now,
  }
  pool.push(ticket, tenant, weight)
  pool.dispatch()
  if ticket.is_admitted then return end
  if places == 0 then -- a tier that never queues: at once, or not at all
    if ticket.is_stored then call('HDEL', mine, id) end
    local overtaken = pool.overtaken_at(ticket.sequence)
    pool.remove(ticket)
    pool.settle_steps(ticket.sequence, overtaken)
    refused[#refused + 1] = id
    pool.dispatch()
  elseif not ticket.is_stored then
    pool.store(ticket)
  end
end

-- A lease is over: its tier owes for it what it held too much of.
function pool.free(owner, id, record)
  local level, tokens, requests, _, excess, admitted = pool.read_lease(record)
  pool.hold(level, -tokens, -requests)
  meta[LEASES] = meta[LEASES] - 1
  if excess > 0 then
    local owed = excess * math.max(0, now - admitted)
    tiers[level][OWES_UNTIL] = math.min(LATEST_US, math.max(now, tiers[level][OWES_UNTIL]) + owed)
  end
  if went == owner .. ' ' .. id then went = false end
  return level
end

function pool.withdraw(ticket)
  local figures, overtaken = pool.wait_text(ticket, ticket.level)
  pool.remove(ticket)
  pool.settle_steps(ticket.sequence, not ticket.times and overtaken)
  return figures
end

-- Ends what a record of some replica says. Returns how it had waited, where it did.
function pool.end_record(owner, id, record)
  if string.sub(record, 1, 1) == 'L' then
    local level = pool.free(owner, id, record)
    if preempts then pool.forget_preemption(owner, id, level) end
    return nil
  end
  return pool.withdraw(pool.read_ticket(owner, id, record))
end

function pool.finish(id)
  local record = call('HGET', mine, id)
  if not record then
    meta[LATE] = meta[LATE] + 1
    return
  end
  call('HDEL', mine, id)
  local figures = pool.end_record(me, id, record)
  if figures then ended[#ended + 1] = id .. ' ' .. figures end
  pool.dispatch()
end

function pool.resize(id, tokens)
  local record = call('HGET', mine, id)
  local level, held, requests, text, excess, admitted = pool.read_lease(record or '')
  if not level then return end
  pool.hold(level, tokens - held, 0)
  call('HSET', mine, id, pool.lease_record(level, tokens, requests, excess, admitted, text))
  pool.dispatch()
end

function pool.operate(index)
  while ARGV[index] do
    local operation, id = ARGV[index], ARGV[index + 1]
    if operation == 'e' or operation == 'E' then
      pool.enter(id, tonumber(ARGV[index + 2]), ARGV[index + 3], tonumber(ARGV[index + 4]), tonumber(ARGV[index + 5]),
        tonumber(ARGV[index + 6]), operation == 'E' and tonumber(ARGV[index + 7]))
      index = index + (operation == 'E' and 8 or 7)
    elseif operation == 'm' or operation == 'M' then
      pool.limits().meter(index, operation == 'M' and tonumber(ARGV[index + 12]))
      index = index + (operation == 'M' and 13 or 12)
    elseif operation == 'u' then
      pool.limits().correct_own(id, tonumber(ARGV[index + 2]))
      pool.finish(id)
      index = index + 3
    elseif operation == 'x' then
      pool.finish(id)
      index = index + 2
    elseif operation == 'k' then
      if preempts then pool.keep_lease(id, tonumber(ARGV[index + 2])) end
      index = index + 3
    elseif operation == 'p' then
      pool.know_preemption()
      pool.requeue(index)
      index = index + 9
    elseif operation == 'b' then
      meta[BACK_UNTIL] = now + tonumber(id)
      pool.dispatch()
      index = index + 2
    elseif operation ~= 'z' then
      index = pool.hear_statement(operation, index)
    else
      pool.resize(id, tonumber(ARGV[index + 2]))
      index = index + 3
    end
  end
end

end

local function define_replicas()

-- -- replicas

-- A dead replica, one that said good-bye, has no fence any more. What it had is ended in slices: its leases first, then
-- its tickets, then what else it was charged. A ticket of it that comes first in order is ended there and then.

function pool.is_dead(owner)
  if meta[DEAD] == 0 then return false end
  if pool.dead[owner] == nil then pool.dead[owner] = call('HEXISTS', prefix .. 'd', owner) == 1 end
  return pool.dead[owner]
end

-- Whether a head is a dead replica's: the live tickets of its tenant are not known before it is ended.
function pool.is_any_head_dead()
  if meta[DEAD] == 0 then return false end
  for level = 0, levels - 1 do
    if tiers[level][QUEUED] > 0 and pool.head_of(level).is_dead then return true end
  end
  return false
end

-- Ends a record of a replica, and what it was charged.
function pool.lose(owner, id, record)
  local charges = prefix .. 'm:' .. owner
  local charge = call('HGET', charges, id)
  if charge then
    call('HDEL', charges, id)
    pool.limits().correct_lost(charge, record)
  end
  call('HDEL', pool.replica_key(owner), id)
  pool.end_record(owner, id, record)
end

function pool.may_discard() return pool.discarded < DISCARDED end

function pool.discard(ticket)
  pool.discarded = pool.discarded + 1
  local record = call('HGET', pool.replica_key(ticket.owner), ticket.id)
  if not record then return pool.damaged() end
  pool.lose(ticket.owner, ticket.id, record)
end

-- Ends some of what a replica had, but for what is in its set of stated ids. PHASE is 1 for leases, 2 for every record,
-- 3 for what was charged without one; it is repeated until it finds nothing. Returns where to go on, nil at the end.
function pool.end_some(replica, text)
  local phase, cursor, ended_before = match(text, '^(%d) (%d+) (%d+)$')
  local spared, charges = prefix .. 'k:' .. replica, prefix .. 'm:' .. replica
  local key = phase == '3' and charges or pool.replica_key(replica)
  local found = call('HSCAN', key, cursor, 'COUNT', phase == '2' and LEFT or SEEN)
  local entries, count = found[2], tonumber(ended_before)
  pool.left = pool.left - #entries / 2 * LEFT / SEEN / 2 - 1
  for index = 1, #entries, 2 do
    local id, record = entries[index], entries[index + 1]
    if id ~= '#' and (phase ~= '1' or string.sub(record, 1, 1) == 'L') and call('SISMEMBER', spared, id) == 0 then
      if pool.left <= 0 then return concat({phase, cursor, pool.int(count)}, ' ') end
      pool.left, count = pool.left - 1, count + 1
      if phase == '3' then
        call('HDEL', charges, id)
        pool.limits().correct_lost(record, nil)
      else
        pool.lose(replica, id, record)
      end
    end
  end
  if found[1] ~= '0' then return concat({phase, found[1], pool.int(count)}, ' ') end
  if count > 0 then return phase .. ' 0 0' end
  return phase ~= '3' and tonumber(phase) + 1 .. ' 0 0' or nil
end

function pool.end_dead()
  if meta[DEAD] == 0 or now < meta[SLICE_AT] then return end
  local key = prefix .. 'd'
  while meta[DEAD] > 0 and pool.left > 0 do
    local replica = call('HRANDFIELD', key, 1)[1]
    if not replica then return pool.damaged() end
    local text = call('HGET', key, replica)
    while text and pool.left > 0 do text = pool.end_some(replica, text) end
    if text then
      call('HSET', key, replica, text)
    else
      call('HDEL', key, replica)
      call('DEL', pool.outbox_key(replica))
      meta[DEAD] = meta[DEAD] - 1
      pool.dead = {}
    end
  end
  meta[SLICE_AT] = now + PAUSE_US
end

function pool.drop(replica)
  local key = pool.replica_key(replica)
  local _, states = pool.read_fence(call('HGET', key, '#'))
  if states == 'l' then meta[STATING] = meta[STATING] - 1 end
  call('HDEL', key, '#')
  call('DEL', pool.outbox_key(replica), prefix .. 'k:' .. replica)
  call('ZREM', beats, replica)
  meta[REPLICAS] = call('ZCARD', beats)
  call('HSET', prefix .. 'd', replica, '1 0 0')
  meta[DEAD], meta[SLICE_AT], pool.dead, heads = meta[DEAD] + 1, 0, {}, {}
end

-- Notes that this replica lives. Its beats do; a plain call does where the pool waits to hear of everybody.
function pool.beat()
  call('ZADD', beats, pool.int(now), me)
  meta[REPLICAS] = call('ZCARD', beats)
end

-- Looks for silent replicas when the longest silence of all, as it stood at the last look, would have lasted too long.
function pool.drop_silent()
  while now >= meta[GRACE] and now >= meta[SWEEP] do
    local oldest = call('ZRANGE', beats, 0, 0, 'WITHSCORES')
    if not oldest[1] or oldest[1] == me then
      pool.beat()
      oldest = call('ZRANGE', beats, 0, 0, 'WITHSCORES')
    end
    meta[SWEEP] = tonumber(oldest[2]) + SILENCE_US
    if now >= meta[SWEEP] then pool.drop(oldest[1]) end
  end
end

function pool.publish()
  for owner, texts in pairs(outbox) do
    for index = 1, #texts, 1000 do -- `unpack` has a limit
      call('RPUSH', pool.outbox_key(owner), unpack(texts, index, math.min(#texts, index + 999)))
    end
    call('PUBLISH', root .. ':grants:' .. owner, concat(texts, '\n'))
  end
end

function pool.keep()
  call('PEXPIRE', root, KEPT_MS)
  for _, name in ipairs({'beats', 'w', 's', 'v', 'c', 'a', 'd', 'k:' .. me, 'r:' .. me, 'o:' .. me, 'm:' .. me}) do
    call('PEXPIRE', prefix .. name, KEPT_MS)
  end
  for level = 0, levels - 1 do
    call('PEXPIRE', pool.queue_key(level), KEPT_MS)
    call('PEXPIRE', pool.large_key(level), KEPT_MS)
    call('PEXPIRE', pool.lane_key(level), KEPT_MS)
    call('PEXPIRE', pool.finish_key(level), KEPT_MS)
    if preempts then call('PEXPIRE', pool.takeable_key(level), KEPT_MS) end
  end
end

-- -- whose pool it is

function pool.create(expected)
  meta = {}
  for field = 1, META_FIELDS do meta[field] = 0 end
  meta[BIRTH] = clock_us()
  meta[NOW], went = meta[BIRTH], false
  rules_text, rules, tiers, heads, lanes = ARGV[5], cjson.decode(ARGV[5]), {}, {}, {}
  all_tokens, all_requests = 0, 0
  pool.heed_rules()
  for level = 0, levels - 1 do tiers[level] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0} end
  if expected > 0 then pool.expect(expected, meta[BIRTH]) end
  call('DEL', root)
  call('HSET', root, 'rules', rules_text)
  pool.name_keys()
end

-- Whether any replica lives. The store's own silence is not theirs.
function pool.is_inhabited()
  if call('ZCARD', beats) == 0 then return false end
  pool.tell_time()
  return now < meta[GRACE] or call('ZCOUNT', beats, '(' .. pool.int(now - SILENCE_US), '+inf') > 0
end

-- nil, or the answer to a replica that cannot share the pool: one with another ladder of tiers, while replicas live.
function pool.agree_on_rules()
  local brings = tonumber(ARGV[6])
  if not pool.load() then
    if brings < 0 then return {'absent'} end
    return pool.create(tonumber(ARGV[4]))
  end
  if rules_text == ARGV[5] then return nil end
  local theirs = cjson.decode(ARGV[5])
  if concat(theirs[NAMES], ' ') ~= concat(rules[NAMES], ' ') then
    if brings == 2 then return pool.create(meta[REPLICAS]) end
    if not pool.is_inhabited() then return pool.create(0) end
    pool.save(false)
    return {'foreign', concat(rules[NAMES], ' ')}
  end
  if brings ~= 0 then
    local before = rules
    rules_text, rules = ARGV[5], theirs
    pool.heed_rules()
    for level = 0, levels - 1 do
      local rule, old = rules[FIRST_RULE + level], before[FIRST_RULE + level]
      if rule[R_TOKENS] ~= old[R_TOKENS] or rule[R_REQUESTS] ~= old[R_REQUESTS] then pool.sort_heads(level) end
    end
    if not preempts then
      pool.know_preemption()
      pool.forget_all_preemption()
    end
    call('HSET', root, 'rules', rules_text)
  end
end

-- -- a replica states what it has: its leases, then its tickets, in as many calls as it likes

-- Its fence, and after that what it is stating: 'l' leases, 't' tickets, 'd PHASE CURSOR ENDED' nothing more: what it did
-- not name is being ended. Until then the ids of those that it stated, or that came meanwhile, are kept.
function pool.read_fence(text)
  local number = tonumber(text)
  if number then return number, '' end
  local fence_text, states = match(text or '', '^(%d+) (.*)$')
  return tonumber(fence_text), states or ''
end

function pool.set_stage(states)
  if stage == 'l' then meta[STATING] = meta[STATING] - 1 end
  if states == 'l' then meta[STATING] = meta[STATING] + 1 end
  stage = states
  call('HSET', mine, '#', states == '' and pool.int(fence) or pool.int(fence) .. ' ' .. states)
end

function pool.note_stated(id) call('SADD', prefix .. 'k:' .. me, id) end

-- A replica comes that the pool does not know. A young store may be told of more replicas than it knew of; one that is
-- older has had the time to hear of all.
function pool.join()
  local knew = tonumber(ARGV[4])
  if knew == 0 then
    meta[NEWCOMERS] = meta[NEWCOMERS] + 1
    if now < meta[ABSENT_UNTIL] then meta[HOLD_FOR] = meta[HOLD_FOR] + 1 end
  elseif now - meta[BIRTH] < SILENCE_US and knew + meta[NEWCOMERS] > meta[HOLD_FOR] then
    pool.expect(knew + meta[NEWCOMERS], now)
  end
end

-- False for a late call. Its records stay as they are until it states them anew, or has stated everything.
function pool.begin()
  local before, states = pool.read_fence(call('HGET', mine, '#'))
  if before and before >= fence then return false end
  if not before then
    meta[LATE] = meta[LATE] + tonumber(ARGV[7])
    if call('HDEL', prefix .. 'd', me) == 1 then meta[DEAD], pool.dead, heads = meta[DEAD] - 1, {}, {} end
    pool.join()
  end
  call('DEL', pool.outbox_key(me), prefix .. 'k:' .. me)
  stage = states
  pool.set_stage('l')
  pool.beat()
  return true
end

-- Others wait for leases that are stated by several calls.
function pool.hold_for_leases()
  if stage ~= 'l' or meta[HOLD_UNTIL] > now then return end
  if now >= meta[ABSENT_UNTIL] then meta[HOLD_SINCE], meta[HOLD_FOR] = now, 0 end
  meta[HOLD_UNTIL] = now + BEAT_US
end

function pool.leases_stated()
  if stage == 'l' then pool.set_stage('t') end
end

function pool.all_stated()
  if stage == '' then return end
  local text = match(stage, '^d (.*)$') or '2 0 0'
  while text and pool.left > 0 do text = pool.end_some(me, text) end
  if not text then call('DEL', prefix .. 'k:' .. me) end
  pool.set_stage(text and 'd ' .. text or '')
end

-- Returns where the next operation is.
function pool.hear_statement(operation, index)
  local id = ARGV[index + 1]
  if operation == 'n' then
    pool.leases_stated()
    return index + 1
  elseif operation == 'd' then
    pool.all_stated()
    return index + 1
  elseif operation == 'f' then
    pool.state_untold(id)
    return index + 2
  elseif operation == 'a' then
    pool.limits().restate(id, ARGV[index + 2])
    return index + 3
  end
  pool.note_stated(id)
  local old = call('HGET', mine, id) or nil
  if operation == 'l' then
    pool.state_lease(index, old)
    return index + 6
  end
  pool.state_ticket(index, old)
  return index + 9
end

-- It asks again: as if it had never come.
function pool.state_untold(id)
  local charges = prefix .. 'm:' .. me
  local charge, record = call('HGET', charges, id), call('HGET', mine, id)
  if charge then
    call('HDEL', charges, id)
    pool.limits().correct_lost(charge, nil)
  end
  if record then
    call('HDEL', mine, id)
    pool.end_record(me, id, record)
  end
end

function pool.is_lease_record(record) return record ~= nil and string.sub(record, 1, 1) == 'L' end

function pool.state_lease(index, old)
  local id, level = ARGV[index + 1], tonumber(ARGV[index + 2])
  local tokens, requests = tonumber(ARGV[index + 3]), tonumber(ARGV[index + 4])
  local excess, admitted = 0, 0
  if pool.is_lease_record(old) then -- it goes on, so nothing is owed for it yet
    local old_level, held, old_requests, _
    old_level, held, old_requests, _, excess, admitted = pool.read_lease(old)
    pool.hold(old_level, -held, -old_requests)
    meta[LEASES] = meta[LEASES] - 1
    if preempts then pool.forget_preemption(me, id, old_level) end
  elseif old then
    pool.end_record(me, id, old)
  end
  pool.hold(level, tokens, requests)
  meta[LEASES] = meta[LEASES] + 1
  call('HSET', mine, id, pool.lease_record(level, tokens, requests, excess, admitted))
  if preempts and rules[FIRST_RULE + level][PREEMPTIONS] > 0 then
    pool.remember({owner = me, id = id, sequence = 0, arrived = 0}, tonumber(ARGV[index + 5]), nil, '')
  end
end

function pool.state_ticket(index, old)
  local id, level = ARGV[index + 1], tonumber(ARGV[index + 2])
  local times = tonumber(ARGV[index + 8])
  if times > 0 then pool.know_preemption() end
  if old and not (times > 0 and pool.is_before_return(id, old, times)) then
    -- it keeps its place, or the lease that it has not heard of
    local _, _, _, text = pool.read_lease(old)
    if text then grants[#grants + 1] = text ~= '' and text or id end
    return
  end
  if times > 0 then return pool.requeue(index) end
  pool.push({
    id = id, owner = me, level = level, tokens = tonumber(ARGV[index + 5]), requests = tonumber(ARGV[index + 6]),
    sequence = pool.next_sequence(), arrived = now - tonumber(ARGV[index + 7]),
  }, ARGV[index + 3], tonumber(ARGV[index + 4]))
  local head = pool.head_of(level)
  if not head.is_stored then pool.store(head) end
end

end

local function define_calls()

-- -- one call

-- Time matters through aging, when a head reaches a whole level, when one has waited long enough to preempt others, while
-- the pool is on hold or held back, and where another replica may have died: whoever waits for what it held looks after
-- it as soon as that can be told.
function pool.next_change()
  local change = pool.next_change_of_waiting()
  if meta[DEAD] == 0 then return change end
  local slice = math.max(0, meta[SLICE_AT] - now)
  return change >= 0 and math.min(change, slice) or slice
end

function pool.next_change_of_waiting()
  if meta[WAITING] == 0 then return -1 end
  local soonest = meta[HOLD_UNTIL] > now and meta[HOLD_UNTIL] - now or -1
  local back = meta[BACK_UNTIL] - now
  if back > 0 and (soonest < 0 or back < soonest) then soonest = back end
  local absent = meta[ABSENT_UNTIL] - now
  if absent > 0 and (soonest < 0 or absent < soonest) and pool.unheard() > 0 then soonest = absent end
  if meta[REPLICAS] > 1 then
    local look = math.max(meta[GRACE], meta[SWEEP]) - now
    if soonest < 0 or look < soonest then soonest = look end
  end
  for level = 0, levels - 1 do
    local owes = tiers[level][OWES_UNTIL] - now
    if owes > 0 and tiers[level][QUEUED] > 0 and (soonest < 0 or owes < soonest) then soonest = owes end
  end
  if preempts then soonest = pool.next_preemption(soonest) end
  if rules[PROMOTE_AFTER] > 0 then soonest = pool.next_promotion(soonest) end
  return soonest
end

function pool.next_promotion(soonest)
  local promote_after = rules[PROMOTE_AFTER]
  for level = rules[CEILING] + 1, levels - 1 do
    if tiers[level][QUEUED] > 0 then
      for _, head in ipairs({pool.head_of(level), pool.second_head(level)}) do
        local rise = math.floor((now - head.arrived) / promote_after) + 1
        local change = head.arrived + rise * promote_after - now
        if rise <= level - rules[CEILING] and (soonest < 0 or change < soonest) then soonest = change end
      end
    end
  end
  return soonest
end

function pool.reply(tells_all)
  local after = pool.next_change()
  local listed = call('LRANGE', pool.outbox_key(me), 0, -1)
  for _, text in ipairs(listed) do grants[#grants + 1] = text end
  local figures = {meta[REPLICAS], after, #listed, meta[WAITING], meta[LEASES], meta[LATE], all_tokens, all_requests,
    meta[LATEST_ARRIVED] == 0 and -1 or now - meta[LATEST_ARRIVED], pool.expected(), pool.is_on_hold() and 1 or 0,
    pool.unheard(), stage == '' and 0 or 1}
  if pool.save_accounts then pool.save_accounts() end
  return {'ok', figures, pool.save(tells_all), grants, ended, refused, pool.verdicts}
end

function pool.main()
  local first = 5 -- operation
  if kind == 'sync' or kind == 'begin' then
    local refusal = pool.agree_on_rules()
    if refusal then return refusal end
    pool.tell_time()
    if not pool.begin() then return {'stale'} end
    first = 8
  else
    if not pool.load() then return {'unknown'} end
    local known, states = pool.read_fence(call('HGET', mine, '#'))
    if not known then
      if call('ZSCORE', beats, me) then return pool.damaged() end
      return {'unknown'}
    end
    if known ~= fence then return {'stale'} end
    stage = states
    pool.tell_time()
    if kind == 'beat' or meta[HOLD_UNTIL] > 0 or stage ~= '' then pool.beat() end
    if ARGV[4] ~= '0' then call('LTRIM', pool.outbox_key(me), ARGV[4], -1) end
  end
  pool.drop_silent()
  if kind == 'bye' then
    if meta[HOLD_FOR] > 0 then meta[HOLD_FOR] = meta[HOLD_FOR] - 1 end
    pool.drop(me)
    stage = ''
  end
  pool.end_dead()
  pool.spare_parts()
  if kind ~= 'bye' then pool.operate(first) end
  if kind == 'sync' then
    pool.leases_stated()
    pool.all_stated()
  end
  pool.hold_for_leases()
  pool.dispatch()
  if preempts and not pool.is_any_head_dead() then pool.preempt() end
  pool.publish()
  if kind ~= 'call' then pool.keep() end
  if kind == 'beat' then
    local tenants = call('HRANDFIELD', prefix .. 'a', LOOKED_AT)
    if tenants and tenants[1] then pool.limits().forget_accounts(tenants) end
    call('PUBLISH', root .. ':grants:' .. me, '')
  end
  return pool.reply(kind ~= 'call')
end

end

define_tickets()
define_rules()
define_operations()
define_replicas()
define_calls()
local is_done, result = pcall(pool.main)
if is_done then return result end
if not is_damaged then return error(result) end
call('DEL', root)
return {'unknown'}
