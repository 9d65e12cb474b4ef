-- Tickets with the figures of their gain, and the queue that finds the one that earns most: the twin of
-- `scheduling/gain.py` and `scheduling/gain_queue.py`, which say what they are. It replaces parts of `tickets.lua`.
--
-- A waiting ticket with figures is in one of two zsets of its lane: by deadline while it is calm, or by density once it is
-- urgent; in none where it is urgent and can earn nothing. Two zsets of the tier have the first of every lane that is not
-- aside. So a decision reads few entries, whatever waits.

function pool.calm_key(level, lane) return prefix .. 'D:' .. level .. ':' .. lane end
function pool.urgent_key(level, lane) return prefix .. 'U:' .. level .. ':' .. lane end
function pool.of_tier(name, level) return prefix .. name .. ':' .. level end

-- -- the figures: 'WEIGHT,TOKENS,COST,DEADLINE,START_BY,SLACK', '-' without

function pool.read_gain(text)
  local weight, tokens, cost, deadline, start_by, slack = match(text, '^(%d+),(%d+),(%d+),(%d+),(%d+),(%d+)$')
  return weight and {
    weight = tonumber(weight), tokens = tonumber(tokens), cost = tonumber(cost), deadline = tonumber(deadline),
    start_by = tonumber(start_by), slack = tonumber(slack),
  }
end

-- What was said of a request just before it.
function pool.stated_gain(id, level)
  return next_gain and next_gain.id == id and next_gain.level == level and next_gain.text
end

-- What a ticket earns for a second of its engine, if it is admitted now.
function pool.density(gain, arrived)
  local late, tokens = now - arrived - gain.start_by, gain.tokens
  if late > 0 then tokens = math.max(0, tokens - (late - late % gain.slack) / gain.slack) end
  local worth = gain.weight * tokens * SCALE
  return (worth - worth % gain.cost) / gain.cost
end

function pool.member_of(ticket)
  return fmt('%016.0f %s %s %.0f %.0f %.0f %.0f %s %s', ticket.sequence, ticket.owner, ticket.id, ticket.tokens,
    ticket.requests, ticket.arrived, ticket.weight, ticket.gain_text, ticket.tenant)
end

local read_member, ticket_text, read_ticket, push = pool.read_member, pool.ticket_text, pool.read_ticket, pool.push

-- The tenant of a text that has the figures before it.
local function with_gain(ticket)
  local text, tenant = match(ticket.tenant, '^(%S+) (.*)$')
  ticket.gain_text, ticket.tenant, ticket.gain = text, tenant, pool.read_gain(text)
  return ticket
end

function pool.read_member(level, member)
  local ticket = with_gain(read_member(level, member))
  ticket.member = member
  return ticket
end

function pool.read_ticket(owner, id, record) return with_gain(read_ticket(owner, id, record)) end

function pool.ticket_text(ticket, served)
  local tenant = ticket.tenant
  ticket.tenant = ticket.gain_text .. ' ' .. tenant
  local text = ticket_text(ticket, served)
  ticket.tenant = tenant
  return text
end

-- -- lanes

-- A head that is not the first of its tenant's lane is one that returned.
function pool.lane_name(ticket)
  if ticket.is_apart == nil then
    if ticket.member and not ticket.times then
      ticket.is_apart = call('HGET', pool.of_tier('fm', ticket.level), ticket.tenant) ~= ticket.member
    else
      ticket.is_apart = ticket.times ~= nil
    end
  end
  return ticket.is_apart and APART or 't' .. ticket.tenant
end

-- V: the smallest start of the tenants that wait, or what it was if that is more.
function pool.virtual_now(level)
  local first = call('ZRANGE', pool.of_tier('fs', level), 0, 0, 'WITHSCORES')
  return first[1] and math.max(tiers[level][VIRTUAL], tonumber(first[2])) or tiers[level][VIRTUAL]
end

-- The virtual time from which on a tenant is not ahead.
function pool.near(level, tenant)
  local lane = pool.lane_of(level, tenant)
  return lane.finish - 2 * tiers[level][LARGEST] / lane.weight
end

function pool.is_ahead(level, lane, virtual)
  return lane ~= APART and virtual < pool.near(level, string.sub(lane, 2))
end

