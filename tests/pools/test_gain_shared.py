"""Pools that order by gain (rule 9): the order in every kind, over replicas, after a flush and without the store."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sidecar.policy.model import Policy
from sidecar.policy.rules import Shares, pool_rules
from sidecar.pools import Ask
from sidecar.pools.base import Lease
from sidecar.scheduling.tickets import TicketGain
from tests.pools.harness import Clock, Harness, ask, by_gain, policy_of
from tests.pools.load import nothing_left, replicas, store_of
from tests.support.redis_servers import RedisServer, first_binary
from tests.support.waiting import until

pytestmark = pytest.mark.anyio
FAR_US = 10**10


def tiers(reserve: Fraction = Fraction(0), *, tokens: int = 100) -> Policy:
    """Two tiers; the first has a floor."""
    shares = (Shares("high", reserve=reserve, lend=Fraction(1)), Shares("low", lend=Fraction(1)))
    return by_gain(policy_of(pool_rules(tokens=tokens, requests=None, tiers=shares)))


def worth(weight: int, *, tenant: str = "t", share: int = 1, cost_us: int = 100) -> Ask:
    """A request that earns its weight for each of 10 tokens, and no less while it waits. `share` is its tenant's."""
    gain = TicketGain(weight, 10, cost_us, 0, FAR_US)
    return msgspec.structs.replace(ask(1, 100, tenant=tenant, weight=share), gain=gain)


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


async def test_the_most_weight_for_the_engines_time_goes_first_and_what_earns_nothing_last(harness: Harness) -> None:
    pool = await harness.pool(tiers(), Clock())
    running = await pool.enter(ask(tokens=100))
    asks = [
        ask(0, 100),
        worth(1, tenant="a"),
        worth(4, tenant="b", cost_us=800),
        worth(4, tenant="c"),
        worth(1, tenant="d"),
        worth(1, tenant="e", cost_us=50),
    ]
    leases = [await pool.enter(each) for each in asks]
    assert await order_of(harness, pool, leases, running) == [3, 5, 1, 4, 2, 0]


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


async def test_a_tenant_with_twice_the_weight_gets_twice_the_share_whatever_the_other_earns(harness: Harness) -> None:
    pool = await harness.pool(tiers(), Clock())
    running = await pool.enter(ask(tokens=100))
    rich = [await pool.enter(worth(9, tenant="rich")) for _ in range(24)]
    large = [await pool.enter(worth(1, tenant="large", share=2)) for _ in range(24)]
    found = await order_of(harness, pool, [*rich, *large], running)
    assert 18 <= sum(index >= len(rich) for index in found[:30]) <= 22, found


# -- replicas


@pytest.mark.parametrize("harness", ["shared"], indirect=True)
@pytest.mark.parametrize("is_back", [False, True])
async def test_the_best_ticket_of_a_replica_without_its_engine_stands_aside(harness: Harness, is_back: bool) -> None:
    """It is no head of its tier: the others of its tier are ordered by gain without it."""
    clock = Clock()
    one, two = [await harness.pool(tiers(), clock) for _ in range(2)]
    running = await one.enter(ask(tokens=100))
    asks = [(one, 1, "x"), (two, 9, "y"), (two, 8, "y"), (one, 7, "z"), (one, 6, "z")]
    leases = [await pool.enter(worth(weight, tenant=tenant)) for pool, weight, tenant in asks]
    two.pause("its engine is away")
    await harness.quiet(two)
    running.settle()
    await harness.quiet(one)
    assert [lease.grant is not None for lease in leases] == [False, False, False, True, False]
    if is_back:
        two.pause(None)
        await harness.quiet(two)
    rest = [leases[0], *(leases[1:3] if is_back else ()), leases[4]]
    assert await order_of(harness, one, rest, leases[3]) == ([1, 2, 3, 0] if is_back else [1, 0])


# -- a store that loses what it had, or is away


@pytest.fixture
def server(tmp_path: Path) -> RedisServer:
    """One that the test may end."""
    return RedisServer(first_binary(), tmp_path)


async def test_a_part_of_the_pool_is_ordered_by_gain_too(server: RedisServer) -> None:
    """While the store is away each replica has a pool of its own."""
    with server:
        async with replicas(tiers(tokens=200), [server.url], name="gain-alone") as pools:
            (pool,) = pools
            running = [await pool.enter(ask(tokens=100)) for _ in range(2)]
            leases = [await pool.enter(worth(index + 1, tenant=f"t{index}")) for index in range(3)]
            server.kill()
            await until(lambda: store_of(pool)["part"] is not None)
            running[0].settle()
            await asyncio.wait_for(leases[2].wait(), 60)
            assert [lease.grant is not None for lease in leases] == [False, False, True]
            server.restart()
            for lease in (running[1], leases[2]):
                lease.settle()
            for lease in leases[:2]:
                await asyncio.wait_for(lease.wait(), 60)
                lease.settle()
            await nothing_left(pools)
