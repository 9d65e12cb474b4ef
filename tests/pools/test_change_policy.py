"""A policy replaces another while requests wait and run: every pool keeps them, and follows the new one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis

from sidecar.errors import QueueFull, RequestTooLarge
from sidecar.policy.capacity import Capacity
from sidecar.policy.choices import CapacitySource
from sidecar.policy.model import Policy
from sidecar.policy.rules import Shares, pool_rules
from sidecar.pools import Pool
from sidecar.pools.member_events import MemberMode
from tests.pools.conftest import in_both_orders
from tests.pools.harness import Clock, Harness, ask, policy_of, simple
from tests.pools.load import beat, recovered, replicas
from tests.pools.test_engine_capacity import Engine, following, sized
from tests.pools.test_engine_capacity import policy_of as sized_by_engine
from tests.support.redis_servers import RedisServer
from tests.support.shared_pools import begun, begun_store
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


def change(pool: Any, policy: Policy) -> None:
    """As a reload does it: the pool's name is the same."""
    pool.change_policy(replace(policy, pool=pool._sizes.policy.pool))


def shared_out(*shares: Shares, tokens: int = 100, promote_after_s: float | None = None) -> Policy:
    promote_after_us = None if promote_after_s is None else round(promote_after_s * 1e6)
    return policy_of(pool_rules(tokens=tokens, requests=None, tiers=shares, promote_after_us=promote_after_us))


def held(pool: Pool) -> list[int]:
    return [tier["held"]["tokens"] for tier in pool.state()["tiers"]]  # type: ignore[attr-defined]


@in_both_orders
async def test_a_grown_pool_lets_who_waits_in_at_once_and_in_order(harness: Harness) -> None:
    pool = await harness.pool(simple(tokens=10))
    running = await pool.enter(ask(tokens=10))
    waiting = [await pool.enter(ask(tier=tier, tokens=10)) for tier in (1, 0, 1)]
    change(pool, simple(tokens=30))
    grants = await asyncio.gather(*(lease.wait() for lease in waiting[:2]))
    await harness.quiet(pool)
    assert waiting[2].grant is None, "came last, in the lower tier"
    assert grants[1].queue_wait_us > 0
    assert held(pool) == [20, 10]
    assert pool.state()["capacity"] == {"tokens": 30, "requests": None}
    running.settle()
    await waiting[2].wait()


@in_both_orders
async def test_a_shrunk_pool_drains_what_runs_and_keeps_who_waits(harness: Harness) -> None:
    pool = await harness.pool(simple(tokens=30))
    running = [await pool.enter(ask(tokens=10)) for _ in range(3)]
    waiting = await pool.enter(ask(tokens=10))
    change(pool, simple(tokens=20))
    await harness.quiet(pool)
    assert held(pool)[0] == 30, "what runs goes on"
    running[0].settle()
    await harness.quiet(pool)
    assert waiting.grant is None, "it would hold 30 of 20"
    running[1].settle()
    await waiting.wait()
    await harness.quiet(pool)
    assert held(pool)[0] == 20
    assert running[2].settle()


@in_both_orders
async def test_who_waits_for_more_than_there_will_ever_be_is_refused(harness: Harness) -> None:
    pool = await harness.pool(shared_out(Shares("high"), Shares("low")))
    running = await pool.enter(ask(tokens=100))
    too_large, fits = await pool.enter(ask(tier=1, tokens=60)), await pool.enter(ask(tier=1, tokens=40))
    change(pool, shared_out(Shares("high"), Shares("low", limit=Fraction(1, 2))))
    with pytest.raises(RequestTooLarge, match=r"would hold 60 tokens .* tier low allows 50"):
        await too_large.wait()
    running.settle()
    await fits.wait()


async def test_who_waits_with_more_than_one_request_may_hold_now_keeps_its_place(harness: Harness) -> None:
    pool = await harness.pool(simple(tokens=100))
    running = await pool.enter(ask(tokens=100))
    waiting = await pool.enter(ask(tokens=60))
    change(pool, simple(tokens=100, max_request_tokens=50))
    with pytest.raises(RequestTooLarge, match="tier high allows 50"):
        await pool.enter(ask(tokens=60))
    running.settle()
    await waiting.wait()


