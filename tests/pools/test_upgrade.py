"""Two layouts in one store never admit together: the new one waits, and goes on when the last of the old has ended."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Callable

import pytest

from sidecar.pools import Pool
from sidecar.pools.redis.link import old_pools
from tests.pools.harness import ask, simple
from tests.pools.load import replica, replicas
from tests.support.redis_servers import RedisServer
from tests.support.waiting import until

pytestmark = pytest.mark.anyio
OLD = old_pools("faults")


def meta(replicas: int) -> bytes:
    """As the scripts of the layouts before the ledger keep it: when the last call was, and how many replicas live."""
    return struct.pack("<13d", 0, time.time() * 1e6, 0, *[0] * 9, replicas)


async def in_old_pool(server: RedisServer, replicas: int) -> None:
    import redis

    def write() -> None:
        with redis.Redis(port=server.port) as client:
            client.hset(OLD[0], "meta", meta(replicas))

    await asyncio.get_running_loop().run_in_executor(None, write)


def waits(pool: Pool) -> Callable[[], bool]:
    return lambda: pool.status.state.value == "waiting"


async def test_replicas_wait_beside_a_pool_of_the_layouts_before(redis_server: RedisServer) -> None:
    redis_server.command("FLUSHALL")
    await in_old_pool(redis_server, 2)
    pool = replica(redis_server.url, simple())
    await pool.open()
    try:
        waiting = await pool.enter(ask())
        for _ in range(6):  # an old replica goes on calling
            await asyncio.sleep(1)
            await in_old_pool(redis_server, 1)
        await until(waits(pool), what="waits")
        assert (waiting.grant, pool.readiness()) == (None, ())
        assert "another layout than" in pool.notices()[0]
        await in_old_pool(redis_server, 0)
        await asyncio.wait_for(waiting.wait(), 60)
        await until(lambda: pool.status.state.value == "shared", what="goes on")
        assert not pool.notices()
        waiting.settle()
    finally:
        await pool.close()


async def test_a_layout_that_comes_waits_for_the_last_replica_of_the_one_in_force(redis_server: RedisServer) -> None:
    redis_server.command("FLUSHALL")
    async with replicas(simple(), [redis_server.url]) as (old,):
        new = replica(redis_server.url, simple())
        new._member.layout += 1
        await new.open()
        try:
            await until(waits(new), what="waits")
            waiting, running = await new.enter(ask()), await old.enter(ask())
            assert (waiting.grant, running.grant is not None, new.readiness()) == (None, True, ())
            running.settle()
            await old.close()
            await asyncio.wait_for(waiting.wait(), 60)
            waiting.settle()
        finally:
            await new.close()
