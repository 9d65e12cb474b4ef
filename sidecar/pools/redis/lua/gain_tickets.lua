-- Tickets with the figures of their gain, and the queue that finds the one that earns most: the twin of
-- `scheduling/gain.py` and `scheduling/gain_queue.py`, which say what they are. It replaces parts of `tickets.lua`.
--
-- A waiting ticket with figures is in one of two orders of its lane: by deadline while it is calm, or by density once it is
-- urgent; in none where it is urgent and can earn nothing. The two orders of the tier have the first of every lane that is
-- not aside. So a decision reads few entries, whatever waits. What was read is kept until its tier changes, for the whole
-- call. LANE is 't' and the tenant, or 'r' for the tickets that returned.
--
--   <root>:<birth>:D:<level>:<lane>  zset  the calm tickets of a lane, by deadline
--   <root>:<birth>:U:<level>:<lane>  zset  the urgent ones that earn something, by density as last computed, below zero
--   <root>:<birth>:dl:<level>        zset  the first calm ticket of every lane that is not aside
--   <root>:<birth>:ul:<level>        zset  the first urgent one
--   <root>:<birth>:fs:<level>        zset  tenant -> the start tag of its first ticket
--   <root>:<birth>:as:<level>        zset  tenant that is aside -> the virtual time from which on it is not ahead
--   <root>:<birth>:due               zset  'ARRIVED TICKET LEVEL' of all calm tickets, by deadline
--
-- A lane of `f` also has its first ticket and where that starts.

local SCALE, MOST_MADE_URGENT, LOOKED_AT_AGAIN = 1000000, 16, 32 -- as in `scheduling`
local APART = 'r' -- the lane of the tickets that returned
local LANE_KEPT_MS, RENEWED_EVERY = 86400000, 64 -- a lane without newcomers for so long vanishes; not all of them renew it

pool.to_bring_back = BROUGHT_BACK

-- By level: the densest ticket or false, and V. By member: the ticket that was read. DUE: the earliest deadline or false.
local kept = {best = {}, virtual = {}, tickets = {}, due = nil}

-- A lane's two orders, and the tier's of the first of all lanes.
local CALM, URGENT = {lane = 'D:', tier = 'dl:'}, {lane = 'U:', tier = 'ul:'}

function pool.gain_key(name, level) return prefix .. name .. level end
function pool.due_key() return prefix .. 'due' end
function pool.order_key(order, level, lane) return prefix .. order.lane .. level .. ':' .. lane end

function pool.forget_best(level) kept.best[level], kept.virtual[level] = nil, nil end

local mark_cut_off = pool.mark_cut_off

function pool.mark_cut_off(owner, is_cut_off)
  kept.best, kept.tickets = {}, {}
  mark_cut_off(owner, is_cut_off)
end

-- -- the figures: 'WEIGHT,TOKENS,COST,DEADLINE,START_BY,SLACK', '-' without; 'r' is before those of a ticket that returned

function pool.read_gain(text)
  local weight, tokens, cost, deadline, start_by, slack = match(text, '^r?(%d+),(%d+),(%d+),(%d+),(%d+),(%d+)$')
  return weight and {
    weight = tonumber(weight), tokens = tonumber(tokens), cost = tonumber(cost), deadline = tonumber(deadline),
    start_by = tonumber(start_by), slack = tonumber(slack),
  }
end

-- What was said of a request just before it.
function pool.stated_gain(id, level)
  return next_gain and next_gain.id == id and next_gain.level == level and next_gain.text
end

-- What a ticket earns for a second of its engine, if it is admitted now, or `at` some time.
function pool.density(gain, arrived, at)
  local late, tokens = (at or now) - arrived - gain.start_by, gain.tokens
  if late > 0 then tokens = math.max(0, tokens - (late - late % gain.slack) / gain.slack) end
  local worth = gain.weight * tokens * SCALE
  return (worth - worth % gain.cost) / gain.cost
end

function pool.member_of(ticket)
  if not ticket.member then
    ticket.member = fmt('%016d %s %s %d %d %d %d %s %s', ticket.sequence, ticket.owner, ticket.id, ticket.tokens,
      ticket.requests, ticket.arrived, ticket.weight, ticket.gain_text, ticket.tenant)
  end
  return ticket.member
end

