"""What an admission adds to a request when nothing is in its way: one round trip, and what the pool does around it."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import uvloop

from benchmarks.redis_batching import ASK, all_settled
from benchmarks.redis_setup import Figure, plain_client, replica, shipped_policy
from sidecar.pools.redis import RedisPool, protocol

BARE = "return 1"


def latency(url: str, quick: bool) -> Figure:
    """The p50 of an uncontended admission, to that of a script that does nothing."""
    return uvloop.run(_latency(url, rounds=5 if quick else 21, samples=100 if quick else 200))


async def _latency(url: str, rounds: int, samples: int) -> Figure:
    async with replica(url, shipped_policy("idle")) as pool, plain_client(url) as client:
        sha = await client.script_load(BARE)
        ways: tuple[Callable[[], Awaitable[int]], ...] = (
            lambda: _admission_ns(pool),
            lambda: _bare_ns(client, sha, pool),
        )
        for way in ways:
            await _p50_us(way, samples)
        seen = [[await _p50_us(way, samples) for way in ways] for _ in range(rounds)]
    parts = {
        "p50 us, enter": statistics.median(enter for enter, _ in seen),
        "p50 us, a script that does nothing": statistics.median(bare for _, bare in seen),
        "us added": statistics.median(enter - bare for enter, bare in seen),
    }
    ratio = statistics.median(enter / bare for enter, bare in seen)
    return Figure("p50 of an uncontended admission, to a bare EVALSHA", ratio, 1.5, parts)


async def _p50_us(way: Callable[[], Awaitable[int]], samples: int) -> float:
    return statistics.median([await way() for _ in range(samples)]) / 1e3


async def _admission_ns(pool: RedisPool) -> int:
    """One admission of an idle pool. The call that settles it is over when this returns."""
    began_ns = time.perf_counter_ns()
    lease = await pool.enter(ASK)
    spent_ns = time.perf_counter_ns() - began_ns
    if lease.grant is None:
        raise RuntimeError("nothing was in its way, and it was not admitted at once")
    lease.settle()
    await all_settled(pool)
    return spent_ns


async def _bare_ns(client: Any, sha: str, pool: RedisPool) -> int:
    """A call with the same arguments to a script that does nothing, and the same pause behind it."""
    enter = (protocol.ENTER, 1, ASK.tier, ASK.tenant, ASK.weight, ASK.tokens, ASK.requests)
    began_ns = time.perf_counter_ns()
    await client.execute_command("EVALSHA", sha, 1, protocol.root_key("bare"), protocol.CALL, pool.name, 1, 0, *enter)
    spent_ns = time.perf_counter_ns() - began_ns
    await asyncio.sleep(0)
    return spent_ns
