"""Preemption as every pool promises it to the sidecar, whatever is behind it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from fractions import Fraction

import pytest

from sidecar.errors import RequestTooLarge
from sidecar.policy.model import Policy
from sidecar.policy.rules import Shares, pool_rules
from sidecar.pools import Lease, Pool
from sidecar.pools.calls import Call, Reply, WakeUp
from sidecar.pools.ledger import Ledger
from tests.pools.conftest import in_both_orders
from tests.pools.harness import Clock, Harness, LocalHarness, ask, change_rules, policy_of

pytestmark = pytest.mark.anyio

HIGH, LOW = 0, 1


def preempting(*, tokens: int = 100, after_s: float = 1, reserve: Fraction = Fraction(0), most: int = 2) -> Policy:
    """A high tier that preempts after a time, and a low one that is preemptible."""
    tiers = (
        Shares("high", preempt_after_us=round(after_s * 1e6)),
        Shares("low", reserve=reserve, preemptible=True),
    )
    return policy_of(pool_rules(tokens=tokens, requests=None, tiers=tiers, max_preemptions=most))


class Holder:
    """Who holds a lease: it notes that it is to give it back, and does so when the test says."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.reported = 0
        lease.on_preempt = self._on_preempt

    def _on_preempt(self) -> None:
        self.reported += 1


async def enter(pool: Pool, tier: int, tokens: int) -> Holder:
    return Holder(await pool.enter(ask(tier=tier, tokens=tokens)))


async def full(harness: Harness, policy: Policy, *sizes: int) -> tuple[Pool, Clock, list[Holder]]:
    """A pool that low requests of these sizes hold."""
    clock = Clock()
    pool = await harness.pool(policy, clock)
    holders = [await enter(pool, LOW, tokens) for tokens in sizes]
    assert all(holder.lease.grant for holder in holders)
    return pool, clock, holders


async def wait_for_preemption(harness: Harness, pool: Pool, clock: Clock, seconds: float = 1) -> None:
    clock.advance(seconds)
    await harness.poke(pool)
    await harness.quiet(pool)


@in_both_orders
async def test_the_latest_of_the_low_gives_its_room_to_a_high_that_has_waited_long_enough(harness: Harness) -> None:
    pool, clock, (older, newer) = await full(harness, preempting(), 50, 50)
    high = await enter(pool, HIGH, 40)
    await wait_for_preemption(harness, pool, clock, 0.9)
    assert (older.reported, newer.reported) == (0, 0)
    await wait_for_preemption(harness, pool, clock, 0.1)
    assert (older.reported, newer.reported) == (0, 1)
    assert high.lease.grant is None  # the room is not free yet
    clock.advance(0.5)
    again = newer.lease.requeue()
    await harness.quiet(pool)
    assert high.lease.grant is not None
    assert high.lease.grant.queue_wait_us == 1_500_000
    assert newer.lease.grant is None
    assert not again.done()
    assert pool.state()["waiting"] == 1


