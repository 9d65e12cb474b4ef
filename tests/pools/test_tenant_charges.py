"""Leases that use more than their tenants were charged for: who comes next, what the store has, and what it costs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from msgspec.structs import replace
from sidecar.pools.redis.batch import MOST_OPERATIONS, BatchQueue
from sidecar.pools.redis.protocol import CHARGE_TENANT, END

from sidecar.policy.model import Limits
from sidecar.policy.rules import Shares, pool_rules
from sidecar.pools import Lease
from sidecar.pools.redis import RedisPool, protocol, session
from tests.pools.fleet_scripted import Triplets
from tests.pools.harness import Clock, ask, policy_of
from tests.pools.load import until
from tests.pools.scripted import Scripted, entering
from tests.pools.test_moving_leases import KINDS, held, opened, quiet, stored
from tests.support.redis_servers import RedisServer, first_binary

anyio = pytest.mark.anyio
ODD = 'a tenant, "quoted" \\ and\twith\nlines|'


# -- who comes next


async def order_of(pool: Any, waiting: dict[str, Lease], running: Lease) -> list[str]:
    """The names in the order in which they run, one at a time."""
    order = []
    while waiting:
        running.settle()
        await quiet(pool)
        (name,) = [name for name, lease in waiting.items() if lease.grant is not None]
        order.append(name)
        running = waiting.pop(name)
    running.settle()
    await quiet(pool)
    return order


@anyio
@pytest.mark.parametrize(("tokens", "order"), [(0, ["b1", "a1", "b2"]), (250, ["b1", "b2", "a1"])])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_charge_sends_the_next_admission_to_the_other_tenant(
    kind: str, tokens: int, order: list[str], redis_server: RedisServer
) -> None:
    async with opened(kind, redis_server, f"next-{tokens}-{kind}".replace(" ", "-")) as pool:
        running = await pool.enter(ask(tokens=100, tenant="a"))
        await running.wait()
        waiting = {"b1": await pool.enter(ask(tokens=100, tenant="b"))}
        running.charge_tenant(tokens)
        for name in ("a1", "b2"):
            waiting[name] = await pool.enter(ask(tokens=100, tenant=name[0]))
        assert await order_of(pool, waiting, running) == order


@anyio
@pytest.mark.parametrize(("tokens", "order"), [(0, ["a1", "b1", "a2", "b2"]), (250, ["a1", "b1", "b2", "a2"])])
@pytest.mark.parametrize("kind", KINDS)
async def test_the_first_that_waits_keeps_its_place_and_the_next_of_its_tenant_pays(
    kind: str, tokens: int, order: list[str], redis_server: RedisServer
) -> None:
    async with opened(kind, redis_server, f"first-{tokens}-{kind}".replace(" ", "-")) as pool:
        running = await pool.enter(ask(tokens=100, tenant="a"))
        await running.wait()
        waiting = {name: await pool.enter(ask(tokens=100, tenant=name[0])) for name in ("a1", "b1", "a2", "b2")}
        running.charge_tenant(tokens)
        assert await order_of(pool, waiting, running) == order


@anyio
@pytest.mark.parametrize("kind", KINDS)
async def test_only_a_lease_that_runs_charges_and_only_where_others_wait(kind: str, redis_server: RedisServer) -> None:
    async with opened(kind, redis_server, f"only-{kind}".replace(" ", "-")) as pool:
        running = await pool.enter(ask(tokens=100, tenant="a"))
        await running.wait()
        running.charge_tenant(10_000)  # no one waits: the tags start afresh
        await quiet(pool)
        waiting = {name: await pool.enter(ask(tokens=100, tenant=name[0])) for name in ("b1", "a1", "b2")}
        waiting["a1"].charge_tenant(10_000)  # it does not run
        running.charge_tenant(0)
        running.charge_tenant(-5)
        over = running
        order = await order_of(pool, waiting, running)
        over.charge_tenant(10_000)
        assert order == ["b1", "a1", "b2"]


# -- what the store is told


def lease(tenant: str, tier: int = 0, weight: int = 1) -> Any:
    """What a queue of operations looks at."""
    return SimpleNamespace(tier=tier, ask=ask(tier, tenant=tenant, weight=weight))


@anyio
async def test_charges_add_up_for_each_tenant_and_level_and_are_no_reason_for_a_call() -> None:
    queue = BatchQueue()
    for tokens in (3, 4):
        queue.charge(lease("a", 0, 2), tokens)
        queue.charge(lease("a", 1, 2), 10 * tokens)
        queue.charge(lease(ODD), 100 * tokens)
    assert not queue._reason.is_set()
    said = [CHARGE_TENANT, 0, "a", 2, 7, CHARGE_TENANT, 1, "a", 2, 70, CHARGE_TENANT, 0, ODD, 1, 700]
    assert queue.take().arguments == said
    assert queue.take().arguments == []


@anyio
async def test_many_charges_travel_in_many_calls_and_none_twice() -> None:
    queue = BatchQueue()
    for number in range(2 * MOST_OPERATIONS + 5):
        queue.charge(lease(f"t{number}"), 1 + number)
    said = [queue.take().arguments for _ in range(4)]
    assert [len(arguments) // 5 for arguments in said] == [MOST_OPERATIONS, MOST_OPERATIONS, 5, 0]
    assert sum(sum(arguments[4::5]) for arguments in said) == sum(range(1, 2 * MOST_OPERATIONS + 6))  # type: ignore[arg-type]


@anyio
async def test_a_statement_keeps_charges_and_a_lost_store_forgets_them() -> None:
    queue = BatchQueue()
    queue.charge(lease("a"), 5)
    assert [batch.arguments for batch in queue.take_all()] == [[]]
    queue.charge(lease("a"), 6)
    assert queue.take().arguments == [CHARGE_TENANT, 0, "a", 1, 11]
    queue.charge(lease("a"), 5)
    queue.forget_charges()
    assert queue.take().arguments == []


@anyio
@pytest.mark.parametrize("kind", ["redis", "redis fleet"])
async def test_a_charge_makes_no_call_and_is_part_of_the_next(kind: str, redis_server: RedisServer) -> None:
    async with opened(kind, redis_server, f"lazy-{kind}".replace(" ", "-")) as pool:
        assert isinstance(pool, RedisPool)
        running = await pool.enter(ask(tokens=100, tenant="a"))
        await running.wait()
        await pool.enter(ask(tokens=100, tenant="b"))
        await quiet(pool)
        calls = pool.round_trips
        for _ in range(1000):
            running.charge_tenant(3)
        await asyncio.sleep(0.1)
        assert pool.round_trips == calls
        await quiet(pool)
        assert tags_in(redis_server, pool)["a"] == 3000.0


@anyio
@pytest.mark.parametrize("kind", ["redis", "redis fleet"])
async def test_charges_and_sizes_that_one_call_does_not_take_are_said_at_once(
    kind: str, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else asks for a call: the heartbeat is far away, and its own call takes a part only."""
    monkeypatch.setattr(session, "BEAT_EVERY_S", 600.0)
    monkeypatch.setattr(session, "SILENT_SUBSCRIPTION_S", 600.0)  # else it listens anew, and misses a grant
    tenants = 2 * MOST_OPERATIONS + 5
    name = f"rest-{kind}".replace(" ", "-")
    async with opened(kind, redis_server, name) as pool:
        assert isinstance(pool, RedisPool)
        running = [await pool.enter(ask(tokens=1, tenant=f"t{number}")) for number in range(tenants)]
        admitted = [lease for lease in running if lease.grant is not None]
        assert len(admitted) == 100
        await quiet(pool)
        for number in range(tenants):
            admitted[0].ask = ask(tokens=1, tenant=f"t{number}")
            admitted[0].charge_tenant(1000)
        calls = pool.round_trips
        pool._batches.wake()
        await until(lambda: pool.round_trips >= calls + 3, what="three calls")
        await until(lambda: len(tags_in(redis_server, pool)) >= tenants, what="all charges")
        tags = tags_in(redis_server, pool)
        assert {tags[f"t{number}"] for number in range(tenants)} == {1000.0}
        await asyncio.sleep(0.1)
        assert pool.round_trips == calls + 3, "no more calls than it takes"