local ticket_text, read_ticket = pool.ticket_text, pool.read_ticket

function pool.set_gain(ticket, text)
  ticket.gain_text, ticket.gain, ticket.is_apart = text, pool.read_gain(text), string.sub(text, 1, 1) == 'r'
end

function pool.new_of_member(level, member)
  local sequence, owner, id, tokens, requests, arrived, weight, text, tenant =
    match(member, '^(%d+) (%S+) (%S+) (%d+) (%d+) (%d+) (%d+) (%S+) (.*)$')
  local ticket = {
    id = id, owner = owner, level = level, tokens = tonumber(tokens), requests = tonumber(requests),
    sequence = tonumber(sequence), arrived = tonumber(arrived), weight = tonumber(weight), tenant = tenant,
    is_stored = true, member = member,
  }
  pool.set_gain(ticket, text)
  return ticket
end

function pool.read_member(level, member)
  local ticket = kept.tickets[member]
  if not ticket then
    ticket = pool.new_of_member(level, member)
    kept.tickets[member] = ticket
  end
  return ticket
end

-- The text of the tenant has the figures before it. A space would end it where a text follows.
function pool.read_ticket(owner, id, record)
  local ticket = read_ticket(owner, id, record)
  local text, tenant = match(ticket.tenant, '^([^;]+);(.*)$')
  ticket.tenant = tenant
  pool.set_gain(ticket, text)
  return ticket
end

function pool.ticket_text(ticket, served)
  local tenant = ticket.tenant
  ticket.tenant = ticket.gain_text .. ';' .. tenant
  local text = ticket_text(ticket, served)
  ticket.tenant = tenant
  return text
end

-- -- what is known of a lease: 'IN_FLOOR URGENT FIGURES', on a line of its own in its record

local lease_record, read_lease, state_lease = pool.lease_record, pool.read_lease, pool.state_lease

function pool.note_for(ticket)
  return (ticket.in_floor and '1 ' or '0 ') .. (ticket.was_urgent and '1 ' or '0 ') .. ticket.gain_text
end

function pool.lease_record(...)
  local note = pool.begins and pool.note_for(pool.begins) or pool.lease_note
  return lease_record(...) .. '\n' .. note
end

-- A lease that is written is the one that was just read, or one that begins.
function pool.read_lease(record)
  local lease, note = match(record, '^(.*)\n(.*)$')
  pool.lease_note = note or ''
  return read_lease(lease or record)
end

-- A lease that goes on may have another size: its replica was without the store.
function pool.state_lease(index, old)
  local goes_on = pool.is_lease_record(old)
  if goes_on then pool.book_lease_in_floor(old, -1) end
  pool.lease_note = ''
  state_lease(index, old)
  if goes_on then pool.book_lease_in_floor(call('HGET', mine, ARGV[index + 1]), 1) end
end

-- Whether a lease is in its tier's floor, whether it was urgent, its figures, and what else is known.
function pool.read_note(record)
  local in_floor, is_urgent, text, more = match(record or '', '\n(%d) (%d) (%S+) ?(.*)$')
  return in_floor == '1', is_urgent == '1', text or '-', more
end

-- -- lanes: that of a tenant is 't' and its name

function pool.lane_name(ticket) return ticket.is_apart and APART or 't' .. ticket.tenant end

-- The lane of a tenant also has its first ticket, and where that starts.
function pool.read_lane(text)
  local finish, waiting, weight, start, first = match(text, '^(%S+) (%d+) (%d+) ?(%S*) ?(.*)$')
  return {
    finish = tonumber(finish), waiting = tonumber(waiting), weight = tonumber(weight), start = tonumber(start), first = first,
  }
end

function pool.save_lane(level, tenant, lane)
  local key = pool.finish_key(level)
  pool.note_use(level, tenant, lane)
  if lane.waiting > 0 then
    call('HSET', key, tenant,
      fmt('%.17g %d %d %.17g ', lane.finish, lane.waiting, lane.weight, lane.start) .. lane.first)
  elseif lane.finish <= tiers[level][VIRTUAL] then
    call('HDEL', key, tenant)
  else
    call('HSET', key, tenant, fmt('%.17g %d %d', lane.finish, lane.waiting, lane.weight))
  end
end

