-- The figures of a pool of several engines. These lines stand outside of all functions, as those of `admission.lua`.

-- The figures of one engine's ledger. PLACE is its place among those that take new work, 0 where it takes none. KNOWN says
-- whether some replica states it. From EFFECTIVE_TOKENS to IS_CAPPED they hold until the next `refresh`.
local PLACE, KNOWN, ENGINE_TOKENS, ENGINE_REQUESTS, ENGINE_PREFILL, SPEED, TAKES_NEW, RAMP, SINCE, DRAINING,
  EFFECTIVE_TOKENS, EFFECTIVE_REQUESTS, EFFECTIVE_PREFILL, OPEN_REQUESTS, IS_CAPPED, CAPPED_REQUESTS, CAPPED_UNTIL,
  ON_TOKENS, ON_REQUESTS, ON_PREFILL, UNPREFILLED = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21
-- The figures of all engines together. CHANGES is when time changes an engine next, -1 for never. REACH is 1 where each
-- replica can use all engines that take new work. DIFFER is 1 where the replicas name different engines. OPEN counts the
-- engines with any room. SAME_UNTIL: a walk would end as the last one did, unless anything else changes. SIZED_*: the
-- size for which the rules were computed. STATEMENTS numbers the statements of replicas. WEIGHT is that of a hit. For
-- BLOCKED_US, and since BLOCKED_SINCE where that is not 0, a ticket waited that fitted the pool and not its engine.
local IS_STALE, CHANGES, REACH, DIFFER, OPEN, ALL_CLAIMANTS, SAME_UNTIL, IS_UNIFORM, LEAST_TOKENS, LEAST_REQUESTS,
  POOL_TOKENS, POOL_REQUESTS, POOL_PREFILL, LARGEST_PREFILL, SIZED_TOKENS, SIZED_REQUESTS, SIZED_PREFILL, SIZED_LARGEST,
  STATEMENTS, WEIGHT, BLOCKED_US, BLOCKED_SINCE = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22
-- More figures of a tier, and of its rules; those of the rules' text follow its fields: six numbers of its three shares.
local HELD_PREFILL, CLAIMANTS = 15, 16
local TIER_FIGURES = 16
local MOST_PREFILL, SMALL_PREFILL, SHARES = TIER_FIELDS + 1, TIER_FIELDS + 2, TIER_FIELDS

-- In place of those of `admission.lua`
local TICKET_US, DISCARDED = 150, 4
local ADMISSION_US, ARGUMENT_US = 250, 20
local CLAIM_US = 150 -- the time to make a ticket a claimant
local UNLIMITED, HELD_PER_PREFILL = 9007199254740991, 50

local fleet, loads, claims, claims_before = false, {}, {}, ''
local ledgers, changed_ledgers = {}, {}
local all_prefill, spare, held_back_until = 0, 0, 0
