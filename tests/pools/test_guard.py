"""A tier that is held to its SLO (rule 10): what its requests see moves what less important work may fill."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from fractions import Fraction

import pytest

from sidecar.events import Obstacle
from sidecar.policy.model import Policy
from sidecar.policy.tier import ServiceObjectives
from sidecar.pools import Lease, Pool
from tests.pools.conftest import in_both_orders
from tests.pools.harness import Clock, Harness, ask, simple

pytestmark = pytest.mark.anyio
HELD = ServiceObjectives(ttft_s=0.5, tpot_s=0.04, hold=Fraction(97, 100))


def guarded() -> Policy:
    """100 tokens; the first of two tiers is held to its SLO."""
    policy = simple()
    first, *others = policy.tiers
    return replace(policy, tiers=(replace(first, slo=HELD), *others))


async def after(harness: Harness, pool: Pool, clock: Clock, seconds: float) -> None:
    """As after so long, with the calls that were due meanwhile."""
    for _ in range(round(seconds)):
        clock.advance(1)
        await harness.poke(pool)
        await harness.quiet(pool)


async def batch(pool: Pool, *tokens: int) -> list[Lease]:
    return [await pool.enter(ask(tokens=each, tier=1)) for each in tokens]


def miss(pool: Pool) -> None:
    """A request of each of twelve tenants misses the SLO."""
    for tenant in "abcdefghijkl":
        pool.note_slo(0, tenant, is_missed=True)


def share(pool: Pool) -> float:
    return pool.guards()[0].share


@in_both_orders
async def test_less_important_work_waits_beyond_a_tenth_and_is_told_why(harness: Harness) -> None:
    pool = await harness.pool(guarded(), Clock())
    first, second = await batch(pool, 8, 5)
    await harness.quiet(pool)
    assert (first.grant is None, second.grant is None) == (False, True)
    obstacle, words = pool.obstacle(second.ask)
    assert obstacle is Obstacle.GUARDED
    assert "is held to its SLO: beyond their reserves, less important requests may fill the pool to 10%, and" in words
    above = await pool.enter(ask(tokens=80, tier=0))
    await harness.quiet(pool)
    assert above.grant is not None
    first.settle()
    above.settle()
    await asyncio.wait_for(second.wait(), 60)


@in_both_orders
async def test_while_the_slo_is_met_more_gets_in(harness: Harness) -> None:
    clock = Clock()
    pool = await harness.pool(guarded(), clock)
    first, second = await batch(pool, 8, 5)
    for _ in range(60):
        pool.note_slo(0, "anyone", is_missed=False)
        await after(harness, pool, clock, 2)
        if second.grant is not None:
            break
    assert second.grant is not None
    assert first.grant is not None
    assert share(pool) >= 0.13
    assert pool.guards()[0].missed == 0


@in_both_orders
async def test_misses_take_room_and_no_lease(harness: Harness) -> None:
    clock = Clock()
    pool = await harness.pool(guarded(), clock)
    first, other = await batch(pool, 5, 4)
    before = share(pool)
    assert pool.guards()[0].usable == 1, "nothing has failed yet"
    miss(pool)
    await after(harness, pool, clock, 5)
    assert 0 < share(pool) < before
    assert pool.guards()[0].usable == before, "where it failed last"
    assert (first.grant is None, other.grant is None) == (False, False)
    (second,) = await batch(pool, 1)
    await harness.quiet(pool)
    assert second.grant is None
    assert pool.guards()[0].missed == 12


@in_both_orders
async def test_misses_move_nothing_while_less_important_work_holds_one_request(harness: Harness) -> None:
    clock = Clock()
    pool = await harness.pool(guarded(), clock)
    (first,) = await batch(pool, 50)  # one enters beside nothing, whatever its size
    before = share(pool)
    miss(pool)
    await after(harness, pool, clock, 5)
    assert first.grant is not None
    assert share(pool) == before


@in_both_orders
async def test_misses_move_nothing_while_less_important_work_holds_nothing(harness: Harness) -> None:
    clock = Clock()
    pool = await harness.pool(guarded(), clock)
    before = share(pool)
    for _ in range(10):
        assert not pool.guards()[0].is_in_vain  # these may be of answers that ran beside less important work
        miss(pool)
        await after(harness, pool, clock, 3)
        if pool.guards()[0].is_in_vain:
            break
    assert share(pool) == before
    assert pool.guards()[0].is_in_vain
    await after(harness, pool, clock, 62)  # nothing more was seen
    assert not pool.guards()[0].is_in_vain


@in_both_orders
async def test_one_miss_of_ten_without_less_important_work_is_chance(harness: Harness) -> None:
    clock = Clock()
    pool = await harness.pool(guarded(), clock)
    for tenant in "abcdefghijkl":
        pool.note_slo(0, tenant, is_missed=tenant == "a")
    await after(harness, pool, clock, 3)
    assert not pool.guards()[0].is_in_vain


@in_both_orders
async def test_one_tenant_whose_requests_must_miss_shuts_nobody_out(harness: Harness) -> None:
    clock = Clock()
    pool = await harness.pool(guarded(), clock)
    first, _ = await batch(pool, 5, 4)
    before = share(pool)
    for _ in range(5):
        for n in range(40):
            pool.note_slo(0, "rude", is_missed=n % 20 == 0)  # all of it would be 5% of misses, and 3% are allowed
            pool.note_slo(0, f"tenant {n % 10}", is_missed=False)
        await after(harness, pool, clock, 2)
    assert share(pool) >= before
    for n in range(40):
        pool.note_slo(0, "rude", is_missed=True)
        pool.note_slo(0, f"tenant {n % 10}", is_missed=n % 2 == 0)  # others are not served well
    await after(harness, pool, clock, 5)
    assert share(pool) < before
    assert first.grant is not None


@in_both_orders
async def test_a_policy_without_hold_guards_nothing(harness: Harness) -> None:
    clock = Clock()
    pool = await harness.pool(simple(), clock)
    pool.note_slo(0, "anyone", is_missed=True)
    await after(harness, pool, clock, 3)
    assert pool.guards() == []
    (lease,) = await batch(pool, 90)
    await harness.quiet(pool)
    assert lease.grant is not None
    pool.change_policy(guarded())  # a reload that begins to hold it takes no lease
    await harness.quiet(pool)
    assert lease.grant is not None
    assert share(pool) == 0.1
    pool.change_policy(simple())
    await harness.quiet(pool)
    assert pool.guards() == []
