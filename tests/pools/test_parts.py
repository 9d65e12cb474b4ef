"""Replicas without their store: what the part of each is, and what becomes of requests meanwhile."""

from __future__ import annotations

import asyncio
from cProfile import Profile
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sidecar.errors import AdmissionError, QueueFull, StoreUnavailable
from sidecar.events import StoreState
from sidecar.policy.choices import StoreLoss
from sidecar.policy.model import Policy
from sidecar.policy.rules import UNLIMITED
from sidecar.pools import Pool
from sidecar.pools.base import Lease
from sidecar.pools.calls import DEAD_US, HEARTBEAT_US
from sidecar.pools.engines import EngineOffer
from tests.pools.harness import ask, simple
from tests.pools.scripted_link import Replicas
from tests.support.examples import examples

pytestmark = pytest.mark.anyio
LOST_S = 5
"""After so long every replica is alone: a heartbeat, and the time until it is sure."""
DEAD_S = (DEAD_US + HEARTBEAT_US) / 1e6 + 1


async def enter(pool: Pool, tier: int = 0, tokens: int = 10, requests: int = 1) -> Lease:
    return await asyncio.wait_for(pool.enter(ask(tier, tokens, requests=requests)), 60)


async def alone(policy: Policy, count: int = 2) -> tuple[Replicas, Pool]:
    """The first of some replicas of an idle pool, none of which reaches the store."""
    all_of_them = await Replicas(policy, count).joined()
    all_of_them.cut()
    await all_of_them.pass_s(LOST_S)
    assert [pool.status.state for pool in all_of_them.pools] == [StoreState.DIVIDED] * count
    return all_of_them, all_of_them.pools[0]


def grants(*leases: Lease) -> list[bool]:
    return [lease.grant is not None for lease in leases]


def part(pool: Pool) -> object:
    return pool.state()["store"]["part"]  # type: ignore[index]


# -- no engine ever runs more than it has


@given(
    sizes=st.lists(st.tuples(*[st.one_of(st.integers(1, 50), st.just(UNLIMITED))] * 2), min_size=1, max_size=3),
    asks=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1), st.integers(1, 20), st.integers(0, 9)), max_size=30),
    count=st.integers(1, 4),
)
@example(sizes=[(50, UNLIMITED)], asks=[(0, 0, 20, 1)] * 9 + [(1, 0, 5, 1), (2, 0, 5, 1)] * 5, count=3)
@settings(max_examples=examples(15), deadline=None)
async def test_the_parts_of_all_replicas_never_exceed_an_engine(
    sizes: list[tuple[int, int]], asks: list[tuple[int, int, int, int]], count: int
) -> None:
    """Half of the requests come before the loss. What was over the part of one keeps others out until it ends."""
    all_of_them = Replicas(simple(tokens=None, requests=9), count, weight_percent=200)
    offers = [EngineOffer(f"e{number}#1", *size) for number, size in enumerate(sizes)]
    for pool in all_of_them.pools:
        pool.set_engines(offers)
    await all_of_them.joined()
    running: list[tuple[Pool, Lease]] = []
    for number, (which, tier, tokens, ends) in enumerate(asks):
        if number == len(asks) // 2:
            await all_of_them.pass_s(2)  # all have heard what all hold
            all_of_them.cut()
            await all_of_them.pass_s(LOST_S)
        try:
            running.append((pool := all_of_them.pools[which % count], await enter(pool, tier, tokens)))
        except AdmissionError:
            continue
        if ends % 3 == 0 and running[ends % len(running)][1].settle():
            await all_of_them.quiet()
        for offer in offers:
            held = [
                one.ask.tokens for _, one in running if one.grant and not one.is_over and one.grant.engine == offer.id
            ]
            assert sum(held) <= offer.tokens
            assert len(held) <= offer.requests


@pytest.mark.parametrize("is_dead", [False, True])
async def test_who_holds_more_than_its_part_admits_no_one_before_it_is_below(*, is_dead: bool) -> None:
    """When the others must be dead each has its whole share: what one ran above it may then be above the engine."""
    all_of_them = await Replicas(simple(tokens=100)).joined()
    one, two = all_of_them.pools
    running = [await enter(one, tokens=40) for _ in range(2)]
    await all_of_them.pass_s(2)
    all_of_them.cut()
    await all_of_them.pass_s(DEAD_S if is_dead else LOST_S)
    waiting = await enter(one, tokens=20)
    others = [await enter(two, tokens=10) for _ in range(6)] if is_dead else [await enter(two, tokens=10)]
    assert grants(waiting, *others) == ([False, *[True] * 5, False] if is_dead else [False, True])
    assert running[0].settle()
    await all_of_them.quiet()
    assert grants(waiting) == [False]
    assert running[1].settle()
    await all_of_them.quiet()
    assert grants(waiting) == [True]


