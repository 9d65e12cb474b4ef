"""A store that comes back empty and goes again: replicas keep the number that is safe, and do not exceed the pool."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from sidecar.policy.model import Policy
from tests.pools.harness import ask, simple
from tests.pools.load import Load, nothing_left, recovered, replicas, store_of, until
from tests.support.redis_servers import RedisServer, first_binary

pytestmark = pytest.mark.anyio
CAPACITY = 12
"""Requests, as in an engine with so many slots."""


def policy() -> Policy:
    return simple(tokens=CAPACITY)


@pytest.mark.long
async def test_a_store_that_flaps_never_lets_three_replicas_exceed_the_pool(tmp_path: Path) -> None:
    await flap(tmp_path, trials=2)


@pytest.mark.soak
async def test_a_store_that_flaps_twenty_times_never_lets_three_replicas_exceed_the_pool(tmp_path: Path) -> None:
    await flap(tmp_path, trials=20)


async def flap(folder: Path, trials: int) -> None:
    """Down, back empty for 0.1 to 0.6 s, down again: under more load than the pool can take."""
    luck = random.Random(12)
    with RedisServer(first_binary(), folder) as server:
        async with replicas(policy(), [server.url] * 3) as pools:
            load = Load(pools, tokens=1, held_s=(0.1, 0.4), tiers=1)
            async with load.going_on(60):
                # What a replica has not heard of, it cannot go by: see the bound in `alone`.
                is_known = lambda pool: pool.state()["tiers"][0]["held"]["tokens"] == CAPACITY  # noqa: E731
                await until(lambda: all(map(is_known, pools)), 60, "all know that the pool is full")
                for _ in range(trials):
                    server.kill()
                    await asyncio.sleep(luck.uniform(0.7, 1.2))
                    server.restart()
                    await asyncio.sleep(luck.uniform(0.1, 0.6))
                    server.kill()
                    await asyncio.sleep(luck.uniform(0.7, 1.2))
                    server.restart()
                    await recovered(pools)
                    await until(lambda: all(store_of(pool)["replicas"] == 3 for pool in pools), 60, "three replicas")
                    await asyncio.sleep(0.7)  # without the store a replica that held nothing may admit nothing
            assert load.peak == CAPACITY
            assert load.admitted > 20 * trials
            await nothing_left(pools)


@pytest.mark.long
async def test_a_store_that_is_flushed_twice_while_a_replica_is_idle_is_never_exceeded(tmp_path: Path) -> None:
    with RedisServer(first_binary(), tmp_path) as server:
        async with replicas(policy(), [server.url] * 3) as pools:
            for _ in range(2):
                idle = [await pools[2].enter(ask(tokens=1)) for _ in range(8)]
                load = Load(pools[:2], tokens=1, held_s=(0.3, 1.0))
                async with load.going_on(20):
                    await asyncio.sleep(0.3)
                    await flushed(server)
                    await asyncio.sleep(0.5)
                    await flushed(server)
                    await until(lambda: store_of(pools[0])["replicas"] == 3, 60, "the idle one has come")
                    await asyncio.sleep(0.2)
                assert load.peak <= CAPACITY - len(idle)
                for lease in idle:
                    lease.settle()
                await nothing_left(pools)


async def flushed(server: RedisServer) -> None:
    await asyncio.get_running_loop().run_in_executor(None, lambda: server.command("FLUSHALL"))
