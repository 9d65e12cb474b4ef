function pool.define_placement()
-- include placement.lua
end

function pool.define_engine_sizes()
-- include engine_sizes.lua
end

function pool.define_engine_rules()
-- include engine_rules.lua
end

function pool.define_engine_statements()
-- include engine_statements.lua
end

function pool.define_fleet_preemption()
-- include fleet_preemption.lua
end

function pool.define_claims()
-- include claims.lua
end

function pool.define_fleet_rules()
-- include fleet_scheduler.lua
end

function pool.define_fleet_state()
-- include fleet_state.lua
end

function pool.define_fleet_operations()
-- include fleet_operations.lua
end

function pool.define_engines()
  pool.define_placement()
  pool.define_engine_sizes()
  pool.define_engine_rules()
  pool.define_engine_statements()
  pool.define_claims()
  pool.define_fleet_rules()
  pool.define_fleet_state()
  pool.define_fleet_operations()
end