async def test_a_part_is_what_it_held_and_its_share_of_what_was_free_but_at_most_its_share_of_all() -> None:
    all_of_them = await Replicas(simple(tokens=100, requests=20)).joined()
    one, two = all_of_them.pools
    await enter(one, tokens=30, requests=2)
    await enter(two, tokens=10, requests=8)
    await all_of_them.pass_s(2)
    all_of_them.cut()
    await all_of_them.pass_s(LOST_S)
    assert part(one) == {"tokens": 50, "requests": 7}
    assert part(two) == {"tokens": 40, "requests": 10}
    await all_of_them.pass_s(DEAD_S - LOST_S)
    assert part(one) == part(two) == {"tokens": 50, "requests": 10}


async def test_who_is_sole_user_of_its_engines_keeps_them_whole() -> None:
    all_of_them = await Replicas(simple(tokens=100), is_sole_user=True).joined()
    all_of_them.cut()
    await all_of_them.pass_s(LOST_S)
    assert part(all_of_them.pools[0]) == {"tokens": 100, "requests": None}


# -- requests meanwhile


async def test_a_request_gets_in_waits_or_is_refused_by_the_part() -> None:
    _, pool = await alone(simple(tokens=100))
    first, second = await enter(pool, tokens=30), await enter(pool, tokens=30)
    assert grants(first, second) == [True, False]
    with pytest.raises(StoreUnavailable, match=r"51 tokens, 1 sequences.*does not fit into this replica's part") as no:
        await enter(pool, tokens=51)
    assert (no.value.status, no.value.code) == (503, "store_unavailable")
    assert no.value.retry_after_s is not None
    assert HEARTBEAT_US / 1e6 <= no.value.retry_after_s <= 2 * HEARTBEAT_US / 1e6
    assert first.resize(20)
    await asyncio.wait_for(second.wait(), 60)


async def test_sequences_are_divided_like_tokens() -> None:
    _, pool = await alone(simple(tokens=None, requests=8))
    assert part(pool) == {"tokens": None, "requests": 4}
    with pytest.raises(StoreUnavailable, match="5 sequences"):
        await enter(pool, requests=5)
    assert grants(await enter(pool, tokens=10**9, requests=4)) == [True]


async def test_the_order_in_a_part_is_that_of_the_pool_and_a_wait_keeps_its_age() -> None:
    all_of_them = await Replicas(simple(tokens=100, promote_after_s=20)).joined()
    pool = all_of_them.pools[0]
    running = await enter(pool, tokens=90)
    old, waits = await enter(pool, 1, 45), all_of_them.clock.us
    await all_of_them.pass_s(15)
    low, high = await enter(pool, 1, 40), await enter(pool, 0, 40)
    all_of_them.cut()
    await all_of_them.pass_s(LOST_S + 1)
    assert grants(old, low, high) == [False] * 3
    assert running.settle()
    await all_of_them.quiet()
    assert grants(old, low, high) == [True, False, False]  # it is as old as the tier above
    assert old.grant is not None
    assert old.grant.queue_wait_us == all_of_them.clock.us - waits
    assert old.settle()
    await all_of_them.quiet()
    assert grants(low, high) == [False, True]


async def test_the_queue_of_a_part_has_the_places_of_the_pool() -> None:
    _, pool = await alone(simple(tokens=100, max_waiting=2))
    running = await enter(pool, tokens=50)
    queue = [await enter(pool, tokens=20) for _ in range(2)]
    with pytest.raises(QueueFull, match="2 requests waiting"):
        await enter(pool, tokens=20)
    await queue.pop().leave()
    queue.append(await enter(pool, tokens=20))
    assert running.settle()
    await asyncio.gather(*(asyncio.wait_for(lease.wait(), 60) for lease in queue))


