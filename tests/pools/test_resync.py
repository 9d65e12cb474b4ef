"""Much to do for the store: in slices, so that no call is long, and no replica takes a busy store for a lost one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import redis

from sidecar.policy.store import store_address
from sidecar.pools.redis import RedisPool, connector, protocol, resync
from sidecar.pools.redis.batch import MOST_OPERATIONS
from sidecar.pools.redis.protocol import BEAT_S, SILENCE_S, Reply
from sidecar.pools.redis.resync import STATED_AT_ONCE
from tests.pools.harness import ask, simple
from tests.pools.load import Load, nothing_left, recovered, replicas, until
from tests.pools.scripted import Scripted, entering
from tests.pools.test_faults import child
from tests.pools.test_script import Replicas, client, granted
from tests.pools.test_script import replicas as scripted_replicas
from tests.support.redis_servers import RedisServer, first_binary

pytestmark = pytest.mark.anyio
MANY = 1_500
MOST_COMMANDS = 6_000
"""Of one run of the script: some 20 ms. A count depends on no other process, unlike a duration."""

__all__ = ["client", "scripted_replicas"]


class Counting:
    """A client that knows how many commands the longest run of the script gave."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.most = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def eval(self, *arguments: Any) -> Any:
        return self._counted(self.client.eval, arguments)

    def evalsha(self, *arguments: Any) -> Any:
        return self._counted(self.client.evalsha, arguments)

    def _counted(self, call: Callable[..., Any], arguments: Any) -> Any:
        self.client.config_resetstat()
        try:
            return call(*arguments)
        finally:
            stats: Any = self.client.info("commandstats")
            self.most = max(self.most, sum(one["calls"] for one in stats.values()))


@pytest.fixture
def counting(redis_server: RedisServer) -> Any:
    with redis.Redis(host=redis_server.host, port=redis_server.port) as made:
        made.flushall()
        yield Counting(made)


def crowd(replica: Scripted, count: int, *, held: int = 0) -> None:
    """So many wait at a replica, after it was admitted `held` leases."""
    for start in range(0, held + count, 100):
        tickets = range(start, min(start + 100, held + count))
        replica.call(*(part for ticket in tickets for part in entering(ticket, waiting(ticket))))


def waiting(ticket: int) -> Any:
    return ask(tier=ticket % 2, tokens=1, tenant=f"t{ticket % 7}")


def steps(replica: Scripted, until_done: Any) -> list[Reply]:
    """Calls, each when the last said that there is something to do, until the condition holds."""
    replies: list[Reply] = []
    while not replies or not until_done(replies[-1]):
        if replies:
            assert replies[-1].change_after_us is not None, "nobody would go on"
            replica.clock.us += replies[-1].change_after_us
        replies.append(replica.call())
        assert len(replies) < 1_000
    return replies


def silent(seen: Sequence[Scripted]) -> None:
    """Those that are not among `seen` are dead by now, and no one has looked."""
    for _ in range(5):
        seen[0].clock.advance(BEAT_S - 0.05)
        for replica in seen:
            replica.call(kind=protocol.BEAT)
    seen[0].clock.advance(SILENCE_S - 5 * (BEAT_S - 0.05) + 0.01)


def test_a_dead_replica_with_many_waiting_is_swept_in_slices(counting: Any) -> None:
    pool = Replicas(counting, simple(tokens=10))
    one, dead = pool.one("a"), pool.one("dead")
    crowd(dead, MANY, held=6)
    one.enter(1, ask(tokens=10))
    silent([one])
    counting.most = 0
    replies = steps(one, lambda reply: reply.waiting == 0)
    assert len(replies) > 10
    assert 0 < counting.most < MOST_COMMANDS
    freed = next(number for number, reply in enumerate(replies) if reply.held_tokens == 10)
    assert freed <= 2
    assert min((reply.waiting for reply in replies[:freed]), default=MANY) > MANY - 16, "but for those first in order"
    assert [ticket for reply in replies for ticket in granted(reply)] == [1]
    assert {reply.replicas for reply in replies} == {1}
    keys = [key for key in counting.keys("admission:*") if b"dead" in key or key.endswith(b":d")]
    assert keys == []