def tags_in(server: RedisServer, pool: RedisPool) -> dict[str, float]:
    with redis.Redis(host=server.host, port=server.port) as client:
        keys = [key for key in client.keys("*:f:0") if pool._sizes.policy.pool.encode() in key]
        return {tenant.decode(): float(text.split()[0]) for key in keys for tenant, text in client.hgetall(key).items()}


@anyio
async def test_a_statement_in_the_middle_of_sizes_and_charges_loses_neither(redis_server: RedisServer) -> None:
    async with opened("redis", redis_server, "restated") as pool:
        assert isinstance(pool, RedisPool)
        assert pool._session is not None
        running = await pool.enter(ask(tokens=100, tenant="a"))
        await pool.enter(ask(tokens=100, tenant="b"))
        await quiet(pool)
        running.resize(90)
        running.charge_tenant(7)
        pool._session.restate()
        running.resize(95)
        running.charge_tenant(8)
        await quiet(pool)
        await quiet(pool)
        assert held(pool) == 95
        assert 95 in stored(redis_server)
        assert tags_in(redis_server, pool)["a"] == 15.0


@anyio
async def test_charges_of_a_lost_store_are_forgotten_without_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sidecar.store")
    with RedisServer(first_binary(), tmp_path) as server:
        async with opened("redis", server, "lost") as pool:
            assert isinstance(pool, RedisPool)
            running = await pool.enter(ask(tokens=100, tenant="a"))
            waiting = [await pool.enter(ask(tokens=60, tenant=tenant)) for tenant in "ab"]
            running.charge_tenant(500)
            server.kill()
            await until(lambda: pool._partition is not None, 60, "the part")
            assert pool._batches._charges == {}
            running.charge_tenant(500)  # in the part's own queue
            assert pool._batches._charges == {}
            server.restart()
            await until(lambda: pool._outage is None, 20, "the store")
            await quiet(pool)
            assert tags_in(server, pool).get("a", 0) == 0
            running.settle()
            await asyncio.wait_for(waiting[0].wait(), 60)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


