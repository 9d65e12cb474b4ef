-- Preemption in a pool of several engines that orders by gain: the rules of `gain_preemption.lua`, on one engine.

local is_eligible = pool.is_eligible

function pool.is_eligible(lease, most_tokens, most_requests, served)
  return lease.engine == pool.target and is_eligible(lease, most_tokens, most_requests, served)
end

local note_of = pool.note_of

-- The prompt of a lease that was stated is not known.
function pool.note_of(lease)
  local in_floor, is_urgent, gain_text, uncached = note_of(lease)
  lease.uncached = tonumber(uncached) or 1
  return in_floor, is_urgent, gain_text
end

pool.in_order_of_turn = pool.in_order_of_walk
