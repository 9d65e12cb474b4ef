"""Random policies and adversarial floods for the bounded wait (invariant 7), from a plain seed.

A flood wants to delay: requests of size 1, of the reserve and of the size limit beside each other, bursts that come
just before leases end, one tier that sends far more than the others, leases mostly at their longest, clients that give
up and try again, leases that shrink.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from oracle import Policy

from sidecar.policy.rules import UNLIMITED, PoolRules, Shares, TierRules, largest_request

LONGEST_LEASE_US = 10_000


class Request(NamedTuple):
    """One request of a flood. Its lease lasts `held_us`, and holds `shrinks_to` tokens after `shrinks_after_us`.

    Its client gives up after `patience_us` of waiting, and submits it again `retries` times, `pause_us` later.
    """

    at_us: int
    tier: int
    tokens: int
    requests: int
    held_us: int
    tenant: str = ""
    weight: int = 1
    patience_us: int | None = None
    retries: int = 0
    pause_us: int = 0
    shrinks_after_us: int | None = None
    shrinks_to: int = 0


@dataclass(frozen=True)
class Kind:
    """What a flood is made of. `over` says that sizes go up to the size limit, and not only up to the reserve."""

    over: bool
    tenants: int
    both: bool
    cancels: bool = False
    shrinks: bool = False
    scale: int = 1

    def __str__(self) -> str:
        sizes = "up to the size limit" if self.over else "up to the reserve"
        extras = [name for name in ("cancels", "shrinks") if getattr(self, name)]
        return ", ".join([sizes, f"{self.tenants}", "both" if self.both else "tokens", *extras])


def random_policy(luck: random.Random, *, both: bool) -> Policy:
    """One to five tiers whose reserves fit into the pool together, after rounding."""
    while True:
        policy = _any_policy(luck, both=both)
        rules = policy.rules()
        tokens = sum(tier.reserve_tokens for tier in rules.tiers)
        requests = sum(tier.reserve_requests for tier in rules.tiers)
        fits = tokens <= rules.tokens and (rules.requests == UNLIMITED or requests <= rules.requests)
        takes_any = all(min(largest_request(rules, tier.level)) > 0 for tier in rules.tiers)
        if fits and takes_any and any(tier.reserve_tokens and not tier.always_first for tier in rules.tiers):
            return policy


def _any_policy(luck: random.Random, *, both: bool) -> Policy:
    count = luck.randint(1, 5)
    parts = [luck.choice([0, 1, 1, 2, 4, 8]) for _ in range(count)]
    whole = Fraction(luck.choice([20, 50, 80, 95, 100]), 100 * max(1, sum(parts)))
    first = count > 1 and parts[0] > 0 and luck.random() < 0.3
    tiers = []
    for level, part in enumerate(parts):
        reserve = part * whole
        roomy = reserve + (1 - reserve) * Fraction(luck.choice([1, 2, 4]), 5)
        limit = luck.choice([Fraction(1), Fraction(1), roomy])
        if first and level == 0:
            limit = luck.choice([reserve, roomy])
        lend = Fraction(luck.choice([0, 1, 2, 2]), 2)
        tiers.append(Shares(f"t{level}", reserve, lend, limit, always_first=first and level == 0))
    return Policy(
        capacity=(luck.choice([50, 200, 1_000]), luck.choice([10, 25, 60]) if both else None),
        tiers=tuple(tiers),
        promote_after_us=luck.choice([None, None, LONGEST_LEASE_US // 7, LONGEST_LEASE_US * 3]),
        ceiling=luck.randrange(count),
    )


def random_flood(luck: random.Random, rules: PoolRules, kind: Kind) -> list[Request]:
    """Requests of every tier, in no order."""
    tiers = range(len(rules.tiers))
    loud = luck.choice(tiers)
    flood: list[Request] = []
    for level in tiers:
        count = kind.scale * (luck.choice([60, 150]) if level == loud else luck.choice([8, 20, 60]))
        flood += _TierFlood(luck, rules, level, kind).requests(count)
    return flood


class _TierFlood:
    """The requests of one tier: it has its own habits of size, of time and of leaving."""

    def __init__(self, luck: random.Random, rules: PoolRules, level: int, kind: Kind) -> None:
        self.luck, self.kind, self.level = luck, kind, level
        self.sizes = _sizes(rules, level, over=kind.over)
        self.palette = luck.choice(
            [
                ("large",),
                ("large", "one"),
                ("reserve", "one", "any"),
                ("large", "reserve", "wide", "tall", "one"),
                ("any",),
            ]
        )
        self.weights = [luck.choice([1, 1, 2, 7]) for _ in range(kind.tenants)]
        self.between_us = luck.choice([LONGEST_LEASE_US // 40, LONGEST_LEASE_US // 6, LONGEST_LEASE_US * 2 // 3])
        self.is_bursty = luck.random() < 0.5
        self.full_leases = luck.choice([0.5, 0.9, 1.0])
        self.giving_up = luck.choice([0.0, 0.3, 0.8]) if kind.cancels else 0.0

    def requests(self, count: int) -> list[Request]:
        found, at_us = [], self.luck.choice([0, 1, LONGEST_LEASE_US // 2])
        for _ in range(count):
            at_us += self._pause_us()
            found.append(self._request(at_us))
        return found

    def _pause_us(self) -> int:
        if not self.is_bursty:
            return int(self.luck.expovariate(1 / self.between_us))
        return 0 if self.luck.random() < 0.9 else self.luck.choice([1, LONGEST_LEASE_US - 1, LONGEST_LEASE_US * 2])

    def _request(self, at_us: int) -> Request:
        luck = self.luck
        tokens, requests = self._size()
        tenant = min(luck.randrange(self.kind.tenants), luck.randrange(self.kind.tenants))
        held_us = LONGEST_LEASE_US if luck.random() < self.full_leases else luck.randint(1, LONGEST_LEASE_US)
        request = Request(at_us, self.level, tokens, requests, held_us, f"tenant-{tenant}", self.weights[tenant])
        if luck.random() < self.giving_up:
            patience_us = luck.randint(0, luck.choice([1, LONGEST_LEASE_US, 4 * LONGEST_LEASE_US]))
            pause_us = luck.choice([0, 1, LONGEST_LEASE_US // 10])
            request = request._replace(patience_us=patience_us, retries=luck.choice([0, 1, 3]), pause_us=pause_us)
        if self.kind.shrinks and luck.random() < 0.5:
            after_us, to = luck.randrange(held_us), luck.randint(1, tokens)
            request = request._replace(shrinks_after_us=after_us, shrinks_to=to)
        return request

    def _size(self) -> tuple[int, int]:
        (reserve_tokens, reserve_requests), (tokens, requests) = self.sizes
        habit = self.luck.choice(self.palette)
        if habit == "large":
            return self.luck.choice([(tokens, requests), (tokens, 1), (max(1, tokens - 1), 1)])
        if habit == "reserve":
            return reserve_tokens, self.luck.choice([1, reserve_requests])
        if habit == "wide":
            return self.luck.randint(1, max(1, tokens // 8)), requests
        if habit == "tall":
            return tokens, self.luck.randint(1, max(1, requests // 8))
        if habit == "one":
            return 1, 1
        return self.luck.randint(1, tokens), self.luck.choice([1, 1, self.luck.randint(1, requests)])


def floor_of(tier: TierRules) -> tuple[int, int]:
    """What a tier can always hold: its reserve, one less where its limit is the reserve and rounds down."""
    return min(tier.reserve_tokens, tier.limit_tokens), min(tier.reserve_requests, tier.limit_requests)


def _sizes(rules: PoolRules, level: int, *, over: bool) -> tuple[tuple[int, int], tuple[int, int]]:
    """The floor of a tier, and the largest size of this flood; small figures stand for a dimension without bounds."""
    largest = largest_request(rules, level)
    floor = tuple(max(1, size) for size in floor_of(rules.tiers[level]))
    has_floor = rules.tiers[level].reserve_tokens > 0
    most = largest if over or not has_floor else floor
    tokens, requests = (min(size, 8) if size == UNLIMITED else size for size in floor)
    return (tokens, requests), (min(most[0], rules.tokens), 8 if most[1] == UNLIMITED else most[1])