# -- what the script keeps


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[Any]:
    with redis.Redis(host=redis_server.host, port=redis_server.port) as client:
        client.flushall()
        yield client


def replica_of(client: Any) -> Scripted:
    shares = (Shares("t0"), Shares("t1"))
    replica = Scripted(client, Clock(), policy_of(pool_rules(tokens=40, requests=None, tiers=shares)))
    replica.sync()
    return replica


def charge(tenant: str, tokens: int, level: int = 0, weight: int = 1) -> tuple[Any, ...]:
    return (CHARGE_TENANT, level, tenant, weight, tokens)


def test_a_level_where_no_one_waits_keeps_nothing(client: Any) -> None:
    replica = replica_of(client)
    replica.call(*charge("a", 5), *charge("a", 5, level=1))
    replica.call(*entering(1, ask(tokens=40)), *charge("a", 5), *charge("a", 5, level=1))
    assert replica.keys()["f"] == []
    replica.call(*entering(2, ask(tokens=40)), *charge("a", 5, level=1))
    assert replica.keys()["f"] == [] or replica.finish_tags(1, 0) == {}


def test_tags_are_exact_and_odd_names_are_kept_apart_and_nothing_is_left(client: Any) -> None:
    """The head is not in the store yet when the charge comes: it is the same call."""
    replica = replica_of(client)
    said = (*entering(1, ask(tokens=40, tenant="x")), *entering(2, ask(tokens=40, tenant=ODD)))
    replica.call(*said, *charge(ODD, 1, weight=3), *charge("a b", 2**53), *charge("a", 2**53, weight=7))
    assert replica.finish_tags(0, 0) == {ODD: 1 / 3, "a b": 2.0**53, "a": 2**53 / 7}
    replica.call(*charge(ODD, 1, weight=3), *charge("a", 1, weight=7), *charge("", 4))
    assert replica.finish_tags(0, 0) == {ODD: 1 / 3 + 1 / 3, "a b": 2.0**53, "a": 2**53 / 7 + 1 / 7, "": 4.0}
    assert replica.call(*entering(3, ask(tokens=40, tenant="a b"))).waiting == 2
    assert [ticket for ticket, _ in replica.call(END, 1).grants] == [2]
    assert [ticket for ticket, _ in replica.call(END, 2).grants] == [3]
    assert replica.keys()["f"] == []
    replica.call(END, 3)
    assert replica.keys()["f"] == []


