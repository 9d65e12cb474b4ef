-- Rule 2: the queue of one tier; its tenants take turns by start-time fair queueing (`queue.py`).
--
-- A queue has lanes: tenant -> its tickets by arrival, packed until they are looked at; `starts`, the tag of each
-- lane's first; `returned`, those that came back; and `finish`, the tags of tenants. It is read when its tier's head does not do. A
-- ticket that comes to an empty tier and is granted at once is never written.
--
-- Where a tenant's users take turns (`user_turns.py`) its lane has the first ticket of each, by its place; the others wait in lanes of
-- their own, `TENANT\0USER`. `users`: tenant -> its users' virtual time, their finish tags, and the places of their firsts.

local function lane_of(queue, tenant)
  if not queue.lanes[tenant] and queue.texts[tenant] then queue.lanes[tenant] = { unpacked(queue.texts[tenant]) } end
  return queue.lanes[tenant]
end

local function queue_of(tier)
  local queue = queues[tier]
  if queue then return queue end
  queue = { lanes = {}, texts = {}, starts = {}, finish = {}, returned = {}, users = {} }
  if tiers[tier][QUEUED] > 0 then
    local name = 'q:' .. tier
    if known[name] and known[name][1] == field(name) then
      queue = known[name][2]
    else
      queue.texts, queue.starts, queue.finish, queue.returned, queue.users = unpacked(field(name))
      queue.users = queue.users or {}
    end
    local head = heads[tier] and ticket_at(heads, tier)
    if head and head[HAS_RETURNED] then -- it is one object, here and there
      for i = 1, #queue.returned do
        if packed_ticket(queue.returned[i]) == head.packed then queue.returned[i], queue.by_gain = head, nil end
      end
    elseif head and lane_of(queue, head[TENANT])[1] ~= head then
      queue.lanes[head[TENANT]][1], queue.by_gain = head, nil
    end
  end
  queues[tier] = queue
  return queue
end

local function packed_queue(tier)
  if not tiers[tier] or tiers[tier][QUEUED] == 0 then return false end -- empty, or of a tier that went
  local queue = queues[tier]
  for tenant, lane in pairs(queue.lanes) do
    queue.texts[tenant] = queue.texts[tenant] or pack(unpack(packed_tickets(lane)))
  end
  return pack(queue.texts, queue.starts, queue.finish, packed_tickets(queue.returned), queue.users)
end

local function is_next(a, b) -- by start, then arrival
  if a[START] ~= b[START] then return a[START] < b[START] end
  return is_before(a, b)
end

-- The next in fair order, of those that are wanted.
local function next_of(tier, is_wanted)
  if tiers[tier][QUEUED] == 0 then return nil end
  if not is_wanted and heads[tier] then return ticket_at(heads, tier) end
  local queue, found = queue_of(tier), nil
  for tenant, start in pairs(queue.starts) do
    if is_wanted or not found or start <= found[START] then
      local first = ticket_at(lane_of(queue, tenant), 1)
      if (not is_wanted or is_wanted(first)) and (not found or is_next(first, found)) then found = first end
    end
  end
  for i = 1, #queue.returned do
    local ticket = ticket_at(queue.returned, i)
    if (not is_wanted or is_wanted(ticket)) and (not found or is_next(ticket, found)) then found = ticket end
  end
  if not is_wanted then heads[tier] = found end
  return found
end

-- Each ticket of a queue, with the start tag of its lane's first.
local function for_queue(tier, each)
  if tiers[tier][QUEUED] == 0 then return end
  local queue = queue_of(tier)
  for tenant, start in pairs(queue.starts) do
    local lane = lane_of(queue, tenant)
    for i = 1, #lane do each(ticket_at(lane, i), start) end
    for user in pairs(queue.users[tenant] and queue.users[tenant].firsts or NOBODY) do
      local others = lane_of(queue, tenant .. '\0' .. user) or NOBODY
      for i = 1, #others do each(ticket_at(others, i), start) end
    end
  end
  for i = 1, #queue.returned do each(ticket_at(queue.returned, i), queue.returned[i][START]) end
end

local function is_before_in_lane(a, b) -- by place, then arrival
  if a[PLACE] ~= b[PLACE] then return a[PLACE] < b[PLACE] end
  return is_before(a, b)
end

