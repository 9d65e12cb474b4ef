"""What every pool promises to the sidecar, whatever is behind it. Times are the test's own, but for one timer."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from sidecar.errors import QueueFull, RequestTooLarge
from sidecar.events import Obstacle
from sidecar.policy.model import Policy
from sidecar.policy.rules import Shares, pool_rules
from sidecar.pools import Grant, Lease, Pool
from sidecar.pools.queue_places import LEAST_S, MOST_S
from tests.pools.conftest import in_both_orders
from tests.pools.harness import Clock, Harness, ask, change_rules, policy_of, simple

pytestmark = pytest.mark.anyio
AT_ONCE = Grant(1_000_000_000, 0, 0, None, {}, 0)


def held(pool: Pool, tier: int = 0) -> Any:
    return pool.state()["tiers"][tier]["held"]  # type: ignore[index]


async def test_a_request_that_fits_holds_its_lease_at_once(harness: Harness) -> None:
    pool = await harness.pool(simple(), Clock())
    lease = await pool.enter(ask(tokens=100))
    assert lease.grant == AT_ONCE
    assert await lease.wait() == AT_ONCE
    await harness.quiet(pool)
    assert held(pool) == {"tokens": 100, "requests": 1}


async def test_a_request_that_does_not_fit_waits_for_a_lease_to_end(harness: Harness) -> None:
    clock = Clock()
    pool = await harness.pool(simple(), clock)
    first, second = await pool.enter(ask(tokens=60)), await pool.enter(ask(tokens=60))
    granted = second.wait()
    await asyncio.sleep(0)
    assert not granted.done()
    clock.advance(2.5)
    assert first.settle()
    grant = await asyncio.wait_for(granted, 60)
    assert (grant.queue_wait_us, grant.starvation_us, grant.overtaken_at_us) == (2_500_000, 0, None)
    assert second.grant == grant


async def test_a_lease_ends_once(harness: Harness) -> None:
    pool = await harness.pool(simple(), Clock())
    lease = await pool.enter(ask())
    assert [lease.settle(), lease.settle(), await lease.leave()] == [True, False, None]
    await harness.quiet(pool)
    assert held(pool) == {"tokens": 0, "requests": 0}


@in_both_orders
async def test_a_wait_ends_once_and_says_how_it_had_gone(harness: Harness) -> None:
    clock = Clock()
    pool = await harness.pool(simple(), clock)
    await pool.enter(ask(tokens=60))
    waiting = await pool.enter(ask(tier=1, tokens=60))
    clock.advance(1)
    await pool.enter(ask(tier=0, tokens=40))  # came later, and goes first
    overtaken_at_us = pool.now_us()
    clock.advance(2)
    assert not waiting.settle()
    left = await waiting.leave()
    assert left is not None
    assert (left.queue_wait_us, left.starvation_us, left.overtaken_at_us) == (3_000_000, 2_000_000, overtaken_at_us)
    assert left.served_ahead == {"high": 40}
    assert [await waiting.leave(), waiting.settle()] == [None, False]
    await harness.quiet(pool)
    assert pool.state()["waiting"] == 0


async def test_one_that_stopped_waiting_as_it_was_granted_settles(harness: Harness) -> None:
    pool = await harness.pool(simple(), Clock())
    first, second = await pool.enter(ask(tokens=60)), await pool.enter(ask(tokens=60))
    second.wait().cancel()
    first.settle()  # grants it all the same: it had not left
    await harness.quiet(pool)
    assert second.grant is not None
    assert await second.leave() is None
    assert second.settle()
    await harness.quiet(pool)
    assert held(pool) == {"tokens": 0, "requests": 0}


async def test_a_canceled_task_leaves_nothing_behind(harness: Harness) -> None:
    pool = await harness.pool(simple(), Clock())
    first = await pool.enter(ask(tokens=100))

    async def stay() -> None:
        lease = await pool.enter(ask(tokens=100))
        try:
            await lease.wait()
        finally:
            assert lease.settle() or await lease.leave() is not None

    tasks = [asyncio.ensure_future(stay()) for _ in range(10)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    first.settle()
    await asyncio.gather(*tasks, return_exceptions=True)
    await harness.quiet(pool)
    assert (pool.state()["waiting"], pool.state()["leases"]) == (0, 0)


# -- refusals


async def test_a_full_queue_refuses_with_when_to_come_back(harness: Harness) -> None:
    pool = await harness.pool(simple(max_waiting=2), Clock())
    first = await pool.enter(ask(tokens=100))
    waiting = [await pool.enter(ask(tokens=100)) for _ in range(2)]
    with pytest.raises(QueueFull, match="tier high has 2 requests waiting, the most that it may have") as refused:
        await pool.enter(ask(tokens=100))
    assert refused.value.status == 503
    assert refused.value.retry_after_s is not None
    assert LEAST_S <= refused.value.retry_after_s <= MOST_S
    assert pool.state()["waiting"] == 2
    assert (await pool.enter(ask(tier=1, tokens=100))).grant is None  # another tier's queue has room
    first.settle()
    await harness.quiet(pool)
    assert waiting[0].grant is not None
    await pool.enter(ask(tokens=100))  # there is room in the queue again


async def test_a_queue_without_places_still_admits_what_fits(harness: Harness) -> None:
    pool = await harness.pool(simple(max_waiting=0), Clock())
    assert (await pool.enter(ask(tokens=100))).grant is not None
    with pytest.raises(QueueFull):
        await pool.enter(ask(tokens=1))
    assert (pool.state()["waiting"], pool.state()["leases"]) == (0, 1)


async def test_more_than_a_tier_could_ever_hold_is_refused_with_the_figures(harness: Harness) -> None:
    rules = pool_rules(
        tokens=100,
        requests=10,
        tiers=(Shares("high", reserve=Fraction(1, 5), lend=Fraction(0)), Shares("low", limit=Fraction(1, 2))),
    )
    pool = await harness.pool(policy_of(rules), Clock())
    with pytest.raises(RequestTooLarge, match=r"would hold 51 tokens.*tier low allows 50"):
        await pool.enter(ask(tier=1, tokens=51))
    with pytest.raises(RequestTooLarge, match=r"would start 6 sequences.*tier low allows 5"):
        await pool.enter(ask(tier=1, requests=6))
    assert (await pool.enter(ask(tier=1, tokens=50, requests=5))).grant is not None


# -- time


@in_both_orders
async def test_a_timer_wakes_what_aging_lets_in(harness: Harness) -> None:
    """On the pool's own clock: the low ticket waits for headroom that it stops owing when it reaches the top level."""
    rules = pool_rules(
        tokens=100,
        requests=None,
        tiers=(Shares("high", reserve=Fraction(1, 2), lend=Fraction(0)), Shares("low")),
        promote_after_us=60_000,
    )
    pool = await harness.pool(policy_of(rules))
    await pool.enter(ask(tier=1, tokens=40))
    waiting = await pool.enter(ask(tier=1, tokens=40))
    assert waiting.grant is None
    grant = await asyncio.wait_for(waiting.wait(), 60)
    assert 60_000 <= grant.queue_wait_us < 2_000_000
    assert grant.level == 0


