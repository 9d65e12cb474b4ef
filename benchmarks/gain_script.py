"""What an operation costs inside Redis with `order: gain`, relative to `order: level`, with as many tickets waiting.

Two pools on one server take turns, call by call: 16 newcomers and the ends of 16 leases, which admit 16 others. So a
cycle is two operations. Microseconds are those that the server says it spent. The target: at most twice the cost of
level order with 100,000 waiting. Then the same before 16 engines, where each admission is three calls of its own
(`redis_engines`) and 10,000 wait.

    python -m benchmarks.gain_script [--waiting N] [--rounds N] [--check]
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator

import redis
import uvloop

from benchmarks.gain_scheduler import options, show
from benchmarks.redis_engines import Subject
from benchmarks.redis_script import TENANTS, Queue
from benchmarks.redis_setup import plain_client, running_server

CALLS = 20
ENGINES, WAITING_FOR_ENGINES, ADMISSIONS = 16, 10_000, 100


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


def measure_engines(url: str, waiting: int, rounds: int) -> tuple[float, float]:
    """Microseconds of processor time of an admission by level and by gain, before 16 engines."""
    with redis.Redis.from_url(url) as client:
        subjects = [Subject(client, ENGINES, waiting, is_by_gain=is_by_gain) for is_by_gain in (False, True)]
        took: list[list[float]] = [[], []]
        for number in range(rounds + 1):
            for subject, times in zip(subjects, took, strict=True):
                admission_us = subject.admissions(ADMISSIONS)
                if number:
                    times.append(admission_us)
        client.flushall()
    level_us, gain_us = map(statistics.median, took)
    return level_us, gain_us


def measured(url: str, waiting: int, rounds: int) -> Iterator[tuple[str, tuple[float, float]]]:
    """Each kind of queue with its costs."""
    for name, tenants in (("one tenant", 1), (f"{TENANTS} tenants", TENANTS), ("5,000 tenants", 5_000)):
        yield name, uvloop.run(measure(url, waiting, tenants, rounds))
    waiting = min(waiting, WAITING_FOR_ENGINES)
    yield f"{ENGINES} engines, {waiting:,} waiting", measure_engines(url, waiting, rounds)


def main() -> int:
    """See `gain_scheduler.show`."""
    arguments = options(__doc__)
    with running_server() as server:
        print(f"{server.binary.name}, {arguments.waiting:,} waiting")
        figures = measured(server.url, arguments.waiting, arguments.rounds)
        return show("the server", figures, is_checked=arguments.check)


if __name__ == "__main__":
    sys.exit(main())