-- V: the smallest start of the tenants that wait, or what it was if that is more.
function pool.virtual_now(level)
  local found = kept.virtual[level]
  if not found then
    local first = call('ZRANGE', pool.gain_key('fs:', level), 0, 0, 'WITHSCORES')
    found = first[1] and math.max(tiers[level][VIRTUAL], tonumber(first[2])) or tiers[level][VIRTUAL]
    kept.virtual[level] = found
  end
  return found
end

-- The virtual time from which on a tenant is not ahead.
function pool.near(level, tenant)
  local lane = pool.lane_of(level, tenant)
  return lane.finish - 2 * tiers[level][LARGEST] / lane.weight
end

function pool.is_ahead(level, ticket)
  if ticket.is_apart then return false end
  local near = pool.near(level, ticket.tenant)
  return tiers[level][VIRTUAL] < near and pool.virtual_now(level) < near
end

function pool.is_aside(level, ticket)
  return tiers[level][ASIDE] > 0 and not ticket.is_apart
    and call('ZSCORE', pool.gain_key('as:', level), ticket.tenant) and true or false
end

-- A ticket enters an order. Where it is the first of its lane it takes the place of the one before in that of the tier.
function pool.put_in(order, ticket, score)
  local level, member, lane = ticket.level, pool.member_of(ticket), pool.order_key(order, ticket.level, pool.lane_name(ticket))
  call('ZADD', lane, score, member)
  local first = call('ZRANGE', lane, 0, 1)
  if not first[2] or ticket.sequence % RENEWED_EVERY == 0 then call('PEXPIRE', lane, LANE_KEPT_MS) end
  if first[1] ~= member then return end
  local of_tier = pool.gain_key(order.tier, level)
  if first[2] then
    if call('ZREM', of_tier, first[2]) == 0 then return end -- the lane is aside
  elseif pool.is_aside(level, ticket) then
    return
  end
  call('ZADD', of_tier, score, member)
end

-- A ticket leaves an order. Returns whether it was there.
function pool.take_out(order, ticket)
  local level, member, lane = ticket.level, pool.member_of(ticket), pool.order_key(order, ticket.level, pool.lane_name(ticket))
  if call('ZREM', lane, member) == 0 then return false end
  local of_tier = pool.gain_key(order.tier, level)
  if call('ZREM', of_tier, member) == 1 then
    local first = call('ZRANGE', lane, 0, 0, 'WITHSCORES')
    if first[1] then call('ZADD', of_tier, first[2], first[1]) end
  end
  return true
end

-- A ticket with figures that waits: calm, or urgent with its density, which is that of now where it is not known.
function pool.enter_gain(ticket, is_urgent, density)
  if not ticket.gain then return end
  pool.forget_best(ticket.level)
  if is_urgent then
    density = density or pool.density(ticket.gain, ticket.arrived)
    if density > 0 then pool.put_in(URGENT, ticket, pool.int(-density)) end
  else
    pool.put_in(CALM, ticket, pool.int(ticket.arrived + ticket.gain.deadline))
    pool.await_deadline(ticket)
  end
end

-- Of equal deadlines the earlier arrival comes first.
function pool.due_entry(ticket) return fmt('%016d ', ticket.arrived) .. pool.member_of(ticket) .. ' ' .. ticket.level end

-- A calm ticket becomes urgent one day.
function pool.await_deadline(ticket)
  local deadline = ticket.arrived + ticket.gain.deadline
  call('ZADD', pool.due_key(), pool.int(deadline), pool.due_entry(ticket))
  if kept.due ~= nil then kept.due = math.min(kept.due or deadline, deadline) end
end

function pool.forget_deadline(ticket)
  call('ZREM', pool.due_key(), pool.due_entry(ticket))
  kept.due = nil
end

-- The earliest deadline of the calm tickets, false where there is none.
function pool.first_due()
  if kept.due == nil then kept.due = tonumber(call('ZRANGE', pool.due_key(), 0, 0, 'WITHSCORES')[2]) or false end
  return kept.due
end

-- Takes it out again. Returns whether it was urgent.
function pool.leave_gain(ticket)
  if not ticket.gain then return false end
  pool.forget_best(ticket.level)
  if pool.take_out(URGENT, ticket) then return true end
  if not pool.take_out(CALM, ticket) then return true end
  pool.forget_deadline(ticket)
  return false
end