async def test_a_longer_queue_takes_more_and_a_shorter_one_refuses_only_who_comes(harness: Harness) -> None:
    pool = await harness.pool(simple(tokens=10, max_waiting=1))
    running = await pool.enter(ask(tokens=10))
    waiting = [await pool.enter(ask(tokens=1))]
    with pytest.raises(QueueFull):
        await pool.enter(ask(tokens=1))
    change(pool, simple(tokens=10, max_waiting=3))
    waiting += [await pool.enter(ask(tokens=1)) for _ in range(2)]
    change(pool, simple(tokens=10, max_waiting=0))
    await harness.quiet(pool)
    with pytest.raises(QueueFull):
        await pool.enter(ask(tokens=1))
    running.settle()
    await asyncio.gather(*(lease.wait() for lease in waiting))


@in_both_orders
async def test_aging_counts_from_the_arrival_by_the_new_figure(harness: Harness) -> None:
    clock = Clock()
    pool = await harness.pool(simple(tokens=10), clock)
    running = await pool.enter(ask(tokens=10))
    old = await pool.enter(ask(tier=1, tokens=10))
    clock.advance(30)
    young = await pool.enter(ask(tier=0, tokens=10))
    change(pool, simple(tokens=10, promote_after_s=20))
    await harness.quiet(pool)
    running.settle()
    grant = await asyncio.wait_for(old.wait(), 60)
    assert grant.level == 0
    assert young.grant is None
    change(pool, simple(tokens=10))
    other = await pool.enter(ask(tier=1, tokens=10))
    clock.advance(60)
    await harness.quiet(pool)
    old.settle()
    await asyncio.wait_for(young.wait(), 60)
    assert other.grant is None


@in_both_orders
async def test_a_reserve_that_is_new_is_kept_from_then_on(harness: Harness) -> None:
    pool = await harness.pool(shared_out(Shares("high"), Shares("low")))
    low = [await pool.enter(ask(tier=1, tokens=20)) for _ in range(5)]
    high = await pool.enter(ask(tier=0, tokens=20))
    change(pool, shared_out(Shares("high", Fraction(1, 2), Fraction(0)), Shares("low")))
    waiting = await pool.enter(ask(tier=1, tokens=20))
    low[0].settle()
    await high.wait()
    low[1].settle()
    low[2].settle()
    await harness.quiet(pool)
    assert waiting.grant is None, "what is free is kept for high"
    assert held(pool) == [20, 40]
    state: Any = pool.state()
    assert state["tiers"][0]["reserve"]["tokens"] == 50


