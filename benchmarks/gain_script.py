"""What an operation costs inside Redis with `order: gain`, relative to `order: level`, with as many tickets waiting.

Two pools on one server take turns, call by call: 16 newcomers and the ends of 16 leases, which admit 16 others. So a
cycle is two operations. Microseconds are those that the server says it spent. The target: at most twice the cost of
level order with 100,000 waiting.

    python -m benchmarks.gain_script [--waiting N] [--rounds N] [--check]
"""

from __future__ import annotations

import statistics
import sys

import uvloop

from benchmarks.gain_scheduler import options, show
from benchmarks.redis_script import TENANTS, Queue
from benchmarks.redis_setup import plain_client, running_server

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
    """See `gain_scheduler.show`."""
    arguments = options(__doc__)
    crowds = (("one tenant", 1), (f"{TENANTS} tenants", TENANTS), ("5,000 tenants", 5_000))
    with running_server() as server:
        print(f"{server.binary.name}, {arguments.waiting:,} waiting")
        measured = (
            (name, uvloop.run(measure(server.url, arguments.waiting, tenants, arguments.rounds)))
            for name, tenants in crowds
        )
        return show("the server", measured, is_checked=arguments.check)


if __name__ == "__main__":
    sys.exit(main())