-- -- the fair queue

local store, store_head, count_queued = pool.store, pool.store_head, pool.count_queued

function pool.count_queued(tier, ticket, sign)
  count_queued(tier, ticket, sign)
  ticket.is_counted = true
  if ticket.gain then tier[COST] = tier[COST] + sign * ticket.gain.cost end
end

-- The cost of a ticket that just comes is not counted yet. Where its deadline is near by now, it is urgent at once.
function pool.store(ticket)
  store(ticket)
  if not ticket.gain then return end
  local is_urgent = ticket.gain.deadline < pool.patience(ticket.is_counted and 0 or ticket.gain.cost)
  pool.enter_gain(ticket, is_urgent)
end

function pool.store_head(ticket)
  store_head(ticket)
  local level, tenant = ticket.level, ticket.tenant
  pool.forget_best(level)
  if ticket.is_apart then return end
  local lane = pool.lane_of(level, tenant)
  lane.first, lane.start = pool.member_of(ticket), ticket.start
  call('ZADD', pool.gain_key('fs:', level), pool.tag(ticket.start), tenant)
end

local sort_some = pool.sort_some

-- No ticket becomes the first of its tenant by another reserve.
function pool.sort_some(level)
  local own = pool.store_head
  pool.store_head = store_head
  sort_some(level)
  pool.store_head = own
end

function pool.note_largest(level, tokens)
  local largest = math.max(1, tiers[level][LARGEST])
  while largest < tokens do largest = largest * 2 end
  tiers[level][LARGEST] = largest
  pool.forget_best(level)
  if tiers[level][ASIDE] == 0 then return end
  local nearest = call('ZRANGE', pool.gain_key('as:', level), 0, LOOKED_AT_AGAIN - 1)
  for _, tenant in ipairs(nearest) do pool.bring_back(level, tenant) end
end

local push = pool.push

-- A ticket is stored as it comes, so that it stands among those that may be best: but not where no other waits.
function pool.push(ticket, tenant, weight)
  pool.set_gain(ticket, pool.stated_gain(ticket.id, ticket.level) or '-')
  local level, before = ticket.level, pool.lane_of(ticket.level, tenant).weight
  push(ticket, tenant, weight)
  if not ticket.is_stored and meta[WAITING] > 1 then
    ticket.start = math.max(tiers[level][VIRTUAL], pool.lane_of(level, tenant).finish)
    pool.store(ticket)
  end
  if ticket.tokens > tiers[level][LARGEST] then
    pool.note_largest(level, ticket.tokens)
  elseif before ~= ticket.weight and pool.is_aside(level, ticket) then
    pool.bring_back(level, tenant)
  end
end

-- The first ticket of a tenant that was charged starts where its finish is.
function pool.delay(level, tenant, lane)
  local start = math.max(tiers[level][VIRTUAL], lane.finish)
  if lane.waiting > 0 and start > lane.start then pool.start_at(level, tenant, lane, start) end
end

function pool.start_at(level, tenant, lane, start)
  lane.start, heads[level] = start, nil
  pool.forget_best(level)
  call('ZADD', pool.gain_key('fs:', level), pool.tag(start), tenant)
  local ticket = pool.read_member(level, lane.first)
  if sorts[level] and pool.remove_head(ticket, lane.first) then -- it may stand among the others
    ticket.start = start
    return store_head(ticket)
  end
  call('ZADD', pool.is_small(ticket) and pool.queue_key(level) or pool.large_key(level), pool.tag(start), lane.first)
end

function pool.leave_lane(ticket)
  local level, tenant, member = ticket.level, ticket.tenant, pool.member_of(ticket)
  ticket.was_urgent = pool.leave_gain(ticket)
  pool.forget_best(level)
  if ticket.is_apart then
    if not pool.remove_head(ticket, member) then return pool.damaged() end
    return
  end
  local lane = pool.lane_of(level, tenant)
  lane.waiting = lane.waiting - 1
  if lane.first ~= member then
    if call('ZREM', pool.lane_key(level), tenant .. ' ' .. member) == 0 then return pool.damaged() end
    pool.delay(level, tenant, lane)
  elseif not pool.remove_head(ticket, member) then
    return pool.damaged()
  elseif lane.waiting > 0 then
    pool.advance(level, tenant, lane)
  else
    call('ZREM', pool.gain_key('fs:', level), tenant)
    tiers[level][WEIGHTS] = tiers[level][WEIGHTS] - lane.weight
  end
  pool.save_lane(level, tenant, lane)
