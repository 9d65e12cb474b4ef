"""What every pool does about tenants' own limits. The buckets themselves: `tests/scheduling/test_rate_limit.py`."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sidecar.errors import QueueFull, RemainingLimit, RemainingLimits, RequestTooLarge, TenantLimit
from sidecar.policy.tenant import Account, Limits
from sidecar.pools import Ask, Pool
from tests.pools.conftest import in_both_orders
from tests.pools.harness import Clock, Harness, change_rules, simple

pytestmark = pytest.mark.anyio
EACH = Limits(requests_per_minute=60, tokens_per_minute=600, concurrent_requests=3)


def asks(tokens: int = 10, limits: Limits | None = EACH, *, tier: int = 0, tenant: str = "t", **more: Any) -> Ask:
    accounts = () if limits is None else (Account(tenant, limits),)
    return Ask(tier, tenant, 1, tokens, 1, accounts=accounts, **more)


async def left(harness: Harness, pool: Pool, limits: Limits = EACH) -> tuple[int | None, int | None]:
    """Requests and tokens that are left to tenant t, as a request larger than all of it hears."""
    await harness.quiet(pool)
    with pytest.raises(TenantLimit) as raised:
        await pool.enter(asks(60_001, limits))
    allowance = raised.value.allowance
    return (
        None if allowance.requests is None else allowance.requests.left,
        None if allowance.tokens is None else allowance.tokens.left,
    )


async def test_a_lease_says_what_is_left_and_one_without_limits_nothing(harness: Harness) -> None:
    pool = await harness.pool(simple(tokens=100_000), Clock())
    lease = await pool.enter(asks(100))
    assert lease.allowance == RemainingLimits(RemainingLimit(60, 59, 1_000_000), RemainingLimit(600, 500, 10_000_000))
    assert lease.tier == 0
    assert (await pool.enter(asks(limits=None))).allowance is None


async def test_what_is_over_a_limit_is_refused_with_the_moment_it_conforms(harness: Harness) -> None:
    clock = Clock()
    pool = await harness.pool(simple(tokens=100_000), clock)
    await pool.enter(asks(600))
    with pytest.raises(TenantLimit, match="tenant t is over its limit of 600 tokens per minute: 0 are left") as raised:
        await pool.enter(asks(25))
    assert (raised.value.retry_after_s, raised.value.never_fits) == (2.5, False)
    clock.advance(2.499999)
    with pytest.raises(TenantLimit):
        await pool.enter(asks(25))
    clock.advance(0.000001)
    assert (await pool.enter(asks(25))).grant is not None


async def test_what_the_bucket_never_holds_is_refused_for_it(harness: Harness) -> None:
    pool = await harness.pool(simple(tokens=100_000), Clock())
    with pytest.raises(TenantLimit, match="lets 600 through at once") as raised:
        await pool.enter(asks(601))
    assert (raised.value.retry_after_s, raised.value.never_fits) == (None, True)


async def test_limited_requests_that_come_together_are_admitted_in_the_order_of_their_tiers(harness: Harness) -> None:
    pool = await harness.pool(simple(tokens=100), Clock())
    # In a store the call of the first is under way when the others come, and theirs has all of them.
    came = [asks(tenant="first"), asks(tier=1, tenant="low"), asks(tenant="high"), asks(tier=1, tenant="other")]
    leases = await asyncio.wait_for(asyncio.gather(*map(pool.enter, came)), 60)
    assert [lease.grant is not None for lease in leases] == [True] * 4
    assert all(lease.settle() for lease in leases)
    await harness.quiet(pool)
    assert [tier["held"]["requests"] for tier in pool.state()["tiers"]] == [0, 0]  # type: ignore[attr-defined]


async def test_requests_are_limited_and_others_tenants_are_not_concerned(harness: Harness) -> None:
    pool = await harness.pool(simple(tokens=100_000), Clock())
    limits = Limits(requests_per_minute=2)
    for _ in range(2):
        await pool.enter(asks(limits=limits))
    with pytest.raises(TenantLimit, match="2 requests per minute") as raised:
        await pool.enter(asks(limits=limits))
    assert raised.value.retry_after_s == 30
    assert raised.value.allowance == RemainingLimits(RemainingLimit(2, 0, 60_000_000), None)
    await pool.enter(asks(limits=limits, tenant="other"))


async def test_those_that_wait_count_as_those_that_are_held_until_they_end(harness: Harness) -> None:
    pool = await harness.pool(simple(tokens=20), Clock())
    held, waiting, leaving = [await pool.enter(asks(tokens)) for tokens in (20, 10, 10)]
    with pytest.raises(TenantLimit, match="3 requests waiting or running"):
        await pool.enter(asks(1))
    await leaving.leave()
    await harness.quiet(pool)
    await pool.enter(asks(1))
    held.settle()
    await harness.quiet(pool)
    assert waiting.grant is not None
    await pool.enter(asks(1))
    with pytest.raises(TenantLimit):
        await pool.enter(asks(1))


@pytest.mark.parametrize(("used", "tokens_left"), [(None, 300), (300, 300), (100, 500), (0, 600), (500, 100)])
async def test_a_lease_is_charged_what_it_used(harness: Harness, used: int | None, tokens_left: int) -> None:
    pool = await harness.pool(simple(tokens=100_000), Clock())
    lease = await pool.enter(asks(300))
    assert lease.settle(used)
    assert not lease.settle(0)
    assert await left(harness, pool) == (59, tokens_left)


async def test_what_left_the_queue_gets_its_tokens_back_and_stays_counted(harness: Harness) -> None:
    pool = await harness.pool(simple(tokens=100_000), Clock())
    await pool.enter(asks(100_000, None))
    waiting = await pool.enter(asks(300))
    await waiting.leave()
    assert await left(harness, pool) == (59, 600)


@pytest.mark.parametrize("places", [0, 1])
async def test_what_its_queue_has_no_place_for_was_never_charged(harness: Harness, places: int) -> None:
    pool = await harness.pool(simple(tokens=100_000, max_waiting=places), Clock())
    await pool.enter(asks(100_000, None))
    if places:
        await pool.enter(asks(100_000, None))
    with pytest.raises(QueueFull):
        await pool.enter(asks(300))
    with pytest.raises(TenantLimit):  # its limits come first
        await pool.enter(asks(601))
    assert await left(harness, pool) == (60, 600)


async def test_what_never_fits_the_pool_is_refused_for_it_before_its_limits(harness: Harness) -> None:
    pool = await harness.pool(simple(tokens=100), Clock())
    with pytest.raises(RequestTooLarge):
        await pool.enter(asks(601))


async def test_a_request_refused_by_a_smaller_pool_gets_its_tokens_back(harness: Harness) -> None:
    pool = await harness.pool(simple(tokens=100_000), Clock())
    await pool.enter(asks(100_000, None))
    waiting = await pool.enter(asks(300))
    reported = waiting.wait()
    change_rules(pool, simple(tokens=200).rules)
    with pytest.raises(RequestTooLarge):
        await reported
    change_rules(pool, simple(tokens=100_000).rules)
    assert await left(harness, pool) == (59, 600)


# -- a lower tier instead


async def test_what_is_over_goes_in_at_the_lower_tier_uncharged(harness: Harness) -> None:
    pool = await harness.pool(simple(tokens=100_000), Clock())
    first = await pool.enter(asks(600, downgrade=1))
    second = await pool.enter(asks(600, downgrade=1))
    assert (first.tier, second.tier) == (0, 1)
    assert (len(first.ask.accounts), second.ask.accounts) == (1, ())
    assert second.allowance == RemainingLimits(RemainingLimit(60, 59, 1_000_000), RemainingLimit(600, 0, 60_000_000))
    await harness.quiet(pool)
    tiers: Any = pool.state()["tiers"]
    assert [tier["held"]["tokens"] for tier in tiers] == [600, 600]
    second.settle(5000)
    assert await left(harness, pool) == (59, 0)


@in_both_orders
async def test_what_was_downgraded_waits_as_its_lower_tier_does(harness: Harness) -> None:
    clock = Clock()
    pool = await harness.pool(simple(tokens=600), clock)
    held = await pool.enter(asks(600, downgrade=1))
    lower = await pool.enter(asks(600, downgrade=1))
    clock.advance(1)
    later = await pool.enter(asks(600, None))
    held.settle()
    await harness.quiet(pool)
    assert (lower.grant, later.grant is None) == (None, False), "what came later is of the better tier"
    later.settle()
    grant = await asyncio.wait_for(lower.wait(), 60)
    assert grant.level == 1


async def test_what_is_at_a_lower_tier_anyway_stays_there(harness: Harness) -> None:
    pool = await harness.pool(simple(("high", "normal", "low"), tokens=100_000), Clock())
    await pool.enter(asks(600, tier=2, downgrade=1))
    over = await pool.enter(asks(600, tier=2, downgrade=1))
    assert (over.tier, over.ask.accounts) == (2, ())
