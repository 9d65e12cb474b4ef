-- The figures of a pool that orders by gain. These lines stand outside of all functions, as those of `admission.lua`.

-- More figures of a tier: what its leases in its floor hold, the engines' time for all that waits, and the largest request
-- since its queue was empty, rounded up to a power of two, and how many tenants are aside.
local FLOOR_TOKENS, FLOOR_REQUESTS, COST, LARGEST, ASIDE = 15, 16, 17, 18, 19
local MOST_REFRESHED = 2 -- as in `scheduling/gain_scheduler.py`
local BROUGHT_BACK = 32 -- the most tenants that one call brings back from aside: 30 us each
local UNLIMITED = 9007199254740991
-- More figures of the pool: when densities were brought up to date last, and how many more may be at that time
local REFRESHED, REFRESHES = 24, 25
-- When tickets became urgent last, and how many more may at that time
local URGED, URGES = 26, 27
local META_FIELDS = 27
local TIER_FIGURES = 19
-- In place of those of `admission.lua`
local TICKET_US, DISCARDED, SORTED = 150, 4, 64
local ADMISSION_US, ARGUMENT_US = 300, 20
local next_gain = false -- what `G` said of the next request
