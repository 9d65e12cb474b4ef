"""What a decision costs with `order: gain`, relative to `order: level`, with as many tickets waiting.

Two schedulers live in one process with the same tickets, and take turns, round by round. One cycle is enter + dispatch
+ settle: a lease is settled, the newcomer goes into the queue, and one that waits is admitted. Three crowds: one
tenant, 1,000 tenants alike, and 1,000 tenants of which one sends half. A ticket has two minutes to its deadline, a
hundredth of what the queue needs, so that nearly all are urgent, and densities fall.

Times are processor time. The target: at most twice the cost of level order with 100,000 waiting.

    python -m benchmarks.gain_scheduler [--waiting N] [--rounds N] [--check]
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterable
from fractions import Fraction

from sidecar.policy.rules import PoolRules, Shares, pool_rules
from sidecar.scheduling import Scheduler
from sidecar.scheduling.gain import GainFigures
from sidecar.scheduling.gain_scheduler import MOST_MADE_URGENT, GainScheduler

TARGET = 2.0
LEASES = 400
TICKET_TOKENS = 500
TIERS = (("critical", 10), ("high", 20), ("normal", 10), ("low", 5), ("batch", 5))
CYCLES = 500
MICROSECONDS_PER_CYCLE = 2_000


def rules(*, is_by_gain: bool) -> PoolRules:
    """The default ladder, half of the pool reserved, aging up to `normal`; a quarter of the reserves as floors."""
    return pool_rules(
        tokens=LEASES * TICKET_TOKENS,
        requests=None,
        tiers=tuple(Shares(name, reserve=Fraction(percent, 100)) for name, percent in TIERS),
        promote_after_us=30_000_000,
        ceiling=2,
        floor_of_reserve=Fraction(1, 4) if is_by_gain else Fraction(1),
        is_by_gain=is_by_gain,
    )


class Crowd:
    """A full pool with `waiting` tickets before it, in every tier but the first. `flood` is one tenant's part."""

    def __init__(self, waiting: int, tenants: int, flood: float, *, is_by_gain: bool) -> None:
        self.scheduler = (GainScheduler if is_by_gain else Scheduler)(rules(is_by_gain=is_by_gain))
        self._tenants, self._flood = tenants, flood
        self._luck = random.Random(7)
        self._count = self._now_us = 0
        self._leases: deque[str] = deque()
        while self.scheduler.waiting() < waiting:
            self._enter()
            if len(self._leases) < LEASES:
                self._dispatch()
        for _ in range(waiting // MOST_MADE_URGENT + 1):  # a pool is rarely so full at once: those of before are urgent
            self._now_us += 1
            self._dispatch()

    def cycle(self) -> None:
        """One enter, one settle, and what that admits."""
        self._now_us += MICROSECONDS_PER_CYCLE
        self._enter()
        self.scheduler.settle(self._leases.popleft(), self._now_us)
        self._dispatch()

    def _enter(self) -> None:
        self._count += 1
        luck = self._luck
        tenant = 0 if luck.random() < self._flood else luck.randrange(self._tenants)
        ticket = self.scheduler.submit(
            str(self._count),
            tier=1 + self._count % (len(TIERS) - 1),
            tokens=TICKET_TOKENS,
            now_us=self._now_us,
            tenant=f"tenant-{tenant}",
        )
        tokens = luck.randrange(10, 1000)
        if isinstance(self.scheduler, GainScheduler):
            figures = GainFigures(2 ** (4 - ticket.tier), tokens, 250 * tokens + 50_000, 120_000_000, 0, 30_000)
            self.scheduler.appraise(ticket, figures)

    def _dispatch(self) -> None:
        self._leases.extend(admission.ticket.id for admission in self.scheduler.dispatch(self._now_us))


def measure(waiting: int, tenants: int, flood: float, rounds: int) -> tuple[float, float]:
    """Microseconds of a cycle by level and by gain: the medians of the rounds."""
    crowds = [Crowd(waiting, tenants, flood, is_by_gain=is_by_gain) for is_by_gain in (False, True)]
    took: list[list[float]] = [[], []]
    for _ in range(rounds):
        for crowd, times in zip(crowds, took, strict=True):
            began_ns = time.process_time_ns()
            for _ in range(CYCLES):
                crowd.cycle()
            times.append((time.process_time_ns() - began_ns) / CYCLES / 1000)
    level_us, gain_us = (statistics.median(times) for times in took)
    return level_us, gain_us


def options(description: str | None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiting", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--check", action="store_true")
    return parser.parse_args()


def show(what: str, measured: Iterable[tuple[str, tuple[float, float]]], *, is_checked: bool) -> int:
    """Prints a line for each crowd: its name, and the cost of a cycle by level and by gain. 1 where `is_checked` finds
    one that costs too much.
    """
    print(f"{f'microseconds of {what} for a cycle':<44}{'level':>8}{'gain':>8}{'ratio':>8}")
    worst = 0.0
    for name, (level_us, gain_us) in measured:
        worst = max(worst, gain_us / level_us)
        print(f"{name:<44}{level_us:8.1f}{gain_us:8.1f}{gain_us / level_us:8.2f}", flush=True)
    print(f"at most {TARGET:g} is asked")
    return 1 if is_checked and worst > TARGET else 0


def main() -> int:
    """See `show`."""
    arguments = options(__doc__)
    print(f"{platform.python_implementation()} {platform.python_version()}, {arguments.waiting:,} waiting")
    crowds = (("one tenant", 1, 0.0), ("1,000 tenants", 1_000, 0.0), ("1,000 tenants, one sends half", 1_000, 0.5))
    measured = ((name, measure(arguments.waiting, tenants, flood, arguments.rounds)) for name, tenants, flood in crowds)
    return show("processor time", measured, is_checked=arguments.check)


if __name__ == "__main__":
    sys.exit(main())