@in_both_orders
async def test_rules_that_change_under_a_random_load_lose_no_one(harness: Harness) -> None:
    """Everybody who entered is granted in the end, and nothing is held behind the last."""
    pool = await harness.pool(simple(("a", "b", "c"), tokens=40))
    leases = []
    for step in range(40):
        leases.append(await pool.enter(ask(tier=step % 3, tokens=1 + step % 7)))
        sizes = (40, 10, 25, 8)
        if step % 5 == 4:
            change(pool, simple(("a", "b", "c"), tokens=sizes[step // 5 % 4], promote_after_s=step / 10))
        if step % 2:
            granted = next((lease for lease in leases if lease.grant is not None), None)
            if granted is not None:
                leases.remove(granted)
                assert granted.settle()
    waiting = [lease.wait() for lease in leases]
    change(pool, simple(("a", "b", "c"), tokens=1000))
    await asyncio.wait_for(asyncio.gather(*waiting), 60)
    assert [lease.settle() for lease in leases] == [True] * len(leases)
    await harness.quiet(pool)
    assert held(pool) == [0, 0, 0]
    assert pool.state()["waiting"] == pool.state()["leases"] == 0


# -- a pool whose size is the engine's


async def test_a_new_fraction_counts_at_once_of_what_the_engine_said_last() -> None:
    engine = Engine(1000)
    async with following(engine) as pool:
        await pool.enter(ask(tokens=900))
        waiting = await pool.enter(ask(tokens=150))
        engine.is_reachable = False
        pool.change_policy(sized_by_engine("4/5"))
        assert pool.state()["capacity"] == {"tokens": 800, "requests": None}
        with pytest.raises(RequestTooLarge, match="tier high allows 800"):
            await pool.enter(ask(tokens=900))
        pool.change_policy(sized_by_engine("1", tokens=2000))
        await asyncio.wait_for(waiting.wait(), 60)


async def test_a_new_policy_admits_no_one_before_the_engine_has_spoken() -> None:
    engine = Engine()
    engine.is_reachable = False
    async with following(engine) as pool:
        pool.change_policy(sized_by_engine("1/2"))
        assert pool.readiness() != ()
        engine.is_reachable = True
        await until(lambda: not pool.readiness())
        assert pool.state()["capacity"] == {"tokens": 500, "requests": None}


async def test_how_many_may_wait_inside_the_engine_is_followed() -> None:
    policy = sized_by_engine("1", waiting=2)
    pool = sized(Engine(1000, 4), policy, 60)
    await pool.open()
    assert pool.state()["capacity"] == {"tokens": 1000, "requests": 6}
    pool.change_policy(
        replace(policy, capacity=Capacity(read_from=CapacitySource.ENGINE, fraction=Fraction(1), waiting=8))
    )
    assert pool.state()["capacity"] == {"tokens": 1000, "requests": 12}
    await pool.close()


# -- many replicas


def stored(server: RedisServer, name: str) -> int:
    """How long a request waits for each level by the rules that count in the store, in seconds."""
    with redis.Redis.from_url(server.url) as client:
        config: Any = client.hget(f"ledger:{{{name}}}", "config")
    return int(msgspec.msgpack.decode(config)["rules"][1]) // 1_000_000  # `calls.PoolRules`


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_of_replicas_with_different_figures_the_latest_stated_count_and_no_one_states_them_again(
    redis_server: RedisServer, order: tuple[int, int]
) -> None:
    begun(redis_server, f"figures-{order}")
    async with replicas(simple(tokens=100), [redis_server.url] * 2, name=f"figures-{order}") as pools:
        policies = [simple(tokens=50, promote_after_s=5), simple(tokens=70, promote_after_s=7)]
        for which in order:
            change(pools[which], policies[which])
            await until(lambda which=which: tokens_of(pools) == [policies[which].rules.tokens] * 2)
        latest = 7 if order == (0, 1) else 5
        for pool in pools:
            await states_all(pool)
        assert stored(redis_server, f"figures-{order}") == latest
        assert tokens_of(pools) == [latest * 10] * 2


async def states_all(pool: Pool) -> None:
    """A replica states everything, as behind a call that was lost."""
    pool._member._number += 10
    stated = pool._member.number + 2  # the next call is not known of
    await until(lambda: beat(pool) or (pool._member.number > stated and pool._member.mode is MemberMode.SHARED))


def tokens_of(pools: Sequence[Pool]) -> list[int | None]:
    """How large each replica knows the pool to be."""
    for pool in pools:
        beat(pool)
    return [pool._member.mirror(pool.now_us()).capacity[0] for pool in pools]


async def test_a_change_while_the_store_is_lost_counts_here_and_is_stated_when_it_is_back(tmp_path: Path) -> None:
    with begun_store(tmp_path, "lost") as server:
        async with replicas(simple(tokens=100), [server.url], name="lost") as (pool,):
            running = await pool.enter(ask(tokens=100))
            waiting = await pool.enter(ask(tokens=60))
            server.kill()
            await until(lambda: pool.state()["store"]["state"] == "divided")
            change(pool, simple(tokens=200, promote_after_s=9))
            await asyncio.wait_for(waiting.wait(), 60)
            server.restart()
            await recovered([pool])
            assert stored(server, "lost") == 9
            await until(lambda: tokens_of([pool]) == [200] and held(pool)[0] == 160)
            assert running.settle()