async def test_all_that_come_back_in_one_tick_are_decided_about_together(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, execute, harness = list[Call](), Ledger.execute, LocalHarness()

    def counted(ledger: Ledger, call: Call, now_us: int) -> tuple[Reply, list[WakeUp]]:
        calls.append(call)
        return execute(ledger, call, now_us)

    pool, clock, holders = await full(harness, preempting(), *[1] * 100)
    high = await enter(pool, HIGH, 100)
    await wait_for_preemption(harness, pool, clock)
    monkeypatch.setattr(Ledger, "execute", counted)
    assert [holder.lease.requeue().done() for holder in holders] == [False] * 100
    await harness.quiet(pool)
    assert high.lease.grant is not None
    assert len(calls) < 10, "and not one for each"
    await harness.close()


@in_both_orders
async def test_a_victim_waits_on_from_its_arrival_and_completes(harness: Harness) -> None:
    pool, clock, (victim,) = await full(harness, preempting(), 100)
    clock.advance(3)
    high = await enter(pool, HIGH, 40)
    await wait_for_preemption(harness, pool, clock)
    again = victim.lease.requeue()
    await harness.quiet(pool)
    behind = await enter(pool, LOW, 100)
    clock.advance(2)
    high.lease.settle()
    grant = await asyncio.wait_for(again, 60)
    assert (grant.queue_wait_us, grant.starvation_us) == (6_000_000, 2_000_000)
    assert grant.served_ahead == {"high": 40}
    assert victim.lease.grant == grant
    assert behind.lease.grant is None
    assert victim.lease.settle()
    await harness.quiet(pool)
    assert behind.lease.grant is not None


async def test_a_kept_lease_is_never_preempted(harness: Harness) -> None:
    pool, clock, (older, newer) = await full(harness, preempting(), 50, 50)
    newer.lease.keep()
    await enter(pool, HIGH, 40)
    await wait_for_preemption(harness, pool, clock)
    assert (older.reported, newer.reported) == (1, 0)


@in_both_orders
async def test_one_that_is_kept_after_it_was_chosen_stays_and_another_gives_its_room(harness: Harness) -> None:
    pool, clock, (older, newer) = await full(harness, preempting(), 50, 50)
    high = await enter(pool, HIGH, 40)
    await wait_for_preemption(harness, pool, clock)
    assert (older.reported, newer.reported) == (0, 1)
    newer.lease.keep()
    await harness.quiet(pool)
    await harness.quiet(pool)
    assert (older.reported, newer.reported) == (1, 1)
    with pytest.raises(RuntimeError, match="after on_preempt"):
        newer.lease.requeue()
    assert newer.lease.grant is not None
    older.lease.requeue()
    await harness.quiet(pool)
    assert high.lease.grant is not None


async def test_a_lease_whose_holder_does_not_listen_is_never_preempted(harness: Harness) -> None:
    pool, clock, (older, deaf) = await full(harness, preempting(), 50, 50)
    deaf.lease.on_preempt = None
    high = await enter(pool, HIGH, 40)
    await wait_for_preemption(harness, pool, clock)
    await harness.quiet(pool)
    assert older.reported == 1
    older.lease.requeue()
    await harness.quiet(pool)
    assert high.lease.grant is not None


async def test_a_victim_that_the_shrunk_pool_can_never_hold_again_is_refused(harness: Harness) -> None:
    policy = preempting()
    pool, clock, (victim,) = await full(harness, policy, 100)
    await enter(pool, HIGH, 40)
    await wait_for_preemption(harness, pool, clock)
    change_rules(pool, replace(policy.rules, tokens=80))
    with pytest.raises(RequestTooLarge, match="100 tokens"):
        await victim.lease.requeue()
    await harness.quiet(pool)
    assert (pool.state()["leases"], pool.state()["waiting"]) == (1, 0)


async def test_only_a_chosen_lease_is_requeued_and_only_once(harness: Harness) -> None:
    pool, clock, (victim,) = await full(harness, preempting(), 100)
    with pytest.raises(RuntimeError, match="after on_preempt"):
        victim.lease.requeue()
    await enter(pool, HIGH, 40)
    await wait_for_preemption(harness, pool, clock)
    victim.lease.requeue()
    with pytest.raises(RuntimeError, match="after on_preempt"):
        victim.lease.requeue()


async def test_time_alone_preempts_on_the_pools_own_timer(harness: Harness) -> None:
    pool = await harness.pool(preempting(after_s=0.05))
    victim = await enter(pool, LOW, 100)
    reported = asyncio.Event()
    victim.lease.on_preempt = reported.set
    high = await enter(pool, HIGH, 40)
    await asyncio.wait_for(reported.wait(), 60)
    victim.lease.requeue()
    grant = await asyncio.wait_for(high.lease.wait(), 60)
    assert grant.queue_wait_us >= 50_000


async def test_one_that_rises_is_preempted_no_more_often_than_another(harness: Harness) -> None:
    clock = Clock()
    tiers = (
        Shares("high", preempt_after_us=1_000_000),
        *(Shares(name, preemptible=True) for name in ("normal", "low")),
    )
    pool = await harness.pool(policy_of(pool_rules(tokens=100, requests=None, tiers=tiers, max_preemptions=1)), clock)
    victim = await enter(pool, 2, 100)
    first = await enter(pool, HIGH, 100)
    await wait_for_preemption(harness, pool, clock)
    assert victim.reported == 1
    again = victim.lease.requeue()
    await harness.quiet(pool)
    assert pool.rise(victim.lease, 1)
    first.lease.settle()
    await asyncio.wait_for(again, 60)
    second = await enter(pool, HIGH, 100)
    await wait_for_preemption(harness, pool, clock)
    assert victim.reported == 1
    victim.lease.settle()
    await harness.quiet(pool)
    assert second.lease.grant is not None