# -- what it says of itself


def obstructed() -> Policy:
    """High keeps 60 of 100 tokens free for itself, batch may hold 20 at most."""
    shares = (Shares("high", Fraction(3, 5), lend=Fraction(0)), Shares("low"), Shares("batch", limit=Fraction(1, 5)))
    return policy_of(pool_rules(tokens=100, requests=None, tiers=shares))


@in_both_orders
async def test_the_oldest_that_waits_in_a_tier_is_known_with_what_went_ahead_of_it(harness: Harness) -> None:
    clock = Clock()
    pool = await harness.pool(simple(), clock)
    assert list(pool.oldest()) == [None] * len(pool.oldest())
    await pool.enter(ask(tokens=60))
    await pool.enter(ask(tier=1, tokens=60))
    clock.advance(1)
    await pool.enter(ask(tier=1, tokens=60))  # younger: not reported of
    high = await pool.enter(ask(tier=0, tokens=40))  # came later, and goes first
    assert high.grant is not None
    assert high.grant.passed == {"low": "level"}
    overtaken_at_us = pool.now_us()
    clock.advance(2)
    first, second = pool.oldest()[:2]
    assert first is None
    assert second is not None
    assert (second.queue_wait_us, second.starvation_us) == (3_000_000, 2_000_000)
    assert (second.overtaken_at_us, second.served_ahead, second.level) == (overtaken_at_us, {"high": 40}, 1)