end

-- Charges the tenant for a ticket that is admitted, from the start of its first ticket.
function pool.charge_tenant(ticket)
  local level = ticket.level
  tiers[level][VIRTUAL] = pool.virtual_now(level)
  pool.forget_best(level)
  if ticket.is_apart then return end
  local lane = pool.lane_of(level, ticket.tenant)
  lane.finish = math.max(lane.finish, lane.start) + ticket.tokens / ticket.weight
end

local leave_queue, restore = pool.leave_queue, pool.restore

function pool.leave_queue(ticket)
  leave_queue(ticket)
  local tier = tiers[ticket.level]
  if tier[QUEUED] > 0 then return end
  if tier[ASIDE] > 0 then call('UNLINK', pool.gain_key('as:', ticket.level)) end
  tier[LARGEST], tier[ASIDE] = 0, 0
  pool.forget_best(ticket.level)
end

-- A ticket that was parked may be urgent again as soon as its pool looks.
function pool.restore(ticket, record)
  restore(ticket, record)
  if ticket.tokens > tiers[ticket.level][LARGEST] then pool.note_largest(ticket.level, ticket.tokens) end
  pool.enter_gain(ticket, false)
end

-- -- by gain

-- The first ticket of a tenant's lane enters the order of its tier, or leaves it.
local function show_lane(level, tenant, is_shown)
  for _, order in ipairs({CALM, URGENT}) do
    local first = call('ZRANGE', pool.order_key(order, level, 't' .. tenant), 0, 0, 'WITHSCORES')
    if first[1] and is_shown then
      call('ZADD', pool.gain_key(order.tier, level), first[2], first[1])
    elseif first[1] then
      call('ZREM', pool.gain_key(order.tier, level), first[1])
    end
  end
end

function pool.bring_back(level, tenant)
  tiers[level][ASIDE] = tiers[level][ASIDE] - call('ZREM', pool.gain_key('as:', level), tenant)
  is_changed[level] = true
  pool.forget_best(level)
  show_lane(level, tenant, true)
end

function pool.set_aside(level, tenant)
  tiers[level][ASIDE] = tiers[level][ASIDE] + call('ZADD', pool.gain_key('as:', level), pool.tag(pool.near(level, tenant)), tenant)
  is_changed[level] = true
  show_lane(level, tenant, false)
end

-- Brings back the tenants that V has come close to: some in this call, the rest in the next ones.
function pool.look_aside(level)
  while tiers[level][ASIDE] > 0 and pool.to_bring_back > 0 do
    local first = call('ZRANGE', pool.gain_key('as:', level), 0, 0, 'WITHSCORES')
    if not first[1] then return pool.damaged() end
    if tonumber(first[2]) > pool.virtual_now(level) then return end
    pool.to_bring_back = pool.to_bring_back - 1
    local near = pool.near(level, first[1])
    if pool.virtual_now(level) < near then
      call('ZADD', pool.gain_key('as:', level), pool.tag(near), first[1])
    else
      pool.bring_back(level, first[1])
    end
  end
end

-- The first in an order of the tickets of tenants that are not ahead, nil where there is none.
function pool.first_in(order, level)
  local of_tier = pool.gain_key(order.tier, level)
  while true do
    local first = call('ZRANGE', of_tier, 0, 0, 'WITHSCORES')
    if not first[1] then return nil end
    local ticket = pool.read_member(level, first[1])
    if not pool.is_ahead(level, ticket) then
      ticket.key = tonumber(first[2])
      if pool.is_any_away() and pool.is_away(ticket.owner) then ticket.is_away = true end
      return ticket
    end
    pool.set_aside(level, ticket.tenant)
  end
end

-- The densest urgent ticket of tenants that are not ahead, by what was last computed.
function pool.densest(level)
  local ticket = kept.best[level]
  if ticket == nil then
    pool.look_aside(level)
    ticket = pool.first_in(URGENT, level) or false
    if ticket then ticket.is_calm, ticket.density = false, -ticket.key end
    kept.best[level] = ticket
  end
  return ticket or nil
end

