"""Two layouts in one store never admit together: the new one waits, and goes on when the last of the old has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from sidecar.pools import Pool
from tests.pools.harness import ask, simple
from tests.pools.load import replica, replicas
from tests.support.redis_servers import RedisServer
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


def waits(pool: Pool) -> Callable[[], bool]:
    return lambda: pool.status.state.value == "waiting"


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
