"""A pool whose process cannot reach the engine: what every pool does with requests meanwhile, and after."""

from __future__ import annotations

import asyncio

import pytest

from sidecar.errors import QueueFull
from sidecar.events import Obstacle
from sidecar.policy.tenant import Limits
from sidecar.pools import Ask
from tests.pools.conftest import in_both_orders
from tests.pools.harness import Clock, Harness, ask, simple
from tests.pools.test_tenant_limits import asks, left

pytestmark = pytest.mark.anyio
GONE = "connection refused"


@in_both_orders
async def test_a_paused_pool_admits_nothing_and_then_everything_in_order(harness: Harness) -> None:
    clock = Clock()
    pool = await harness.pool(simple(), clock)
    pool.pause(GONE)
    leases = [await pool.enter(ask(tokens=40, tier=tier)) for tier in (1, 0, 1, 0)]
    await harness.quiet(pool)
    assert [lease.grant for lease in leases] == [None] * 4
    assert pool.state()["waiting"] == 4
    assert pool.obstacle(ask()) == (Obstacle.ENGINE, GONE)
    clock.advance(3)
    pool.pause(None)
    first, second = await asyncio.wait_for(asyncio.gather(leases[1].wait(), leases[3].wait()), 60)
    assert [(grant.queue_wait_us, grant.starvation_us) for grant in (first, second)] == [(3_000_000, 0)] * 2
    await harness.quiet(pool)
    assert [lease.grant is None for lease in leases] == [True, False, True, False]


@in_both_orders
async def test_a_lease_that_no_engine_took_waits_at_its_place(harness: Harness) -> None:
    clock = Clock()
    pool = await harness.pool(simple(), clock)
    first, second = await pool.enter(ask(tokens=60)), await pool.enter(ask(tokens=60))
    clock.advance(1)
    pool.pause(GONE)
    granted = first.hand_back()
    await harness.quiet(pool)
    assert (first.grant, second.grant) == (None, None)
    assert pool.state()["leases"] == 0
    clock.advance(1)
    pool.pause(None)
    grant = await asyncio.wait_for(granted, 60)
    assert (grant.queue_wait_us, grant.starvation_us) == (2_000_000, 0)
    assert second.grant is None
    assert first.settle()
    await asyncio.wait_for(second.wait(), 60)
    with pytest.raises(RuntimeError, match="while it is held"):
        first.hand_back()


async def test_a_full_queue_refuses_while_the_pool_is_paused(harness: Harness) -> None:
    pool = await harness.pool(simple(max_waiting=2), Clock())
    pool.pause(GONE)
    for _ in range(2):
        assert (await pool.enter(ask())).grant is None
    with pytest.raises(QueueFull):
        await pool.enter(ask())


async def test_what_the_engine_failed_counts_in_no_limit(harness: Harness) -> None:
    limits = Limits(requests_per_minute=60, tokens_per_minute=600)
    pool = await harness.pool(simple(tokens=100_000), Clock())

    def one() -> Ask:
        return asks(100, limits)

    failed, answered = await pool.enter(one()), await pool.enter(one())
    failed.settle(0, is_counted=False)
    answered.settle(30)
    assert await left(harness, pool, limits) == (59, 570)
    pool.pause(GONE)
    waiting = await pool.enter(one())
    await waiting.leave()
    assert await left(harness, pool, limits) == (59, 570)
