"""What every pool does about the users of a tenant: their turns, and the limits of each."""

from __future__ import annotations

import pytest

from sidecar.errors import TenantLimit
from sidecar.policy.tenant import Account, Limits, RateLimits
from sidecar.pools import Ask, Lease, Pool
from tests.pools.conftest import in_both_orders
from tests.pools.harness import Clock, Harness, simple

pytestmark = pytest.mark.anyio
ONCE = RateLimits(requests_per_minute=1)


def asks(user: str, most: int = 0) -> Ask:
    accounts = (Account("t", Limits(requests_per_minute=60)), Account(f"t user {user}", ONCE, most))
    return Ask(0, "t", 1, 10, 1, accounts=accounts if most else (), user=user)


async def is_within(pool: Pool, clock: Clock, user: str, most: int) -> bool:
    clock.advance(0.001)
    try:
        (await pool.enter(asks(user, most))).settle(10)
    except TenantLimit as refused:
        return f"tenant t (user {user}) is over its limit of 1 requests per minute" not in refused.message
    return True


@in_both_orders
async def test_users_take_turns(harness: Harness) -> None:
    pool = await harness.pool(simple(tokens=10), Clock())
    running, served = await pool.enter(asks("f")), list[str]()
    waiting: list[Lease] = [await pool.enter(asks(user)) for user in "ffffgfgh"]
    while waiting:
        running.settle(10)
        await harness.quiet(pool)
        (running,) = (lease for lease in waiting if lease.grant is not None)
        waiting.remove(running)
        served.append(running.ask.user or "")
    assert "".join(served) == "fghfgfff"


async def test_each_user_has_limits_of_its_own_and_the_least_recently_seen_are_forgotten(harness: Harness) -> None:
    clock = Clock()
    pool = await harness.pool(simple(tokens=1_000), clock)
    assert [await is_within(pool, clock, user, 3) for user in ("a", "b", "c", "a", "b")] == [
        True,
        True,
        True,
        False,
        False,
    ]
    assert await is_within(pool, clock, "d", 3)  # c was seen least recently
    assert [await is_within(pool, clock, user, 3) for user in ("a", "b", "d", "c")] == [False, False, False, True]
