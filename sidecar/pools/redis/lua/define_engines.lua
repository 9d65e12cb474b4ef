local function define_placement()
-- include placement.lua
end

local function define_engine_sizes()
-- include engine_sizes.lua
end

local function define_engine_rules()
-- include engine_rules.lua
end

local function define_engine_statements()
-- include engine_statements.lua
end

local function define_fleet_preemption()
-- include fleet_preemption.lua
end

local function define_claims()
-- include claims.lua
end

local function define_fleet_rules()
-- include fleet_scheduler.lua
end

local function define_fleet_state()
-- include fleet_state.lua
end

local function define_fleet_operations()
-- include fleet_operations.lua
end

local function define_engines()
  define_placement()
  define_engine_sizes()
  define_engine_rules()
  define_engine_statements()
  define_claims()
  define_fleet_rules()
  define_fleet_state()
  define_fleet_operations()
end
