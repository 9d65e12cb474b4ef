local function define_gain_tickets()
-- include gain_tickets.lua
end

local function define_gain_order()
-- include gain_order.lua
end

local function define_gain_preemption()
-- include gain_preemption.lua
end

local function define_gain_state()
-- include gain_state.lua
end

local function define_gain()
  define_gain_tickets()
  define_gain_order()
  define_gain_state()
end
