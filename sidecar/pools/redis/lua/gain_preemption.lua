-- Preemption in a pool that orders by gain. It replaces parts of `preemption.lua`.

local put_back, requeue = pool.put_back, pool.requeue

-- A lease that returns keeps its figures, and whether it was urgent.
function pool.requeue(index, is_handed_back)
  local _, is_urgent, gain_text = pool.read_note(call('HGET', mine, ARGV[index + 1]))
  local stated = pool.stated_gain(ARGV[index + 1], tonumber(ARGV[index + 2]))
  pool.returning = {is_urgent = is_urgent, gain_text = stated or gain_text}
  requeue(index, is_handed_back)
  pool.returning = nil
end

function pool.put_back(ticket)
  pool.set_gain(ticket, 'r' .. string.gsub(pool.returning.gain_text, '^r', ''))
  put_back(ticket)
  pool.enter_gain(ticket, pool.returning.is_urgent)
end

function pool.note_of(lease) return pool.read_note(call('HGET', pool.replica_key(lease.owner), lease.id)) end

-- A lease comes with the figures that it would wait with.
function pool.comes_before(ticket, candidate)
  if not ticket.gain_text then
    local _, is_urgent, gain_text = pool.note_of(ticket)
    ticket.is_lease, ticket.gain = true, pool.read_gain(gain_text)
    ticket.is_calm = not is_urgent
    ticket.density = is_urgent and ticket.gain and pool.density(ticket.gain, ticket.arrived) or 0
  end
  return pool.is_before(pool.beyond(ticket.level, ticket), candidate)
end

-- No lease in a floor is taken, and none of a tier whose floor is not full.
function pool.is_eligible(lease, most_tokens, most_requests, served)
  if rules[FIRST_RULE + lease.level][ALWAYS_FIRST] == 1 or pool.is_below_floor(lease.level) then return false end
  if pool.note_of(lease) then return false end
  if lease.tokens > most_tokens or lease.requests > most_requests then return false end
  if not pool.recall(lease) then return pool.damaged() end
  return lease.times < rules[FIRST_RULE + lease.level][PREEMPTIBLE] and not pool.comes_before(lease, served)
end

local preempt = pool.preempt

function pool.preempt()
  if pool.may_preempt() then pool.refresh_densities() end
  preempt()
end

pool.in_order_of_turn = pool.in_order

local next_preemption = pool.next_preemption

-- A best ticket may preempt, too.
function pool.next_preemption(soonest)
  local found = next_preemption(soonest)
  for level = 0, levels - 1 do
    local after = rules[FIRST_RULE + level][PREEMPT_AFTER_US]
    if after >= 0 and tiers[level][QUEUED] > 0 then
      local best = pool.best_beside(level)
      local change = best and best.arrived + after - now or -1
      if change > 0 and (found < 0 or change < found) then found = change end
    end
  end
  return found
end
