"""Two ways to stand in the way: before a request that may preempt, and while the engine is capped.

In virtual time, before the product's decisions. A low request is first in order because its tier is below its floor,
and too large for the room there is: the high one after it may preempt. And an hour in which the engine runs one request
at a time, and high and a tier with a floor of 25% always have requests waiting: what is inside a floor goes by level.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial

from benchmarks.adversary.policies import BATCH, HIGH, LOW, NORMAL, preempting, shipped, with_tiers
from benchmarks.adversary.report import Line, at_most
from benchmarks.adversary.simulation import Request, Simulation, us
from sidecar.policy.rules import PoolRules

END_S, PREEMPTED_WITHIN_S = 600, 2.0
HOUR_S, LEASE_S = 3_600, 1.0
TWO_TIERS = {"high": {"reserve": "20%"}, "other": {"reserve": "25%"}}


def rows() -> Iterator[Line]:
    """Both, and a control for the first: without the low request."""
    rules = shipped(preempting).rules
    name = "low request before a high one that may preempt: the high one waits"
    yield at_most(name, preempted_after_s(rules, is_low_there=True), PREEMPTED_WITHIN_S, " s")
    alone_s = preempted_after_s(rules, is_low_there=False)
    yield at_most("  control, no low request", alone_s, PREEMPTED_WITHIN_S, " s")
    admitted = capped(shipped(with_tiers(TWO_TIERS)).rules)
    yield Line(
        "capped at one request for an hour: admissions of high, and of the other", "{:,}, {:,}".format(*admitted)
    )


def preempted_after_s(rules: PoolRules, *, is_low_there: bool) -> float:
    """How long a high request waits before a pool of which batch, normal and high hold 95% for ten minutes."""
    simulation = Simulation(rules)
    share = rules.tokens // 100

    def begin() -> None:
        for tier, parts in ((BATCH, 42), (NORMAL, 31), (HIGH, 22)):
            for _ in range(parts):
                simulation.send(Request(tier, share, us(END_S)))

    def attack() -> None:
        if is_low_there:
            simulation.send(Request(LOW, 12 * share, us(10)))

    high = Request(HIGH, 10 * share, us(10))
    simulation.at(0, begin)
    simulation.at(us(10), attack)
    simulation.at(us(11), lambda: simulation.send(high) and None)
    simulation.run(us(END_S))
    return high.waited_us(simulation.now_us) / us(1)


def capped(rules: PoolRules) -> tuple[int, int]:
    """Admissions of both tiers in an hour in which one request runs at a time, and both always have some waiting."""
    simulation = Simulation(rules)

    def send(tier: int) -> None:
        simulation.send(Request(tier, 1_000, us(LEASE_S), on_admitted=partial(send, tier)))

    simulation.at(0, lambda: simulation.scheduler.cap(1, us(HOUR_S), 0))
    for tier in (0, 1, 0, 1, 0, 1):
        simulation.at(0, partial(send, tier))
    simulation.run(us(HOUR_S))
    admitted = Counter(request.tier for request in simulation.sent if request.admitted_us is not None)
    return admitted[0], admitted[1]
