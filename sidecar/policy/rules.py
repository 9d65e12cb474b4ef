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


Amount: TypeAlias = tuple[int, int, int]
"""Tokens, requests, and for a pool of several engines prompt tokens that were sent to an engine which has sent no first
byte yet. All whole numbers."""


@dataclass(frozen=True, slots=True)
class TierRules:
    """One tier's floor, headroom and limit.

    `limited` says that the tier may hold less than the whole pool. Of a tier that is not limited the first ticket is
    always a candidate, even while leases that were registered again hold more than the pool. `preemptible` leases may
    be taken back, before their first byte, for a ticket of a more important tier that has waited `preempt_after_us`
    microseconds of its own tier; None: it waits its turn.
    """

    name: str
    level: int
    reserve: Amount
    headroom: Amount
    limit: Amount
    limited: bool = False
    always_first: bool = False
    preemptible: bool = False
    preempt_after_us: int | None = None


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

    @property
    def capacity(self) -> Amount:
        """Its size."""
        return self.tokens, self.requests, self.prefill

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
    capacity = _unlimited(tokens), _unlimited(requests), _unlimited(prefill)
    return PoolRules(
        *capacity[:2],
        prefill=capacity[2],
        tiers=tuple(
            TierRules(
                shares.name,
                level,
                *tier_amounts(shares, capacity, floor_of_reserve, by_gain=is_by_gain),
                limited=shares.limit < 1,
                always_first=shares.always_first,
                preemptible=shares.preemptible,
                preempt_after_us=shares.preempt_after_us,
            )
            for level, shares in enumerate(tiers)
        ),
        promote_after_us=promote_after_us,
        ceiling=ceiling,
        max_preemptions=max_preemptions,
        is_by_gain=is_by_gain,
    )


def _unlimited(size: int | None) -> int:
    return UNLIMITED if size is None else size


def rounded_part(share: Fraction, capacity: Amount, of_unbounded: int) -> Amount:
    """A share of a pool, rounded down; `of_unbounded` where the pool has no bound."""
    tokens, requests, prompt = (of_unbounded if c == UNLIMITED else math.floor(share * c) for c in capacity)
    return tokens, requests, prompt


def tier_amounts(
    shares: StatedShares, capacity: Amount, fair: Fraction, *, by_gain: bool
) -> tuple[Amount, Amount, Amount]:
    """Rule 1: a tier's floor R, headroom H and limit L in a pool. By gain the floor is at least the headroom (rule 9).

    A dimension without a bound never decides whether a tier is below its floor.
    """
    headroom = rounded_part((1 - shares.lend) * shares.reserve, capacity, 0)
    share, least = shares.reserve * fair, headroom if by_gain else (0, 0, 0)
    tokens, requests, prompt = (
        (UNLIMITED if share else 0) if c == UNLIMITED else max(kept, math.ceil(share * c))
        for c, kept in zip(capacity, least, strict=True)
    )
    return (tokens, requests, prompt), headroom, rounded_part(shares.limit, capacity, UNLIMITED)


def admissible(capacity: Amount, limit: Amount, headrooms: Sequence[Amount]) -> Amount:
    """The most that a ticket could ever be given: the pool empty but for it.

    That is its tier's limit, or the pool less the `headrooms` of the tiers more important than the level it can age to
    (rule 2), whichever is less. A ticket that waits already is judged by this: it is not refused where the pool has
    shrunk, as long as it can be admitted at all.
    """
    tokens, requests, prompt = (
        min(most, whole - sum(headroom[d] for headroom in headrooms))
        for d, (most, whole) in enumerate(zip(limit, capacity, strict=True))
    )
    return tokens, requests, prompt


def size_limit(capacity: Amount, level: int, most: Amount, reserves: Sequence[Amount]) -> Amount:
    """The most that one request of a tier may hold when it comes, of `most` that could be admitted at all.

    For a tier with a reserve it is no more than the pool less the reserves of all other tiers, or its own reserve where
    that is more. A larger request could wait for room that the floors of the others never leave. A tier without a
    reserve has no promise to keep.
    """
    sizes = list(most)
    for d, (own, whole) in enumerate(zip(reserves[level], capacity, strict=True)):
        if own and whole != UNLIMITED:
            sizes[d] = min(most[d], max(own, whole - sum(reserve[d] for reserve in reserves) + own))
    return sizes[0], sizes[1], sizes[2]


def best_level(rules: PoolRules, level: int) -> int:
    """The most important level that a ticket of a tier at `level` can age to."""
    return level if rules.promote_after_us is None else min(level, rules.ceiling)


def largest_admissible(rules: PoolRules, level: int) -> tuple[int, int]:
    """The (tokens, requests) that are `admissible` in a tier."""
    above = rules.tiers[: best_level(rules, level)]  # never the tier itself: it ages up, not down
    return admissible(rules.capacity, rules.tiers[level].limit, [tier.headroom for tier in above])[:2]


def largest_request(rules: PoolRules, level: int) -> tuple[int, int]:
    """The `size_limit` of a tier, in (tokens, requests)."""
    most = *largest_admissible(rules, level), UNLIMITED
    return size_limit(rules.capacity, level, most, [tier.reserve for tier in rules.tiers])[:2]


def largest_certain_request(rules: PoolRules, level: int) -> tuple[int, int]:
    """The size limit of a tier while every other `always_first` tier holds its limit, and not its reserve.

    A larger request of the tier may wait as long as that lasts. A size below the tier's own reserve says that not even
    the reserve is certain then. For a tier without a reserve nothing is certain: (0, 0).
    """
    own = rules.tiers[level]
    if not has_reserve(own):
        return 0, 0
    others = [tier.limit if tier.always_first else tier.reserve for tier in rules.tiers if tier is not own]
    left = [
        most if whole == UNLIMITED else min(most, max(0, whole - sum(kept[d] for kept in others)))
        for d, (most, whole) in enumerate(zip(largest_request(rules, level), rules.capacity[:2], strict=True))
    ]
    return left[0], left[1]


def has_reserve(tier: TierRules) -> bool:
    """True if a tier has a floor. In a dimension that the policy does not bound every tier has one."""
    return min(tier.reserve[:2]) > 0
