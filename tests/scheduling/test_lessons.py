"""The measured lessons behind the rules, in virtual time and at a tenth of the size."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sidecar.scheduling.time_alone import next_change
from tests.scheduling.player import SchedulerPlayer

CAPACITY = 20_000
MEAN_TOKENS = 500
MEAN_HELD_S = 5.0
LADDER = ("critical", "high", "normal", "low", "batch")
CRITICAL, HIGH, NORMAL, LOW, BATCH = range(5)


class Arrival(NamedTuple):
    at_us: int
    id: str
    tier: int
    tokens: int
    held_us: int


def stream(tier: int, load: float, seconds: int) -> list[Arrival]:
    """Requests of log-normal size that ask for `load` times the pool."""
    luck = random.Random(f"{tier}-1")
    rate_per_s = load * CAPACITY / (MEAN_TOKENS * MEAN_HELD_S)
    arrivals, at_s = [], luck.expovariate(rate_per_s)
    while at_s < seconds:
        arrivals.append(request(luck, tier, len(arrivals), int(at_s * 1e6)))
        at_s += luck.expovariate(rate_per_s)
    return arrivals


def request(luck: random.Random, tier: int, number: int, at_us: int) -> Arrival:
    tokens = min(4_000, max(20, int(luck.lognormvariate(0, 0.8) * MEAN_TOKENS / 1.377)))
    return Arrival(at_us, f"{LADDER[tier]}-{number}", tier, tokens, int(luck.uniform(0.5, 1.5) * MEAN_HELD_S * 1e6))


class Outcome:
    """Plays arrivals until a moment, on tiers with these reserves in percent. Waits are in seconds, shortest first."""

    def __init__(
        self, percents: Sequence[int], arrivals: Iterable[Arrival], until_s: int, *, ceiling: int = NORMAL
    ) -> None:
        tiers = [{"name": name, "reserve": p / 100} for name, p in zip(LADDER, percents, strict=True)]
        aging = {"promote_after_s": 30, "ceiling": LADDER[ceiling]}
        pool = SchedulerPlayer({"tiers": tiers, "aging": aging, "capacity": {"tokens": CAPACITY}})
        events = [(a.at_us, n, "submit", a) for n, a in enumerate(sorted(arrivals))]
        order, change_us, until_us = len(events), None, until_s * 1_000_000
        waiting: dict[str, Arrival] = {}
        admitted: list[tuple[Arrival, int]] = []
        heapq.heapify(events)
        while True:
            now = min([*([events[0][0]] if events else []), *([change_us] if change_us is not None else [])])
            if now > until_us:
                break
            while events and events[0][0] == now:
                _, _, what, arrival = heapq.heappop(events)
                if what == "submit":
                    waiting[arrival.id] = arrival
                pool.do({"do": what, "id": arrival.id, "tier": LADDER[arrival.tier], "tokens": arrival.tokens}, now)
            for name, _ in pool.dispatch(now):
                arrival, order = waiting.pop(name), order + 1
                admitted.append((arrival, now))
                heapq.heappush(events, (now + arrival.held_us, order, "settle", arrival))
            change_us = next_change(pool.scheduler, now)
        self.left = list(waiting.values())
        self.waits = {t: sorted((now - a.at_us) / 1e6 for a, now in admitted if a.tier == t) for t in range(5)}
        held = {t: sum(a.tokens * a.held_us / 1e6 for a, _ in admitted if a.tier == t) for t in range(5)}
        self.part = {t: held[t] / (CAPACITY * until_s) for t in range(5)}

    def percentile_s(self, tier: int, percent: int) -> float:
        waits = self.waits[tier]
        return waits[min(len(waits) - 1, len(waits) * percent // 100)]


def besieged_large_requests() -> Outcome:
    """The batch tier is guaranteed 1,000 tokens and asks for 2,500 at a time, while the others ask for 1.2 pools."""
    others = [arrival for tier, load in enumerate((0.1, 0.4, 0.5, 0.2)) for arrival in stream(tier, load, 300)]
    large = [Arrival(n * 10_000_000, f"large-{n}", BATCH, 2_500, 5_000_000) for n in range(30)]
    return Outcome((10, 30, 40, 15, 5), others + large, 300)


def test_a_request_larger_than_its_tiers_reserve_gets_in() -> None:
    outcome = besieged_large_requests()
    assert len(outcome.waits[BATCH]) >= 20
    assert [a for a in outcome.left if a.tier == BATCH and a.at_us < 200_000_000] == []


def deep_batch_backlog(percents: Sequence[int], ceiling: int) -> Outcome:
    """High load at 60% of the pool for ten minutes, and a batch backlog that fills the pool for eight."""
    luck = random.Random("backlog")
    backlog = [request(luck, BATCH, number, 0) for number in range(4_000)]
    return Outcome(percents, stream(HIGH, 0.6, 600) + backlog, 600, ceiling=ceiling)


def test_a_deep_batch_backlog_leaves_high_its_short_wait_and_batch_its_share() -> None:
    outcome = deep_batch_backlog((0, 20, 0, 0, 5), NORMAL)
    assert outcome.percentile_s(HIGH, 99) < 10
    assert [a for a in outcome.left if a.tier == HIGH and a.at_us < 590_000_000] == []
    assert 0.25 < outcome.part[BATCH] < 0.45


def test_aging_to_the_top_without_reserves_is_first_come_first_served() -> None:
    outcome = deep_batch_backlog((0, 0, 0, 0, 0), CRITICAL)
    waits = [*outcome.waits[HIGH], *(600 - a.at_us / 1e6 for a in outcome.left if a.tier == HIGH)]
    assert max(waits) > 200
    assert sorted(waits)[len(waits) // 2] > 50


def overload(percents: Sequence[int]) -> Outcome:
    """1.3 times what the pool can do, from all tiers, `high` asking for 45% of it."""
    loads = (0.05, 0.45, 0.40, 0.20, 0.20)
    return Outcome(percents, [a for tier, load in enumerate(loads) for a in stream(tier, load, 400)], 400)


def test_a_fully_reserved_pool_makes_high_wait_and_a_half_reserved_one_keeps_it_fast() -> None:
    assert overload((10, 30, 40, 15, 5)).percentile_s(HIGH, 50) > 20
    half = overload((10, 20, 10, 5, 5))
    assert half.percentile_s(HIGH, 50) < 1
    assert half.percentile_s(HIGH, 99) < 5
    assert all(half.waits[tier] for tier in (NORMAL, LOW, BATCH))
