-- Leases of preemptible tiers, and whether any ticket may preempt one: what every call needs where a tier is preemptible.
-- `preemption.lua` has the rest.

function pool.preemptible_key(level) return prefix .. 'p:' .. level end

function pool.remember(lease, times, overtaken, served)
  call('HSET', prefix .. 'v', lease.owner .. ' ' .. lease.id,
    fmt('%d %d %d %d ', lease.sequence, lease.arrived, times, overtaken or -1) .. served)
end

-- A lease of a preemptible tier begins. If it is preempted, its wait goes on. The tokens of a ticket never count as served
-- before itself.
function pool.may_return(ticket, overtaken)
  local level, served = ticket.level, {}
  if ticket.served then
    for text in string.gmatch(ticket.served, '%d+') do served[#served + 1] = text end
  else
    for other = 0, levels - 1 do served[other + 1] = pool.int(tiers[other][SERVED] - (served_since[other] or 0)) end
  end
  served[level + 1] = pool.int(tonumber(served[level + 1]) + ticket.tokens)
  pool.remember(ticket, ticket.times or 0, overtaken, concat(served, ' '))
  call('ZADD', pool.preemptible_key(level), pool.int(tiers[level][ADMITTED]), ticket.owner .. ' ' .. ticket.id)
end

function pool.keep(id, level)
  local member = me .. ' ' .. id
  call('ZREM', pool.preemptible_key(level), member)
  call('HDEL', prefix .. 'c', member)
end

-- A lease has ended.
function pool.forget_preemption(owner, id, level)
  local member = owner .. ' ' .. id
  if call('HDEL', prefix .. 'v', member) == 1 then
    call('ZREM', pool.preemptible_key(level), member)
    call('HDEL', prefix .. 'c', member)
  end
end

-- Whether any head waits that may preempt. This is cheaper than the order.
function pool.may_preempt()
  if meta[WAITING] == 0 or (now < meta[BACK_UNTIL] and all_requests > 0) or pool.is_on_hold() then return false end
  for level = 0, levels - 1 do
    if tiers[level][QUEUED] > 0 and rules[FIRST_RULE + level][PREEMPT_AFTER_US] >= 0 then return true end
  end
  return false
end

-- The first in order that has waited long enough receives the room of others, with every ticket before it. The victims
-- are reported to their replicas, and hold their room until their engines have released them.
function pool.preempt()
  if not pool.may_preempt() then return end
  local order = pool.up_to_served()
  if not order then return end
  for _, lease in ipairs(pool.choose(order)) do
    call('ZREM', pool.preemptible_key(lease.level), lease.member)
    call('HSET', prefix .. 'c', lease.member, lease.level)
    pool.grant(lease.owner, '!' .. lease.id .. ' ' .. pool.int(lease.times))
  end
end

function pool.next_preemption(soonest)
  for level = 0, levels - 1 do
    local after = rules[FIRST_RULE + level][PREEMPT_AFTER_US]
    if after >= 0 and tiers[level][QUEUED] > 0 then
      for _, head in ipairs({pool.head_of(level), pool.second_head(level)}) do
        local change = head.arrived + after - now
        if change > 0 and (soonest < 0 or change < soonest) then soonest = change end
      end
    end
  end
  return soonest
end