async def test_who_waited_and_can_never_fit_is_refused_when_others_must_be_dead_and_no_one_else() -> None:
    all_of_them = await Replicas(simple(tokens=100)).joined()
    pool = all_of_them.pools[0]
    running, large, fits = await enter(pool, tokens=50), await enter(pool, tokens=60), await enter(pool, tokens=40)
    all_of_them.cut()
    await all_of_them.pass_s(LOST_S)
    assert (large.is_over, fits.is_over) == (False, False)
    await all_of_them.pass_s(DEAD_S - LOST_S)
    with pytest.raises(StoreUnavailable, match=r"60 tokens.*does not fit into this replica's part"):
        await large.wait()
    assert not large.settle()
    assert running.settle()
    await asyncio.wait_for(fits.wait(), 60)


async def test_those_that_wait_are_looked_at_again_where_the_part_has_become_smaller() -> None:
    all_of_them = await Replicas(simple(tokens=100)).joined()
    pool = all_of_them.pools[0]
    running, large, fits = await enter(pool, tokens=60), await enter(pool, tokens=50), await enter(pool, tokens=40)
    all_of_them.cut()
    await all_of_them.pass_s(DEAD_S)
    assert (large.is_over, fits.is_over) == (False, False)
    pool.change_policy(simple(tokens=90))
    await all_of_them.pass_s(1)
    with pytest.raises(StoreUnavailable, match=r"50 tokens.*does not fit into this replica's part"):
        await large.wait()
    assert not fits.is_over
    assert running.settle()
    await asyncio.wait_for(fits.wait(), 60)


async def test_without_the_store_an_event_costs_the_same_however_many_wait() -> None:
    few, many = await calls_of_an_event(waiting=20), await calls_of_an_event(waiting=400)
    assert many < 1.5 * few


async def calls_of_an_event(waiting: int) -> int:
    """Calls of functions, in Python and beyond it, while one request ends and another enters a divided pool."""
    all_of_them, pool = await alone(simple(tokens=100))
    running = await enter(pool, tokens=50)
    leases = [await enter(pool, tokens=50) for _ in range(waiting)]
    await all_of_them.pass_s(DEAD_S)
    assert (running.grant is not None, any(lease.is_over for lease in leases)) == (True, False)
    profile = Profile()
    profile.enable()
    assert running.settle()
    await enter(pool, tokens=50)
    profile.disable()
    assert grants(leases[0]) == [True]
    return sum(entry.callcount for entry in profile.getstats())


async def test_closed_refuses_new_requests_at_once_and_those_that_waited_when_others_must_be_dead() -> None:
    all_of_them = await Replicas(replace(simple(tokens=100), on_store_loss=StoreLoss.CLOSED)).joined()
    pool = all_of_them.pools[0]
    running, waiting = await enter(pool, tokens=100), await enter(pool, tokens=100)
    all_of_them.cut()
    await all_of_them.pass_s(LOST_S)
    with pytest.raises(StoreUnavailable, match="cannot be reached; try again"):
        await enter(pool)
    assert (part(pool), waiting.is_over) == ({"tokens": 0, "requests": 0}, False)
    await all_of_them.pass_s(DEAD_S - LOST_S)
    with pytest.raises(StoreUnavailable):
        await waiting.wait()
    assert running.settle()


@pytest.mark.parametrize("on_loss", list(StoreLoss))
async def test_a_store_that_was_never_reached_admits_no_one_and_lets_no_one_wait(on_loss: StoreLoss) -> None:
    """Unless the policy says how many replicas there are."""
    for replicas, is_refused in ((0, True), (2, on_loss is StoreLoss.CLOSED)):
        all_of_them = Replicas(replace(simple(tokens=100), on_store_loss=on_loss, replicas=replicas), 1)
        all_of_them.cut()
        await all_of_them.quiet()
        await all_of_them.pass_s(3)
        if is_refused:
            with pytest.raises(StoreUnavailable, match="not been reached yet"):
                await enter(all_of_them.pools[0])
        else:
            assert grants(await enter(all_of_them.pools[0], tokens=50)) == [True]


async def test_with_the_store_back_what_waits_and_runs_is_the_pools_again() -> None:
    all_of_them, pool = await alone(simple(tokens=100))
    running = [await enter(pool, tokens=50), await enter(all_of_them.pools[1], tokens=50)]
    waiting = await enter(pool, tokens=50)
    assert grants(*running, waiting) == [True, True, False]
    all_of_them.cut(is_cut=False)
    await all_of_them.pass_s(4)
    assert [each.status.state for each in all_of_them.pools] == [StoreState.SHARED] * 2
    assert grants(waiting) == [False]
    assert running[1].settle()  # of the other replica
    await all_of_them.pass_s(2)
    assert grants(waiting) == [True]