function pool.is_aside(level, lane)
  return lane ~= APART and call('ZSCORE', pool.of_tier('as', level), string.sub(lane, 2)) and true or false
end

-- The entry of a lane in one of the two zsets of its tier is that of its first ticket.
function pool.update_first(level, lane, key, of_tier)
  local first = call('ZRANGE', key, 0, 0, 'WITHSCORES')
  if first[1] then call('ZADD', of_tier, first[2], lane) else call('ZREM', of_tier, lane) end
end

function pool.update_calm(level, lane)
  if not pool.is_aside(level, lane) then
    pool.update_first(level, lane, pool.calm_key(level, lane), pool.of_tier('dl', level))
  end
end

function pool.update_urgent(level, lane)
  if not pool.is_aside(level, lane) then
    pool.update_first(level, lane, pool.urgent_key(level, lane), pool.of_tier('ul', level))
  end
end

-- A lane is renewed with every ticket that enters it. A ticket that waited longer would be stated anew by its replica.
function pool.keep_lane(key) call('PEXPIRE', key, LANE_KEPT_MS) end

-- A ticket with figures that waits: calm, or urgent with its density.
function pool.enter_gain(ticket, is_urgent)
  if not ticket.gain then return end
  local level, lane, member = ticket.level, pool.lane_name(ticket), pool.member_of(ticket)
  if is_urgent then
    local density = pool.density(ticket.gain, ticket.arrived)
    if density > 0 then
      call('ZADD', pool.urgent_key(level, lane), pool.int(-density), member)
      pool.keep_lane(pool.urgent_key(level, lane))
      pool.update_urgent(level, lane)
    end
    return
  end
  local deadline = pool.int(ticket.arrived + ticket.gain.deadline)
  call('ZADD', pool.calm_key(level, lane), deadline, member)
  pool.keep_lane(pool.calm_key(level, lane))
  call('ZADD', prefix .. 'e', deadline, level .. ' ' .. lane .. '\n' .. member)
  pool.update_calm(level, lane)
end

-- Takes it out again. Returns whether it was urgent.
function pool.leave_gain(ticket)
  if not ticket.gain then return false end
  local level, lane, member = ticket.level, pool.lane_name(ticket), pool.member_of(ticket)
  if call('ZREM', pool.calm_key(level, lane), member) == 1 then
    call('ZREM', prefix .. 'e', level .. ' ' .. lane .. '\n' .. member)
    pool.update_calm(level, lane)
    return false
  end
  if call('ZREM', pool.urgent_key(level, lane), member) == 1 then pool.update_urgent(level, lane) end
  return true
end

-- -- the fair queue

local store_head, leave_lane, count_queued = pool.store_head, pool.leave_lane, pool.count_queued

function pool.count_queued(tier, ticket, sign)
  count_queued(tier, ticket, sign)
  if ticket.gain then tier[COST] = tier[COST] + sign * ticket.gain.cost end
end

function pool.store_head(ticket)
  store_head(ticket)
  if ticket.is_apart == nil then ticket.is_apart = ticket.times ~= nil end
  if not ticket.is_apart then
    call('ZADD', pool.of_tier('fs', ticket.level), pool.tag(ticket.start), ticket.tenant)
    call('HSET', pool.of_tier('fm', ticket.level), ticket.tenant, pool.member_of(ticket))
  end
end

function pool.note_largest(level, tokens)
  local largest = math.max(1, tiers[level][LARGEST])
  while largest < tokens do largest = largest * 2 end
  tiers[level][LARGEST] = largest
  pool.bring_all_back(level)
end

local sort_heads = pool.sort_heads

-- No ticket becomes the first of its tenant by another reserve.
function pool.sort_heads(level)
  local own = pool.store_head
  pool.store_head = store_head
  sort_heads(level)
  pool.store_head = own
end

-- Every ticket is stored as it comes, so that it stands among those that may be best.
function pool.push(ticket, tenant, weight)
  ticket.gain_text, ticket.is_apart = pool.stated_gain(ticket.id, ticket.level) or '-', false
  ticket.gain = pool.read_gain(ticket.gain_text)
  local level, before = ticket.level, pool.lane_of(ticket.level, tenant).weight
  push(ticket, tenant, weight)
  if not ticket.is_stored then
    ticket.start = math.max(tiers[level][VIRTUAL], pool.lane_of(level, tenant).finish)
    pool.store(ticket)
    heads[level] = nil
  end
  if ticket.tokens > tiers[level][LARGEST] then
    pool.note_largest(level, ticket.tokens)
  elseif before ~= ticket.weight and pool.is_aside(level, 't' .. tenant) then
    pool.bring_back(level, tenant)
  end
  pool.enter_gain(ticket, false)