@in_both_orders
async def test_what_stands_in_a_requests_way_is_said_with_figures(harness: Harness) -> None:
    pool = await harness.pool(obstructed())
    for tier, tokens in ((0, 10), (1, 20), (2, 10)):
        await pool.enter(ask(tier=tier, tokens=tokens))

    async def obstacle_of(tier: int, tokens: int) -> tuple[Obstacle, str]:
        lease = await pool.enter(ask(tier=tier, tokens=tokens))
        await harness.quiet(pool)
        assert lease.grant is None
        return pool.obstacle(ask(tier=tier, tokens=tokens))

    assert await obstacle_of(1, 30) == (Obstacle.HEADROOM, "what is free is kept for high")
    assert await obstacle_of(1, 1) == (
        Obstacle.BEHIND,
        "1 other request waits already, in low: none goes before the first in order",
    )
    assert await obstacle_of(2, 15) == (
        Obstacle.LIMIT,
        "tier batch is at its limit: it holds 10 of 20 tokens, and it asks for 15 tokens",
    )
    assert await obstacle_of(0, 95) == (
        Obstacle.NO_ROOM,
        "the pool has no room: 40 of 100 tokens are held, and it asks for 95 tokens",
    )


async def test_the_state_is_json_and_unbounded_is_null(harness: Harness) -> None:
    pool = await harness.pool(simple(tokens=100, requests=None), Clock())
    await pool.enter(ask(tokens=60))
    await pool.enter(ask(tier=1, tokens=60))
    await harness.quiet(pool)
    state = json.loads(json.dumps(pool.state()))
    assert state["capacity"] == {"tokens": 100, "requests": None}
    assert (state["leases"], state["waiting"]) == (1, 1)
    assert [tier["tier"] for tier in state["tiers"]] == ["high", "low"]
    assert state["tiers"][0]["held"] == {"tokens": 60, "requests": 1}
    assert state["tiers"][1]["queued"] == {"tokens": 60, "requests": 1}
    assert state["tiers"][0]["limit"] == {"tokens": 100, "requests": None}
    assert str(2**53 - 1) not in json.dumps(state)


# -- when to come back


async def test_retry_after_is_within_its_caps_whatever_happened(harness: Harness) -> None:
    clock = Clock()
    pool = await harness.pool(simple(), clock)
    for elapsed in (0.0, 0.001, 5, 3600, 10**6):
        clock.advance(elapsed)
        assert all(LEAST_S <= pool.retry_after_s(0) <= MOST_S for _ in range(50))
        (await pool.enter(ask())).settle()


async def test_retry_after_is_roughly_how_long_a_steady_queue_takes(harness: Harness) -> None:
    per_second, backlog = 2, 20
    clock = Clock()
    pool = await harness.pool(simple(("only",), tokens=10), clock)
    leases = [await pool.enter(ask()) for _ in range(backlog + 40 * per_second)]
    served = iter(leases)
    for _ in range(40 * per_second):
        clock.advance(1 / per_second)
        next(served).settle()
        await harness.quiet(pool)
    reported = sum(pool.retry_after_s(0) for _ in range(200)) / 200
    assert reported == pytest.approx(backlog / per_second, rel=0.15)


