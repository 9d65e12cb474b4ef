"""The stated bounds of a wait, against random policies and floods: how often they are broken, the worst part of each.

Sizes up to the reserve or up to the size limit, in tokens alone or in requests, too; one tenant or four in a tier,
clients that give up, aging, headroom, an always_first tier within its reserve, tiers with a limit; then one flood of
50,000 tickets. In virtual time through the real scheduler, observed from outside: what a tier owes is computed here.

D is the longest lease, R a tier's reserve, k the number of tiers with one. As the head of its tier a ticket waits at
most (a) D from when it is inside its reserve; (b) 2 D if it is no larger than R; (c) (k + 1) D, and as long as its tier
owes, if it is larger. (d) In a tier of one tenant with sizes up to R it waits at most 2 D ceil(S / (R - t_max + 1)), S
what of its tier left the queue while it waited, and itself. (e) In general it waits at most the sum of 2 D or
(k + 1 + t / R) D over those, and D (1 + t_max / R). (o) A tier owes at most D t_max / R. Which ticket is the head is
known from outside with one tenant alone, so (a) to (d) are not judged of others. A tier with a limit, or without a
reserve, has no bound.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from itertools import accumulate

from benchmarks.adversary.report import Line
from benchmarks.adversary.simulation import Request, Simulation, us
from sidecar.policy.rules import UNLIMITED, PoolRules, Shares, TierRules, best_level, largest_request, pool_rules

POLICIES, TOKENS, DEEP = 240, 1_000, 50_000
D_US = us(10)
NAMES = "abcdeo"
LEAST_CHECKED, LEAST_PART = 500, 0.3
"""A campaign that checked fewer tickets of a bound, or came nowhere near it, proves nothing."""

Size = tuple[int, int]


@dataclass(slots=True)
class Tally:
    """How near waits came to each bound, as parts of it."""

    checked: Counter[str] = field(default_factory=Counter)
    broken: Counter[str] = field(default_factory=Counter)
    worst: dict[str, float] = field(default_factory=lambda: dict.fromkeys(NAMES, 0.0))

    def note(self, name: str, waited_us: int, bound_us: Fraction | int) -> None:
        """One wait and its bound."""
        self.checked[name] += 1
        self.broken[name] += waited_us > bound_us
        self.worst[name] = max(self.worst[name], float(waited_us / Fraction(bound_us)))


def rows() -> Iterator[Line]:
    """The campaign, a line for each bound, and the one deep flood."""
    tally, admitted = Tally(), 0
    for seed in range(POLICIES):
        admitted += campaign(seed, tally)
    broken = tally.broken.total()
    attack = f"stated wait bounds, {POLICIES} policies, {admitted:,} admissions: violations"
    yield Line(attack, f"{broken:,}", "0", not broken)
    yield from (line(name, tally) for name in NAMES)
    deep = Tally()
    admitted = flooded(deep)
    figure = f"{deep.broken.total():,}, worst (e) {deep.worst['e']:.2f}"
    yield Line(f"  {admitted:,} tickets that all come in a minute: violations", figure, "0", not deep.broken.total())


def line(name: str, tally: Tally) -> Line:
    """One bound. It also fails where too little was checked, or nothing came near it."""
    figure = f"{tally.broken[name]:,} of {tally.checked[name]:,}, worst {tally.worst[name]:.2f}"
    is_strong = tally.checked[name] >= LEAST_CHECKED and tally.worst[name] >= LEAST_PART
    return Line(f"  ({name})", figure, f"0, and worst at least {LEAST_PART}", is_strong and not tally.broken[name])


@dataclass(frozen=True, slots=True)
class Flood:
    """What one tier is sent."""

    tier: TierRules
    tenants: int
    sizes: Size
    patience_s: float | None
    count: int
    per_s: float


def campaign(seed: int, tally: Tally) -> int:
    """One random policy under one random flood. How many were admitted."""
    luck = random.Random(seed)
    rules = random_rules(luck)
    is_small, tenants = luck.random() < 0.5, luck.choice([1, 1, 4])
    floods = [_flood(luck, rules, tier, tenants, is_small=is_small) for tier in rules.tiers]
    return play(rules, floods, luck, tally)


def flooded(tally: Tally) -> int:
    """50,000 tickets of four tiers and four tenants, in about a minute."""
    luck = random.Random(1)
    tiers = tuple(Shares(f"t{level}", Fraction(part, 100)) for level, part in enumerate((20, 20, 10, 5)))
    rules = pool_rules(tokens=TOKENS, requests=None, tiers=tiers, promote_after_us=us(30), ceiling=1)
    each = DEEP // len(tiers)
    floods = [Flood(tier, 4, size_limit(rules, tier), None, each, each / 60) for tier in rules.tiers]
    return play(rules, floods, luck, tally)


def random_rules(luck: random.Random) -> PoolRules:
    """A policy whose floors fit beside each other in both dimensions."""
    while True:
        tiers = luck.randint(2, 5)
        cuts = [luck.choice([0, 5, 10, 20, 30, 40]) for _ in range(tiers)]
        first, limited = luck.random() < 0.3, luck.choice([*range(tiers), *[-1] * (2 * tiers)])
        shares = tuple(
            _shares(luck, level, cut, level == 0 and first, level == limited) for level, cut in enumerate(cuts)
        )
        rules = pool_rules(
            tokens=TOKENS,
            requests=luck.choice([None, 20, 40]),
            tiers=shares,
            promote_after_us=luck.choice([None, us(1), us(30)]),
            ceiling=luck.randrange(tiers),
        )
        if any(cuts) and _fit(rules):
            return rules


def _shares(luck: random.Random, level: int, cut: int, is_first: bool, is_limited: bool) -> Shares:
    reserve, lend = Fraction(cut, 100), Fraction(luck.choice([0, 1, 2]), 2)
    if is_first and cut:
        return Shares(f"t{level}", reserve, lend, reserve, always_first=True)
    limit = max(reserve, Fraction(1, 2)) if is_limited else Fraction(1)
    return Shares(f"t{level}", reserve, lend, limit)


def _fit(rules: PoolRules) -> bool:
    tokens = sum(tier.reserve[0] for tier in rules.tiers)
    requests = sum(tier.reserve[1] for tier in rules.tiers)
    return tokens <= rules.tokens and (rules.requests == UNLIMITED or requests <= rules.requests)


def size_limit(rules: PoolRules, tier: TierRules) -> Size:
    """The size limit as the rules state it; a tree that accepts more is not sent more."""
    above = rules.tiers[: best_level(rules, tier.level)]
    others = [other for other in rules.tiers if other is not tier]
    tokens = rules.tokens - sum(other.headroom[0] for other in above)
    requests = rules.requests - sum(other.headroom[1] for other in above)
    if tier.reserve[0]:
        tokens = min(tokens, max(tier.reserve[0], rules.tokens - sum(other.reserve[0] for other in others)))
        if rules.requests != UNLIMITED:
            left = rules.requests - sum(other.reserve[1] for other in others)
            requests = min(requests, max(tier.reserve[1], left))
    accepted = largest_request(rules, tier.level)
    return min(tokens, tier.limit[0], accepted[0]), min(requests, tier.limit[1], accepted[1])


def _flood(luck: random.Random, rules: PoolRules, tier: TierRules, tenants: int, *, is_small: bool) -> Flood:
    tokens, requests = size_limit(rules, tier)
    if is_small and tier.reserve[0]:
        tokens, requests = min(tokens, tier.reserve[0]), min(requests, tier.reserve[1])
        tokens = max(1, tokens // luck.choice([1, 2, 4]))
    patience_s = luck.choice([None, None, None, 5.0, 40.0])
    return Flood(
        tier, tenants, (tokens, requests), patience_s, luck.choice([10, 60, 120]), luck.choice([0.1, 1.0, 10.0])
    )


def play(rules: PoolRules, floods: Sequence[Flood], luck: random.Random, tally: Tally) -> int:
    """Plays floods to the end of every request, and notes the waits of the tiers that have bounds."""
    simulation = Simulation(rules)
    watches = [Watch(simulation, flood) for flood in floods]
    for watch in watches:
        watch.start(luck)
    simulation.run(us(10_000_000))
    floors = sum(tier.reserve[0] > 0 for tier in rules.tiers)
    for watch in watches:
        if watch.flood.tier.reserve[0] and not watch.flood.tier.limited:
            watch.judge(floors, tally)
    return sum(len(watch.admitted) for watch in watches)


class Watch:
    """One tier, observed from outside: what it holds and owes over time, and who was admitted when."""

    def __init__(self, simulation: Simulation, flood: Flood) -> None:
        self.flood = flood
        self.sent: list[Request] = []
        self.admitted: list[Request] = []
        self.owed_until_us: dict[int, int] = {}  # by the admission's number in this tier
        self.owed: list[int] = []
        self._simulation = simulation
        self._tier = flood.tier
        self._held: Size = (0, 0)
        self._changes: list[tuple[int, Size]] = [(-1, (0, 0))]
        self._owes_until_us = 0
        self._excess: dict[int, int] = {}

    @property
    def reserve(self) -> Size:
        """Tokens and requests."""
        return self._tier.reserve[:2]

    def start(self, luck: random.Random) -> None:
        """Plans what the tier is sent."""
        at_us, flood = 0, self.flood
        for _ in range(flood.count):
            at_us += 0 if luck.random() < 0.3 else us(luck.expovariate(flood.per_s))
            request = self._request(luck)
            self._simulation.at(at_us, partial(self._send, request))

    def _request(self, luck: random.Random) -> Request:
        tokens, requests = self.flood.sizes
        patience_s = self.flood.patience_s
        request = Request(
            self._tier.level,
            luck.choice([1, tokens, luck.randint(1, tokens)]),
            luck.choice([D_US, luck.randint(1, D_US)]),
            f"tenant-{luck.randrange(self.flood.tenants)}",
            1 if requests >= UNLIMITED // 2 else luck.choice([1, 1, luck.randint(1, max(1, requests))]),
            None if patience_s is None or luck.random() < 0.5 else us(luck.uniform(0, patience_s)),
        )
        request.on_admitted = partial(self._enters, request)
        request.on_over = partial(self._leaves, request)
        return request

    def _send(self, request: Request) -> None:
        if self._simulation.send(request) is not None:
            self.sent.append(request)

    def _enters(self, request: Request) -> None:
        now_us, after = self._simulation.now_us, _added(self._held, _size(request), 1)
        inside = all(held <= reserve for held, reserve in zip(after, self.reserve, strict=True))
        below = all(held < reserve for held, reserve in zip(self._held, self.reserve, strict=True))
        if below and not inside and now_us >= self._owes_until_us:
            pairs = zip(after, self.reserve, strict=True)
            self._excess[id(request)] = min(1_000, max(0, *((held - reserve) // reserve for held, reserve in pairs)))
        self.owed_until_us[len(self.admitted)] = self._owes_until_us
        self.admitted.append(request)
        self._hold(after)

    def _leaves(self, request: Request) -> None:
        if request.admitted_us is None:
            return
        now_us = self._simulation.now_us
        owed_us = self._excess.pop(id(request), 0) * (now_us - request.admitted_us)
        if owed_us:
            self._owes_until_us = max(now_us, self._owes_until_us) + owed_us
            self.owed.append(self._owes_until_us - now_us)
        self._hold(_added(self._held, _size(request), -1))

    def _hold(self, held: Size) -> None:
        self._held = held
        self._changes.append((self._simulation.now_us, held))

    def judge(self, floors: int, tally: Tally) -> None:
        """Compares every wait with its bounds."""
        if not self.sent:
            return
        largest = max(request.tokens for request in self.sent), max(request.requests for request in self.sent)
        excess = max(Fraction(size, reserve) for size, reserve in zip(largest, self.reserve, strict=True))
        for owed_us in self.owed:
            tally.note("o", owed_us, D_US * excess)
        self._judge_sums(floors, largest, excess, tally)
        if self.flood.tenants == 1:
            self._judge_heads(floors, tally)

    def _judge_sums(self, floors: int, largest: Size, excess: Fraction, tally: Tally) -> None:
        """(d) and (e), over all that left the queue while a ticket waited."""
        left = sorted(self.sent, key=_left_us)
        moments = [_left_us(request) for request in left]
        costs = list(accumulate((self._cost_us(request, floors) for request in left), initial=Fraction(0)))
        sums = [list(accumulate((_size(request)[side] for request in left), initial=0)) for side in (0, 1)]
        is_small = self.flood.tenants == 1 and excess <= 1
        for request in self.admitted:
            first, last = bisect_left(moments, request.came_us), bisect_right(moments, _left_us(request))
            waited_us = request.waited_us(0)
            tally.note("e", waited_us, costs[last] - costs[first] + D_US * (1 + excess))
            if is_small:
                turns = [
                    -(-(total[last] - total[first]) // (reserve - size + 1))
                    for total, reserve, size in zip(sums, self.reserve, largest, strict=True)
                ]
                tally.note("d", waited_us, 2 * D_US * max(turns))

    def _cost_us(self, request: Request, floors: int) -> Fraction:
        part = max(Fraction(size, reserve) for size, reserve in zip(_size(request), self.reserve, strict=True))
        return Fraction(2 * D_US) if part <= 1 else D_US * (floors + 1 + part)

    def _judge_heads(self, floors: int, tally: Tally) -> None:
        """(a), (b) and (c) in a tier of one tenant: its head is the first of those that wait."""
        order = {id(request): number for number, request in enumerate(self.sent)}
        latest_us = list(accumulate((_left_us(request) for request in self.sent), max, initial=0))
        moments = [at_us for at_us, _ in self._changes]
        newest = -1
        for number, request in enumerate(self.admitted):
            place, at_us = order[id(request)], _left_us(request)
            is_passing = latest_us[place] > at_us or place < newest
            newest = max(newest, place)
            if is_passing:
                continue
            head_us = max(request.came_us, latest_us[place])
            tally.note("a", at_us - self._inside_since_us(request, head_us, moments), D_US)
            if all(size <= reserve for size, reserve in zip(_size(request), self.reserve, strict=True)):
                tally.note("b", at_us - head_us, 2 * D_US)
            elif self.owed_until_us[number] <= at_us:
                tally.note("c", at_us - max(head_us, self.owed_until_us[number]), (floors + 1) * D_US)

    def _inside_since_us(self, request: Request, head_us: int, moments: Sequence[int]) -> int:
        """Since when the ticket, as the head, was inside its reserve without a break up to its admission."""
        at_us = since_us = _left_us(request)
        for index in range(bisect_left(moments, at_us) - 1, -1, -1):
            held = _added(self._changes[index][1], _size(request), 1)
            if since_us <= head_us or any(side > reserve for side, reserve in zip(held, self.reserve, strict=True)):
                break
            since_us = max(head_us, moments[index])
        return since_us


def _size(request: Request) -> Size:
    return request.tokens, request.requests


def _added(held: Size, size: Size, sign: int) -> Size:
    return held[0] + sign * size[0], held[1] + sign * size[1]


def _left_us(request: Request) -> int:
    """When a request left the queue, to run or because its client gave up."""
    left_us = request.gave_up_us if request.admitted_us is None else request.admitted_us
    if left_us is None:
        raise RuntimeError("a request never left the queue: nothing else was to happen, and it still waits")
    return left_us
