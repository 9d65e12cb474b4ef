"""A pool that orders by gain and is shared: the order over replicas, and what becomes of it in every fault."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import msgspec
import pytest
from sidecar.pools.redis.protocol import BEAT_S, SILENCE_S
from sidecar.scheduling.gain import GainFigures

from sidecar.policy.model import Policy
from sidecar.policy.rules import Shares, pool_rules
from sidecar.pools import Ask
from sidecar.pools.base import Lease
from sidecar.pools.redis import RedisPool, protocol
from tests.pools.conftest import FIRST, Servers
from tests.pools.harness import Clock, Harness, ask, by_gain, policy_of
from tests.pools.load import nothing_left, recovered, replicas, store_of, until
from tests.pools.test_script import Replicas, client, granted
from tests.support.redis_servers import RedisServer

pytestmark = pytest.mark.anyio
__all__ = ["client"]
SECOND_US = 1_000_000
FAR_US = 1_000 * SECOND_US


def tiers(reserve: Fraction = Fraction(0), *, tokens: int = 100) -> Policy:
    """Two tiers; the first has a floor."""
    shares = (Shares("high", reserve=reserve, lend=Fraction(1)), Shares("low", lend=Fraction(1)))
    return by_gain(policy_of(pool_rules(tokens=tokens, requests=None, tiers=shares)))


def worth(
    weight: int, *, tier: int = 1, tokens: int = 100, tenant: str = "t", ttft_us: int = 1, cost_us: int = 100
) -> Ask:
    """A request that earns its weight for each of 10 tokens. It is urgent at once, unless its deadline is far."""
    slack_us = 10 * FAR_US  # lateness takes nothing from it
    gain = GainFigures(weight, 10, cost_us, ttft_us, 0 if ttft_us == 1 else ttft_us, slack_us)
    return msgspec.structs.replace(ask(tier, tokens, tenant=tenant), gain=gain)


async def order_of(harness: Harness, pool: Any, leases: Sequence[Lease], running: Lease) -> list[int]:
    """The positions of leases in the order in which they are admitted, one after the other."""
    found: list[int] = []
    running.settle()
    while len(found) < len(leases):
        await harness.quiet(pool)
        (admitted,) = [index for index, lease in enumerate(leases) if lease.grant and index not in found]
        found.append(admitted)
        leases[admitted].settle()
    return found


# -- every pool


async def test_the_densest_goes_first_then_the_nearest_deadline_then_the_rest(harness: Harness) -> None:
    pool = await harness.pool(tiers(), Clock())
    running = await pool.enter(ask(tokens=100))
    asks = [
        ask(0, 100),
        worth(1, tenant="a", ttft_us=9 * FAR_US),
        worth(1, tenant="b", ttft_us=8 * FAR_US),
        worth(1, tenant="c"),
        worth(4, tenant="d"),
        worth(2, tenant="e"),
    ]
    leases = [await pool.enter(each) for each in asks]
    assert await order_of(harness, pool, leases, running) == [4, 5, 3, 2, 1, 0]


async def test_a_floor_goes_before_all_gain(harness: Harness) -> None:
    pool = await harness.pool(tiers(Fraction(1, 2)), Clock())
    running = await pool.enter(ask(tokens=100))
    leases = [await pool.enter(one) for one in (worth(9), worth(8), ask(0, 50))]
    running.settle()
    await harness.quiet(pool)
    assert [lease.grant is not None for lease in leases] == [False, False, True]


async def test_another_reserve_keeps_the_order_and_another_floor_holds(harness: Harness) -> None:
    """The first tickets of the tenants are sorted anew, those that returned among them."""
    pool = await harness.pool(tiers(), Clock())
    running = await pool.enter(worth(1, tenant="x"))
    leases = [await pool.enter(each) for each in (worth(1, tenant="a"), worth(2, tenant="a"), worth(3, tenant="b"))]
    granted = running.hand_back()
    await harness.quiet(pool)
    assert leases[2].grant is not None, "a lease that returned has the same worth as before"
    pool.change_policy(tiers(Fraction(1, 2)))
    await harness.quiet(pool)
    first = await pool.enter(ask(0, 50))
    leases[2].settle()
    await harness.quiet(pool)
    assert first.grant is not None
    assert await order_of(harness, pool, [running, *leases[:2]], first) == [2, 0, 1]
    assert granted.done()


async def test_a_tenant_that_is_served_more_than_its_share_goes_in_fair_order_only(harness: Harness) -> None:
    pool = await harness.pool(tiers(), Clock())
    running = await pool.enter(ask(tokens=100))
    greedy = [await pool.enter(worth(9, tenant="greedy")) for _ in range(8)]
    modest = [await pool.enter(worth(1, tenant="modest")) for _ in range(4)]
    found = await order_of(harness, pool, [*greedy, *modest], running)
    assert found.index(8) < 5, found
    assert sorted(found[:6]) != [0, 1, 2, 3, 4, 5]


# -- replicas


def test_the_order_is_that_of_all_replicas(client: Any) -> None:
    pool = Replicas(client, tiers())
    one, two = pool.one("a"), pool.one("b")
    one.enter(0, ask(tokens=100))
    for ticket in range(1, 6):
        (one, two)[ticket % 2].enter(ticket, worth(ticket, tenant=f"t{ticket}"))
    found = []
    holder, held = one, 0
    while len(found) < 5:
        replies = [(holder, holder.call(protocol.END, held)), (one, one.call()), (two, two.call())]
        ((holder, held),) = [(replica, ticket) for replica, reply in replies for ticket in granted(reply)]
        found.append(held)
    assert found == [5, 4, 3, 2, 1]


@pytest.mark.parametrize("is_back", [False, True])
def test_the_best_ticket_of_a_replica_without_its_engine_stands_aside(client: Any, is_back: bool) -> None:
    """It is no head of its tier: the others of its tier are ordered by gain without it."""
    pool = Replicas(client, tiers())
    one, two = pool.one("a"), pool.one("b")
    one.enter(0, ask(tokens=100))
    one.enter(1, worth(1, tenant="x"))
    two.enter(2, worth(9, tenant="y"))
    two.enter(3, worth(8, tenant="y"))
    one.enter(4, worth(7, tenant="z"))
    one.enter(5, worth(6, tenant="z"))
    two.call(protocol.CUT_OFF)
    assert granted(one.call(protocol.END, 0)) == [4]
    if is_back:
        stated = [worth(9, tenant="y"), worth(8, tenant="y")]
        parts = [
            part
            for ticket, each in enumerate(stated, 2)
            for part in (*protocol.gain(ticket, each), *protocol.statement(ticket, each, 0, 0))
        ]
        reply = two.sync(*parts, known=2, installs=False)
        assert reply.waiting == 4
        assert granted(one.call(protocol.END, 4)) == []
        assert granted(two.call()) == [2]
    else:
        assert granted(one.call(protocol.END, 4)) == [5]
        assert granted(one.call(protocol.END, 5)) == [1]


def test_the_best_ticket_of_a_dead_replica_is_ended(client: Any) -> None:
    pool = Replicas(client, tiers())
    one, dead = pool.one("a"), pool.one("dead")
    one.enter(0, ask(tokens=100))
    dead.enter(9, worth(9, tenant="dead"))
    one.enter(1, worth(1, tenant="x"))
    one.enter(2, worth(2, tenant="y"))
    for _ in range(5):
        pool.clock.advance(BEAT_S - 0.05)
        one.call(kind=protocol.BEAT)
    pool.clock.advance(SILENCE_S - 5 * (BEAT_S - 0.05) + 0.01)
    assert granted(one.call(protocol.END, 0)) == [2]
    assert granted(one.call(protocol.END, 2)) == [1]
    one.call(protocol.END, 1)
    kept = {key.decode().rsplit(":", 1)[-1] for key in client.keys(f"{one.root}:*")}
    assert not any("dead" in key for key in kept)


def test_nothing_is_left_in_the_store(client: Any) -> None:
    """Neither of the lanes' orders by gain nor of the notes of leases."""
    pool = Replicas(client, tiers(Fraction(1, 4)))
    one = pool.one("a")
    before = set(client.keys(f"{one.root}*"))
    for ticket in range(40):
        one.enter(ticket, worth(ticket % 5 + 1, tier=ticket % 2, tokens=20, tenant=f"t{ticket % 7}"))
        pool.clock.advance(0.01)
    lanes = [key for key in client.keys(f"{one.root}:*") if b":U:" in key or b":D:" in key]
    assert lanes
    assert all(client.pttl(key) > 0 for key in lanes), "a lane vanishes with its pool"
    for ticket in range(40):
        one.call(protocol.END, ticket)
    assert set(client.keys(f"{one.root}*")) <= before