def test_a_charge_before_and_after_a_cancellation_leaves_nothing(client: Any) -> None:
    replica = replica_of(client)
    replica.call(*entering(1, ask(tokens=40)), *entering(2, ask(tokens=40)), *charge("a", 5), END, 2)
    assert replica.keys()["f"] == []
    replica.call(*entering(3, ask(tokens=40)))
    replica.call(*charge("a", 5), END, 3, *charge("a", 5))
    assert replica.keys()["f"] == []


def test_a_call_that_first_ends_a_dead_replica_with_limits_charges_its_own_tenants(client: Any) -> None:
    """What the dead one had is ended, and taken out of its tenant's limits, by the code that also charges there."""
    clock = Clock()
    policy = policy_of(pool_rules(tokens=100, requests=None, tiers=(Shares("t0"),)))
    dead, alive = (Scripted(client, clock, policy, name) for name in ("dead", "alive"))
    dead.sync()
    alive.sync(known=1, installs=False)
    limits = Limits(tokens_per_minute=6000, requests_per_minute=60, concurrent_requests=5)
    dead.call(*protocol.enter(1, replace(ask(tokens=100, tenant="a"), limits=limits), None))
    alive.call(*entering(2, ask(tokens=100, tenant="b")), *entering(3, ask(tokens=100, tenant="c")))
    reply, charges = alive.call(kind=protocol.BEAT), 0
    while reply.waiting == 2:
        clock.advance(protocol.BEAT_S)
        assert charges < 20
        charges += 1
        reply = alive.call(*charge("c", 500), *charge("a", 70, weight=7), kind=protocol.BEAT)
    assert (reply.leases, reply.waiting) == (1, 1), "the dead one's lease is gone"
    assert clock.us > protocol.SILENCE_S * 1e6
    assert [ticket for ticket, _ in reply.grants] == [2]
    tags = alive.finish_tags(0, 0)
    assert tags["c"] == charges * 500
    assert tags["a"] == charges * 10, "its fair order, and nothing of its limits"
    assert client.keys("*:m:*") == []


# -- a claimant's refund


@pytest.mark.parametrize(("growth", "left"), [(0, 0.0), (5, 25.0)])
def test_a_claim_that_comes_to_nothing_is_refunded_unless_its_tenant_was_charged_since(
    client: Any, growth: int, left: float
) -> None:
    """Twins compare every finish tag of the script with those of one process; the oracle decides the same."""
    from oracle import Policy as OraclePolicy

    fleet = Triplets(OraclePolicy(capacity=(None, None), tiers=(Shares("one"),))).open(client)
    for name in ("a", "b"):
        fleet.set_engine(name, tokens=100, prefill=1000)
        fleet.dispatch()
    for name in ("a", "b"):
        fleet.submit(tier=0, tokens=90, tenant=f"fills {name}".replace(" ", "-"))
        fleet.dispatch()
    claimant = fleet.submit(tier=0, tokens=20, tenant="t")  # fits the pool, and no engine
    fleet.dispatch()
    assert [request.id for request in fleet.oracle.claimants()] == [claimant]
    waiting = fleet.submit(tier=0, tokens=190, tenant="u")
    fleet.dispatch()
    assert fleet.replica.finish_tags(0, 0)["t"] == 20.0
    if growth:
        fleet.charge(0, "t", 1, growth)
        fleet.dispatch()
    fleet.cancel(claimant)
    fleet.dispatch()
    assert fleet.replica.finish_tags(0, 0).get("t", 0.0) == left
    fleet.cancel(waiting)
    fleet.dispatch()
    assert fleet.replica.keys()["f"] == []
