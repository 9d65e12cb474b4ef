function pool.define_gain_claims()
-- include gain_claims.lua
end

function pool.define_gain_fleet()
-- include gain_fleet.lua
end

function pool.define_gain_fleet_preemption()
-- include gain_fleet_preemption.lua
end

function pool.define_gain_engines()
  pool.define_gain_claims()
  pool.define_gain_fleet()
end
