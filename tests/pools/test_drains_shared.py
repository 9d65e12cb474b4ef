"""Drains and restarts of engines while the store is away, and while a replica states what it has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from sidecar.events import StoreState
from sidecar.pools.redis import RedisFleetPool
from sidecar.pools.redis.connection import StoreConnection
from tests.pools.load import recovered, until
from tests.pools.test_redis_fleet import A, B, replicas
from tests.support.redis_servers import RedisServer, first_binary

pytestmark = [pytest.mark.anyio, pytest.mark.long, pytest.mark.hasty]
RESTARTED = A._replace(id="a#2")


@pytest.fixture
def server(tmp_path: Path) -> RedisServer:
    """One that the test may kill."""
    return RedisServer(first_binary(), tmp_path)


def takes(pool: RedisFleetPool) -> dict[str, bool]:
    """The engines, and whether each takes new requests, by the store's latest answer."""
    return {engine.id: engine.takes_new for engine in pool.engines()}


async def all_see(pools: Sequence[RedisFleetPool], engine: str, *, takes_new: bool) -> None:
    for pool in pools:
        await until(lambda pool=pool: takes(pool).get(engine) is takes_new, 60, f"{engine} takes new: {takes_new}")


async def lost(pools: Sequence[RedisFleetPool]) -> None:
    for pool in pools:
        await until(lambda pool=pool: pool.status.state is not StoreState.SHARED, 60, "the store is lost")


async def two_beats(pools: Sequence[RedisFleetPool]) -> None:
    """Returns when each pool has heard of what all had said before."""
    for _ in range(2):
        for pool in pools:
            pool._batches.beat()
        await asyncio.sleep(0.3)


def in_the_next_resync(pool: RedisFleetPool, act: Callable[[], None]) -> None:
    """Does something while the answer to the pool's next statement is on its way."""
    state, did = pool.statement, []

    def statement() -> Any:
        found = state()
        if not did:
            did.append(True)
            asyncio.get_running_loop().call_soon(act)
        return found

    pool.statement = statement  # type: ignore[method-assign]


async def test_a_drained_engine_that_restarts_without_the_store_does_not_drain_in_an_empty_one(
    server: RedisServer,
) -> None:
    with server:
        async with replicas(server.url, 2, A, B) as pools:
            pools[0].drain_engine("a", drains=True)
            await all_see(pools, "a#1", takes_new=False)
            server.kill()
            await lost(pools)
            for pool in pools:
                pool.set_engines([RESTARTED, B])
            server.restart()
            await recovered(pools)
            await two_beats(pools)
            await all_see(pools, "a#2", takes_new=True)


async def test_a_drain_that_was_not_answered_is_not_said_again_of_an_engine_that_others_saw_restart(
    server: RedisServer,
) -> None:
    with server:
        async with replicas(server.url, 2, A, B) as pools:
            late, other = pools
            late.on_incarnation = lambda _, number, __: late.set_engines([A._replace(id=f"a#{number}"), B])
            server.pause()
            await lost(pools)
            late.drain_engine("a", drains=True)
            assert late._session
            connect, may_connect = late._session._connect, asyncio.Event()

            async def connect_late() -> StoreConnection:
                await may_connect.wait()
                return await connect()

            late._session._connect = connect_late
            server.resume()
            await recovered([other])
            other.set_engines([RESTARTED, B])
            await all_see([other], "a#2", takes_new=True)
            may_connect.set()
            await recovered(pools)
            await two_beats(pools)
            await all_see(pools, "a#2", takes_new=True)
            assert takes(late) == {"a#2": True, "b#1": True}


async def test_a_drain_that_is_said_during_a_resync_reaches_all_replicas(server: RedisServer) -> None:
    with server:
        async with replicas(server.url, 2, A, B) as pools:
            heard: list[tuple[str, bool]] = []
            pools[0].on_drain = lambda name, does: heard.append((name, does))
            server.pause()
            await lost(pools)
            in_the_next_resync(pools[0], lambda: pools[0].drain_engine("a", drains=True))
            server.resume()
            await recovered(pools)
            await all_see(pools, "a#1", takes_new=False)
            assert heard == []
            pools[1].drain_engine("a", drains=False)
            await all_see(pools, "a#1", takes_new=True)
            await until(lambda: heard == [("a", False)], 60, "what others say later counts")


async def test_an_engine_that_restarts_during_a_resync_is_known_to_all_replicas(server: RedisServer) -> None:
    with server:
        async with replicas(server.url, 2, A, B) as pools:
            server.pause()
            await lost(pools)
            in_the_next_resync(pools[0], lambda: pools[0].set_engines([RESTARTED, B]))
            server.resume()
            await recovered(pools)
            await all_see(pools, "a#2", takes_new=True)
