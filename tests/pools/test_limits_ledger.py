"""Tenants' limits in pools over one ledger: they are asked with the bid, in one round trip, also when that fails."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from sidecar.errors import QueueFull, StoreUnavailable, TenantLimit
from sidecar.policy.choices import StoreLoss
from sidecar.policy.tenant import Account, Limits
from sidecar.pools import Ask, Pool
from sidecar.pools.calls import ALONE_US, HEARTBEAT_US
from sidecar.pools.ledger import Ledger
from tests.pools.harness import simple
from tests.pools.scripted_link import Replicas

pytestmark = pytest.mark.anyio
TOKENS = Limits(tokens_per_minute=600)
TWO = Limits(concurrent_requests=2)
LOST_S = (HEARTBEAT_US + ALONE_US) / 1e6 + 1


def asks(limits: Limits | None, tokens: int = 10, **more: Any) -> Ask:
    accounts = () if limits is None else (Account("t", limits),)
    return Ask(0, "t", 1, tokens, 1, accounts=accounts, **more)


async def joined(count: int, **more: Any) -> Replicas:
    on_loss = more.pop("on_store_loss", StoreLoss.DIVIDE)
    return await Replicas(replace(simple(tokens=100_000, **more), on_store_loss=on_loss), count).joined()


async def left_of(pool: Pool, limits: Limits = TOKENS) -> int:
    """The tokens that are left."""
    left = await pool.allowance("t", limits)
    assert left is not None
    assert left.tokens is not None
    return left.tokens.left


async def test_a_limited_request_is_decided_and_admitted_by_one_call() -> None:
    all_of_them = await joined(3)
    pool, link = all_of_them.pools[0], all_of_them.links[0]
    calls = len(link.calls)
    lease = await pool.enter(asks(TOKENS, 400))
    assert lease.grant is not None
    assert (len(link.calls) - calls, len(link.calls[-1].metered), len(link.calls[-1].bids)) == (1, 1, 1)
    with pytest.raises(TenantLimit, match="200 are left"):
        await all_of_them.pools[1].enter(asks(TOKENS, 300))
    lower = await all_of_them.pools[1].enter(asks(TOKENS, 300, downgrade=1))
    assert (lower.tier, lower.ask.accounts) == (1, ())
    lease.settle(100)
    all_of_them.clock.advance(0.02)
    await all_of_them.quiet()
    assert await left_of(all_of_them.pools[2]) == 500
    assert all_of_them.pools[1].state()["waiting"] == 0


async def test_nothing_is_left_of_a_client_that_leaves_before_the_verdict() -> None:
    all_of_them = await joined(1)
    (pool,) = all_of_them.pools
    tasks = [asyncio.ensure_future(pool.enter(asks(TWO, 100_000))) for _ in range(3)]
    await asyncio.sleep(0)  # the first is asked, the others wait for its answer
    for task in tasks:
        task.cancel()
    assert [type(it) for it in await asyncio.gather(*tasks, return_exceptions=True)] == [asyncio.CancelledError] * 3
    all_of_them.clock.advance(0.02)
    await all_of_them.quiet()
    held = [await pool.enter(asks(TWO)) for _ in range(2)]
    assert all(lease.grant is not None for lease in held)
    assert (pool.state()["leases"], pool.state()["waiting"]) == (2, 0)


async def test_a_lost_answer_charges_once_and_without_the_store_each_has_its_part() -> None:
    all_of_them = await joined(2)
    pool, link = all_of_them.pools[0], all_of_them.links[0]
    entering = asyncio.ensure_future(pool.enter(asks(TOKENS, 300)))
    await asyncio.sleep(0)
    link.loses_answers = True
    await asyncio.sleep(0)
    link.loses_answers = False
    await all_of_them.quiet()
    lease = await asyncio.wait_for(entering, 60)
    assert await left_of(pool) == 300
    all_of_them.cut()
    await all_of_them.pass_s(LOST_S)
    assert await pool.allowance("t", TOKENS) is None
    with pytest.raises(StoreUnavailable, match="part of the limits of tenant t"):
        await pool.enter(asks(TOKENS, 301))
    part = await pool.enter(asks(TOKENS, 300))
    with pytest.raises(TenantLimit, match="300 tokens per minute: 0 are left"):
        await pool.enter(asks(TOKENS, 300))
    assert part.settle(0)
    assert lease.settle(0)
    assert (await pool.enter(asks(TOKENS, 300))).grant is not None
    all_of_them.cut(is_cut=False)
    await all_of_them.pass_s(6)
    assert await left_of(pool) == 600


async def test_after_an_empty_store_buckets_are_full_and_what_runs_still_counts() -> None:
    all_of_them = await joined(1)
    (pool,) = all_of_them.pools
    both = Limits(tokens_per_minute=600, concurrent_requests=2)
    running = [await pool.enter(asks(both, 300)) for _ in range(2)]
    all_of_them.ledger = Ledger()
    with pytest.raises(TenantLimit, match="2 requests waiting or running"):
        await asyncio.wait_for(pool.enter(asks(both)), 60)
    assert running[0].settle(300)
    await all_of_them.pass_s(3)
    assert (await pool.enter(asks(both, 600))).grant is not None


# -- while the ledger gives no verdict


async def test_beside_another_layout_a_limited_request_waits_and_hears_its_verdict_later() -> None:
    """As any other: its queue timeout runs, and it is ready for the moment when the last of the old has ended."""
    all_of_them = Replicas(simple(tokens=100_000), 2)
    old, new = all_of_them.pools
    new._member.layout += 1
    await all_of_them.joined()
    assert new.status.state.value == "waiting"
    first = await new.enter(asks(TOKENS, 400))
    second, lower = await new.enter(asks(TOKENS, 300)), await new.enter(asks(TOKENS, 300, downgrade=1))
    gone = await new.enter(asks(TOKENS, 200))
    assert (first.grant, second.grant, new.state()["waiting"]) == (None, None, 4)
    assert await new.allowance("t", TOKENS) is None
    await gone.leave()
    await old.close()
    await all_of_them.pass_s(3)
    assert first.grant is not None
    assert first.allowance is not None
    with pytest.raises(TenantLimit, match="200 are left"):
        await second.wait()
    assert (lower.tier, lower.grant is not None) == (1, True)
    assert lower.ask.accounts == ()
    for lease in (first, lower):
        assert lease.settle(0)
    await all_of_them.pass_s(1)
    assert (new.state()["waiting"], new.state()["leases"], await left_of(new)) == (0, 0, 600)


@pytest.mark.parametrize("was_reached", [True, False])
async def test_a_limited_request_in_a_lost_store_that_closes_the_pool_is_refused_within_three_seconds(
    *, was_reached: bool
) -> None:
    all_of_them = Replicas(replace(simple(), on_store_loss=StoreLoss.CLOSED), 1)
    if was_reached:
        await all_of_them.joined()
    all_of_them.cut()
    await all_of_them.quiet()
    entering = [asyncio.ensure_future(all_of_them.pools[0].enter(asks(limits))) for limits in (TOKENS, None)]
    question = asyncio.ensure_future(all_of_them.pools[0].allowance("t", TOKENS))
    await all_of_them.pass_s(3)
    for task in entering:
        with pytest.raises(StoreUnavailable):
            await asyncio.wait_for(task, 60)
    assert await asyncio.wait_for(question, 60) is None
    all_of_them.cut(is_cut=False)
    await all_of_them.pass_s(6)
    assert (all_of_them.pools[0].state()["waiting"], await left_of(all_of_them.pools[0])) == (0, 600)


async def test_a_limited_request_in_a_store_that_is_lost_is_decided_by_the_part_within_three_seconds() -> None:
    all_of_them = await joined(2)
    all_of_them.cut()
    entering = [asyncio.ensure_future(all_of_them.pools[0].enter(asks(TOKENS, tokens))) for tokens in (200, 200, 400)]
    await all_of_them.pass_s(3)
    first, second, third = await asyncio.wait_for(asyncio.gather(*entering, return_exceptions=True), 60)
    assert not isinstance(first, BaseException)
    assert (first.grant is not None, type(second), type(third)) == (True, TenantLimit, StoreUnavailable)


async def test_a_request_of_a_tier_that_never_queues_hears_at_once_in_a_part_also_when_the_others_are_dead() -> None:
    all_of_them = await joined(2, max_waiting=0)
    all_of_them.cut()
    await all_of_them.pass_s(15)
    for limits in (None, TOKENS):
        running = await asyncio.wait_for(all_of_them.pools[0].enter(asks(None, 50_000)), 60)
        with pytest.raises(QueueFull):
            await asyncio.wait_for(all_of_them.pools[0].enter(asks(limits)), 60)
        running.settle()


async def test_a_request_over_its_limits_enters_a_lower_tier_that_never_queues_where_that_has_room() -> None:
    all_of_them = await joined(1, max_waiting=0)
    (pool,) = all_of_them.pools
    await pool.enter(asks(TOKENS, 600))
    lower = await pool.enter(asks(TOKENS, 300, downgrade=1))
    assert (lower.tier, lower.grant is not None) == (1, True)
    await pool.enter(asks(None, 99_000))
    with pytest.raises(QueueFull):
        await pool.enter(asks(TOKENS, 300, downgrade=1))