def test_the_tickets_of_a_dead_replica_are_not_admitted_while_it_is_swept(client: Any) -> None:
    pool = Replicas(client, simple(tokens=10))
    one, dead = pool.one("a"), pool.one("dead")
    one.enter(0, ask(tokens=10))
    crowd(dead, 400)
    one.enter(1, ask(tier=1, tokens=10))
    silent([one])
    first = one.call(protocol.END, 0)
    replies = [first, *steps(one, lambda reply: reply.waiting == 0)]
    assert granted(first) == [1], "a live ticket does not wait until all of the dead are ended"
    assert [ticket for reply in replies for ticket in granted(reply)] == [1]
    assert all(reply.leases == (reply.held_tokens > 0) for reply in replies), "no lease of the dead"
    assert client.exists(f"{one.root}:{1}:o:dead") == 0


def test_a_good_bye_with_many_waiting_is_short_and_others_end_the_rest(counting: Any) -> None:
    pool = Replicas(counting, simple(tokens=10))
    one, leaving = pool.one("a"), pool.one("leaving")
    crowd(leaving, 500, held=10)
    one.enter(1, ask(tokens=10))
    counting.most = 0
    reply = leaving.call(kind=protocol.BYE)
    assert (reply.leases, reply.held_tokens) == (1, 10), "its own are free, and the other's is admitted"
    first, *_ = steps(one, lambda reply: reply.waiting == 0)
    assert counting.most < MOST_COMMANDS
    assert first.replicas == 1


def test_what_a_dead_replica_was_charged_comes_back_in_slices_too(counting: Any) -> None:
    pool = Replicas(counting, simple(tokens=10))
    one, dead = pool.one("a"), pool.one("dead")
    metered = lambda ticket: (protocol.METERED_ENTER, ticket, 0, "t", 1, 1, 1, -1, -1, MANY, 1_000_000, -1)  # noqa: E731
    for start in range(0, 1_000, 100):
        dead.call(*(part for ticket in range(start, start + 100) for part in metered(ticket)))
    silent([one])
    counting.most = 0
    steps(one, lambda reply: reply.waiting == reply.leases == 0)
    one.clock.advance(1)
    one.call()
    assert counting.most < MOST_COMMANDS
    assert not [key for key in counting.keys("admission:*") if b":m:" in key]
    reply = one.call(*metered(5))
    assert [verdict.over for verdict in reply.verdicts] == [None]


def test_a_replica_that_comes_back_while_it_is_swept_keeps_what_is_left(client: Any) -> None:
    pool = Replicas(client, simple(tokens=10))
    one, dead = pool.one("a"), pool.one("dead")
    one.enter(0, ask(tokens=10))
    crowd(dead, 500)
    silent([one])
    one.call()
    left = one.call().waiting
    assert 0 < left < 500
    statements = [part for ticket in range(500) for part in protocol.statement(ticket, waiting(ticket), 1_000_000)]
    reply = dead.sync(*statements, known=2, installs=False)
    assert (reply.waiting, reply.replicas, reply.is_stating) == (500, 2, True)
    while reply.is_stating:
        reply = dead.call(protocol.ALL_STATED)
    assert (reply.waiting, reply.replicas) == (500, 2)
    one.clock.advance(1)
    assert one.call().waiting == 500


