-- The state of a pool that orders by gain, and its operations. It replaces parts of `state.lua` and `operations.lua`.

local create = pool.create

function pool.create(expected)
  create(expected)
  for level = 0, levels - 1 do
    for field = FLOOR_TOKENS, ASIDE do tiers[level][field] = 0 end
  end
end

function pool.load_preemption()
  if not pool.preempt then
    define_preemptible()
    define_preemption()
    pool.define_gain_preemption()
  end
end

local state_one = pool.state_one

-- `G ID LEVEL FIGURES`: those of the request that enters, is stated or returns next. One that its tenant's limits move to
-- another tier has none there.
function pool.state_one(operation, index)
  if operation ~= 'G' then return state_one(operation, index) end
  next_gain = {id = ARGV[index + 1], level = tonumber(ARGV[index + 2]), text = ARGV[index + 3]}
  return index + 4
end

local renew_keys = pool.renew_keys

function pool.renew_keys()
  renew_keys()
  call('PEXPIRE', pool.due_key(), KEPT_MS)
  for level = 0, levels - 1 do
    for _, name in ipairs({'fs:', 'dl:', 'ul:', 'as:'}) do call('PEXPIRE', pool.gain_key(name, level), KEPT_MS) end
  end
end
