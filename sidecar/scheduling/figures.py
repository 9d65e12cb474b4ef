"""Rule 1: what each tier of a pool may hold, in whole numbers. And the size limit of a request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from sidecar.policy.rules import StatedShares
from sidecar.scheduling.amounts import NOTHING, UNBOUNDED, Amount, larger, plus
from sidecar.scheduling.tickets import Ticket


@dataclass(frozen=True, eq=False)
class Rules:
    """The rules of one pool. Shares are parts of it, from 0 to 1; the first of its tiers is level 0.

    Each is its own: to compare all of it takes long.

    `promote_after_us`: a waiting ticket rises one level per so long, up to the level `ceiling`; None: none ages.
    `affinity_percent`: how much a predicted prefix hit counts in the choice of an engine. `fair`: the part of the
    reserves that is kept by gain (rule 9).
    """

    tiers: tuple[StatedShares, ...]
    promote_after_us: int | None = None
    ceiling: int = 0
    max_preemptions: int = 0
    affinity_percent: int = 200
    by_gain: bool = False
    fair: Fraction = Fraction(1)

    def aged_level(self, ticket: Ticket, now_us: int) -> int:
        """Rule 3: `level * promote_after - waited`: it rises one level per `promote_after`, not past the ceiling."""
        if self.promote_after_us is None:
            return ticket.tier
        aged = ticket.tier * self.promote_after_us
        if ticket.tier <= self.ceiling:
            return aged
        return max(aged - (now_us - ticket.arrived_us), self.ceiling * self.promote_after_us)

    def whole_level(self, ticket: Ticket, now_us: int) -> int:
        """How many levels are more important: those that are less than the aged one."""
        return -(-self.aged_level(ticket, now_us) // (self.promote_after_us or 1))


@dataclass(frozen=True)
class Figures:
    """The amounts of a pool of one size: `capacity` is C; of each tier `reserve` R, `headroom` H, `limit` L.

    `size_limit`: the largest request of each tier. `returnable`: the largest lease of each tier that could come back
    after it was taken back (rule 7).
    """

    capacity: Amount
    reserve: tuple[Amount, ...]
    headroom: tuple[Amount, ...]
    limit: tuple[Amount, ...]
    size_limit: tuple[Amount, ...]
    returnable: tuple[Amount, ...]
    has_headroom: bool


def rounded_part(share: Fraction, capacity: Amount, of_unbounded: int) -> Amount:
    """A share of a pool, rounded down; `of_unbounded` where the pool has no bound."""
    tokens, requests, prompt = (of_unbounded if c == UNBOUNDED else math.floor(share * c) for c in capacity)
    return tokens, requests, prompt


@lru_cache(maxsize=64)
def figures_for(rules: Rules, capacity: Amount) -> Figures:
    """The figures of a pool. Cached: capacity changes with the engines only."""
    reserves, headrooms, limits = [], [], []
    for tier in rules.tiers:
        headroom = rounded_part((1 - tier.lend) * tier.reserve, capacity, 0)
        share = tier.reserve * rules.fair
        tokens, requests, prompt = (
            (UNBOUNDED if share else 0) if c == UNBOUNDED else math.ceil(share * c) for c in capacity
        )
        reserve = (tokens, requests, prompt)
        reserves.append(larger(reserve, headroom) if rules.by_gain else reserve)
        headrooms.append(headroom)
        limits.append(rounded_part(tier.limit, capacity, UNBOUNDED))
    returnable = [
        _beside(capacity, limit, headrooms[: _best_level(rules, level)]) for level, limit in enumerate(limits)
    ]
    sizes = [_size_limit(capacity, level, most, reserves) for level, most in enumerate(returnable)]
    return Figures(
        capacity,
        tuple(reserves),
        tuple(headrooms),
        tuple(limits),
        tuple(sizes),
        tuple(returnable),
        any(h != NOTHING for h in headrooms),
    )


def _best_level(rules: Rules, level: int) -> int:
    """The best level that a ticket can age to."""
    return level if rules.promote_after_us is None else min(level, rules.ceiling)


def _beside(capacity: Amount, limit: Amount, headrooms: Sequence[Amount]) -> Amount:
    above = NOTHING
    for headroom in headrooms:
        above = plus(above, headroom)
    tokens, requests, prompt = (min(most, c - h) for most, c, h in zip(limit, capacity, above, strict=True))
    return tokens, requests, prompt


def _size_limit(capacity: Amount, level: int, most: Amount, reserves: Sequence[Amount]) -> Amount:
    sizes = list(most)
    for d in range(3):
        own = reserves[level][d]
        if capacity[d] == UNBOUNDED or not own:
            continue
        others = sum(reserve[d] for reserve in reserves) - own  # no headroom is more than its reserve
        sizes[d] = min(most[d], max(own, capacity[d] - others))
    return sizes[0], sizes[1], sizes[2]
