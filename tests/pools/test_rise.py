"""A waiting request may rise to a better tier: in every pool it waits there as if it had come to that one."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from sidecar.errors import QueueFull
from sidecar.pools import Lease, Pool
from tests.pools.conftest import in_both_orders
from tests.pools.harness import Clock, Harness, ask, simple

pytestmark = pytest.mark.anyio
HIGH, NORMAL, LOW = range(3)
TIERS = ("high", "normal", "low")


def queued(pool: Pool) -> list[int]:
    return [tier["queued"]["requests"] for tier in pool.state()["tiers"]]  # type: ignore[index, attr-defined]


async def served(harness: Harness, pool: Pool, holder: Lease, waiting: dict[str, Lease]) -> list[str]:
    """The names of those that wait, in the order in which they are admitted one after the other."""
    order: list[str] = []
    while waiting:
        assert holder.settle()
        await harness.quiet(pool)
        (name,) = (name for name, lease in waiting.items() if lease.grant is not None)
        order.append(name)
        holder = waiting.pop(name)
    holder.settle()
    await harness.quiet(pool)
    assert (pool.state()["leases"], pool.state()["waiting"]) == (0, 0)
    return order


@in_both_orders
async def test_one_that_rises_goes_by_its_arrival_among_those_of_its_new_tier(harness: Harness) -> None:
    clock = Clock()
    pool = await harness.pool(simple(TIERS), clock)
    holder = await pool.enter(ask(tokens=100))
    waiting = {}
    for name, tier in (("low", LOW), ("first", LOW), ("second", NORMAL), ("third", LOW), ("high", HIGH)):
        clock.advance(1)
        waiting[name] = await pool.enter(ask(tier=tier, tokens=100))
    await harness.quiet(pool)
    assert pool.rise(waiting["third"], NORMAL)
    assert pool.rise(waiting["first"], NORMAL)
    await harness.quiet(pool)
    assert queued(pool) == [1, 3, 1]
    clock.advance(1)
    first = waiting["first"]
    assert await served(harness, pool, holder, waiting) == ["high", "first", "second", "third", "low"]
    assert not pool.rise(first, HIGH)  # it is over
    grant = first.grant
    assert grant is not None
    assert grant.queue_wait_us == 4_000_000
    assert grant.starvation_us == 0
    assert grant.served_ahead == {"high": 100}


async def test_its_tenant_is_charged_once_and_in_the_new_tier(harness: Harness) -> None:
    pool = await harness.pool(simple(TIERS), Clock())
    holder = await pool.enter(ask(tokens=100))
    waiting = {
        f"{tenant}{number}": await pool.enter(ask(tier=tier, tokens=100, tenant=tenant))
        for tenant, tier in (("a", LOW), ("b", NORMAL), ("c", LOW))
        for number in range(3)
    }
    for number in range(3):
        assert pool.rise(waiting[f"a{number}"], NORMAL)
    assert await served(harness, pool, holder, waiting) == ["a0", "b0", "a1", "b1", "a2", "b2", "c0", "c1", "c2"]


async def test_a_full_queue_takes_it_only_where_it_would_take_a_newcomer(harness: Harness) -> None:
    pool = await harness.pool(simple(TIERS, max_waiting=2), Clock())
    holder = await pool.enter(ask(tokens=100))
    own = [await pool.enter(ask(tier=NORMAL, tokens=100)) for _ in range(2)]
    deferred = await pool.enter(ask(tier=LOW, tokens=100))
    assert not pool.rise(deferred, NORMAL)
    assert queued(pool) == [0, 2, 1]
    assert deferred.tier == LOW
    other = await pool.enter(ask(tier=LOW, tokens=100, tenant="u"))
    assert pool.rise(other, NORMAL)  # the first tenant has more than its share
    await harness.quiet(pool)
    with pytest.raises(QueueFull):
        await own[1].wait()
    assert queued(pool) == [0, 2, 1]
    await own[0].leave()
    await harness.quiet(pool)
    assert pool.rise(deferred, NORMAL)
    assert queued(pool) == [0, 2, 0]
    assert await served(harness, pool, holder, {"deferred": deferred, "other": other}) == ["deferred", "other"]


async def test_what_no_room_is_for_in_the_better_tier_stays_where_it_is(harness: Harness) -> None:
    policy, small = simple(TIERS), simple(TIERS, max_request_tokens=50)
    pool = await harness.pool(replace(policy, tiers=(*small.tiers[:LOW], policy.tiers[LOW])), Clock())
    holder, large = await pool.enter(ask(tier=LOW, tokens=100)), await pool.enter(ask(tier=LOW, tokens=60))
    assert not pool.rise(large, NORMAL)
    assert await served(harness, pool, holder, {"large": large}) == ["large"]


@in_both_orders
async def test_whatever_happens_as_it_rises_it_is_admitted_once_or_gone(harness: Harness) -> None:
    clock = Clock()
    pool = await harness.pool(simple(TIERS), clock)
    for order in range(6):
        holder = await pool.enter(ask(tokens=100))
        one, two = [await pool.enter(ask(tier=LOW, tokens=100)) for _ in range(2)]
        if order % 2:
            await harness.quiet(pool)  # the ledger knows them, too
        if order // 2 == 0:  # its grant may be on the way
            holder.settle()
            pool.rise(one, NORMAL)
            pool.rise(two, HIGH)
        elif order // 2 == 1:
            pool.rise(one, HIGH)
            holder.settle()
            pool.rise(two, NORMAL)
        else:
            pool.rise(one, NORMAL)
            pool.rise(one, HIGH)
            left = one.leave()
            holder.settle()
            await left
        if order // 2 < 2:
            first, second = await _in_turn(harness, pool, one, two)
            assert first is not second
            first.settle()
            await harness.quiet(pool)
            second.settle()
        else:
            await harness.quiet(pool)
            assert two.settle()
        await harness.quiet(pool)
        assert (pool.state()["leases"], pool.state()["waiting"]) == (0, 0)
        assert [tier["held"]["tokens"] for tier in pool.state()["tiers"]] == [0, 0, 0]  # type: ignore[index, attr-defined]


async def _in_turn(harness: Harness, pool: Pool, one: Lease, two: Lease) -> tuple[Lease, Lease]:
    await harness.quiet(pool)
    done, _ = await asyncio.wait({one.wait(), two.wait()}, timeout=60, return_when=asyncio.FIRST_COMPLETED)
    assert len(done) == 1  # the pool has room for one
    return (one, two) if one.grant is not None else (two, one)
