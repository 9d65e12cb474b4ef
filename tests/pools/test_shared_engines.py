"""What replicas of one pool tell each other of their engines, through the ledger in the store."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import replace

import pytest

from sidecar.events import Placed
from sidecar.policy.store import store_address
from sidecar.pools import Ask, Pool
from sidecar.pools.engines import EngineOffer
from sidecar.pools.ledger import Ledger
from sidecar.pools.redis import RedisLink, ledger_connector
from tests.pools.harness import ask, simple
from tests.pools.scripted_link import Replicas
from tests.support.redis_servers import RedisServer
from tests.support.shared_pools import begun
from tests.support.waiting import until

pytestmark = pytest.mark.anyio
A, B = (EngineOffer(f"{name}#1", tokens=100, requests=10, prefill=20) for name in "ab")
HEARD_S, LOST_S, DEAD_S = 3, 5, 13


def pool_on(server: RedisServer) -> Pool:
    policy = replace(simple(), pool="engines")
    link = RedisLink(ledger_connector(store_address(server.url), "engines"), "engines")
    return Pool(policy, link=link, weight_percent=200)


async def test_drains_restarts_and_reach_are_heard_of_by_the_other_replicas(redis_server: RedisServer) -> None:
    redis_server.command("FLUSHALL")
    begun(redis_server, "engines")
    one, two = pool_on(redis_server), pool_on(redis_server)
    drains: list[tuple[str, bool]] = []
    incarnations: list[tuple[str, int]] = []
    reached: list[Collection[str]] = []
    two.elsewhere.on_drain = lambda name, is_drained: drains.append((name, is_drained))
    two.elsewhere.on_incarnation = lambda name, number, _: incarnations.append((name, number))
    two.elsewhere.on_reached = reached.append
    try:
        for pool in (one, two):
            await pool.open()
            pool.set_engines([EngineOffer("a#1", 100, 10), EngineOffer("b#1", 100, 10)])
        held = await one.enter(ask(tokens=50))
        await held.wait()
        await until(lambda: sum(it.held_tokens for it in two.engines()) == 50, what="the other's lease is seen")
        one.drain_engine("a", drains=True)
        await until(lambda: ("a", True) in drains, what="the drain is heard of")
        one.set_engines([EngineOffer("a#2", 100, 10), EngineOffer("b#1", 100, 10)])
        await until(lambda: ("a", 2) in incarnations, what="the restart is heard of")
        await until(lambda: ("a", False) in drains, what="a new incarnation does not drain")
        two.set_engines([EngineOffer("b#1", 100, 10)])
        await until(lambda: bool(reached) and "a" in reached[-1], what="it is reached elsewhere")
        held.settle()
        await until(lambda: sum(it.held_tokens for it in two.engines()) == 0, what="it has ended")
    finally:
        await one.close()
        await two.close()


# -- on the test's clock


async def replicas(*offers: EngineOffer, count: int = 2) -> Replicas:
    all_of_them = Replicas(simple(), count, weight_percent=200)
    for pool in all_of_them.pools:
        pool.set_engines(offers)
    return await all_of_them.joined()


def asks(tokens: int = 10, prompt: int = 1, **more: object) -> Ask:
    return Ask(0, "t", 1, tokens, 1, prompt=prompt, **more)  # type: ignore[arg-type]


async def engine_of(pool: Pool, wanted: Ask) -> str | None:
    """Where a request gets in at once."""
    lease = await pool.enter(wanted)
    return None if lease.grant is None else lease.grant.engine


def held(pool: Pool) -> dict[str, tuple[int, int, int]]:
    return {it.id: (it.held_tokens, it.held_requests, it.unprefilled_tokens) for it in pool.engines()}


async def test_replicas_count_what_all_have_on_each_engine_also_after_a_flush() -> None:
    all_of_them = await replicas(A, B)
    one, two = all_of_them.pools
    leases = [await pool.enter(asks(prompt=5)) for pool in (one, two, one, two)]
    assert [lease.grant and lease.grant.engine for lease in leases] == ["a#1", "b#1", "a#1", "b#1"]
    leases[0].prefilled()
    one.drain_engine("b", drains=True)
    await all_of_them.pass_s(HEARD_S)
    all_of_them.ledger = Ledger()
    await all_of_them.pass_s(LOST_S)
    for pool in (one, two):
        assert held(pool) == {"a#1": (20, 2, 5), "b#1": (20, 2, 10)}
        assert pool.state()["capacity"] == {"tokens": 120, "requests": 12}, "and what the drained one still holds"
    assert await engine_of(two, asks(prompt=9, hits=(("b#1", 9),))) == "a#1", "b still drains"
    for lease in leases:
        assert [lease.settle(), lease.settle()] == [True, False]
    await all_of_them.pass_s(HEARD_S)
    assert held(one) == held(two) == {"a#1": (10, 1, 9), "b#1": (0, 0, 0)}


async def test_no_request_goes_to_an_engine_that_its_replica_cannot_use() -> None:
    all_of_them = await replicas(A, B)
    one, two = all_of_them.pools
    one.set_engines([A._replace(takes_new=False), B])
    mine = [await one.enter(asks(tokens=20)) for _ in range(5)]
    assert [lease.grant and lease.grant.engine for lease in mine] == ["b#1"] * 5
    waiting = await one.enter(asks(tokens=20, hits=(("a#1", 1),)))
    assert (await engine_of(two, asks(tokens=20)), waiting.grant) == ("a#1", None)
    mine[0].settle()
    await all_of_them.pass_s(HEARD_S)
    assert waiting.grant is not None
    assert waiting.grant.engine == "b#1"


async def test_mounted_replicas_share_a_pool_and_each_uses_its_own_engine() -> None:
    all_of_them = Replicas(simple(), weight_percent=200)
    one, two = all_of_them.pools
    one.set_engines([A])
    two.set_engines([B])
    await all_of_them.joined()
    assert [await engine_of(pool, asks(tokens=60)) for pool in (one, two, one)] == ["a#1", "b#1", None]


@pytest.mark.parametrize("first", [1, 1_795_690_000_000_123], ids=["counted", "in_us"])
async def test_a_restart_that_several_see_counts_once_and_a_replica_that_comes_late_hears_of_it(first: int) -> None:
    """A proxy counts from 1; an engine that is mounted is numbered by the time of its start."""
    before, after = A._replace(id=f"a#{first}"), A._replace(id=f"a#{first + 1}")
    all_of_them = await replicas(before, count=4)
    *pools, late = all_of_them.pools
    await late.close()
    await all_of_them.pass_s(HEARD_S, without=late)
    heard: list[tuple[str, int, bool]] = []

    def restarted(*news: tuple[str, int, bool]) -> None:
        heard.append(news)  # type: ignore[arg-type]
        pools[2].set_engines([after])

    pools[2].elsewhere.on_incarnation = restarted  # type: ignore[assignment]
    old = await pools[0].enter(asks(prompt=5))
    pools[0].drain_engine("a", drains=True)
    await all_of_them.pass_s(HEARD_S, without=late)
    pools[0].set_engines([after])
    pools[1].set_engines([after])
    await all_of_them.pass_s(HEARD_S, without=late)
    assert await engine_of(pools[1], asks(prompt=7)) == after.id, "what was said of the one before does not drain it"
    await all_of_them.pass_s(HEARD_S, without=late)
    assert held(pools[2]) == {before.id: (10, 1, 5), after.id: (10, 1, 7)}
    assert set(heard) == {("a", first + 1, True)}
    assert {it.id: it.takes_new for it in pools[2].engines()} == {before.id: False, after.id: True}
    drains: list[tuple[str, bool]] = []
    late.elsewhere.on_incarnation = lambda *news: heard.append(news)
    late.elsewhere.on_drain = lambda *news: drains.append(news)
    heard.clear()
    await all_of_them.quiet()
    await all_of_them.pass_s(HEARD_S)
    assert (heard[:1], drains) == ([("a", first + 1, False)], [])
    old.settle()
    await all_of_them.pass_s(HEARD_S)
    assert held(pools[2])[after.id] == (10, 1, 7), "never negative: the old one has its own"


async def test_a_cap_holds_for_all_replicas_and_ends_by_itself() -> None:
    all_of_them = await replicas(A, B)
    one, two = all_of_them.pools
    refused = [await one.enter(asks()) for _ in range(3)][2]
    assert refused.grant is not None
    assert refused.grant.engine == "a#1"
    one.cap_engine("a#1", 5.0)
    again = refused.hand_back()
    await all_of_them.pass_s(1)
    assert again.result().engine == "b#1"
    two.set_engines([A, B._replace(takes_new=False)])
    waiting = await two.enter(asks(prompt=3, hits=(("a#1", 3),)))
    await all_of_them.pass_s(2)
    assert not waiting.wait().done()
    await all_of_them.pass_s(HEARD_S)
    assert waiting.grant is not None
    assert waiting.grant.engine == "a#1"


async def test_a_grant_says_why_it_got_its_engine_by_the_store_and_without_it() -> None:
    all_of_them = await replicas(A, B)
    one, two = all_of_them.pools
    await one.enter(asks(tokens=30, prompt=5))
    await all_of_them.pass_s(HEARD_S)
    hits = (("a#1", 7), ("b#1", 2))
    lease = await two.enter(asks(tokens=20, prompt=8, hits=hits))
    assert lease.grant is not None
    assert lease.grant.placed == Placed(100, 10, 30, 1, 5, prompt=8, hits=hits)
    all_of_them.cut()
    await all_of_them.pass_s(LOST_S)
    alone = await two.enter(asks(tokens=1))
    assert alone.grant is not None
    assert alone.grant.placed is not None
    assert alone.grant.placed.prompt == 1


async def test_slow_start_is_by_the_age_that_a_replica_states_and_not_by_its_clock() -> None:
    all_of_them = await replicas(A)
    ahead, other = all_of_them.pools
    ahead.now_us = lambda: all_of_them.clock() + 10**12
    for pool in (ahead, other):
        pool.set_engines([A._replace(ramp_us=60_000_000, since_us=pool.now_us() - 30_000_000)])
    await all_of_them.pass_s(HEARD_S)
    assert [[it.effective_tokens for it in pool.engines()] for pool in (ahead, other)] == [[60], [60]]


async def test_a_killed_replica_gives_back_what_it_held_and_its_engines_are_gone() -> None:
    all_of_them = Replicas(simple(), weight_percent=200)
    survivor, dead = all_of_them.pools
    survivor.set_engines([A, B])
    dead.set_engines([A, B._replace(id="c#1")])
    await all_of_them.joined()
    assert await engine_of(dead, asks(tokens=60, prompt=9, hits=(("c#1", 9),))) == "c#1"
    await all_of_them.pass_s(HEARD_S)
    assert held(survivor) == {"a#1": (0, 0, 0), "b#1": (0, 0, 0), "c#1": (60, 1, 1)}
    await all_of_them.pass_s(DEAD_S, without=dead)
    assert set(held(survivor)) == {"a#1", "b#1"}
    assert survivor.state()["capacity"] == {"tokens": 200, "requests": 20}


async def test_another_weight_reaches_the_ledger() -> None:
    all_of_them = await replicas(A, B)
    pool, _ = all_of_them.pools
    first = await pool.enter(asks(tokens=60, prompt=15))
    first.prefilled()
    assert await engine_of(pool, asks(prompt=8, hits=(("a#1", 8),))) == "a#1"
    pool.change_weight(1)
    pool.change_policy(pool._sizes.policy)
    await all_of_them.pass_s(HEARD_S)
    assert await engine_of(pool, asks(prompt=3, hits=(("a#1", 3),))) == "b#1"


# -- on a server


async def test_the_first_byte_lets_a_request_of_another_replica_in_at_once(redis_server: RedisServer) -> None:
    odd = A._replace(id='a"\\000\tb:80#1')
    redis_server.command("FLUSHALL")
    begun(redis_server, "engines")
    one, two = pool_on(redis_server), pool_on(redis_server)
    for pool in (one, two):
        pool.set_engines([odd])
        await pool.open()
    try:
        large = await one.enter(asks(prompt=50))
        assert (await asyncio.wait_for(large.wait(), 60)).engine == odd.id
        waiting = await two.enter(asks(prompt=5))
        assert waiting.grant is None
        two._member._heartbeat_us = 10**18  # it does not ask
        large.prefilled()
        assert (await asyncio.wait_for(waiting.wait(), 60)).engine == odd.id
    finally:
        await one.close()
        await two.close()
