"""What a decision costs while very many wait, and the longest that one keeps everything else of its process waiting.

    python -m benchmarks.decision [--waiting N] [--leases N] [--tenants N] [--cycles N] [--check]

One process, of one engine and of 8, by level and by gain, through the product's own pool on an event loop. A cycle: a
lease ends, one that waits is admitted, and another request comes. It costs at most twice as much with 100,000 waiting
as with 100, and by gain at most twice as much as by level. No turn of the loop takes more than 20 ms, whatever happens:
cycles, clients that give up, other reserves, a pool that grows, shrinks, stops and goes on, the end of all that run.

Times are processor time of the thread, with the garbage collector off. `--check` exits with 1 where more is taken.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from benchmarks.crowd import Crowd
from sidecar.policy.choices import Order

FEW, ENGINES = 100, (0, 8)
MOST_RATIO, MOST_MS = 2.0, 20.0
QUIET_S = 0.2


class Turns:
    """The longest turn of the event loop, in milliseconds of the thread's processor time."""

    def __init__(self) -> None:
        self.longest_ms = 0.0
        self._began_ns = time.thread_time_ns()
        self._handle = asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        now_ns = time.thread_time_ns()
        self.longest_ms = max(self.longest_ms, (now_ns - self._began_ns) / 1e6)
        self._began_ns = now_ns
        self._handle = asyncio.get_running_loop().call_soon(self._turn)

    def stop(self) -> float:
        """No more of them count."""
        self._handle.cancel()
        return self.longest_ms


async def cost_us(crowd: Crowd, cycles: int) -> float:
    """Microseconds of a cycle."""
    began_ns = time.thread_time_ns()
    for _ in range(cycles):
        await crowd.cycle()
        await asyncio.sleep(0)
    return (time.thread_time_ns() - began_ns) / cycles / 1e3


async def longest_ms(crowd: Crowd, operation: Callable[[Crowd], Iterator[None]]) -> float:
    """The longest turn from an operation's begin until nothing of it is left to do; it may take turns, too."""
    turns = Turns()
    for _ in operation(crowd):
        await asyncio.sleep(0)
    running, since_s = len(crowd.running), time.monotonic()
    while time.monotonic() < since_s + QUIET_S:
        await asyncio.sleep(0)
        if len(crowd.running) != running:
            running, since_s = len(crowd.running), time.monotonic()
    return turns.stop()


def others_leave(crowd: Crowd) -> Iterator[None]:
    """Clients of a tenth of those that wait give up."""
    for _ in range(len(crowd.waiting) // 10):
        crowd.leave()
        yield


def reserves_change(crowd: Crowd) -> Iterator[None]:
    """The policy is another one."""
    tiers = tuple(replace(tier, reserve=tier.reserve / 2) for tier in crowd.policy.tiers)
    other, size = replace(crowd.policy, tiers=tiers), (crowd.policy.rules.tokens, crowd.policy.rules.requests)
    crowd.pool.change_policy(replace(other, rules=other.rules_for(*size)))
    yield


def stops(crowd: Crowd) -> Iterator[None]:
    """The engine is not healthy for a moment."""
    crowd.pool.pause("not healthy")
    yield
    crowd.pool.pause(None)
    yield


def shrinks(crowd: Crowd) -> Iterator[None]:
    """To half of its size."""
    crowd.resize(0.5)
    yield


def grows(crowd: Crowd) -> Iterator[None]:
    """To twice its size."""
    crowd.resize(2)
    yield


def all_end(crowd: Crowd) -> Iterator[None]:
    """All that run at a moment, one after the other."""
    for lease in list(crowd.running):
        lease.settle()
        yield


OPERATIONS = {
    "clients give up": others_leave,
    "the reserves change": reserves_change,
    "it stops, and goes on": stops,
    "it shrinks to half": shrinks,
    "it grows to four times that": grows,
    "all that run end": all_end,
}


async def measure(arguments: argparse.Namespace, engines: int, order: Order) -> tuple[float, list[str]]:
    """Prints the figures of one kind of pool. Returns the cost of a cycle, and what was missed."""
    few = Crowd(FEW, arguments.leases, arguments.tenants, order, engines)
    many = Crowd(arguments.waiting, arguments.leases, arguments.tenants, order, engines)
    name, missed = f"{max(1, engines)} engine{'s' * (engines > 1)}, by {order.value}", []
    await few.fill()
    await many.fill()
    gc.collect()
    gc.disable()
    turns = Turns()
    costs = [(await cost_us(few, arguments.cycles), await cost_us(many, arguments.cycles)) for _ in range(5)]
    found = {"cycles": turns.stop()}
    ratio = sorted(large / small for small, large in costs)[2]
    cost = sorted(large for _, large in costs)[2]
    print(f"\n{name}\n    us a cycle with {arguments.waiting:,} waiting{cost:12.0f}\n    to {FEW} waiting{ratio:27.2f}")
    if ratio > MOST_RATIO:
        missed.append(f"{name}: {ratio:.2f} times the cost with {FEW} waiting")
    for what, operation in OPERATIONS.items():
        found[what] = await longest_ms(many, operation)
    for what, took_ms in found.items():
        print(f"    longest pause, ms: {what:30}{took_ms:8.1f}", flush=True)
        if took_ms > MOST_MS:
            missed.append(f"{name}: {what}, {took_ms:.1f} ms")
    await few.pool.close()
    await many.pool.close()
    gc.enable()
    return cost, missed


def main() -> int:
    """Parses the command line and runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiting", type=int, default=100_000)
    parser.add_argument("--leases", type=int, default=5_000)
    parser.add_argument("--tenants", type=int, default=20_000)
    parser.add_argument("--cycles", type=int, default=500)
    parser.add_argument("--check", action="store_true", help="exit with 1 where a target is missed")
    arguments = parser.parse_args()
    missed: list[str] = []
    for engines in ENGINES:
        by_level, late = asyncio.run(measure(arguments, engines, Order.LEVEL))
        by_gain, later = asyncio.run(measure(arguments, engines, Order.GAIN))
        print(f"\nby gain to by level, {max(1, engines)} engines{by_gain / by_level:24.2f}")
        missed += [*late, *later]
        if by_gain > MOST_RATIO * by_level:
            missed.append(f"{max(1, engines)} engines: by gain {by_gain / by_level:.2f} times by level")
    print("\nevery target is met" if not missed else "\nMISSED: " + "; ".join(missed))
    return 1 if missed and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