end

function pool.leave_lane(ticket)
  local level, tenant = ticket.level, ticket.tenant
  ticket.was_urgent = pool.leave_gain(ticket)
  pool.lane_name(ticket)
  leave_lane(ticket)
  if not ticket.is_apart and pool.lane_of(level, tenant).waiting == 0 then
    call('ZREM', pool.of_tier('fs', level), tenant)
    call('HDEL', pool.of_tier('fm', level), tenant)
  end
end

-- The first ticket of a tenant that was charged starts where its finish is.
function pool.delay(level, tenant)
  local lane = pool.lane_of(level, tenant)
  if lane.waiting == 0 then return end
  local before = tonumber(call('ZSCORE', pool.of_tier('fs', level), tenant))
  local start = math.max(tiers[level][VIRTUAL], lane.finish)
  if not before or start <= before then return end
  local member = call('HGET', pool.of_tier('fm', level), tenant)
  if not member then return pool.damaged() end
  call('ZADD', pool.of_tier('fs', level), pool.tag(start), tenant)
  local is_small = call('ZSCORE', pool.queue_key(level), member)
  call('ZADD', is_small and pool.queue_key(level) or pool.large_key(level), pool.tag(start), member)
  heads[level] = nil
end

-- Charges the tenant for a ticket that is admitted, from the start of its first ticket.
function pool.charge_tenant(ticket)
  local level = ticket.level
  tiers[level][VIRTUAL] = pool.virtual_now(level)
  pool.lane_name(ticket)
  if ticket.is_apart then return end
  local lane = pool.lane_of(level, ticket.tenant)
  local first = tonumber(call('ZSCORE', pool.of_tier('fs', level), ticket.tenant))
  lane.finish = math.max(lane.finish, first or 0) + ticket.tokens / ticket.weight
end

function pool.forget_queue(level)
  for _, name in ipairs({'fs', 'fm', 'dl', 'ul', 'as'}) do call('DEL', pool.of_tier(name, level)) end
  tiers[level][LARGEST] = 0
end

local leave_queue = pool.leave_queue

function pool.leave_queue(ticket)
  local level, tenant = ticket.level, ticket.tenant
  leave_queue(ticket)
  if tiers[level][QUEUED] == 0 then
    pool.forget_queue(level)
  elseif not ticket.is_apart then
    pool.delay(level, tenant)
  end
end

local restore = pool.restore

-- A ticket that was parked may be urgent again as soon as its pool looks.
function pool.restore(ticket, record)
  restore(ticket, record)
  if ticket.tokens > tiers[ticket.level][LARGEST] then pool.note_largest(ticket.level, ticket.tokens) end
  ticket.is_apart = ticket.times ~= nil
  pool.enter_gain(ticket, false)
end

-- -- by gain

function pool.bring_back(level, tenant)
  call('ZREM', pool.of_tier('as', level), tenant)
  pool.update_calm(level, 't' .. tenant)
  pool.update_urgent(level, 't' .. tenant)
end

function pool.bring_all_back(level)
  for _, tenant in ipairs(call('ZRANGE', pool.of_tier('as', level), 0, -1)) do pool.bring_back(level, tenant) end
end

function pool.set_aside(level, lane)
  local tenant = string.sub(lane, 2)
  call('ZREM', pool.of_tier('dl', level), lane)
  call('ZREM', pool.of_tier('ul', level), lane)
  call('ZADD', pool.of_tier('as', level), pool.tag(pool.near(level, tenant)), tenant)
end

-- Brings back the tenants that V has come close to.
function pool.look_aside(level, virtual)
  while true do
    local first = call('ZRANGE', pool.of_tier('as', level), 0, 0, 'WITHSCORES')
    if not first[1] or tonumber(first[2]) > virtual then return end
    local near = pool.near(level, first[1])
    if virtual < near then
      call('ZADD', pool.of_tier('as', level), pool.tag(near), first[1])
    else
      pool.bring_back(level, first[1])
    end
  end
