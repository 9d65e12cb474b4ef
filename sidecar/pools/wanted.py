"""How many times the room of a pool is wanted, for those that scale its engines.

In tokens and in requests it is what the tiers hold and what waits beyond their floors, over the room of the engines
that are ready; the larger counts. A request inside its tier's floor waits for a borrower to end: an engine that takes
minutes to start comes too late for it. What a tier's own limit keeps out wants nothing, so that a limit bounds the
engines that a backlog can ask for. Headroom is wanted also while it is idle, because nothing else may use it. Where a
guarded tier bounds how full less important work may make the pool, its room is that part of it.

The wanted room is smoothed, and not the ratio: one more engine halves the ratio at once, where a smoothed ratio would
ask for a third engine meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from sidecar.policy.rules import UNLIMITED, PoolRules, TierRules
from sidecar.pools.guards import GuardFigures
from sidecar.pools.stats import NO_BOUND, TierUsage

SMOOTHED_OVER_US = 60_000_000
"""Time constant of the mean. A new engine takes minutes, so that a burst which is shorter is over before it serves.
Longer ones would add to these minutes."""

Room = tuple[float, float]
"""Tokens and requests."""


class Demand(NamedTuple):
    """Room that is wanted, and `has`: that of the engines that are ready, None without any.

    `is_used`: something is held or waits.
    """

    wanted: Room
    has: Room | None
    is_used: bool


def demand(rules: PoolRules | None, tiers: Sequence[TierUsage], guards: Sequence[GuardFigures] = ()) -> Demand:
    """Demand of tiers that hold and have waiting so much; `rules` are those of the ready engines, None without any."""
    is_used = any(map(any, tiers))
    if rules is None:
        tokens = sum(tier.held_tokens + tier.queued_tokens for tier in tiers)
        return Demand((tokens, sum(tier.held_requests + tier.queued_requests for tier in tiers)), None, is_used)
    of_tiers = [_wanted_by(own, tier) for own, tier in zip(rules.tiers, tiers, strict=True)]
    share = _usable_share(rules, tiers, guards)
    tokens, requests = (sum(amounts) / share for amounts in zip(*of_tiers, strict=True))
    return Demand((tokens, requests), (rules.tokens, rules.requests), is_used)


def _usable_share(rules: PoolRules, tiers: Sequence[TierUsage], guards: Sequence[GuardFigures]) -> float:
    """The share to which the pool may be filled: all of it, unless a guarded tier bounds work beyond its floor."""
    usable = {guard.tier: guard.usable for guard in guards if not guard.is_in_vain}
    found = of_guards = 1.0
    for own, tier in zip(rules.tiers, tiers, strict=True):
        tokens, requests = tier.held_tokens + tier.queued_tokens, tier.held_requests + tier.queued_requests
        if tokens > own.reserve[0] or requests > own.reserve[1]:
            found = of_guards
        of_guards = min(of_guards, usable.get(own.name, 1.0))
    return found


def _wanted_by(own: TierRules, tier: TierUsage) -> Room:
    limit_tokens, limit_requests = own.limit[:2] if own.limited else NO_BOUND
    tokens = _beyond_floor(tier.held_tokens, tier.queued_tokens, own.reserve[0], limit_tokens)
    requests = _beyond_floor(tier.held_requests, tier.queued_requests, own.reserve[1], limit_requests)
    return max(own.headroom[0], tokens), max(own.headroom[1], requests)


def _beyond_floor(held: int, waiting: int, floor: int, limit: int) -> int:
    """The amount that is held, and that waits beyond the floor and within the limit."""
    return held + max(0, min(held + waiting, limit) - max(held, floor))


class SmoothedDemand:
    """The demand of one pool, as an exponential mean over time: it may be noted at any moments."""

    def __init__(self) -> None:
        self._wanted: Room = (0.0, 0.0)
        self._noted_us = self._used_us = -math.inf

    def note(self, demand: Demand, now_us: int) -> float:
        """Notes the present demand. Returns how many times the present room is wanted.

        0 after a minute in which nothing was held and nothing waited: that pool needs no engine. Else 1 where no engine
        is ready.
        """
        before = math.exp(min(0.0, self._noted_us - now_us) / SMOOTHED_OVER_US)
        tokens, requests = (new + (old - new) * before for old, new in zip(self._wanted, demand.wanted, strict=True))
        self._wanted, self._noted_us = (tokens, requests), now_us
        if demand.is_used:
            self._used_us = now_us
        if now_us - self._used_us > SMOOTHED_OVER_US:
            return 0.0
        if demand.has is None:
            return 1.0
        return max(
            (wanted / has for wanted, has in zip(self._wanted, demand.has, strict=True) if 0 < has < UNLIMITED),
            default=1.0,
        )
