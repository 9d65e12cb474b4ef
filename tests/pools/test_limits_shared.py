"""Tenants' limits over several replicas: one allowance for all of them, and what becomes of it when something fails."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from sidecar.errors import StoreUnavailable, TenantLimit
from sidecar.policy.tenant import Account, Limits
from sidecar.pools import Ask
from tests.pools.harness import simple
from tests.pools.load import nothing_left, recovered, replicas, until
from tests.support.fault_proxy import FaultProxy
from tests.support.redis_servers import RedisServer, first_binary
from tests.support.shared_pools import begun

pytestmark = pytest.mark.anyio
TWO = Limits(concurrent_requests=2)
TOKENS = Limits(tokens_per_minute=600)


def asks(limits: Limits, tokens: int = 10) -> Ask:
    return Ask(0, "t", 1, tokens, 1, accounts=(Account("t", limits),))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server of these tests' own: no one else should find it killed."""
    with RedisServer(first_binary(), tmp_path_factory.mktemp("limits")) as started:
        yield started


@pytest.fixture
def store(server: RedisServer) -> RedisServer:
    if not server.is_running:
        server.start()
    server.command("FLUSHALL")
    return begun(server, "faults")


# -- replicas


async def test_all_replicas_share_one_allowance(store: RedisServer) -> None:
    async with replicas(simple(tokens=100_000), [store.url] * 2) as pools:
        lease = await pools[0].enter(asks(TOKENS, 600))
        with pytest.raises(TenantLimit, match="600 tokens per minute: 0 are left"):
            await pools[1].enter(asks(TOKENS, 300))
        assert lease.settle(10)
        await nothing_left(pools)
        again = await pools[1].enter(asks(TOKENS, 300))
        assert again.settle(0)
        await nothing_left(pools)


# -- a store that loses what it had, or answers that get lost


async def test_after_an_empty_store_buckets_are_full_and_what_runs_still_counts(store: RedisServer) -> None:
    both = Limits(tokens_per_minute=600, concurrent_requests=2)
    async with replicas(simple(tokens=100_000), [store.url]) as (pool,):
        running = [await pool.enter(asks(both, 300)) for _ in range(2)]
        store.command("FLUSHALL")
        with pytest.raises(TenantLimit, match="2 requests waiting or running"):
            await pool.enter(asks(both))
        assert running[0].settle(300)
        await until(lambda: pool.state()["leases"] == 1, 60)
        again = await pool.enter(asks(both, 600))
        assert again.grant is not None
        for lease in (running[1], again):
            lease.settle()
        await nothing_left([pool])


@pytest.mark.hasty
async def test_nothing_is_charged_twice_through_a_network_that_swallows_answers(store: RedisServer) -> None:
    limits = Limits(tokens_per_minute=60_000, concurrent_requests=50)
    async with FaultProxy(store.host, store.port) as proxy, replicas(simple(tokens=100_000), [proxy.url()]) as (pool,):
        proxy.cut_reply_after(3)
        leases = await asyncio.gather(*(pool.enter(asks(limits, 1000)) for _ in range(10)))
        await recovered([pool])
        last = await pool.enter(asks(limits, 1000))
        assert last.allowance is not None
        assert last.allowance.tokens is not None
        assert 49_000 <= last.allowance.tokens.left <= 60_000
        for lease in (*leases, last):
            lease.settle(0)
        await nothing_left([pool])


# -- without the store


@pytest.mark.long
async def test_without_the_store_every_replica_has_its_part_of_the_limits(store: RedisServer) -> None:
    limits = Limits(tokens_per_minute=600, concurrent_requests=4)
    async with replicas(simple(tokens=100_000), [store.url] * 2) as pools:
        running = await pools[0].enter(asks(limits, 100))
        store.kill()
        await until(lambda: all(pool.status.state.value == "divided" for pool in pools), 60, "divided")
        beside = await pools[0].enter(asks(limits, 200))
        with pytest.raises(TenantLimit, match="2 requests waiting or running"):
            await pools[0].enter(asks(limits, 1))
        with pytest.raises(StoreUnavailable, match="part of the limits of tenant t"):
            await pools[1].enter(asks(limits, 301))
        assert beside.settle(50)
        third = await pools[0].enter(asks(limits, 200))
        store.restart()
        await recovered(pools)
        leases = [await pools[1].enter(asks(limits, 10)) for _ in range(2)]
        with pytest.raises(TenantLimit, match="4 requests waiting or running"):
            await pools[1].enter(asks(limits, 10))
        for lease in (running, third, *leases):
            assert lease.settle()
        await nothing_left(pools)