end

-- The first of the first tickets of all lanes that are not ahead, nil where there is none.
function pool.first_by_gain(level, of_tier, lane_key, virtual)
  while true do
    local top = call('ZRANGE', of_tier, 0, 0, 'WITHSCORES')
    if not top[1] then return nil end
    local found, found_lane, is_set_aside
    for _, lane in ipairs(call('ZRANGEBYSCORE', of_tier, top[2], top[2], 'LIMIT', 0, MOST_EQUAL)) do
      if pool.is_ahead(level, lane, virtual) then
        pool.set_aside(level, lane)
        is_set_aside = true
      else
        local member = call('ZRANGE', lane_key(level, lane), 0, 0)[1]
        if not member then
          call('ZREM', of_tier, lane)
          is_set_aside = true
        elseif not found or member < found then
          found, found_lane = member, lane
        end
      end
    end
    if found and not is_set_aside then
      local ticket = pool.read_member(level, found)
      ticket.is_apart, ticket.member, ticket.lane = found_lane == APART, found, found_lane
      ticket.key = tonumber(top[2])
      return ticket
    end
  end
end

-- The densest urgent ticket of tenants that are not ahead, by what was last computed.
function pool.densest(level)
  local virtual = pool.virtual_now(level)
  pool.look_aside(level, virtual)
  local ticket = pool.first_by_gain(level, pool.of_tier('ul', level), pool.urgent_key, virtual)
  if ticket then ticket.is_urgent, ticket.density = true, -ticket.key end
  return ticket
end

-- The one with the earliest deadline of those that are not urgent. Call it after `densest`.
function pool.earliest(level)
  local ticket = pool.first_by_gain(level, pool.of_tier('dl', level), pool.calm_key, pool.virtual_now(level))
  if ticket then ticket.is_calm = true end
  return ticket
end

function pool.comes_earlier(one, other)
  if one.key ~= other.key then return one.key < other.key end
  if one.arrived ~= other.arrived then return one.arrived < other.arrived end
  return one.sequence < other.sequence
end

-- Brings densities up to date, the highest of all tiers first. Returns the densest ticket of every tier.
function pool.refresh_densities()
  local found = {}
  for level = 0, levels - 1 do
    if tiers[level][QUEUED] > 0 and rules[FIRST_RULE + level][ALWAYS_FIRST] == 0 then found[level] = pool.densest(level) end
  end
  if meta[REFRESHED] ~= now then meta[REFRESHED], meta[REFRESHES] = now, MOST_REFRESHED end
  while meta[REFRESHES] > 0 do
    local top
    for level = 0, levels - 1 do
      local ticket = found[level]
      if ticket and (not top or pool.comes_earlier(ticket, top)) then top = ticket end
    end
    if not top then break end
    local density = pool.density(top.gain, top.arrived)
    if density == top.density then break end
    meta[REFRESHES] = meta[REFRESHES] - 1
    local key = pool.urgent_key(top.level, top.lane)
    if density > 0 then call('ZADD', key, pool.int(-density), top.member) else call('ZREM', key, top.member) end
    pool.update_urgent(top.level, top.lane)
    found[top.level] = pool.densest(top.level)
  end
  return found
end

-- A ticket whose deadline is nearer than this is urgent.
function pool.patience()
  local cost = 0
  for level = 0, levels - 1 do cost = cost + tiers[level][COST] end
  return (cost - cost % 2) / 2
end

function pool.make_urgent()
  local before = now + pool.patience()
  for _ = 1, MOST_MADE_URGENT do
    local first = call('ZRANGE', prefix .. 'e', 0, 0, 'WITHSCORES')
    if not first[1] or tonumber(first[2]) >= before then return end
    call('ZREM', prefix .. 'e', first[1])
    local level_text, lane, member = match(first[1], '^(%d+) (.-)\n(.*)$')
    local level = tonumber(level_text)
    if call('ZREM', pool.calm_key(level, lane), member) == 0 then return pool.damaged() end
    pool.update_calm(level, lane)
    local ticket = pool.read_member(level, member)
    ticket.is_apart = lane == APART
    pool.enter_gain(ticket, true)
  end
end