def test_many_tickets_are_stated_by_many_calls_and_what_was_not_stated_is_ended_at_last(counting: Any) -> None:
    pool = Replicas(counting, simple(tokens=10))
    one = pool.one("a")
    crowd(one, 2 * MANY, held=10)
    kept = range(10, 2_000)
    counting.most = 0
    one.begin(
        *(part for lease in range(9) for part in protocol.statement(lease, waiting(lease), None)),
        protocol.LEASES_STATED,
    )
    for start in range(kept[0], kept[-1] + 1, 100):
        tickets = range(start, min(start + 100, 2_000))
        one.call(*(part for ticket in tickets for part in protocol.statement(ticket, waiting(ticket), 0)))
    one.call(*entering(5_000, waiting(0)))  # one that comes meanwhile is not ended with the rest
    replies = [one.call(protocol.ALL_STATED)]
    while replies[-1].is_stating:
        replies.append(one.call(protocol.ALL_STATED))
    assert counting.most < MOST_COMMANDS
    assert len(replies) > 3
    assert (replies[-1].leases, replies[-1].waiting) == (10, len(kept) + 1 - 1)
    assert not [key for key in counting.keys("admission:*") if b":k:" in key]


def test_what_was_stated_before_a_statement_broke_off_does_not_count_and_is_forgotten_in_slices(counting: Any) -> None:
    pool = Replicas(counting, simple(tokens=10))
    one = pool.one("a")
    crowd(one, MANY, held=10)
    one.begin(protocol.LEASES_STATED)
    for start in range(10, MANY, 100):
        tickets = range(start, min(start + 100, MANY))
        one.call(*(part for ticket in tickets for part in protocol.statement(ticket, waiting(ticket), 0)))
    (key,) = counting.keys("admission:*:k:a")
    assert counting.hlen(key) == MANY - 10
    counting.most = 0
    one.begin(*protocol.statement(0, waiting(0), None), protocol.LEASES_STATED)
    one.call(*protocol.statement(11, waiting(11), 0))
    left = [counting.hlen(key)]
    reply = one.call(protocol.ALL_STATED)
    while reply.is_stating:
        left.append(counting.hlen(key))
        reply = one.call(protocol.ALL_STATED)
    assert counting.most < MOST_COMMANDS
    assert (reply.leases, reply.waiting) == (2, 0), "11 went in where the other nine were"
    assert len([1 for before, after in pairwise(left) if before > after > 0]) >= 1
    assert not counting.exists(key)


def test_a_statement_that_breaks_off_is_begun_again(client: Any) -> None:
    pool = Replicas(client, simple(tokens=10))
    one, other = pool.one("a"), pool.one("b")
    crowd(one, 6, held=10)
    one.begin(*protocol.statement(0, waiting(0), None))
    assert other.call().is_on_hold
    reply = one.sync(*(part for lease in range(10) for part in protocol.statement(lease, waiting(lease), None)))
    assert (reply.is_on_hold, reply.leases, reply.waiting, reply.is_stating) == (False, 10, 0, False)
    one.begin()
    one.call(kind=protocol.BYE)
    assert not other.call().is_on_hold


# -- replicas, on a server that has much to do


async def enter_many(pool: RedisPool, count: int, tokens: int = 1) -> list[Any]:
    """Requests that came at once."""
    return list(await asyncio.gather(*(pool.enter(ask(tokens=tokens)) for _ in range(count))))


def longest_s(server: RedisServer) -> float:
    """The longest run of the script that the server has noted."""
    return max((entry[2] for entry in server.command("SLOWLOG", "GET", 1_000)), default=0) / 1e6


async def test_many_that_come_or_leave_at_once_travel_in_calls_of_bounded_size(redis_server: RedisServer) -> None:
    async with replicas(simple(tokens=10), [redis_server.url], name="burst") as (pool,):
        sizes: list[int] = []
        link: Any = pool._session
        take = link._batches.take

        def taken() -> Any:
            batch = take()
            sizes.append(batch.operations)
            return batch

        link._batches.take = taken
        leases = await enter_many(pool, 1_000)
        left = [lease.leave() if lease.grant is None else None for lease in leases]
        waits = [await figures for figures in left if figures is not None]
        assert len(waits) == 990
        assert all(wait is not None for wait in waits)
        for lease in leases:
            lease.settle()
        await nothing_left([pool])
        assert max(sizes) == MOST_OPERATIONS
        assert sum(sizes) == 2_000


