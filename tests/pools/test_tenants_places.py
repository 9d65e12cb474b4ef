"""The places of a full queue are shared by the tenants as service is: a flood fills what the others leave of it."""

from __future__ import annotations

import pytest

from sidecar.errors import QueueFull
from sidecar.pools import Lease, Pool
from sidecar.pools.queue_places import LEAST_S, MOST_S
from tests.pools.conftest import in_both_orders
from tests.pools.harness import Clock, Harness, ask, simple

pytestmark = pytest.mark.anyio

PLACES = 4


async def enter(pool: Pool, tenant: str, weight: int = 1, *, request: int = 0) -> Lease:
    return await pool.enter(ask(tokens=100, tenant=tenant, weight=weight, request=request))


async def flooded(harness: Harness, clock: Clock | None = None) -> tuple[Pool, Lease, list[Lease]]:
    """A pool that one request fills, and a queue that one tenant fills."""
    pool = await harness.pool(simple(("only",), max_waiting=PLACES), clock or Clock())
    running = await enter(pool, "flood")
    return pool, running, [await enter(pool, "flood", request=number) for number in range(PLACES)]


async def refusal(lease: Lease) -> QueueFull:
    with pytest.raises(QueueFull) as refused:
        await lease.wait()
    return refused.value


@in_both_orders
async def test_a_tenant_below_its_share_takes_the_newest_place_of_the_tenant_above_its_own(harness: Harness) -> None:
    pool, _, waiting = await flooded(harness)
    mine = await enter(pool, "small")
    await harness.quiet(pool)
    assert mine.grant is None
    refused = await refusal(waiting[-1])
    assert refused.retry_after_s is not None
    assert LEAST_S <= refused.retry_after_s <= MOST_S
    assert pool.state()["waiting"] == PLACES
    assert await waiting[-1].leave() is None  # it is over: leaving changes nothing
    assert not waiting[-1].settle()
    await harness.quiet(pool)
    assert pool.state()["waiting"] == PLACES


async def test_a_tenant_that_has_its_share_of_the_places_is_refused(harness: Harness) -> None:
    pool, _, waiting = await flooded(harness)
    mine = [await enter(pool, "small") for _ in range(PLACES // 2)]
    with pytest.raises(QueueFull):
        await enter(pool, "small")
    with pytest.raises(QueueFull):
        await enter(pool, "flood")
    for lease in waiting[PLACES // 2 :]:
        await refusal(lease)
    assert [lease.grant for lease in (*mine, *waiting[: PLACES // 2])] == [None] * PLACES


@in_both_orders
async def test_shares_of_the_places_follow_the_weights(harness: Harness) -> None:
    pool, _, _ = await flooded(harness)
    for _ in range(3):
        await enter(pool, "heavy", 3)
    with pytest.raises(QueueFull):
        await enter(pool, "heavy", 3)
    with pytest.raises(QueueFull):  # a share of a half place is none
        await enter(pool, "third")


async def test_a_tenant_below_its_share_enters_a_place_that_is_promised_to_the_flood(harness: Harness) -> None:
    clock = Clock()
    pool, running, _ = await flooded(harness, clock)
    with pytest.raises(QueueFull) as refused:
        await enter(pool, "flood", request=10)
    assert refused.value.retry_after_s is not None
    clock.advance(refused.value.retry_after_s)
    running.settle()
    await harness.quiet(pool)
    with pytest.raises(QueueFull):  # the free place is promised
        await enter(pool, "flood", request=11)
    assert (await enter(pool, "small")).grant is None
    assert pool.state()["waiting"] == PLACES


async def test_a_place_that_was_taken_is_given_up_once_and_the_rest_are_served(harness: Harness) -> None:
    pool, running, waiting = await flooded(harness)
    mine = await enter(pool, "small")
    await refusal(waiting[-1])
    served = []
    for _ in range(PLACES):
        running.settle()
        await harness.quiet(pool)
        running = next(lease for lease in (mine, *waiting) if lease.grant is not None and lease not in served)
        served.append(running)
    assert mine in served
    assert running.settle()
    await harness.quiet(pool)
    assert (pool.state()["waiting"], pool.state()["leases"]) == (0, 0)


@pytest.mark.parametrize("harness", ["shared"], indirect=True)
async def test_each_replica_has_all_the_places_for_its_own_queue(harness: Harness) -> None:
    """A flood at one takes none of another's."""
    policy, clock = simple(("only",), max_waiting=PLACES), Clock()
    first, second = await harness.pool(policy, clock), await harness.pool(policy, clock)
    running = await enter(first, "flood")
    waiting = [await enter(first, "flood", request=number) for number in range(PLACES)]
    waiting += [await enter(second, "small", request=number) for number in range(PLACES)]
    for pool, tenant in ((first, "flood"), (second, "small")):
        with pytest.raises(QueueFull):
            await enter(pool, tenant)
    assert [lease.grant for lease in waiting] == [None] * len(waiting)
    running.settle()
    await harness.quiet(first)
    await harness.quiet(second)
    assert sum(lease.grant is not None for lease in waiting) == 1
