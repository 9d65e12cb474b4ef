"""Free room that lies in parts on every engine, while many tickets wait that come before each other as they claim."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction

from fleets import NAMES, Twins
from oracle import Policy

from sidecar.policy.rules import Shares
from sidecar.scheduling.fleet_scheduler import FleetScheduler
from sidecar.scheduling.gain import GainFigures

TOKENS = 10
"""Of each ticket. An engine holds three."""
TIERS = ("high", "normal", "low")
TENTHS = Policy((None, None), tuple(Shares(name, Fraction(1, 10)) for name in TIERS))


def falling(luck: random.Random) -> GainFigures:
    """Of a ticket that is urgent at once, and earns less with every microsecond: no two are equally dense for long."""
    return GainFigures(1, luck.randrange(70, 200), luck.randrange(1_000, 1_200), 0, 0, 1)


def fill(twins: Twins, luck: random.Random) -> None:
    """Engines that are full."""
    for name in NAMES:
        twins.set_engine(name, prefill=100)
        twins.dispatch()
    for _ in range(3 * len(NAMES)):
        twins.submit(tier=luck.randrange(len(TIERS)), tokens=TOKENS, tenant="runs")
        twins.dispatch()
    assert not twins.scheduler.waiting()


def let_wait(twins: Twins, luck: random.Random, count: int, *, charged: bool, barred: float = 0.0) -> None:
    """So many tickets wait, of a tenant each. Where the tenants are `charged`, the latest comes first in fair order.

    `barred` is the part of them that no engine may have.
    """
    for number in range(count):
        tier, tenant = luck.randrange(len(TIERS)), f"tenant-{number}"
        if charged and twins.scheduler.queued(tier)[1]:
            twins.charge(tier, tenant, 1, (count - number) * TOKENS)
        names = NAMES if luck.random() < barred else ()
        twins.submit(tier=tier, tokens=TOKENS, tenant=tenant, prompt=luck.randrange(TOKENS), barred=names)
        twins.dispatch()


def scatter(twins: Twins) -> None:
    """Every lease shrinks by a token: the room of a ticket is free, and no engine has so much."""
    twins.now_us += 60
    for name in [*twins.scheduler._leases]:
        twins.resize(name, TOKENS - 1)


def crowd(twins: Twins, luck: random.Random, *, charged: bool) -> None:
    """Some of that, by chance."""
    fill(twins, luck)
    let_wait(twins, luck, luck.choice([30, 60, 90]), charged=charged, barred=luck.choice([0, 0.3]))
    scatter(twins)


class WithoutOracle(Twins):
    """Before the twins: a scheduler alone, for many tickets. The oracle is slow."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.oracle = _DoesNothing()  # type: ignore[assignment]  # a stand-in

    def dispatch(self) -> list:
        return self.scheduler.dispatch(self.now_us)

    def _same(self, did: bool, should: bool) -> bool:
        return did


class _DoesNothing:
    def __getattr__(self, name: str):
        return lambda *_, **__: None


@contextmanager
def walks_of(scheduler: FleetScheduler) -> Iterator[list[int]]:
    """How often each walk began meanwhile."""
    walks: list[int] = []
    walk, walk_once = scheduler._walk, scheduler._walk_once

    def began(now_us: int):
        walks[-1] += 1
        return walk_once(now_us)

    def another(now_us: int):
        walks.append(0)
        return walk(now_us)

    scheduler._walk, scheduler._walk_once = another, began  # type: ignore[method-assign]
    try:
        yield walks
    finally:
        del scheduler._walk, scheduler._walk_once
