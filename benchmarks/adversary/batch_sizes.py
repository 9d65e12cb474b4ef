"""Batch requests of 2 to 60% of the pool, always four that wait or run, before the policy that we ship.

High asks for 40% of the pool and normal for 30%, batch leases last 15 to 45 s, one hour of virtual time each. What is
asked of high is the figure of the rules' own simulation, with room for another mix of sizes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from benchmarks.adversary.policies import BATCH, HIGH, NORMAL, shipped
from benchmarks.adversary.report import Line, at_most
from benchmarks.adversary.simulation import Decides, Request, Simulation, Traffic, fits, us
from sidecar.policy.rules import PoolRules
from sidecar.tools.loadgen import quantile

ORDINARY = tuple(Traffic(tier, load, 3_000, 0.6, 12_000, (2.0, 8.0)) for tier, load in ((HIGH, 0.40), (NORMAL, 0.30)))
HELD_S = (15.0, 45.0)
CLIENTS = 4
HOUR_S, WARM_UP_S = 3_600, 60
STATED_S: Mapping[int, float] = {2: 0.2, 20: 1.0, 30: 1.1, 40: 2.8, 50: 11.0, 60: 0.2}
"""High's p99 wait by the batch requests' part of the pool in percent; 60% is to be refused."""
ROOM, LEAST_ROOM_S = 2.0, 1.5
"""At most twice the stated figure, or so many seconds more: these ordinary requests are not the same ones."""


@dataclass(frozen=True, slots=True)
class Hour:
    """How one size went; waits in seconds, `use` of the pool. `is_refused`: batch accepts no such request."""

    high_p99_s: float
    normal_p99_s: float
    use: float
    batch_use: float
    is_refused: bool = False


def rows() -> Iterator[Line]:
    """A line for every size."""
    rules = shipped().rules
    for percent, stated_s in STATED_S.items():
        yield line(percent, stated_s, hour(rules, percent))


def line(percent: int, stated_s: float, seen: Hour) -> Line:
    """One size, and what is asked of high."""
    limit_s = max(ROOM * stated_s, stated_s + LEAST_ROOM_S)
    asked = at_most(f"  batch of {percent}% of the pool: high p99 wait", seen.high_p99_s, limit_s, " s")
    batch = "refused" if seen.is_refused else f"batch {seen.batch_use:.2f}"
    others = f"; normal {seen.normal_p99_s:.1f} s, used {seen.use:.2f}, {batch}"
    return Line(asked.attack, asked.figure + others, asked.asked, asked.holds)


def hour(rules: PoolRules, percent: int, scheduler: Decides | None = None, seconds: int = HOUR_S) -> Hour:
    """Plays one size."""
    simulation = Simulation(rules, scheduler)
    for traffic in ORDINARY:
        traffic.start(simulation, percent)
    luck = random.Random(percent)

    def next_one() -> None:
        request = Request(BATCH, rules.tokens * percent // 100, us(luck.uniform(*HELD_S)), on_over=next_one)
        simulation.send(request)

    for _ in range(CLIENTS):
        simulation.at(0, next_one)
    simulation.run(us(seconds))
    high_s, normal_s = (simulation.waits_s(tier, us(WARM_UP_S), us(seconds)) for tier in (HIGH, NORMAL))
    held = sum(request.held_us for request in simulation.sent if request.tier == BATCH and request.ended_us)
    return Hour(
        quantile(high_s, 0.99),
        quantile(normal_s, 0.99),
        simulation.use.mean(us(WARM_UP_S), us(seconds)),
        held * percent / 100 / us(seconds),
        is_refused=not fits(rules, Request(BATCH, rules.tokens * percent // 100, 1)),
    )
