function pool.define_gain_tickets()
-- include gain_tickets.lua
end

function pool.define_gain_order()
-- include gain_order.lua
end

function pool.define_gain_preemption()
-- include gain_preemption.lua
end

function pool.define_gain_state()
-- include gain_state.lua
end

function pool.define_gain()
  pool.define_gain_tickets()
  pool.define_gain_order()
  pool.define_gain_state()
end
