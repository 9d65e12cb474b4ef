"""Rule 1: what each tier of a pool may hold, in whole numbers. And the size limit of a request."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from sidecar.policy.rules import StatedShares, admissible, size_limit, tier_amounts
from sidecar.scheduling.amounts import NOTHING, Amount
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


@lru_cache(maxsize=64)
def figures_for(rules: Rules, capacity: Amount) -> Figures:
    """The figures of a pool. Cached: capacity changes with the engines only."""
    tiers = [tier_amounts(tier, capacity, rules.fair, by_gain=rules.by_gain) for tier in rules.tiers]
    reserves, headrooms, limits = zip(*tiers, strict=True) if tiers else ((), (), ())
    returnable = [
        admissible(capacity, limit, headrooms[: _best_level(rules, level)]) for level, limit in enumerate(limits)
    ]
    return Figures(
        capacity,
        reserves,
        headrooms,
        limits,
        tuple(size_limit(capacity, level, most, reserves) for level, most in enumerate(returnable)),
        tuple(returnable),
        any(h != NOTHING for h in headrooms),
    )


def _best_level(rules: Rules, level: int) -> int:
    """The best level that a ticket can age to."""
    return level if rules.promote_after_us is None else min(level, rules.ceiling)
