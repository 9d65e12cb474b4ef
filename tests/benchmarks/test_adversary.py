"""The attacks' own arithmetic, and schedulers that must not pass: they admit all, or no one, or by arrival alone."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from typing import Any, cast

import pytest

from benchmarks.adversary import batch_sizes, bounds, disconnects, prompts, store, tenants
from benchmarks.adversary.__main__ import ATTACKS, play
from benchmarks.adversary.engine import Engine
from benchmarks.adversary.policies import shipped
from benchmarks.adversary.serving import Held
from benchmarks.adversary.simulation import Overfilled, Simulation, us
from benchmarks.decisions import Decided
from sidecar.policy.rules import Shares, pool_rules
from sidecar.scheduling.tickets import ScheduledLease, Ticket

pytestmark = pytest.mark.long

RULES = shipped().rules
HALF = RULES.tokens // 2
ENOUGH_S = 300
"""Seconds of virtual time that are enough to see a scheduler that does nothing."""


class OneQueue:
    """First come, first served, whichever tier or tenant sends; `room` is how many tokens it gives away."""

    def __init__(self, room: float) -> None:
        self.room = room
        self.waiting: dict[str, Ticket] = {}
        self.held: dict[str, int] = {}

    def submit(self, ticket: Ticket) -> None:
        self.waiting[ticket.id] = ticket

    def decide(self, now_us: int) -> Decided:
        admitted = []
        while self.waiting and sum(self.held.values()) + next(iter(self.waiting.values())).tokens <= self.room:
            ticket = self.waiting.pop(next(iter(self.waiting)))
            self.held[ticket.id] = ticket.tokens
            admitted.append(ScheduledLease(ticket, "pool#1", 0, 0))
        return Decided(admitted, [])

    def settle(self, ticket_id: str, now_us: int) -> None:
        del self.held[ticket_id]

    def cancel(self, ticket_id: str, now_us: int) -> None:
        del self.waiting[ticket_id]

    def next_change_us(self) -> None:
        return None


def one_queue() -> Any:
    return OneQueue(RULES.tokens)


def admits_everything() -> Any:
    return OneQueue(math.inf)


def admits_nothing() -> Any:
    return OneQueue(0)


@pytest.mark.parametrize("percent", [2, 50])
def test_a_scheduler_that_admits_everything_is_found_out(percent: int):
    with pytest.raises(Overfilled):
        batch_sizes.hour(RULES, percent, admits_everything(), ENOUGH_S)
    with pytest.raises(Overfilled):
        tenants.share(RULES, 5.0, admits_everything())


def test_a_scheduler_that_admits_nothing_is_found_out():
    seen = batch_sizes.hour(RULES, 2, admits_nothing(), ENOUGH_S)
    assert batch_sizes.line(2, batch_sizes.STATED_S[2], seen).holds is False
    assert tenants.share(RULES, None, admits_nothing()) < tenants.LEAST_SHARE


def test_one_queue_for_all_is_found_out():
    seen = batch_sizes.hour(RULES, 50, one_queue(), ENOUGH_S)
    assert batch_sizes.line(50, batch_sizes.STATED_S[50], seen).holds is False
    assert tenants.share(RULES, 5.0, one_queue()) < tenants.LEAST_SHARE


def test_the_share_of_equal_tenants_is_a_half():
    assert tenants.share(RULES, None) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize(
    ("peak", "holds"), [(disconnects.PLACES, True), (disconnects.PLACES + 1, False), (disconnects.PLACES - 1, False)]
)
def test_an_engine_that_was_never_full_was_not_attacked(peak: int, holds: bool):
    engine = Engine()
    engine.peak = peak
    assert disconnects.line("vllm", 0.1, engine).holds is holds
    assert store.judged("", [1, peak + store.PLACES - disconnects.PLACES]).holds is holds


@pytest.mark.parametrize(
    ("held", "is_held"),
    [(Held(3_000, 1), True), (Held(2_999, 1), False), (Held(refused=400), True), (Held(refused=502), False)],
)
def test_a_shape_is_held_in_full_or_refused(held: Held, is_held: bool):
    assert prompts.SHAPES[0].is_held(held) is is_held


async def _breaks():
    raise RuntimeError("no engine")
    yield


@pytest.mark.anyio
async def test_an_attack_that_cannot_be_played_has_not_held(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setitem(ATTACKS, "store", _breaks)
    (line,) = await play(["store"])
    assert line.holds is False
    assert "no engine" in line.attack


def test_a_scheduler_that_admits_nothing_breaks_the_bounds_or_cannot_be_judged():
    luck = random.Random(3)
    rules = bounds.random_rules(luck)
    flood = bounds.Flood(rules.tiers[0], 1, (1, 1), None, 10, 1.0)
    simulation = Simulation(rules, admits_nothing())
    watch = bounds.Watch(simulation, flood)
    watch.start(luck)
    simulation.run(us(1_000))
    with pytest.raises(RuntimeError, match="still waits"):
        watch.judge(1, bounds.Tally())


def test_one_queue_for_all_breaks_the_bounds():
    rules = pool_rules(tokens=1_000, requests=None, tiers=(Shares("a", Fraction(3, 10)), Shares("b", Fraction(3, 10))))
    simulation = Simulation(rules, cast("Any", OneQueue(1_000)))
    luck = random.Random(3)
    watches = [
        bounds.Watch(simulation, bounds.Flood(rules.tiers[level], 1, (200, 1), None, count, per_s))
        for level, count, per_s in ((0, 400, 10.0), (1, 10, 0.05))
    ]
    for watch in watches:
        watch.start(luck)
    simulation.run(us(10_000))
    tally = bounds.Tally()
    watches[1].judge(2, tally)
    assert tally.broken["b"]
    assert bounds.line("b", tally).holds is False


def test_a_bound_that_nothing_came_near_proves_nothing():
    tally = bounds.Tally()
    for _ in range(bounds.LEAST_CHECKED):
        tally.note("a", 10, 100)
    assert bounds.line("a", tally).holds is False
    tally.note("a", 50, 100)
    assert bounds.line("a", tally).holds is True
    tally.note("a", 101, 100)
    assert bounds.line("a", tally).holds is False
