"""What an operation costs inside Redis with `order: gain`, relative to `order: level`, with as many tickets waiting.

Two pools on one server take turns, call by call: 16 newcomers and the ends of 16 leases, which admit 16 others. So a
cycle is two operations. Microseconds are those that the server says it spent. The target: at most twice the cost of
level order with 100,000 waiting.

    python -m benchmarks.gain_script [--waiting N] [--rounds N] [--check]
"""

from __future__ import annotations

import argparse
import statistics
import sys

import uvloop

from benchmarks.redis_script import TENANTS, Queue
from benchmarks.redis_setup import plain_client, running_server

TARGET = 2.0
CALLS = 20


async def measure(url: str, waiting: int, tenants: int, rounds: int) -> tuple[float, float]:
    """Microseconds of a cycle by level and by gain: the medians of the rounds."""
    async with plain_client(url) as client:
        queues = [Queue(client, waiting, is_by_gain=is_by_gain, tenants=tenants) for is_by_gain in (False, True)]
        for each in queues:
            await each.fill()
        took: list[list[float]] = [[], []]
        for number in range(rounds + 1):
            for queue, times in zip(queues, took, strict=True):
                cycle_us = 2 * await queue.microseconds_each(CALLS)
                if number:  # the first round warms up
                    times.append(cycle_us)
        await client.flushall()
    level_us, gain_us = map(statistics.median, took)
    return level_us, gain_us


def main() -> int:
    """Prints a line for each crowd. 1 where `--check` finds one that costs too much."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiting", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    worst = 0.0
    with running_server() as server:
        print(f"{server.binary.name}, {arguments.waiting:,} waiting")
        print(f"{'microseconds of the server for a cycle':<44}{'level':>8}{'gain':>8}{'ratio':>8}")
        for name, tenants in (("one tenant", 1), (f"{TENANTS} tenants", TENANTS), ("5,000 tenants", 5_000)):
            level_us, gain_us = uvloop.run(measure(server.url, arguments.waiting, tenants, arguments.rounds))
            worst = max(worst, gain_us / level_us)
            print(f"{name:<44}{level_us:8.1f}{gain_us:8.1f}{gain_us / level_us:8.2f}", flush=True)
    print(f"at most {TARGET:g} is asked")
    return 1 if arguments.check and worst > TARGET else 0


if __name__ == "__main__":
    sys.exit(main())
