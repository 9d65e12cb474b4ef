-- The figures of a pool of several engines that orders by gain. These lines stand outside of all functions.

-- The figures of a tier that follow those of `gain_fields.lua`: those of `engine_fields.lua`, and what its leases in its floor
-- have un-prefilled.
local HELD_PREFILL, CLAIMANTS = 20, 21
local FLOOR_PREFILL = 22
local TIER_FIGURES = 22
local ADMISSION_US, CLAIM_US = 300, 250 -- in place of those before