-- In fair order of each replica the first, wherever it is in its tenant's queue.
local function first_of_each_owner(tier)
  local found, list = {}, {}
  local function is_less_than(a, b) return a.start < b.start or (a.start == b.start and is_before_in_lane(a.ticket, b.ticket)) end
  for_queue(tier, function(ticket, start)
    local it, known_one = { start = start, ticket = ticket }, found[ticket[OWNER]]
    if not known_one or is_less_than(it, known_one) then found[ticket[OWNER]] = it end
  end)
  for _, it in pairs(found) do list[#list + 1] = it end
  table.sort(list, is_less_than)
  return list
end

-- What changes in a queue may change its head; a tenant's first gets its start tag. Where none waits, all tags start afresh at a
-- virtual time beyond every tag. `before`: of a tenant whose users take turns the one that was first, if it waits still.
local function tag(tier, tenant, before)
  local t, queue = tiers[tier], queue_of(tier)
  local lane = lane_of(queue, tenant)
  queue.texts[tenant], changed['q:' .. tier], heads[tier], state[NEXT] = nil, true, false, false
  if t[QUEUED] == 0 then
    for _, finish in pairs(queue.finish) do t[VIRTUAL] = max(t[VIRTUAL], finish) end
    queue.finish, queue.users, t[LARGEST], t[SMALLEST], t[AFRESH] = {}, {}, 1, UNBOUNDED, t[AFRESH] + 1
    return
  end
  local first = lane and ticket_at(lane, 1)
  if before and first ~= before then -- another user's turn is before that of the one that was first, whose tag it gets
    first[START], before[START], first.packed, before.packed = before[START], false, nil, nil
  end
  if first and not first[START] then
    first[START], first.packed = max(first[HINT] or t[VIRTUAL], queue.finish[tenant] or 0), nil
  end
  if first then queue.starts[tenant] = first[START] end
  if rules[R_BY_GAIN] then t[VIRTUAL] = max(t[VIRTUAL], next_of(tier)[START]) end
end

-- Rule 9: weight for time.
local function earned(ticket)
  local gain = ticket[GAIN]
  if not gain then return 0 end
  local lost = floor(max(0, now - ticket[ARRIVED] - gain[GAIN_START_BY]) / gain[GAIN_SLACK])
  local share = floor(max(0, gain[GAIN_TOKENS] - lost) * 1000 / gain[GAIN_TOKENS])
  return floor(gain[GAIN_WEIGHT] * share * 1000000 / gain[GAIN_COST])
end

-- By gain: `by_gain` has what earns something, the most first, by what it earned when it was looked at last: with time that falls.
local function rank(queue, ticket)
  local list, bounds, low = queue.by_gain, queue.bounds, 1
  local high = #list + 1
  bounds[ticket] = earned(ticket)
  while low < high do
    local middle = floor((low + high) / 2)
    local other = list[middle]
    if bounds[other] > bounds[ticket] or (bounds[other] == bounds[ticket] and is_before(other, ticket)) then low = middle + 1 else high = middle end
  end
  if bounds[ticket] > 0 then table.insert(list, low, ticket) end
end

local function charged(ticket) return ticket[COST] or ticket[TOKENS] end

-- ---- the users of a tenant

local turns = {} -- functions: a script has 200 locals at most

local function insert(queue, name, ticket)
  local lane = lane_of(queue, name) or {}
  local i = #lane + 1
  while i > 1 and is_before_in_lane(ticket, ticket_at(lane, i - 1)) do i = i - 1 end
  table.insert(lane, i, ticket)
  queue.lanes[name], queue.texts[name] = lane, nil
end

function turns.find(queue, tenant)
  queue.users[tenant] = queue.users[tenant] or { virtual = 0, finish = {}, firsts = {} }
  return queue.users[tenant]
end

function turns.place(queue, ticket)
  local users, user = turns.find(queue, ticket[TENANT]), ticket[USER]
  ticket[PLACE], ticket.packed = max(users.virtual, users.finish[user] or 0) + charged(ticket), nil
  users.firsts[user] = ticket[PLACE]
  insert(queue, ticket[TENANT], ticket)
end

function turns.first(queue, ticket)
  if not turns.find(queue, ticket[TENANT]).firsts[ticket[USER]] then return nil end
  local lane, i = lane_of(queue, ticket[TENANT]), 1
  while ticket_at(lane, i)[USER] ~= ticket[USER] do i = i + 1 end
  return lane[i]
end

function turns.add(queue, ticket)
  local first, later = turns.first(queue, ticket), ticket
  if not first or is_before(ticket, first) then
    if first then take_from(lane_of(queue, ticket[TENANT]), first) end
    turns.place(queue, ticket)
    later = first
  end
  if later then
    later[PLACE], later.packed = UNBOUNDED, nil
    insert(queue, later[TENANT] .. '\0' .. later[USER], later)
  end
end

function turns.take_out(queue, ticket)
  local name = ticket[TENANT] .. '\0' .. ticket[USER]
  local others = lane_of(queue, name) or {}
  if take_from(lane_of(queue, ticket[TENANT]), ticket) then
    turns.find(queue, ticket[TENANT]).firsts[ticket[USER]] = nil
    if others[1] then turns.place(queue, ticket_at(others, 1)) end
    table.remove(others, 1)
  else
    take_from(others, ticket)
  end
  queue.texts[name] = nil
  if #others == 0 then queue.lanes[name] = nil end
end

function turns.set_finish(users, user, finish)
  local all, count = users.finish, 0
  all[user] = finish > users.virtual and finish or nil
  for _ in pairs(all) do count = count + 1 end
  if count <= MOST_AHEAD then return end
  for it, of in pairs(all) do
    if of <= users.virtual then all[it], count = nil, count - 1 end
  end
  if count <= MOST_AHEAD then return end
  for it in pairs(all) do
    if not users.firsts[it] then all[it] = nil end
  end
end

-- A user's lease has grown; below 0: it has used less, and the user's first is placed so much earlier, but never before the virtual time.
function turns.grow(queue, tenant, user, tokens)
  local users = queue.users[tenant]
  local virtual = users.virtual
  turns.set_finish(users, user, max(virtual, max(virtual, users.finish[user] or 0) + tokens))
  local place = users.firsts[user]
  if tokens >= 0 or not place then return end
  local first = turns.first(queue, { [TENANT] = tenant, [USER] = user })
  take_from(lane_of(queue, tenant), first)
  first[PLACE], first.packed = min(place, max(virtual + charged(first), place + tokens)), nil
  users.firsts[user] = first[PLACE]
  insert(queue, tenant, first)
end

-- Its user is charged for one that leaves its tenant's queue, whose first is `first`: time passes to that one.
function turns.charge(queue, ticket, first)
  local users, user, own = turns.find(queue, ticket[TENANT]), ticket[USER], turns.first(queue, ticket)
  local passed = first[PLACE] - (rules[R_BY_GAIN] and charged(first) or 0)
  users.virtual = max(users.virtual, passed)
  turns.set_finish(users, user, max(own[PLACE] - charged(own), users.finish[user] or 0) + charged(ticket))
  if own ~= ticket then -- by gain
    take_from(lane_of(queue, ticket[TENANT]), own)
    turns.place(queue, own)
  end
end

function turns.are_ahead(users)
  for _, finish in pairs(users.finish) do
    if finish > users.virtual then return true end
  end
  return false
end

-- Nothing is remembered where nobody waits and no user is ahead.
function turns.forget(queue, tenant)
  local users = queue.users[tenant]
  if users and not turns.are_ahead(users) then queue.users[tenant] = nil end
end

-- One without a user is of an unknown one where a reload has ended the turns, until none of the others waits.
function turns.join(queue, ticket)
  local users = not ticket[USER] and queue.users[ticket[TENANT]]
  if users and (next(users.firsts) or turns.are_ahead(users)) then ticket[USER] = '' end
end

-- The first of a tenant whose users take turns, unless it is the one that leaves.
function turns.first_before(queue, ticket)
  local lane = ticket[USER] and not ticket[HAS_RETURNED] and lane_of(queue, ticket[TENANT])
  local first = lane and ticket_at(lane, 1)
  return first ~= ticket and first or nil
end

-- ---- what comes and leaves

local function queue_add(ticket)
  local tier, tenant = ticket[TIER], ticket[TENANT]
  local t, queue = tiers[tier], queue_of(tier)
  if not ticket[HAS_RETURNED] then turns.join(queue, ticket) end
  local before = turns.first_before(queue, ticket)
  t[LARGEST], t[SMALLEST] = max(t[LARGEST], charged(ticket)), min(t[SMALLEST], ticket[TOKENS])
  if ticket[HAS_RETURNED] then
    local first = next_of(tier)
    ticket[START] = first and min(t[VIRTUAL], first[START]) or t[VIRTUAL]
    queue.returned[#queue.returned + 1] = ticket
  elseif ticket[USER] then
    turns.add(queue, ticket)
  else
    insert(queue, tenant, ticket)
  end
  t[QUEUED] = t[QUEUED] + 1
  if queue.by_gain then rank(queue, ticket) end
  tag(tier, tenant, before)
end

local function take_out(queue, ticket)
  local tenant = ticket[TENANT]
  local list = ticket[HAS_RETURNED] and queue.returned or lane_of(queue, tenant)
  if ticket[USER] and not ticket[HAS_RETURNED] then turns.take_out(queue, ticket) else take_from(list, ticket) end
  if not ticket[HAS_RETURNED] and #list == 0 then
    queue.lanes[tenant], queue.texts[tenant], queue.starts[tenant] = nil, nil, nil
    turns.forget(queue, tenant)
  end
  tiers[ticket[TIER]][QUEUED] = tiers[ticket[TIER]][QUEUED] - 1
  if queue.by_gain then
    take_from(queue.by_gain, ticket)
    queue.bounds[ticket] = nil
  end
end

-- One that leaves by cancellation: it costs nothing.
local function queue_remove(ticket)
  local queue = queue_of(ticket[TIER])
  local before = turns.first_before(queue, ticket)
  take_out(queue, ticket)
  tag(ticket[TIER], ticket[TENANT], before)
end

-- From so many on, tags that are not beyond the virtual time, and of whom nobody waits, are forgotten.
local function forget_tags(tier, queue)
  local t, kept, count, left = tiers[tier], {}, 0, 0
  for tenant, finish in pairs(queue.finish) do
    count = count + 1
    if finish > t[VIRTUAL] or queue.lanes[tenant] then kept[tenant], left = finish, left + 1 end
  end
  if count > t[MOST_TAGS] then queue.finish, t[MOST_TAGS] = kept, 2 * left + 64 end
end

-- One that leaves for an engine or for the line: its tenant is charged.
local function queue_leave(ticket)
  local tier, tenant = ticket[TIER], ticket[TENANT]
  local t, queue = tiers[tier], queue_of(tier)
  local before = turns.first_before(queue, ticket)
  if not rules[R_BY_GAIN] then t[VIRTUAL] = max(t[VIRTUAL], ticket[START] or 0) end
  if not ticket[HAS_RETURNED] then
    local first = ticket_at(lane_of(queue, tenant), 1)
    local finish = max(first[START] or 0, queue.finish[tenant] or 0) + charged(ticket) / ticket[WEIGHT]
    queue.finish[tenant] = finish
    forget_tags(tier, queue)
    if first ~= ticket and (not first[START] or first[START] < finish) then first[START], first.packed = finish, nil end
    if ticket[USER] then turns.charge(queue, ticket, first) end
  end
  take_out(queue, ticket)
  tag(tier, tenant, before)
end

-- Growth of a tenant's lease, while others of the tier wait; of its user's, while others of the tenant do. Below 0: what it did not
-- use is given back.
local function queue_charge(tier, tenant, tokens, weight, user)
  if not tier or tiers[tier][QUEUED] == 0 then return end
  local queue, virtual = queue_of(tier), tiers[tier][VIRTUAL]
  queue.finish[tenant] = max(virtual, max(virtual, queue.finish[tenant] or 0) + tokens / weight)
  local lane = lane_of(queue, tenant)
  local users, first = user and lane and queue.users[tenant], lane and ticket_at(lane, 1)
  if users then turns.grow(queue, tenant, user, tokens) end
  changed['q:' .. tier] = true
  if tokens >= 0 or not first then return end
  tag(tier, tenant, first) -- its user's turn may be before that of the one that was first
  first = ticket_at(lane, 1)
  first[START], first.packed = max(virtual, first[START] + tokens / weight), nil
  tag(tier, tenant)
end

-- Rule 9: whether a tenant, or its user, had so much more than its part that it comes after all others.
local function is_ahead(ticket)
  local queue = queue_of(ticket[TIER])
  local ahead = ((queue.finish[ticket[TENANT]] or 0) - tiers[ticket[TIER]][VIRTUAL]) * ticket[WEIGHT]
  local users = ticket[USER] and queue.users[ticket[TENANT]]
  if users then ahead = max(ahead, (users.finish[ticket[USER]] or 0) - users.virtual) end
  return not ticket[HAS_RETURNED] and ahead > 2 * tiers[ticket[TIER]][LARGEST]
end

-- By gain: the best of all that wait in a queue, earn something, and whose tenant is not ahead.
local function best_in_queue(tier)
  local queue, i = queue_of(tier), 1
  if not queue.by_gain then
    queue.by_gain, queue.bounds = {}, {}
    for_queue(tier, function(ticket) rank(queue, ticket) end)
  end
  while true do
    local ticket = queue.by_gain[i]
    if not ticket then return nil end
    if earned(ticket) < queue.bounds[ticket] then
      rank(queue, table.remove(queue.by_gain, i))
    elseif is_ahead(ticket) then
      i = i + 1
    else
      return ticket
    end
  end
end
