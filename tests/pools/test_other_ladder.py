"""Processes with another ladder of tiers: the one that comes is refused, and the ones that run go on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from sidecar.errors import StoreUnavailable
from sidecar.policy.choices import StoreLoss
from sidecar.policy.model import Policy
from sidecar.pools import Pool
from tests.pools.harness import ask, simple
from tests.pools.load import Load, nothing_left, replica, replicas
from tests.support.redis_servers import RedisServer
from tests.support.shared_pools import begun
from tests.support.waiting import until

pytestmark = pytest.mark.anyio
CAPACITY = 10
OTHER = simple(("urgent", "rest"), tokens=CAPACITY)


@pytest.fixture(params=list(StoreLoss))
def on_loss(request: pytest.FixtureRequest) -> StoreLoss:
    return StoreLoss(request.param)


@contextlib.asynccontextmanager
async def newcomer(
    server: RedisServer, on_loss: StoreLoss = StoreLoss.DIVIDE, *, policy: Policy = OTHER, takes_over: bool = False
) -> AsyncIterator[Pool]:
    """A process that starts beside the others, in their pool."""
    pool = replica(server.url, replace(policy, on_store_loss=on_loss), takes_over=takes_over)
    try:
        await pool.open()
        yield pool
    finally:
        await pool.close()


async def do(server: RedisServer, *words: str) -> None:
    await asyncio.get_running_loop().run_in_executor(None, lambda: server.command(*words))


async def test_the_newcomer_is_refused_and_says_what_differs(
    redis_server: RedisServer, on_loss: StoreLoss, caplog: pytest.LogCaptureFixture
) -> None:
    await do(redis_server, "FLUSHALL")
    begun(redis_server, "faults")
    async with replicas(simple(tokens=CAPACITY), [redis_server.url] * 2, on_loss=on_loss) as pools:
        load = Load(pools, tokens=1)
        async with load.going_on(30):
            await until(lambda: load.held == CAPACITY)
            with caplog.at_level(logging.WARNING, "sidecar.store"):
                async with newcomer(redis_server, on_loss) as pool:
                    (reason,) = pool.readiness()
                    with pytest.raises(StoreUnavailable, match="its policy and its pool have other tiers"):
                        await pool.enter(ask())
                    await asyncio.sleep(1.2)  # it tries again
                    assert pool.readiness() == (reason,)
            assert [other.status.state.value for other in pools] == ["shared"] * 2
        assert (load.peak, load.refused) == (CAPACITY, {})
        await nothing_left(pools)
    assert reason.startswith("the pool refuses this process: pool faults has the tiers high, low, and the policy of ")
    assert "has urgent, rest; " in reason
    assert "--take-over-pool" in reason
    assert len([record for record in caplog.records if "refuses this process" in record.getMessage()]) == 1


@pytest.mark.long
async def test_the_newcomer_is_refused_also_when_the_store_loses_everything(redis_server: RedisServer) -> None:
    await do(redis_server, "FLUSHALL")
    begun(redis_server, "faults")
    async with replicas(simple(tokens=CAPACITY), [redis_server.url] * 2) as pools:
        running = [await pool.enter(ask(tokens=5)) for pool in pools]
        async with newcomer(redis_server) as pool:
            for _ in range(2):
                await do(redis_server, "FLUSHALL")
                await asyncio.sleep(2.2)
                assert [other.status.state.value for other in pools] == ["shared"] * 2
                assert "refuses this process" in pool.readiness()[0]
        for lease in running:
            assert lease.settle()
        await nothing_left(pools)


async def test_the_newcomer_comes_in_where_the_others_are_gone(redis_server: RedisServer) -> None:
    await do(redis_server, "FLUSHALL")
    async with contextlib.AsyncExitStack() as stack:
        others = await stack.enter_async_context(contextlib.AsyncExitStack())
        await others.enter_async_context(replicas(simple(tokens=CAPACITY), [redis_server.url] * 2))
        pool = await stack.enter_async_context(newcomer(redis_server))
        assert pool.readiness()
        await others.aclose()
        await until(lambda: not pool.readiness(), 60, "taken")
        lease = await pool.enter(ask(tokens=CAPACITY))
        assert lease.grant is not None
        lease.settle()
        await nothing_left([pool])


async def test_the_same_tiers_with_other_figures_still_count_for_all(redis_server: RedisServer) -> None:
    await do(redis_server, "FLUSHALL")
    async with (
        replicas(simple(tokens=CAPACITY), [redis_server.url]) as (pool,),
        newcomer(redis_server, policy=simple(tokens=2 * CAPACITY)),
    ):
        leases = [await pool.enter(ask(tokens=CAPACITY)) for _ in range(2)]
        assert [lease.grant is not None for lease in leases] == [True, True]
        for lease in leases:
            lease.settle()


@pytest.mark.long
async def test_taking_over_is_on_purpose_and_those_that_had_the_pool_admit_nothing_any_more(
    redis_server: RedisServer, on_loss: StoreLoss
) -> None:
    """What they run, runs on; requests that wait there or come now are refused: the engine is the others' now."""
    await do(redis_server, "FLUSHALL")
    begun(redis_server, "faults")
    async with replicas(simple(tokens=CAPACITY), [redis_server.url], on_loss=on_loss) as (old,):
        running, waiting = await old.enter(ask(tokens=CAPACITY)), await old.enter(ask(tokens=CAPACITY))
        waits = waiting.wait()
        async with newcomer(redis_server, on_loss, takes_over=True) as pool:
            assert pool.readiness() == ()
            await until(lambda: bool(old.readiness()), 60, "refused")
            assert "has the tiers urgent, rest, and the policy of this process has high, low" in old.readiness()[0]
            with pytest.raises(StoreUnavailable):
                await asyncio.wait_for(waits, 60)
            with pytest.raises(StoreUnavailable):
                await old.enter(ask())
            lease = await pool.enter(ask(tokens=5))
            assert lease.grant is None  # what they run, counts
            assert running.settle()
            await asyncio.wait_for(lease.wait(), 60)
            lease.settle()
            await do(redis_server, "FLUSHALL")  # it takes over once, and the others do not take back
            await asyncio.sleep(2.2)
            assert (pool.status.state.value, old.status.state.value) == ("shared", "closed")