-- The one with the earliest deadline of those that are not urgent. Call it after `densest`.
function pool.earliest(level)
  local ticket = pool.first_in(CALM, level)
  if ticket then ticket.is_calm = true end
  return ticket
end

-- What is known of a waiting ticket: whether it is calm, else its density as last computed.
function pool.look_up(ticket)
  if not ticket.gain or ticket.is_lease then return end
  local level, lane, best = ticket.level, pool.lane_name(ticket), kept.best[ticket.level]
  if not ticket.is_stored then
    ticket.is_calm = true
    return
  elseif best == ticket then
    return
  end
  local key = call('ZSCORE', pool.order_key(URGENT, level, lane), pool.member_of(ticket))
  ticket.is_calm = not key and call('ZSCORE', pool.order_key(CALM, level, lane), ticket.member) and true or false
  ticket.density = -tonumber(key or 0)
end

function pool.comes_earlier(one, other)
  if one.key ~= other.key then return one.key < other.key end
  if one.arrived ~= other.arrived then return one.arrived < other.arrived end
  return one.sequence < other.sequence
end

-- The first of the tickets by level.
function pool.first_by_gain(tickets)
  local first
  for level = 0, levels - 1 do
    local ticket = tickets[level]
    if ticket and (not first or pool.comes_earlier(ticket, first)) then first = ticket end
  end
  return first
end

-- The densest ticket has another density, a lower one.
local function renew(ticket, density)
  local level, member = ticket.level, ticket.member
  if density == 0 then
    pool.take_out(URGENT, ticket)
  else
    local lane, of_tier = pool.order_key(URGENT, level, pool.lane_name(ticket)), pool.gain_key(URGENT.tier, level)
    call('ZADD', lane, pool.int(-density), member)
    local first = call('ZRANGE', lane, 0, 0, 'WITHSCORES')
    if first[1] ~= member then call('ZREM', of_tier, member) end
    call('ZADD', of_tier, first[2], first[1])
  end
  kept.best[level] = nil
end

-- Brings densities up to date, the highest of all tiers first. Returns the densest ticket of every tier, by level. A lone
-- ticket's is.
function pool.refresh_densities(lone)
  local found = {}
  for level = 0, levels - 1 do
    if not lone and tiers[level][QUEUED] > 0 and rules[FIRST_RULE + level][ALWAYS_FIRST] == 0 then
      found[level] = pool.densest(level)
    end
  end
  if meta[REFRESHED] ~= now then meta[REFRESHED], meta[REFRESHES] = now, MOST_REFRESHED end
  while meta[REFRESHES] > 0 do
    local first = pool.first_by_gain(found)
    if not first then break end
    local density = pool.density(first.gain, first.arrived)
    if density == first.density then break end
    meta[REFRESHES] = meta[REFRESHES] - 1
    renew(first, density)
    found[first.level] = pool.densest(first.level)
  end
  return found
end

-- A ticket whose deadline is nearer than this is urgent. `more` is the cost of one that is not counted yet.
function pool.patience(more)
  local cost, halves = more or 0, 2 * pool.engines_that_work()
  for level = 0, levels - 1 do cost = cost + tiers[level][COST] end
  return (cost - cost % halves) / halves
end

function pool.engines_that_work() return 1 end

-- Returns how many tickets become urgent.
function pool.make_urgent()
  local before, made = now + pool.patience(), 0
  if meta[URGED] ~= now then meta[URGED], meta[URGES] = now, MOST_MADE_URGENT end
  local deadline = pool.first_due()
  if meta[URGES] == 0 or not deadline or deadline >= before then return 0 end
  local due = call('ZRANGEBYSCORE', pool.due_key(), '-inf', '(' .. pool.int(before), 'LIMIT', 0, meta[URGES])
  for place, entry in ipairs(due) do
    local member, level = match(entry, '^%d+ (.*) (%d+)$')
    pool.make_one_urgent(tonumber(level), member)
    made = place
  end
  call('ZREMRANGEBYRANK', pool.due_key(), 0, made - 1)
  kept.due, meta[URGES] = nil, meta[URGES] - made
  return made
end

function pool.make_one_urgent(level, member)
  local ticket = pool.read_member(level, member)
  if not pool.take_out(CALM, ticket) then return pool.damaged() end
  pool.enter_gain(ticket, true)
end