async def test_a_pool_that_closes_with_more_to_say_than_one_call_may_tells_everyone(redis_server: RedisServer) -> None:
    async with replicas(simple(tokens=10), [redis_server.url], name="closes") as (pool,):
        leases = await enter_many(pool, 1_000)
        left = [lease.leave() for lease in leases]
        await pool.close()
        assert len(await asyncio.wait_for(asyncio.gather(*left), 60)) == 1_000


@pytest.mark.parametrize("is_displaced", [False, True], ids=["left", "displaced"])
async def test_a_request_that_ends_before_its_part_of_a_statement_does_not_come_back(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, is_displaced: bool
) -> None:
    monkeypatch.setattr(resync, "STATED_AT_ONCE", 1)
    name = f"ends {is_displaced}"
    async with replicas(simple(tokens=10, max_waiting=4), [redis_server.url], name=name) as (pool,):
        leases = await enter_many(pool, 5, tokens=10)
        before = pool._statement
        pool.change_rules(pool._sizes.rules)  # all is stated anew
        while pool._statement is before:  # noqa: ASYNC110  # as soon as its first part is on its way
            await asyncio.sleep(0)
        if is_displaced:
            leases.append(await pool.enter(ask(tokens=10, tenant="another")))
        else:
            await leases.pop().leave()
        await until(lambda: pool._session._statement is None)
        assert pool.state()["waiting"] == (4 if is_displaced else 3)
        for lease in leases:
            if not lease.settle():
                lease.leave()
        await nothing_left([pool])


async def test_replicas_with_many_waiting_state_them_to_an_empty_store_and_exceed_nothing(tmp_path: Path) -> None:
    await flushed_with(tmp_path, [STATED_AT_ONCE * 6 + 1] * 3)


@pytest.mark.soak
async def test_eight_replicas_with_25000_waiting_each_exceed_nothing_when_the_store_is_flushed(tmp_path: Path) -> None:
    await flushed_with(tmp_path, [25_000] * 8)


async def flushed_with(folder: Path, waiting_each: Sequence[int]) -> None:
    """All have many waiting, one has all leases; requests come and go on the others while all is stated."""
    with RedisServer(first_binary(), folder) as server:
        async with replicas(simple(tokens=40), [server.url] * len(waiting_each)) as pools:
            idle = await enter_many(pools[-1], 30)
            crowds = [await enter_many(pool, count, tokens=40) for pool, count in zip(pools, waiting_each, strict=True)]
            load = Load(pools[:1], tokens=1, held_s=(0.01, 0.05), tiers=1)
            await do(server, "CONFIG", "SET", "slowlog-log-slower-than", "1000")
            await do(server, "FLUSHALL")
            async with load.going_on(20):
                everyone = sum(waiting_each)
                await until(
                    lambda: pools[0]._last is not None and pools[0]._last.waiting >= everyone, 120, "all stated"
                )
                assert [pool.status.state.value for pool in pools] == ["shared"] * len(pools)
                for lease in [lease for crowd in crowds for lease in crowd]:
                    await lease.leave() if lease.id % 1_000 == 0 else lease.leave()
            assert load.peak <= 10
            for lease in idle:
                lease.settle()
            await nothing_left(pools)


async def do(server: RedisServer, *words: str) -> Any:
    """A command on the server, off the event loop."""
    return await asyncio.get_running_loop().run_in_executor(None, lambda: server.command(*words))


@pytest.mark.long
async def test_no_one_takes_the_store_for_lost_while_a_dead_replica_with_many_waiting_is_swept(tmp_path: Path) -> None:
    await killed_with(tmp_path, 5_000)


@pytest.mark.soak
async def test_no_one_takes_the_store_for_lost_while_one_with_125000_waiting_is_swept(tmp_path: Path) -> None:
    await killed_with(tmp_path, 125_000)


