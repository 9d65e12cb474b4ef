"""Tenants' limits over several replicas: one allowance for all of them, and what becomes of it when something fails."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import redis

from sidecar.errors import StoreUnavailable, TenantLimit
from sidecar.policy.model import Limits
from sidecar.pools import Ask
from sidecar.pools.redis import protocol
from sidecar.scheduling.rate_limit import GUESSED_US, ExceededLimit, Limit
from tests.pools.harness import Clock, simple
from tests.pools.load import nothing_left, recovered, replicas, until
from tests.pools.scripted import Scripted
from tests.support.fault_proxy import FaultProxy
from tests.support.redis_servers import RedisServer, first_binary

pytestmark = pytest.mark.anyio
TWO = Limits(concurrent_requests=2)
TOKENS = Limits(tokens_per_minute=600)


def asks(limits: Limits, tokens: int = 10) -> Ask:
    return Ask(0, "t", 1, tokens, 1, limits=limits)


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
    return server


@pytest.fixture
def scripted(store: RedisServer) -> Iterator[tuple[Scripted, Scripted, Clock]]:
    """Two replicas on a clock of the test's."""
    with redis.Redis(host=store.host, port=store.port) as client:
        clock, policy = Clock(), simple(tokens=100_000)
        a, b = Scripted(client, clock, policy, "replica-a"), Scripted(client, clock, policy, "replica-b")
        a.sync(known=1)
        b.sync(known=1)
        yield a, b, clock


def over(replica: Scripted, ticket: int, ask: Ask) -> ExceededLimit | None:
    (verdict,) = replica.call(*protocol.enter(ticket, ask, None)).verdicts
    return verdict.over


# -- replicas


async def test_all_replicas_share_one_allowance(store: RedisServer) -> None:
    async with replicas(simple(tokens=100_000), [store.url] * 2) as pools:
        lease = await pools[0].enter(asks(TOKENS, 600))
        with pytest.raises(TenantLimit, match="600 tokens per minute: 0 are left"):
            await pools[1].enter(asks(TOKENS, 300))
        assert lease.settle(10)
        await until(lambda: pools[0].state()["leases"] == 0, 60)
        again = await pools[1].enter(asks(TOKENS, 300))
        assert again.settle(0)
        await nothing_left(pools)


def test_what_a_dead_replica_had_running_is_free_again(scripted: tuple[Scripted, Scripted, Clock]) -> None:
    dead, other, clock = scripted
    assert [over(dead, ticket, asks(TWO)) for ticket in (1, 2)] == [None, None]
    assert over(other, 1, asks(TWO)) == ExceededLimit(Limit.CONCURRENT, GUESSED_US)
    for _ in range(6):
        clock.advance(2)
        other.call(kind=protocol.BEAT)
    assert over(other, 2, asks(TWO)) is None
    assert other.client.keys("*:m:replica-a") == []


def test_what_a_dead_replica_had_running_is_charged_its_estimate_and_what_waited_nothing(
    scripted: tuple[Scripted, Scripted, Clock],
) -> None:
    dead, other, clock = scripted
    limits = Limits(tokens_per_minute=60_000)
    over(dead, 1, asks(limits, 50_000))
    dead.call(*protocol.enter(2, Ask(0, "filler", 1, 50_000, 1), None))
    over(dead, 3, asks(limits, 10_000))
    assert dead.call().waiting == 1
    for _ in range(6):
        clock.advance(2)
        other.call(kind=protocol.BEAT)
    (verdict,) = other.call(*protocol.enter(1, asks(limits, 60_001), None)).verdicts
    assert verdict.tokens == (60_000 - (50_000 - 12_000), 38_000_000)


def test_a_replica_that_says_good_bye_frees_what_its_tenants_had(scripted: tuple[Scripted, Scripted, Clock]) -> None:
    leaving, other, _ = scripted
    over(leaving, 1, asks(TWO))
    over(leaving, 2, asks(TWO))
    leaving.call(kind=protocol.BYE)
    assert over(other, 1, asks(TWO)) is None


def test_tenants_back_at_rest_are_forgotten(scripted: tuple[Scripted, Scripted, Clock]) -> None:
    replica, _, clock = scripted
    for ticket in range(100):
        replica.call(*protocol.enter(ticket, Ask(0, f"t{ticket}", 1, 10, 1, limits=TOKENS), None))
        replica.call(*protocol.end(ticket, asks(TOKENS), 10))
    (accounts,) = replica.client.keys("*:a")
    assert replica.client.hlen(accounts) == 100
    for _ in range(200):
        clock.advance(1)
        replica.call(kind=protocol.BEAT)
    assert replica.client.hlen(accounts) < 3


def test_how_long_requests_take_is_known_after_they_have_all_ended_for_some_minutes(
    scripted: tuple[Scripted, Scripted, Clock],
) -> None:
    replica, _, clock = scripted
    one = asks(Limits(concurrent_requests=1))
    replica.call(*protocol.enter(1, one, None))
    clock.advance(40)
    replica.call(*protocol.end(1, one, 10))
    (accounts,) = replica.client.keys("*:a")
    for _ in range(500):
        clock.advance(1)
        replica.call(kind=protocol.BEAT)
    replica.call(*protocol.enter(2, one, None))
    (refused,) = replica.call(*protocol.enter(3, one, None)).verdicts
    assert refused.over == ExceededLimit(Limit.CONCURRENT, 40_000_000)
    replica.call(*protocol.end(2, one, 10))
    for _ in range(700):
        clock.advance(1)
        replica.call(kind=protocol.BEAT)
    assert replica.client.hlen(accounts) == 0


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


def test_a_request_without_an_answer_is_charged_once(scripted: tuple[Scripted, Scripted, Clock]) -> None:
    replica, other, _ = scripted
    over(replica, 1, asks(TOKENS, 400))  # the answer was lost
    replica.sync(protocol.UNTOLD, 1, known=2, installs=False)
    assert over(replica, 1, asks(TOKENS, 400)) is None
    (verdict,) = other.call(*protocol.enter(1, asks(TOKENS, 601), None)).verdicts
    assert verdict.tokens == (200, 40_000_000)


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
