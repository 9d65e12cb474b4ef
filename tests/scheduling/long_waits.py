"""Adversarial floods for the bounded wait, from a plain seed: what is sent, and how long a tier's front waits for it.

A flood wants to delay: requests of one token, of the reserve and of the size limit beside each other, bursts that come
just before leases end, one tier that sends far more than the others, leases mostly at their longest, clients that give
up, leases that shrink or grow, engines that all want.

With several engines two kinds of waits have no bound in D, and do not count. In line for the floor: until the last that
is before it in order (of an `always_first` tier, or for the floor for longer) has entered its engine, which closes to
all others. And a front: until the last of its own tier that is before it (one that came earlier, or stood for the
floor) has entered, because the line has many of a tier, and class 4 is by arrival.
"""

from __future__ import annotations

import heapq
import random
from fractions import Fraction
from itertools import count
from typing import Any

from sidecar.scheduling.amounts import UNBOUNDED
from sidecar.scheduling.figures import figures_for
from sidecar.scheduling.scheduler import INSIDE, LINE
from sidecar.scheduling.tickets import ScheduledLease
from sidecar.scheduling.time_alone import next_change
from tests.scheduling.player import SchedulerPlayer

D = 10_000_000
"""The longest lease: twice the patience of one in line (rule 6)."""
LEVELS = ("inside", "small", "large", "line", "owes")