async def killed_with(folder: Path, count: int) -> None:
    """A process holds half of the pool and has many waiting, and is killed."""
    with RedisServer(first_binary(), folder) as server:
        command = ["-m", "tests.pools.crowded", server.url, "faults", "50", str(count)]
        async with child(*command) as process, replicas(simple(tokens=100), [server.url] * 2) as pools:
            assert (await asyncio.wait_for(process.stdout.readline(), 200)).decode().strip() == "waiting"  # type: ignore[union-attr]
            states: set[str] = set()
            load = Load(pools, tokens=1, held_s=(0.01, 0.05))
            async with load.going_on(20):
                ends_s = time.monotonic() + 240
                while pools[0]._last is None or pools[0]._last.waiting < count:  # it has heard of them
                    assert time.monotonic() < ends_s
                    await asyncio.sleep(0.01)
                process.kill()
                while not (pools[0]._last is not None and pools[0]._last.waiting < 20):
                    states |= {pool.status.state.value for pool in pools}
                    assert time.monotonic() < ends_s
                    await asyncio.sleep(0.01)
                before = load.admitted
                await asyncio.sleep(0.5)
            assert states == {"shared"}
            assert load.admitted > before
            assert load.refused == {}
            await nothing_left(pools)


# -- a store that is slow


@pytest.mark.hasty
@pytest.mark.alone
@pytest.mark.long
async def test_a_store_that_is_slow_is_not_lost(redis_server: RedisServer) -> None:
    silent_s = 1.2
    async with replicas(simple(tokens=10), [redis_server.url] * 2, name="slow") as pools:
        load = Load(pools, tokens=1)
        async with load.going_on(20):
            await asyncio.sleep(0.2)
            for _ in range(2):
                await do(redis_server, "CLIENT", "PAUSE", str(round(silent_s * 1_000)), "ALL")
                ends_s = time.monotonic() + silent_s + 0.3
                while time.monotonic() < ends_s:
                    assert [pool.status.state.value for pool in pools] == ["shared"] * 2
                    await asyncio.sleep(0.02)
        assert load.refused == {}
        await nothing_left(pools)


@pytest.mark.alone
@pytest.mark.hasty
async def test_a_store_that_hangs_is_lost_within_four_seconds(redis_server: RedisServer) -> None:
    """The negative control."""
    async with replicas(simple(tokens=10), [redis_server.url] * 2, name="hangs") as pools:
        load = Load(pools, tokens=1)
        async with load.going_on(20):
            redis_server.pause()
            try:
                await until(lambda: all(pool.status.state.value == "divided" for pool in pools), 5, "divided")
            finally:
                redis_server.resume()
            await recovered(pools)
        # The store hangs as the pool fills: by what a replica has not heard of then it may exceed its part (`alone`).
        await nothing_left(pools)


@pytest.mark.alone
async def test_a_closed_connection_is_known_at_once(tmp_path: Path) -> None:
    with RedisServer(first_binary(), tmp_path) as server:
        policy = replace(simple(tokens=10), pool="closed")
        pool = RedisPool(policy, connector(store_address(server.url), "closed"))
        await pool.open()
        server.kill()
        lease = await asyncio.wait_for(pool.enter(ask()), 1)
        assert pool.status.state.value == "divided"
        assert lease.grant is not None
        lease.settle()
        await pool.close()


def test_a_dead_replica_whose_records_are_all_read_at_once_is_ended_all_the_same(counting: Any) -> None:
    """A server answers a hash that it keeps as a list with all its entries, whatever number is asked for."""
    usual = counting.config_get("hash-max-listpack-*")
    for name in usual:
        counting.config_set(name, 100_000)
    try:
        pool = Replicas(counting, simple(tokens=10))
        one, dead = pool.one("a"), pool.one("dead")
        crowd(dead, 2 * MANY)
        (key,) = (key for key in counting.keys("admission:*dead") if counting.hlen(key) > MANY)
        assert counting.object("encoding", key) == b"listpack"
        silent([one])
        replies = steps(one, lambda reply: reply.waiting < 2 * MANY - 40)
        assert len(replies) < 100
    finally:
        for name, value in usual.items():
            counting.config_set(name, value)
