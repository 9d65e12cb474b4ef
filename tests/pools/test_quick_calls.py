"""Calls that a session makes without its task: in the turn of a request that comes alone, and of an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from sidecar.pools import Lease
from sidecar.pools.redis import RedisPool
from sidecar.pools.redis.connection import StoreConnection
from tests.pools.harness import ask, simple
from tests.pools.load import nothing_left, replicas, store_of, until
from tests.support.redis_servers import RedisServer

pytestmark = pytest.mark.anyio
CAPACITY = 1_000


def held(pool: RedisPool) -> int:
    state: Any = pool.state()
    return sum(tier["held"]["tokens"] for tier in state["tiers"])


async def settled(pool: RedisPool) -> None:
    """Returns when the store has answered all that was said, and a lone request would be asked for at once."""
    await nothing_left([pool])
    await asyncio.sleep(0.02)


async def quiet(pool: RedisPool) -> None:
    """The same after a call of one operation."""
    (await pool.enter(ask(tokens=1))).settle()
    await settled(pool)


async def admitted(pool: RedisPool) -> Lease:
    """The lease of one request that is admitted soon."""
    lease = await asyncio.wait_for(pool.enter(ask(tokens=10)), 60)
    await asyncio.wait_for(lease.wait(), 60)
    return lease


async def test_a_request_that_comes_alone_is_asked_for_in_its_own_turn(redis_server: RedisServer) -> None:
    async with replicas(simple(tokens=CAPACITY), [redis_server.url]) as (pool,):
        await quiet(pool)
        calls = pool.round_trips
        entering = asyncio.ensure_future(pool.enter(ask(tokens=1)))
        await asyncio.sleep(0)
        assert pool.round_trips == calls + 1
        (await entering).settle()
        await settled(pool)


async def test_requests_of_one_turn_share_calls(redis_server: RedisServer) -> None:
    async with replicas(simple(tokens=CAPACITY), [redis_server.url]) as (pool,):
        await quiet(pool)
        for most in (2, 1):  # the first of many goes alone, and after a call of many none does
            calls = pool.round_trips
            leases = await asyncio.gather(*(pool.enter(ask(tokens=1)) for _ in range(100)))
            assert all(lease.grant for lease in leases)
            assert pool.round_trips <= calls + most
            calls = pool.round_trips
            for lease in leases:
                lease.settle()
            await until(lambda calls=calls: pool.round_trips > calls, what="all ends in a call")
            await asyncio.sleep(0.05)
            assert pool.round_trips == calls + 1


async def test_an_end_and_the_next_request_of_its_turn_travel_together(redis_server: RedisServer) -> None:
    async with replicas(simple(tokens=CAPACITY), [redis_server.url]) as (pool,):
        await quiet(pool)
        lease = await pool.enter(ask(tokens=CAPACITY))
        calls = pool.round_trips
        lease.settle()
        lease = await pool.enter(ask(tokens=CAPACITY))
        assert lease.grant is not None
        assert pool.round_trips == calls + 1
        lease.settle()
        await settled(pool)


async def test_a_request_in_a_server_that_forgot_the_script_is_admitted_once(redis_server: RedisServer) -> None:
    async with replicas(simple(tokens=CAPACITY), [redis_server.url]) as (pool,):
        await quiet(pool)
        await asyncio.get_running_loop().run_in_executor(None, lambda: redis_server.command("SCRIPT", "FLUSH"))
        leases = await asyncio.gather(*(pool.enter(ask(tokens=10)) for _ in range(5)))
        assert all(lease.grant for lease in leases)
        await until(lambda: held(pool) == 50, 60)
        assert store_of(pool)["state"] == "shared"
        for lease in leases:
            lease.settle()
        await settled(pool)


async def test_a_defect_while_an_answer_is_applied_is_logged_and_the_store_is_reached_again(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answered, defects = RedisPool.answered, ["oops"]

    def fails_once(self: RedisPool, reply: Any, batch: Any) -> None:
        if defects and batch.entering:
            raise ZeroDivisionError(defects.pop())
        answered(self, reply, batch)

    async with replicas(simple(tokens=CAPACITY), [redis_server.url]) as (pool,):
        await quiet(pool)
        monkeypatch.setattr(RedisPool, "answered", fails_once)
        lease = await admitted(pool)
        assert "a defect in the sidecar" in caplog.text
        assert "ZeroDivisionError: oops" in caplog.text
        lease.settle()
        await until(lambda: store_of(pool)["state"] == "shared", 60)
        await settled(pool)


async def test_a_connection_that_is_lost_between_a_call_and_its_answer_loses_no_request(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server did what the call said. The answer is lost, and the statement after it says so again."""
    send, lost = StoreConnection.send, list[Any]()

    def loses_one(self: StoreConnection, arguments: Any, answered: Callable[[Any], None]) -> None:
        if not lost:
            lost.append(arguments)
            send(self, arguments, lambda answer: answered(ConnectionResetError("the answer is lost")))
        else:
            send(self, arguments, answered)

    async with replicas(simple(tokens=CAPACITY), [redis_server.url]) as (pool,):
        await quiet(pool)
        monkeypatch.setattr(StoreConnection, "send", loses_one)
        lease = await admitted(pool)
        assert lost
        await until(lambda: held(pool) == 10, 60)
        lease.settle()
        await settled(pool)


async def test_a_call_that_cannot_be_written_is_no_failure_of_the_request_in_whose_turn_that_is(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, failures = StoreConnection.send, ["surrogates not allowed"]

    def fails_once(self: StoreConnection, arguments: Any, answered: Callable[[Any], None]) -> None:
        if failures:
            raise ValueError(failures.pop())
        send(self, arguments, answered)

    async with replicas(simple(tokens=CAPACITY), [redis_server.url]) as (pool,):
        await quiet(pool)
        monkeypatch.setattr(StoreConnection, "send", fails_once)
        lease = await admitted(pool)
        assert not failures
        lease.settle()
        await settled(pool)


@pytest.mark.parametrize("cancels", [False, True], ids=["closed", "canceled"])
async def test_a_pool_that_closes_while_a_call_is_on_its_way_leaves_nothing(
    redis_server: RedisServer, cancels: bool
) -> None:
    async with replicas(simple(tokens=CAPACITY), [redis_server.url] * 2) as (pool, other):
        await quiet(pool)
        entering = asyncio.ensure_future(pool.enter(ask(tokens=10)))
        await asyncio.sleep(0)
        if cancels:
            entering.cancel()
        await pool.close()
        entering.cancel()
        await asyncio.gather(entering, return_exceptions=True)
        await nothing_left([other])
