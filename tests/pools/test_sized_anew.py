"""Requests that came before it was known how long they are: they enter by their sizes of then."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from sidecar.pools import Lease, Pool
from tests.pools.harness import Clock, Harness, ask, simple
from tests.pools.test_preemption import HIGH, LOW, Holder, preempting, wait_for_preemption

pytestmark = pytest.mark.anyio
CAPACITY = 100


def is_held(lease: Lease) -> bool:
    return lease.grant is not None and not lease.is_over


async def full(pool: Pool) -> Lease:
    blocker = await pool.enter(ask(tokens=CAPACITY))
    assert is_held(blocker)
    return blocker


async def queue(pool: Pool, tokens: int, sizes: Sequence[int], tenant: str = "t") -> list[Lease]:
    """Requests that wait, of one estimate; then their sizes are known."""
    leases = [await pool.enter(ask(tokens=tokens, tenant=tenant)) for _ in sizes]
    for lease, size in zip(leases, sizes, strict=True):
        lease.size_now = lambda size=size: size
    assert not any(map(is_held, leases))
    return leases


@pytest.mark.parametrize(("estimate", "size", "at_once"), [(10, 50, 2), (90, 10, 10), (100, 30, 3)])
async def test_a_queue_drains_at_its_real_size_and_never_overfills(
    harness: Harness, estimate: int, size: int, at_once: int
) -> None:
    pool = await harness.pool(simple(tokens=CAPACITY), Clock())
    blocker = await full(pool)
    leases = await queue(pool, estimate, [size] * 70)
    blocker.settle()
    served: list[Lease] = []
    while len(served) < len(leases):
        await harness.quiet(pool)
        held = [lease for lease in leases if is_held(lease)]
        assert sum(lease.ask.tokens for lease in held) <= CAPACITY
        assert len(held) == min(at_once, len(leases) - len(served))
        assert held == leases[len(served) : len(served) + len(held)], "by their arrival"
        for lease in held:
            assert lease.settle()
        served += held
    await harness.quiet(pool)
    tiers = pool.state()["tiers"]
    assert (pool.state()["leases"], pool.state()["waiting"]) == (0, 0)
    assert [tier["queued"]["tokens"] for tier in tiers] == [0, 0]  # type: ignore[attr-defined]


async def test_an_eighth_more_is_no_reason_to_ask_again_and_counts(harness: Harness) -> None:
    """While lengths are learned, estimates move all the time."""
    pool = await harness.pool(simple(tokens=CAPACITY), Clock())
    blocker = await full(pool)
    leases = await queue(pool, 10, [11] * 10)
    blocker.settle()
    last = await pool.enter(ask(tokens=10))
    await harness.quiet(pool)
    assert all(map(is_held, leases))
    assert [lease.ask.tokens for lease in leases] == [11] * 10
    leases[0].settle()
    await harness.quiet(pool)
    assert not is_held(last)
    leases[1].settle()
    await harness.quiet(pool)
    assert is_held(last)


async def test_who_has_grown_enters_before_who_came_later_and_its_tenant_pays_for_all(harness: Harness) -> None:
    pool = await harness.pool(simple(tokens=CAPACITY), Clock())
    blocker = await full(pool)
    large, small = await queue(pool, 20, [80] * 4, "large"), await queue(pool, 20, [20] * 16, "small")
    blocker.settle()
    order = ""
    for _ in range(20):
        await harness.quiet(pool)
        for lease in [lease for lease in (*large, *small) if is_held(lease)]:
            order += lease.ask.tenant[0]
            assert lease.settle()
    assert sorted(order) == ["l"] * 4 + ["s"] * 16
    at = order.rindex("l")
    assert order[:at].count("l") == 3
    assert order[:at].count("s") * 20 >= 2 * 80, f"{order}: a tenant pays for what its requests held"


async def test_asking_again_spends_no_preemption(harness: Harness) -> None:
    clock = Clock()
    pool = await harness.pool(preempting(most=1), clock)
    blocker = await full(pool)
    victim = Holder(await pool.enter(ask(tier=LOW, tokens=10)))
    victim.lease.size_now = lambda: 100
    blocker.settle()
    await harness.quiet(pool)
    assert is_held(victim.lease)
    assert victim.lease.held is not None
    assert (victim.lease.held.returns, victim.lease.paid_tokens) == (0, 100)
    high = await pool.enter(ask(tier=HIGH, tokens=60))
    await wait_for_preemption(harness, pool, clock)
    assert victim.reported == 1
    victim.lease.requeue()
    await harness.quiet(pool)
    assert is_held(high)


async def test_who_has_outgrown_the_pool_is_refused_and_holds_up_no_one(harness: Harness) -> None:
    pool = await harness.pool(simple(tokens=CAPACITY), Clock())
    blocker = await full(pool)
    large, small = await queue(pool, 10, [CAPACITY + 1, 10])
    waits = large.wait()
    blocker.settle()
    await harness.quiet(pool)
    assert (type(waits.exception()).__name__, is_held(small)) == ("RequestTooLarge", True)