async def test_clients_refused_together_are_not_asked_to_come_back_together(harness: Harness) -> None:
    pool = await harness.pool(simple(), Clock())  # nothing was ever admitted: every request gets the most
    reported = [pool.retry_after_s(0) for _ in range(200)]
    assert max(reported) - min(reported) > 0.3 * max(reported)


# -- many at once


@in_both_orders
async def test_nothing_is_left_after_any_mix_of_ends(harness: Harness) -> None:
    rng, clock = random.Random(1), Clock()
    pool = await harness.pool(simple(("a", "b", "c"), requests=5, promote_after_s=1, max_waiting=20), clock)
    open_leases: list[Lease] = []
    ended = itertools.count()
    for _ in range(300):
        clock.advance(rng.random() / 10)
        if open_leases and rng.random() < 0.5:
            lease = open_leases.pop(rng.randrange(len(open_leases)))
            assert lease.settle() != (await lease.leave() is not None) or is_displaced(lease)
            next(ended)
            continue
        try:
            open_leases.append(await pool.enter(ask(rng.randrange(3), rng.randint(1, 60), tenant=rng.choice("xyz"))))
        except QueueFull:
            continue
        if rng.random() < 0.3:
            open_leases[-1].wait().cancel()
    for lease in open_leases:
        assert lease.settle() != (await lease.leave() is not None) or is_displaced(lease)
    await harness.quiet(pool)
    assert (pool.state()["waiting"], pool.state()["leases"]) == (0, 0)
    assert next(ended) > 50


def is_displaced(lease: Lease) -> bool:
    """Whether it gave its place in a full queue to another tenant."""
    return isinstance(lease._error, QueueFull)  # type: ignore[attr-defined]


async def test_the_most_that_one_request_may_hold_follows_the_size_of_the_pool(harness: Harness) -> None:
    policy = simple()
    pool = await harness.pool(policy, Clock())
    most = pool.most_tokens(0)
    assert (await pool.enter(ask(tokens=most))).settle()
    with pytest.raises(RequestTooLarge):
        await pool.enter(ask(tokens=most + 1))
    change_rules(pool, replace(policy.rules, tokens=most // 2))
    assert pool.most_tokens(0) == most // 2


@in_both_orders
async def test_a_request_that_waits_knows_how_many_stand_before_it(harness: Harness) -> None:
    """In one tier and one tenant exactly; a more important tier stands before it; those that leave are seen at last."""
    clock = Clock()
    pool = await harness.pool(simple(), clock)
    running = [await pool.enter(ask(tier=1, tokens=50)) for _ in range(2)]
    waiting, marks = [], []
    for _ in range(5):
        waiting.append(await pool.enter(ask(tier=1, tokens=50)))
        await harness.quiet(pool)
        marks.append(pool.mark(1))
    assert [pool.standing(1, mark).ahead for mark in marks] == [0, 1, 2, 3, 4]
    for lease in running:
        clock.advance(1)
        lease.settle()
        await harness.quiet(pool)
    assert [lease.grant is not None for lease in waiting] == [True, True, False, False, False]
    standings = [pool.standing(1, mark) for mark in marks[2:]]
    assert [standing.ahead for standing in standings] == [0, 1, 2]
    times = [standing.wait_s for standing in standings]
    assert all(wait_s is not None and 0.1 < wait_s < 10 for wait_s in times)
    assert times == sorted(times, key=lambda wait_s: wait_s or 0.0)
    important = await pool.enter(ask(tier=0, tokens=100))
    await harness.quiet(pool)
    assert [pool.standing(1, mark).ahead for mark in marks[2:]] == [1, 2, 3]
    important.leave()
    waiting[3].leave()
    await harness.quiet(pool)
    assert pool.standing(1, marks[4]).ahead <= 1  # no more than wait at all
