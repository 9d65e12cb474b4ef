"""Admission rules as whole numbers: the scheduler's input, computed once when a policy is loaded.

Whole numbers (`R = ceil(reserve * C)`, `H = floor((1 - lend) * reserve * C)`, `L = floor(limit * C)`) and not
fractions, so that every implementation of the rules compares exactly the same figures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from sidecar.policy.tier import Tier

UNLIMITED = 2**53 - 1
"""Stands for a dimension the policy does not bound. The largest whole number that a double (so Lua) holds exactly."""
MOST_EXCESS = 1_000
"""The most whole reserves that one ticket counts as too much (rule 5)."""


@dataclass(frozen=True, slots=True)
class TierRules:
    """One tier's floor, headroom and limit, in tokens and in requests, and for a pool of several engines in `prefill`:
    prompt tokens that were sent to an engine which has sent no first byte yet.

    `limited` says that the tier may hold less than the whole pool. Of a tier that is not limited the first ticket is
    always a candidate, even while leases that were registered again hold more than the pool. `preemptible` leases may
    be taken back, before their first byte, for a ticket of a more important tier that has waited `preempt_after_us`
    microseconds of its own tier; None: it waits its turn.
    """

    name: str
    level: int
    reserve_tokens: int
    reserve_requests: int
    headroom_tokens: int
    headroom_requests: int
    limit_tokens: int
    limit_requests: int
    limited: bool = False
    always_first: bool = False
    preemptible: bool = False
    preempt_after_us: int | None = None
    reserve_prefill: int = 0
    headroom_prefill: int = 0
    limit_prefill: int = UNLIMITED


@dataclass(frozen=True, slots=True)
class PoolRules:
    """The whole pool: its capacity in each dimension and its tiers, most important first (`tiers[i].level == i`).

    `prefill` is bounded in a pool of several engines only.

    `promote_after_us` is the time in microseconds after which a waiting ticket rises one level, None for no aging;
    `ceiling` is the level past which none rises. `max_preemptions` is how often one request is preempted at most.
    `is_by_gain` says that tickets beyond the floors are ordered by gain, and not by level.
    """

    tokens: int
    requests: int
    tiers: tuple[TierRules, ...]
    promote_after_us: int | None = None
    ceiling: int = 0
    max_preemptions: int = 0
    prefill: int = UNLIMITED
    is_by_gain: bool = False

    def is_preemptible(self, level: int) -> bool:
        """True if the room of a request at this level may be taken back before its first byte."""
        return self.max_preemptions > 0 and self.tiers[level].preemptible


@dataclass(frozen=True, slots=True)
class Shares:
    """One tier as an operator states it: exact fractions of the pool, and in `hold` of its requests.

    `hold` of them must meet its objectives, or the less important tiers hold less; 0: it is not guarded.
    """

    name: str
    reserve: Fraction = Fraction(0)
    lend: Fraction = Fraction(1)
    limit: Fraction = Fraction(1)
    always_first: bool = False
    preemptible: bool = False
    preempt_after_us: int | None = None
    hold: Fraction = Fraction(0)


StatedShares: TypeAlias = "Shares | Tier"
"""The shares of one tier, alone or with all else that its policy says of it."""


def pool_rules(
    *,
    tokens: int | None,
    requests: int | None,
    tiers: Sequence[StatedShares],
    promote_after_us: int | None = None,
    ceiling: int = 0,
    max_preemptions: int = 0,
    prefill: int | None = None,
    floor_of_reserve: Fraction = Fraction(1),
    is_by_gain: bool = False,
) -> PoolRules:
    """Turns fractions of a pool into whole numbers. A dimension is None where it is unbounded.

    `floor_of_reserve` is the part of each reserve that is its tier's floor. Headroom is of the whole reserve.
    """
    return PoolRules(
        tokens=UNLIMITED if tokens is None else tokens,
        requests=UNLIMITED if requests is None else requests,
        prefill=UNLIMITED if prefill is None else prefill,
        tiers=tuple(
            _tier_rules(shares, level, (tokens, requests, prefill), shares.reserve * floor_of_reserve)
            for level, shares in enumerate(tiers)
        ),
        promote_after_us=promote_after_us,
        ceiling=ceiling,
        max_preemptions=max_preemptions,
        is_by_gain=is_by_gain,
    )


def _tier_rules(
    shares: StatedShares, level: int, capacity: tuple[int | None, int | None, int | None], floor: Fraction
) -> TierRules:
    tokens, requests, prefill = capacity
    return TierRules(
        name=shares.name,
        level=level,
        reserve_tokens=_floor_for(floor, tokens),
        reserve_requests=_floor_for(floor, requests),
        headroom_tokens=_headroom_for(shares, tokens),
        headroom_requests=_headroom_for(shares, requests),
        limit_tokens=_limit_for(shares, tokens),
        limit_requests=_limit_for(shares, requests),
        limited=shares.limit < 1,
        always_first=shares.always_first,
        preemptible=shares.preemptible,
        preempt_after_us=shares.preempt_after_us,
        reserve_prefill=_floor_for(floor, prefill),
        headroom_prefill=_headroom_for(shares, prefill),
        limit_prefill=_limit_for(shares, prefill),
    )


def _floor_for(share: Fraction, capacity: int | None) -> int:
    if capacity is None:  # an unbounded dimension never decides whether a tier is below its reserve
        return UNLIMITED if share else 0
    return math.ceil(share * capacity)


def _headroom_for(shares: StatedShares, capacity: int | None) -> int:
    return 0 if capacity is None else math.floor((1 - shares.lend) * shares.reserve * capacity)


def _limit_for(shares: StatedShares, capacity: int | None) -> int:
    return UNLIMITED if capacity is None else math.floor(shares.limit * capacity)


def best_level(rules: PoolRules, level: int) -> int:
    """The most important level that a ticket of a tier at `level` can age to."""
    return level if rules.promote_after_us is None else min(level, rules.ceiling)


def largest_admissible(rules: PoolRules, level: int) -> tuple[int, int]:
    """The most (tokens, requests) that a ticket of a tier could ever be given: the pool empty but for this ticket.

    That is the tier's limit, or the pool less the headroom of the tiers more important than the level it can age to
    (rule 2), whichever is less. A ticket that waits already is judged by this: it is not refused where the pool has
    shrunk, as long as it can be admitted at all.
    """
    tier = rules.tiers[level]
    above = rules.tiers[: best_level(rules, level)]  # never the tier itself: it ages up, not down
    return (
        min(tier.limit_tokens, rules.tokens - sum(other.headroom_tokens for other in above)),
        min(tier.limit_requests, rules.requests - sum(other.headroom_requests for other in above)),
    )


def largest_request(rules: PoolRules, level: int) -> tuple[int, int]:
    """The size limit of a tier: the most (tokens, requests) that one of its requests may hold when it comes.

    It is what could be admitted at all and, for a tier with a reserve, no more than the pool less the reserves of all
    other tiers, or its own reserve where that is more. A larger request could wait for room that the floors of the
    others never leave. A tier without a reserve has no promise to keep. Where floors are a part of the reserves, the
    headroom of a more important tier may be more than its floor, and counts in its place.
    """
    own = rules.tiers[level]
    tokens, requests = _beside(rules, [_kept(tier, level) for tier in rules.tiers], level)
    beside = max(own.reserve_tokens, tokens), max(own.reserve_requests, requests)
    tokens, requests = map(min, largest_admissible(rules, level), beside)
    return tokens, requests


def largest_certain_request(rules: PoolRules, level: int) -> tuple[int, int]:
    """The size limit of a tier while every other `always_first` tier holds its limit, and not its reserve.

    A larger request of the tier may wait as long as that lasts. A size below the tier's own reserve says that not even
    the reserve is certain then. For a tier without a reserve nothing is certain: (0, 0).
    """
    if not has_reserve(rules.tiers[level]):
        return 0, 0
    tokens, requests = largest_request(rules, level)
    floors = [
        (tier.limit_tokens, tier.limit_requests) if tier.always_first and tier.level != level else _kept(tier, level)
        for tier in rules.tiers
    ]
    beside_tokens, beside_requests = _beside(rules, floors, level)
    return min(tokens, max(0, beside_tokens)), min(requests, max(0, beside_requests))


def has_reserve(tier: TierRules) -> bool:
    """True if a tier has a floor. In a dimension that the policy does not bound every tier has one."""
    return min(tier.reserve_tokens, tier.reserve_requests) > 0


def _kept(tier: TierRules, level: int) -> tuple[int, int]:
    """The tokens and requests that a tier keeps from a ticket of a level."""
    if tier.level >= level:
        return tier.reserve_tokens, tier.reserve_requests
    return max(tier.reserve_tokens, tier.headroom_tokens), max(tier.reserve_requests, tier.headroom_requests)


def _beside(rules: PoolRules, floors: list[tuple[int, int]], level: int) -> tuple[int, int]:
    """The (tokens, requests) that the other tiers' floors leave: unlimited where a pool is, and for a tier without a
    floor.
    """
    left = []
    for capacity, kept in zip((rules.tokens, rules.requests), zip(*floors, strict=True), strict=True):
        is_free = capacity == UNLIMITED or not kept[level]
        left.append(UNLIMITED if is_free else capacity - sum(kept) + kept[level])
    return left[0], left[1]