def test_a_lane_that_the_store_lost_is_stated_anew(client: Any) -> None:
    pool = Replicas(client, tiers())
    one = pool.one("a")
    one.enter(0, ask(tokens=100))
    one.enter(1, worth(1, tenant="x", ttft_us=10 * SECOND_US))
    for key in client.keys(f"{one.root}:*"):
        if b":D:" in key:
            client.delete(key)
    pool.clock.advance(20)
    answer = one.answer(protocol.BEAT, one.name, one.fence, 0)
    assert answer[0] == protocol.UNKNOWN, "the replica states what it has"


# -- pools with real servers


@pytest.fixture
def server(servers: Servers) -> RedisServer:
    found = servers[FIRST]
    found.command("FLUSHALL")
    return found


async def test_the_order_survives_a_flush(server: RedisServer) -> None:
    async with replicas(tiers(), [server.url, server.url], name="gain") as pools:
        running = await pools[0].enter(ask(tokens=100))
        leases = [await pools[index % 2].enter(worth(index + 1, tenant=f"t{index}")) for index in range(4)]
        await asyncio.get_running_loop().run_in_executor(None, server.command, "FLUSHALL")
        await recovered(pools)
        running.settle()
        for lease in reversed(leases):
            await asyncio.wait_for(lease.wait(), 60)
            assert sum(one.grant is not None for one in leases) == len(leases) - leases.index(lease)
            lease.settle()
        await nothing_left(pools)


async def test_a_part_of_the_pool_is_ordered_by_gain_too(server: RedisServer, servers: Servers) -> None:
    """While the store is away each replica has a pool of its own."""
    policy = replace(tiers(tokens=200), generation="gain")
    async with replicas(policy, [server.url], name="gain-alone") as pools:
        (pool,) = pools
        running = [await pool.enter(ask(tokens=100)) for _ in range(2)]
        leases = [await pool.enter(worth(index + 1, tenant=f"t{index}")) for index in range(3)]
        server.stop()
        try:
            await until(lambda: is_lost(pool))
            running[0].settle()
            await asyncio.wait_for(leases[2].wait(), 60)
            assert [lease.grant is not None for lease in leases] == [False, False, True]
        finally:
            server.start()
        for lease in (running[1], leases[2]):
            lease.settle()
        for lease in leases[:2]:
            await asyncio.wait_for(lease.wait(), 20)
            lease.settle()
        await nothing_left(pools)


def is_lost(pool: RedisPool) -> bool:
    return store_of(pool)["part"] is not None
