"""A store that comes back empty and goes again: replicas keep the number that is safe, and do not exceed the pool."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sidecar.policy.model import Policy
from sidecar.pools.redis import RedisPool
from sidecar.pools.redis.connection import StoreConnection, StoreError
from sidecar.pools.redis.partition import first_part
from sidecar.pools.redis.protocol import BEAT_S, SILENCE_S
from tests.pools.harness import ask, simple
from tests.pools.load import Load, nothing_left, recovered, replicas, store_of, until
from tests.pools.scripted import Scripted, entering
from tests.pools.test_script import Replicas, client, granted
from tests.pools.test_script import replicas as scripted_replicas
from tests.support.redis_servers import RedisServer, first_binary

pytestmark = pytest.mark.anyio
CAPACITY = 12
"""Requests, as in an engine with so many slots."""

__all__ = ["client", "scripted_replicas"]


def policy() -> Policy:
    return simple(tokens=CAPACITY)


# -- the script: which number it tells


@pytest.fixture
def three(scripted_replicas: Replicas) -> list[Scripted]:
    """Three replicas that know of each other, in a pool of 12."""
    scripted_replicas.policy = policy()
    group = [scripted_replicas.one(name) for name in "abc"]
    assert [replica.call().expected for replica in group] == [3, 3, 3]
    return group


def flush(group: list[Scripted]) -> None:
    group[0].client.flushall()
    group[0].clock.us += 1


def test_an_empty_store_tells_the_number_that_the_first_to_state_knew(three: list[Scripted]) -> None:
    one, two, _ = three
    flush(three)
    reply = one.sync(known=3, installs=False)
    assert (reply.replicas, reply.expected, reply.unheard, reply.is_on_hold) == (1, 3, 2, True)
    flush(three)  # a second time, before the others came
    reply = two.sync(known=3, installs=False)
    assert (reply.replicas, reply.expected, reply.unheard, reply.is_on_hold) == (1, 3, 2, True)


def test_the_number_of_the_replica_that_knew_most_counts(three: list[Scripted]) -> None:
    one, two, last = three
    flush(three)
    assert one.sync(known=1, installs=False).expected == 1
    reply = two.sync(known=3, installs=False)
    assert (reply.expected, reply.is_on_hold) == (3, True)
    assert granted(two.enter(1, ask(tokens=1))) == []
    assert not last.sync(known=2, installs=False).is_on_hold
    assert granted(two.call()) == [1]


def test_replicas_that_an_empty_store_has_not_heard_of_count_as_long_as_silent_ones(three: list[Scripted]) -> None:
    one = three[0]
    flush(three)
    one.sync(known=3, installs=False)
    for _ in range(4):
        one.clock.advance(BEAT_S)
        assert one.call(kind=b"beat").expected == 3
    one.clock.advance(SILENCE_S - 4 * BEAT_S)
    reply = one.call(kind=b"beat")
    assert (reply.expected, reply.unheard) == (1, 0)


def test_a_replica_that_says_good_bye_is_not_waited_for_and_a_new_one_counts_beside_the_others(
    three: list[Scripted],
) -> None:
    one, two, _ = three
    flush(three)
    one.sync(known=3, installs=False)
    two.sync(known=3, installs=False)
    new = Scripted(one.client, one.clock, one.policy, "new")
    assert new.sync(known=0).expected == 4
    two.call(kind=b"bye")
    assert one.call().expected == 3


def test_the_parts_of_those_that_were_not_heard_of_stay_free_while_they_may_live(three: list[Scripted]) -> None:
    one = three[0]
    flush(three)
    one.sync(known=3, installs=False)
    one.call(*(part for ticket in range(CAPACITY) for part in entering(ticket, ask(tokens=1))))
    one.clock.advance(BEAT_S)
    reply = one.call(kind=b"beat")
    assert (len(reply.grants), reply.unheard) == (4, 2)
    assert reply.change_after_us == (SILENCE_S - BEAT_S) * 1e6
    for _ in range(4):
        one.clock.advance(BEAT_S)
        reply = one.call(kind=b"beat")
    assert (len(reply.grants), reply.held_tokens) == (8, 12)


def test_a_store_that_is_older_believes_what_it_knows(three: list[Scripted]) -> None:
    one = three[0]
    for _ in range(6):
        one.clock.advance(BEAT_S)
        for replica in three:
            replica.call(kind=b"beat")
    late = Scripted(one.client, one.clock, one.policy, "late")
    reply = late.sync(known=9, installs=False)
    assert (reply.expected, reply.is_on_hold) == (4, False)


@pytest.mark.parametrize("by_calls", [False, True])
def test_nothing_is_admitted_before_every_replica_has_stated_all_its_leases(
    by_calls: bool, three: list[Scripted]
) -> None:
    one, two, last = three
    flush(three)
    one.sync(b"t", 1, 0, "t", 1, 1, 1, 0, 0, known=3, installs=False)
    two.sync(known=3, installs=False)
    begun = last.begin(b"l", 1, 0, 6, 1, 0, known=3)
    assert begun.is_on_hold
    if by_calls:
        assert granted(one.call()) == []
        assert last.call(b"l", 2, 0, 6, 1, 0).is_on_hold
    assert granted(one.call()) == []
    assert not last.call(b"l", 3, 0, 6, 1, 0, b"n").is_on_hold
    assert granted(one.call()) == []  # 12 or 18 of 12 are held
    last.call(*(part for lease in (1, 2, 3) for part in (b"x", lease)))
    assert granted(one.call()) == [1]


# -- replicas: what they make of it


async def heard_of_three(pool: RedisPool) -> None:
    await until(lambda: pool._last is not None and pool._last.expected == 3, 60, "three replicas")


@pytest.mark.long
async def test_a_store_that_flaps_never_lets_three_replicas_exceed_the_pool(tmp_path: Path) -> None:
    await flap(tmp_path, trials=2)


@pytest.mark.soak
async def test_a_store_that_flaps_twenty_times_never_lets_three_replicas_exceed_the_pool(tmp_path: Path) -> None:
    await flap(tmp_path, trials=20)


async def flap(folder: Path, trials: int) -> None:
    """Down, back empty for 0.1 to 0.6 s, down again: under more load than the pool can take."""
    luck = random.Random(12)
    with RedisServer(first_binary(), folder) as server:
        async with replicas(policy(), [server.url] * 3) as pools:
            load = Load(pools, tokens=1, held_s=(0.1, 0.4), tiers=1)
            async with load.going_on(60):
                # What a replica has not heard of, it cannot go by: see the bound in `alone`.
                is_known = lambda pool: pool._last is not None and pool._last.held_tokens == CAPACITY  # noqa: E731
                await until(lambda: all(map(is_known, pools)), 60, "all know that the pool is full")
                for _ in range(trials):
                    server.kill()
                    await asyncio.sleep(luck.uniform(0.7, 1.2))
                    server.restart()
                    await asyncio.sleep(luck.uniform(0.1, 0.6))
                    server.kill()
                    await asyncio.sleep(luck.uniform(0.7, 1.2))
                    server.restart()
                    await recovered(pools)
                    await asyncio.gather(*map(heard_of_three, pools))
                    await asyncio.sleep(0.7)  # without the store a replica that held nothing may admit nothing
            assert load.peak == CAPACITY
            assert load.admitted > 20 * trials
            await nothing_left(pools)


@pytest.mark.long
async def test_a_store_that_is_flushed_twice_while_a_replica_is_idle_is_never_exceeded(tmp_path: Path) -> None:
    with RedisServer(first_binary(), tmp_path) as server:
        async with replicas(policy(), [server.url] * 3) as pools:
            for _ in range(2):
                idle = [await pools[2].enter(ask(tokens=1)) for _ in range(8)]
                load = Load(pools[:2], tokens=1, held_s=(0.3, 1.0))
                async with load.going_on(20):
                    await asyncio.sleep(0.3)
                    await flushed(server)
                    await asyncio.sleep(0.5)
                    await flushed(server)
                    await until(lambda: store_of(pools[0])["replicas"] == 3, 60, "the idle one has come")
                    await asyncio.sleep(0.2)
                assert load.peak <= CAPACITY - len(idle)
                for lease in idle:
                    lease.settle()
                await nothing_left(pools)


async def flushed(server: RedisServer) -> None:
    await asyncio.get_running_loop().run_in_executor(None, lambda: server.command("FLUSHALL"))


@pytest.mark.long
async def test_a_store_that_is_lost_while_it_waits_for_others_leaves_everyone_what_it_held(tmp_path: Path) -> None:
    """Two of three come back to the empty store; the third holds what the first two must not take."""
    with RedisServer(first_binary(), tmp_path) as server:
        async with replicas(policy(), [server.url] * 3) as pools:
            held = [await pools[2].enter(ask(tokens=1)) for _ in range(9)]
            for pool in pools:
                pool._batches.beat()
            await until(lambda: all(pool._last.held_tokens == 9 for pool in pools if pool._last), 60)
            server.kill()
            await until(lambda: all(pool.status.state.value == "divided" for pool in pools), 60)
            reaches = hide_store_from(pools[2])
            server.restart()
            await recovered(pools[:2])
            assert all(pool._last.expected == 3 for pool in pools[:2] if pool._last)
            server.kill()
            await until(lambda: all(pool.status.state.value == "divided" for pool in pools), 60)
            leases = [await pool.enter(ask(tokens=1)) for pool in pools[:2] for _ in range(4)]
            assert [lease.grant is not None for lease in leases] == [False] * 8  # it may have given what was free
            reaches()
            server.restart()
            await recovered(pools)
            for lease in [*held, *leases]:
                if not lease.settle():
                    await asyncio.wait_for(lease.wait(), 60)
                    assert lease.settle()
            await nothing_left(pools)


def hide_store_from(pool: RedisPool) -> Callable[[], None]:
    """From now on it cannot connect to the store, until the returned function is called."""

    async def unreachable() -> StoreConnection:
        raise StoreError("not for this replica")

    link: Any = pool._session
    connect, link._connect = link._connect, unreachable

    def reaches() -> None:
        link._connect = connect

    return reaches


@pytest.mark.long
async def test_a_replica_that_has_heard_of_a_part_of_the_others_takes_nothing_for_free(tmp_path: Path) -> None:
    """The store admits again without the third, which holds 8 of 12, and is lost before it was heard of."""
    with RedisServer(first_binary(), tmp_path) as server:
        async with replicas(policy(), [server.url] * 3) as pools:
            hide_store_from(pools[2])
            server.restart()
            await until(lambda: pools[0]._last is not None and pools[0]._last.unheard == 1, 60, "one is missing")
            await until(lambda: not (pools[0]._last and pools[0]._last.is_on_hold), 60, "it admits without it")
            known = pools[0]._known.at_loss(None)
            assert known is not None
            assert known.replicas == 3
            assert first_part(policy().rules, known).tokens == 0