def random_policy(luck: random.Random, *, both: bool, by_gain: bool) -> dict[str, Any]:
    """One to five tiers. An always_first tier has its floor for its limit: by gain a part of its reserve (rule 9)."""
    parts = [luck.choice([0, 1, 1, 2, 4, 8]) for _ in range(luck.randint(1, 5))]
    whole = Fraction(luck.choice([20, 50, 80, 95]), 100 * max(1, sum(parts)))
    tiers: list[dict[str, Any]] = []
    for level, part in enumerate(parts):
        reserve = part * whole
        tier = {"name": f"t{level}", "reserve": reserve, "lend": luck.choice([Fraction(0), Fraction(1, 2), 1, 1])}
        tier["limit"] = luck.choice([1, 1, reserve + (1 - reserve) * Fraction(luck.choice([2, 4]), 5)])
        if not level and len(parts) > 1 and part and luck.random() < 0.3:
            tier |= {"always_first": True, "limit": reserve}
        tiers.append(tier)
    policy: dict[str, Any] = {"tiers": tiers, "order": "gain" if by_gain else "level"}
    if by_gain:
        policy["fair"] = luck.choice([Fraction(1, 4), Fraction(1, 2), 1])
        for tier in tiers:
            if tier.get("always_first"):
                tier["limit"] = max(policy["fair"], 1 - tier["lend"]) * tier["reserve"]
    if luck.random() < 0.5:
        promote_after_s = luck.choice([D // 7, 3 * D]) / 1e6
        policy["aging"] = {"promote_after_s": promote_after_s, "ceiling": luck.choice(tiers)["name"]}
    tokens, requests = luck.choice([50, 200, 1_000]), luck.choice([10, 25, 60]) if both else UNBOUNDED
    policy["engines"] = [{"id": "e0#1", "tokens": tokens, "requests": requests}]
    return policy


def random_engines(luck: random.Random, number: int) -> list[dict[str, Any]]:
    equal = luck.random() < 0.5
    found = []
    for each in range(number):
        engine = {"id": f"e{each}#1", "tokens": 100, "requests": 16, "prefill": 40}
        if not equal:
            engine |= {"tokens": luck.choice([60, 100, 200]), "requests": luck.choice([8, 30])}
            engine |= {"prefill": luck.choice([20, 50]), "speed": luck.choice([500, 1000, 1000])}
        found.append(engine)
    return found


class _Tier:
    """The habits of one tier: of size, of time, and of leaving."""

    def __init__(self, luck: random.Random, floor: tuple[int, ...], most: tuple[int, ...], *, over: bool) -> None:
        self.luck, self.floor = luck, [max(1, min(f, m)) for f, m in zip(floor, most, strict=True)]
        self.most = list(most) if over or not floor[0] else self.floor
        self.palette = luck.choice(
            [("large",), ("large", "one"), ("floor", "one", "any"), ("large", "floor", "wide", "one"), ("any",)]
        )
        self.between_us = luck.choice([D // 40, D // 6, D * 2 // 3])
        self.is_bursty, self.full_leases = luck.random() < 0.5, luck.choice([0.5, 0.9, 1.0])

    def pause_us(self) -> int:
        if not self.is_bursty:
            return int(self.luck.expovariate(1 / self.between_us))
        return 0 if self.luck.random() < 0.9 else self.luck.choice([1, D - 1, 2 * D])

    def size(self) -> tuple[int, int]:
        (tokens, requests, _), luck, habit = self.most, self.luck, self.luck.choice(self.palette)
        if habit == "large":
            return tokens, luck.choice([requests, 1])
        if habit == "floor":
            return self.floor[0], luck.choice([1, self.floor[1]])
        if habit == "wide":
            return luck.randint(1, max(1, tokens // 8)), requests
        return (1, 1) if habit == "one" else (luck.randint(1, tokens), luck.choice([1, 1, luck.randint(1, requests)]))


class Flood:
    """A flood on a pool. `worst`: of each level the longest wait of a front, in D; of `owes` in its bound.

    `over`: sizes are up to the size limit, and not only up to the reserve.
    """

    def __init__(
        self, seed: int, engines: int = 0, *, over: bool = True, by_gain: bool = False, scale: int = 1
    ) -> None:
        self.luck = luck = random.Random(f"{seed} {engines} {over} {by_gain}")
        self.is_alone, self.order = not engines, count()
        while True:
            policy = random_policy(luck, both=luck.random() < 0.5, by_gain=by_gain)
            if engines:
                policy["engines"] = random_engines(luck, engines)
            self.pool = SchedulerPlayer(policy)
            self.scheduler = self.pool.scheduler
            self.scheduler.look(0)
            self.figures = figures_for(self.scheduler.rules, self.scheduler.capacity)
            if self._is_fair():
                break
        self.favorite = luck.choice([None, "e0#1"])
        self.loud = luck.randrange(len(policy["tiers"]))
        self.engines = policy["engines"]
        self.events: list[tuple[int, int, dict[str, Any]]] = []
        self.worst = dict.fromkeys(LEVELS, 0.0)
        self.since: dict[tuple[str, str], int] = {}
        self.sent = 0
        self.turns = [1] * len(policy["tiers"])
        """How many leases of each tier that began by a turn ran at once, at most."""
        self._most: dict[int, tuple[int, int]] = {}
        for level in range(len(policy["tiers"])):
            self._fill(level, scale * (luck.choice([60, 150]) if level == self.loud else luck.choice([8, 20])), over)

    def _is_fair(self) -> bool:
        """What the page asks for: floors that fit the pool together, and a tier that may be sent anything."""
        sums = [sum(reserve[d] for reserve in self.figures.reserve) for d in range(3)]
        sums = [0 if c == UNBOUNDED else s for s, c in zip(sums, self.figures.capacity, strict=True)]
        tiers = self.scheduler.rules.tiers
        return (
            all(s <= c for s, c in zip(sums, self.figures.capacity, strict=True))
            and all(min(size) > 0 for size in self.figures.size_limit)
            and any(tier.reserve and not tier.always_first for tier in tiers)
        )

    def _fill(self, level: int, number: int, over: bool) -> None:
        luck, at_us, tenants = self.luck, 0, self.luck.choice([1, 4])
        engine = max(self.engines, key=lambda e: e["tokens"])
        largest = [engine.get(size, 8) for size in ("tokens", "requests", "prefill")]
        most = [min(*sizes) for sizes in zip(self.figures.size_limit[level], largest, strict=True)]
        most[1] = min(most[1], 8) if self.figures.capacity[1] == UNBOUNDED else most[1]
        tier = _Tier(luck, self.figures.reserve[level], tuple(most), over=over)
        gives_up = luck.choice([0, 0, 0.5])
        weights = [luck.choice([1, 1, 2, 7]) for _ in range(tenants)]
        for _ in range(number):
            at_us += tier.pause_us()
            tokens, requests = tier.size()
            tenant = min(luck.randrange(tenants), luck.randrange(tenants))
            name = f"r{next(self.order)}"
            step: dict[str, Any] = {"do": "submit", "id": name, "tier": f"t{level}", "tokens": tokens}
            step |= {"requests": requests, "tenant": f"{tenant}", "weight": weights[tenant]}
            if not self.is_alone:
                step["prompt"] = luck.randint(0, tokens)
                engine = self.favorite or luck.choice(self.engines)["id"]
                step["hits"] = [(engine, luck.randint(0, step["prompt"]))] if luck.random() < 0.5 else []
            if self.scheduler.rules.by_gain and luck.random() < 0.8:
                step["gain"] = {
                    "weight": luck.choice([1, 4, 64]), "tokens": luck.choice([1, 50, 5000]),
                    "cost": luck.choice([0.001, 1, 10]), "start_by": luck.choice([0, 1, 10, 100]),
                    "slack": luck.choice([0.001, 0.1, 10]),
                }  # fmt: skip
            before = self._most.get(level, (1, 1))
            self._most[level] = max(before[0], tokens), max(before[1], requests)
            step["held"] = D if luck.random() < tier.full_leases else luck.randint(1, D)
            self._at(at_us, step)
            if luck.random() < gives_up:
                self._at(at_us + luck.randint(0, luck.choice([1, D, 4 * D])), {"do": "cancel", "id": name})
            self.sent += 1

    def _at(self, at_us: int, step: dict[str, Any]) -> None:
        heapq.heappush(self.events, (at_us, next(self.order), step))

    def play(self) -> Flood:
        held: dict[str, int] = {}
        change_us: int | None = None
        while self.events or change_us is not None:
            moments = [at for at in (change_us, self.events[0][0] if self.events else None) if at is not None]
            now_us = min(moments)
            self._look_back(now_us)
            while self.events and self.events[0][0] == now_us:
                step = heapq.heappop(self.events)[2]
                if step["do"] == "submit":
                    held[step["id"]] = step["held"]
                self.pool.do(step, now_us)
            for name, _ in self.pool.dispatch(now_us):
                self._entered(name, held.pop(name), now_us)
            self._look(now_us)
            change_us = next_change(self.scheduler, now_us)
        self.left = len(self.pool.tickets)
        return self

    def _entered(self, name: str, held_us: int, now_us: int) -> None:
        luck, (tier, tokens) = self.luck, (self.pool.leases[name].ticket.tier, self.pool.leases[name].ticket.tokens)
        mine = [lease for lease in self.pool.leases.values() if lease.ticket.tier == tier and lease.ticket.excess]
        self.turns[tier] = max(self.turns[tier], len(mine))
        self._goes_before(self.pool.leases[name], now_us)
        self._at(now_us + held_us, {"do": "settle", "id": name})
        if not self.is_alone:
            self._at(now_us + luck.randint(1, held_us), {"do": "prefilled", "id": name})
        if luck.random() < 0.2 and tokens > 1:
            self._at(now_us + luck.randrange(held_us), {"do": "resize", "id": name, "tokens": luck.randint(1, tokens)})

    def _goes_before(self, lease: ScheduledLease, now_us: int) -> None:
        """With engines and prompts: those that it was before begin to wait from now on."""
        entered, first = lease.ticket, self.scheduler.rules.tiers[lease.ticket.tier].always_first
        for level, name in self.since if not self.is_alone else ():
            if (ticket := self.pool.tickets.get(name)) is None:
                continue
            if level == "line":
                is_before = lease.engine == ticket.engine and (first or entered.admission < ticket.admission)
            else:
                is_earlier = entered.counted_us < now_us or entered.arrival < ticket.arrival
                is_before = level != "inside" and entered.tier == ticket.tier and is_earlier
            if is_before:
                self.since[level, name] = max(now_us, self.since[level, name])

    def _look_back(self, now_us: int) -> None:
        for (level, _), since_us in self.since.items():
            self.worst[level] = max(self.worst[level], (now_us - since_us) / D)

    def _look(self, now_us: int) -> None:
        """Which conditions hold from now on: of each tier's front, and of what may be inside beside it."""
        scheduler, found = self.scheduler, {}
        for level, tier in enumerate(scheduler.tiers):
            rules = scheduler.rules.tiers[level]
            if not rules.reserve or rules.always_first:
                continue
            lined = [ticket for ticket in scheduler.line if ticket.tier == level]
            heads = scheduler.heads(level)
            front = next((ticket for ticket in lined if not ticket.is_for_floor), None)
            for ticket in {*lined, *heads}:
                order_class = scheduler.class_for(ticket, front, heads)
                if order_class == LINE:
                    found["line", ticket.id] = now_us
                elif order_class == INSIDE and scheduler.is_within_limit(ticket):  # no limit in the way
                    found["inside", ticket.id] = now_us
            fronts = heads[:1] if front is None else [front]
            for ticket in filter(scheduler.is_within_limit, fronts):
                if scheduler.is_small(ticket):
                    found["small", ticket.id] = now_us
                else:
                    found["large", ticket.id] = max(now_us, tier.owes_until_us)
            self._owes(level, tier.owes_until_us - now_us)
        for key, at_us in found.items():
            before_us = self.since.get(key)
            if before_us is not None:
                found[key] = max(before_us, at_us) if key[0] == "large" and at_us > now_us else before_us
        self.since = found

    def _owes(self, level: int, owes_us: int) -> None:
        """Of one engine without prompts: a tier owes at most `D * t / R` for each lease that began by a turn."""
        if self.is_alone and owes_us > 0:
            times = max(t / r for t, r in zip(self._most[level], self.figures.reserve[level], strict=False))
            self.worst["owes"] = max(self.worst["owes"], owes_us / (D * times * self.turns[level]))
