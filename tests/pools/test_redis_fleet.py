"""Several engines behind one shared pool: real servers, several replicas, and everything that may go wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import redis
from sidecar.pools.redis.protocol import SILENCE_S

from sidecar.errors import RequestTooLarge, StoreUnavailable
from sidecar.events import Obstacle, Placed, StoreState
from sidecar.policy.model import Policy, StoreLoss
from sidecar.policy.rules import Shares
from sidecar.policy.store import store_address
from sidecar.pools import Ask, EnginePool, Lease
from sidecar.pools.clock import monotonic_us
from sidecar.pools.engines import EngineOffer
from sidecar.pools.redis import RedisFleetPool, connector, protocol, session
from tests.pools.fleet_scripted import engines_policy
from tests.pools.load import until
from tests.support.redis_servers import RedisServer, first_binary
from tests.support.redis_topologies import cluster

pytestmark = pytest.mark.anyio
A, B = (EngineOffer(f"{name}#1", tokens=100, requests=10, prefill=20) for name in "ab")
Held = dict[str, tuple[int, int, int]]


ORDER = {"is_by_gain": False}


@pytest.fixture(autouse=True)
def quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a replica hears with a heartbeat comes nine times as soon."""
    monkeypatch.setattr(session, "BEAT_EVERY_S", session.BEAT_EVERY_S / 9)


@pytest.fixture(autouse=True)
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of every pool: by level, but where the test says otherwise."""
    monkeypatch.setitem(ORDER, "is_by_gain", getattr(request, "param", "level") == "gain")


in_both_orders = pytest.mark.parametrize(
    "order", ["level", pytest.param("gain", marks=pytest.mark.long)], indirect=True
)
"""For what a replica states of its tickets and leases, and the store keeps of them: by gain that is more."""


@pytest.fixture
def server(tmp_path: Path) -> RedisServer:
    """One that the test may kill."""
    return RedisServer(first_binary(), tmp_path)


@asynccontextmanager
async def replicas(
    url: str,
    number: int,
    *offers: EngineOffer,
    name: str = "fleet",
    clock: Callable[[], int] = monotonic_us,
    **more: object,
) -> AsyncIterator[list[RedisFleetPool]]:
    policy = replace(two_tiers(), pool=name, **more)  # type: ignore[arg-type]
    pools = [pool_of(url, policy, clock) for _ in range(number)]
    try:
        for pool in pools:
            if offers:
                pool.set_engines(offers)
            await pool.open()
        await until(lambda: all(pool.status.state is StoreState.SHARED for pool in pools), what="greeted")
        if number > 1:
            await asyncio.sleep(0.1)  # each subscribes to its grants: one that it misses comes with its heartbeat
        yield pools
    finally:
        for pool in pools:
            await pool.close()


def two_tiers() -> Policy:
    """A policy in the order of the test."""
    policy = engines_policy((Shares("high"), Shares("low")))
    return replace(policy, rules=replace(policy.rules, **ORDER))


def pool_of(url: str, policy: Policy, clock: Callable[[], int] = monotonic_us) -> RedisFleetPool:
    connect = connector(store_address(url), policy.pool, has_engines=True, **ORDER)
    return RedisFleetPool(policy, connect, clock)


def ask(tokens: int = 10, prompt: int = 1, **more: object) -> Ask:
    return Ask(0, "t", 1, tokens, 1, prompt=prompt, **more)  # type: ignore[arg-type]


async def granted(lease: Lease) -> str | None:
    return (await asyncio.wait_for(lease.wait(), 60)).engine


def held(pool: EnginePool) -> Held:
    return {it.id: (it.held_tokens, it.held_requests, it.unprefilled_tokens) for it in pool.engines()}


def blocked_s(pool: RedisFleetPool) -> float:
    found = pool.state()["no_engine_fits_s"]
    assert isinstance(found, float)
    return found


async def holds(pools: Sequence[EnginePool], expected: Held) -> None:
    for pool in pools:
        await until(lambda pool=pool: held(pool) == expected, 60, f"{expected}")


@in_both_orders
@pytest.mark.long
async def test_replicas_share_the_ledgers_of_all_engines(server: RedisServer) -> None:
    with server:
        async with replicas(server.url, 2, A, B) as pools:
            leases = [await pools[number % 2].enter(ask(prompt=5)) for number in range(4)]
            assert [await granted(lease) for lease in leases] == ["a#1", "b#1", "a#1", "b#1"]
            await holds(pools, {"a#1": (20, 2, 10), "b#1": (20, 2, 10)})
            assert pools[0].state()["capacity"] == {"tokens": 200, "requests": 20}
            for lease in leases:
                lease.prefilled()
                lease.prefilled()
            await holds(pools, {"a#1": (20, 2, 0), "b#1": (20, 2, 0)})
            for lease in leases:
                assert [lease.settle(), lease.settle()] == [True, False]
            await holds(pools, {"a#1": (0, 0, 0), "b#1": (0, 0, 0)})


async def test_the_first_byte_lets_a_request_of_another_replica_in_without_a_heartbeat(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "BEAT_EVERY_S", 600.0)
    monkeypatch.setattr(session, "SILENT_SUBSCRIPTION_S", 600.0)  # else it listens anew, and misses a grant
    with server:
        async with replicas(server.url, 2, A) as (one, other):
            await until(lambda: len(server.command("PUBSUB", "CHANNELS", "*")) == 2, what="each listens")
            large = await one.enter(ask(prompt=50))
            waiting = await other.enter(ask(prompt=5))
            assert waiting.grant is None
            large.prefilled()
            assert (await asyncio.wait_for(waiting.wait(), SILENCE_S / 2)).engine == "a#1"


async def test_no_request_goes_to_an_engine_that_its_replica_cannot_use(server: RedisServer) -> None:
    with server:
        async with replicas(server.url, 2, A, B) as (one, other):
            reached: list[frozenset[str]] = []
            one.on_reached_elsewhere = lambda names: reached.append(frozenset(names))
            one.set_engines([A._replace(takes_new=False), B])
            mine = [await one.enter(ask(tokens=20)) for _ in range(5)]
            assert [await granted(lease) for lease in mine] == ["b#1"] * 5
            waiting = await one.enter(ask(tokens=20, prompt=1, hits=(("a#1", 1),)))
            theirs = await other.enter(ask(tokens=20))
            assert (await granted(theirs), waiting.grant) == ("a#1", None)
            assert reached == [frozenset("a")]
            assert {it.id: it.takes_new for it in one.engines()} == {"a#1": True, "b#1": True}
            mine[0].settle()
            assert await granted(waiting) == "b#1"


async def test_a_replica_that_can_use_no_engine_holds_no_other_up(server: RedisServer) -> None:
    with server:
        async with replicas(server.url, 2, A) as (one, other):
            one.set_engines([A._replace(takes_new=False)])
            cut_off = [await one.enter(ask()) for _ in range(40)]
            theirs = await other.enter(ask())
            assert await granted(theirs) == "a#1"
            assert not any(lease.grant for lease in cut_off)
            one.set_engines([A])
            assert [await granted(lease) for lease in cut_off[:9]] == ["a#1"] * 9


@pytest.mark.long
async def test_mounted_replicas_of_an_engine_share_a_pool_and_each_uses_its_own(server: RedisServer) -> None:
    with server:
        async with replicas(server.url, 2) as (one, other):
            one.set_engines([A])
            other.set_engines([B])
            leases = [await pool.enter(ask(tokens=60)) for pool in (one, other, one)]
            assert [lease.grant and lease.grant.engine for lease in leases] == ["a#1", "b#1", None]
            names = {one.name: ["a"], other.name: ["b"]}
            for pool in (one, other):
                await until(lambda pool=pool: dict(pool.named_engines()) == names, 60, "lists that differ are visible")
            other.set_engines([A._replace(takes_new=False), B])
            one.set_engines([A, B._replace(takes_new=False)])
            for pool in (one, other):
                await until(lambda pool=pool: pool.named_engines() == {}, 60, "the same lists")


@pytest.mark.long
async def test_a_drain_reaches_all_replicas_and_ends_with_the_incarnation(server: RedisServer) -> None:
    with server:
        async with replicas(server.url, 2, A, B) as (one, other):
            drains: list[tuple[str, bool]] = []
            other.on_drain = lambda name, does: drains.append((name, does))
            running = await other.enter(ask())
            one.drain_engine("a", drains=True)
            leases = [await pool.enter(ask(tokens=1)) for pool in (one, other) for _ in range(3)]
            assert {await granted(lease) for lease in leases} == {"b#1"}
            await until(lambda: drains == [("a", True)], 60, "the other hears of it")
            assert running.grant
            assert running.grant.engine == "a#1"
            one.drain_engine("a", drains=False)
            await until(lambda: drains == [("a", True), ("a", False)], 60, "and of its end")
            other.drain_engine("a", drains=True)
            await until(lambda: len(drains) == 2, 60)
            one.set_engines([A._replace(id="a#2"), B])
            assert await granted(await one.enter(ask(tokens=1, prompt=3, hits=(("a#2", 3),)))) == "a#2"


@pytest.mark.parametrize("drains", [True, False])
async def test_an_answer_from_before_a_drain_or_its_end_does_not_undo_it(server: RedisServer, drains: bool) -> None:
    """The call that states the engines is on its way, and its answer has their ledgers."""
    with server:
        async with replicas(server.url, 2, A, B) as (pool, other):
            heard: list[tuple[str, bool]] = []
            if not drains:
                pool.drain_engine("a", drains=True)
                await until(lambda: not pool.engines()[0].takes_new, 60)
            pool.on_drain = lambda name, does: heard.append((name, does))
            pool.set_engines([A, B._replace(tokens=90)])
            await asyncio.sleep(0)
            assert pool._session
            assert pool._session._in_flight, "the statement's call is on its way"
            pool.drain_engine("a", drains=drains)
            for each in (pool, other):
                await until(lambda each=each: each.engines()[0].takes_new is not drains, 60)
            assert heard == []
            other.drain_engine("a", drains=not drains)
            await until(lambda: heard == [("a", not drains)], 60, "what others say later counts")


@pytest.mark.hasty
@pytest.mark.long
@pytest.mark.parametrize("is_known_lost", [True, False])
async def test_a_drain_of_a_time_without_the_store_counts_when_it_is_back(
    server: RedisServer, is_known_lost: bool
) -> None:
    """Said in a call that is never answered, or while the replica decides by itself."""
    with server:
        async with replicas(server.url, 2, A, B) as pools:
            heard: list[tuple[str, bool]] = []
            pools[0].on_drain = lambda name, does: heard.append((name, does))
            server.pause()
            if not is_known_lost:
                pools[0].drain_engine("a", drains=True)
            for pool in pools:
                await until(lambda pool=pool: pool.status.state is not StoreState.SHARED, 60)
            if is_known_lost:
                pools[0].drain_engine("a", drains=True)
            server.resume()
            for pool in pools:
                await until(lambda pool=pool: pool.status.state is StoreState.SHARED, 60)
            for pool in pools:
                await until(lambda pool=pool: [it.takes_new for it in pool.engines()] == [False, True], 60)
            assert heard == []
            pools[1].drain_engine("a", drains=False)
            await until(lambda: heard == [("a", False)], 60, "what others say later counts")


async def test_what_is_left_of_a_drained_incarnation_does_not_drain_the_next(server: RedisServer) -> None:
    with server:
        async with replicas(server.url, 1, A) as (one,):
            running = await one.enter(ask())
            one.drain_engine("a", drains=True)
            await until(lambda: not one.engines()[0].takes_new, 60)
            restarted = A._replace(id="a#2")
            one.set_engines([restarted])
            late = pool_of(server.url, replace(two_tiers(), pool="fleet"))
            heard: list[tuple[str, bool]] = []
            late.on_drain = lambda name, does: heard.append((name, does))
            late.set_engines([restarted])
            await late.open()
            try:
                await holds([late], {"a#1": (10, 1, 1), "a#2": (0, 0, 0)})
                assert heard == []
                assert running.settle()
            finally:
                await late.close()


@pytest.mark.long
@pytest.mark.parametrize("first", [1, 1_795_690_000_000_123], ids=["counted", "in_us"])
async def test_two_replicas_that_see_one_restart_raise_the_incarnation_once(server: RedisServer, first: int) -> None:
    """A proxy counts from 1; an engine that is mounted is numbered by the time of its start."""
    before, after = f"a#{first}", f"a#{first + 1}"
    begun = A._replace(id=before)
    with server:
        async with replicas(server.url, 3, begun) as pools:
            heard: list[tuple[str, int, bool]] = []
            pools[2].on_incarnation = lambda *news: heard.append(news)
            old = await pools[0].enter(ask(prompt=5))
            restarted = begun._replace(id=after)
            pools[0].set_engines([restarted])
            pools[1].set_engines([restarted])
            new = await pools[1].enter(ask(prompt=7))
            assert await granted(new) == after
            await holds(pools, {before: (10, 1, 5), after: (10, 1, 7)})
            assert set(heard) == {("a", first + 1, True)}
            assert {it.id: it.takes_new for it in pools[2].engines()} == {before: False, after: True}
            old.settle()
            pools[2].set_engines([restarted])
            await holds(pools, {after: (10, 1, 7)})  # never negative: the old one's ledger is its own
            policy = replace(two_tiers(), pool="fleet")
            late = pool_of(server.url, policy)
            adopted: list[tuple[str, int, bool]] = []
            late.on_incarnation = lambda *news: adopted.append(news)
            late.set_engines([begun])
            await late.open()
            await until(lambda: bool(adopted), 60)
            assert adopted[0] == ("a", first + 1, False)
            await late.close()


async def test_a_cap_holds_for_all_replicas_and_ends_by_itself(server: RedisServer) -> None:
    with server:
        async with replicas(server.url, 2, A, B) as (one, other):
            running, elsewhere, refused = [await one.enter(ask()) for _ in range(3)]
            assert refused.grant
            assert refused.grant.engine == "a#1"
            one.cap_engine("a#1", 1.0)
            assert (await asyncio.wait_for(refused.hand_back(), 60)).engine == "b#1"
            assert await granted(await other.enter(ask(prompt=3, hits=(("a#1", 3),)))) == "b#1"
            other.set_engines([A, B._replace(takes_new=False)])
            waiting = await other.enter(ask())
            assert waiting.grant is None
            assert await granted(waiting) == "a#1"
            assert running.grant
            assert elsewhere.grant


async def test_a_cap_rises_with_answers_for_all_replicas(server: RedisServer) -> None:
    with server:
        async with replicas(server.url, 2, A) as (one, other):
            for _ in range(2):
                await one.enter(ask())
            one.cap_engine("a#1", 30.0, refused=0)
            await (await one.enter(ask())).leave()  # behind it: the store has heard of it
            first, second = await other.enter(ask()), await other.enter(ask())
            assert (first.grant, second.grant) == (None, None)
            one.raise_cap("none#1", 5)
            one.raise_cap("a#1", 1)
            assert await granted(first) == "a#1"
            await asyncio.sleep(0.1)
            assert second.grant is None


@pytest.mark.long
async def test_a_grant_says_why_it_got_its_engine_by_the_store_and_without_it(server: RedisServer) -> None:
    with server:
        async with replicas(server.url, 2, A, B) as (one, other):
            await one.enter(ask(tokens=30, prompt=5))
            hits = (("a#1", 7), ("b#1", 2))
            lease = await other.enter(ask(tokens=20, prompt=8, hits=hits))
            assert await granted(lease) == "a#1"
            assert lease.grant
            assert lease.grant.placed == Placed(100, 10, 30, 1, 5, prompt=8, hits=hits)
            assert await granted(await other.enter(ask(tokens=60))) == "b#1"
            large = await one.enter(ask(tokens=70))  # 90 are free, 50 and 40
            assert large.grant is None
            await asyncio.sleep(0.2)
            one.set_engines([A, B, A._replace(id="c#1")])
            assert await granted(large) == "c#1"
            assert large.grant
            assert large.grant.placed
            assert large.grant.placed.claimed_us > 100_000
            for pool in (one, other):  # the other hears of it with its heartbeat
                await until(lambda pool=pool: 0.1 < blocked_s(pool) < 10, 60, "how long no engine fitted")
            server.kill()
            await until(lambda: other.status.state is not StoreState.SHARED, 60)
            alone = await other.enter(ask(tokens=1, prompt=1))
            assert alone.grant
            assert alone.grant.placed
            assert alone.grant.placed.prompt == 1
            assert 0.1 < blocked_s(other) < 10


async def test_an_engine_that_broke_a_request_does_not_get_it_again(server: RedisServer) -> None:
    with server:
        async with replicas(server.url, 1, A, B) as (pool,):
            lease = await pool.enter(ask())
            assert await granted(lease) == "a#1"
            assert (await asyncio.wait_for(lease.hand_back(("a",)), 60)).engine == "b#1"
            waits = lease.hand_back(("b",))
            await asyncio.sleep(0.2)
            assert not waits.done()
            pool.set_engines([A, B, A._replace(id="c#1")])
            assert (await asyncio.wait_for(waits, 60)).engine == "c#1"


async def test_a_name_that_no_json_may_have_unescaped_ends_no_replicas_calls(server: RedisServer) -> None:
    odd = EngineOffer('a"\\000\tb:80#1', tokens=100, requests=10, prefill=20)
    with server:
        async with replicas(server.url, 2, A) as (one, other):
            one.set_engines([A, odd])
            await until(lambda: odd.id in held(one), 60, "the engine")
            other.set_engines([A, B])
            await until(lambda: B.id in held(other), 60, "the other engine")
            assert one.readiness() == other.readiness() == ()
            leases = [await other.enter(ask(hits=((B.id, 1),))), await one.enter(ask())]
            assert [await granted(lease) for lease in leases] == [B.id, A.id]


async def test_sizes_obstacles_and_requests_that_wait_for_engines(server: RedisServer) -> None:
    with server:
        async with replicas(server.url, 1) as (pool,):
            huge, small = await pool.enter(ask(tokens=10**9)), await pool.enter(ask())
            assert (huge.grant, small.grant) == (None, None)
            assert pool.obstacle(ask())[0] is Obstacle.ENGINE
            pool.set_engines([A])
            assert await granted(small) == "a#1"
            with pytest.raises(RequestTooLarge):
                await huge.wait()
            with pytest.raises(RequestTooLarge, match="allows 100"):
                await pool.enter(ask(tokens=101))
            pool.set_engines([A, B])
            for _ in range(2):
                await pool.enter(ask(tokens=60))
            waiting = await pool.enter(ask(tokens=60))
            assert waiting.grant is None
            cause, sentence = pool.obstacle(ask(tokens=60))
            assert (cause, "none of 2 engines has room" in sentence) == (Obstacle.NO_ROOM, True)


async def test_slow_start_is_by_the_age_that_a_replica_states_and_not_by_its_clock(server: RedisServer) -> None:
    def fast() -> int:
        return monotonic_us() + 10**12

    with server:
        async with replicas(server.url, 1, clock=fast) as (one,), replicas(server.url, 1) as (other,):
            one.set_engines([A._replace(ramp_us=60_000_000, since_us=one.now_us() - 30_000_000)])
            other.set_engines([A._replace(ramp_us=60_000_000, since_us=other.now_us() - 30_000_000)])
            for pool in (one, other):
                await until(lambda pool=pool: [it.effective_tokens for it in pool.engines()] == [60], 60)


@in_both_orders
@pytest.mark.long
async def test_a_flushed_store_has_the_ledgers_again_from_the_leases(server: RedisServer) -> None:
    with server:
        async with replicas(server.url, 2, A, B) as pools:
            leases = [await pools[number % 2].enter(ask(prompt=5)) for number in range(6)]
            leases[0].prefilled()
            pools[0].drain_engine("b", drains=True)
            expected = {"a#1": (30, 3, 10), "b#1": (30, 3, 15)}
            await holds(pools, expected)
            for pool in pools:
                await until(lambda pool=pool: list(pool._draining) == ["b"], 60)
            server.command("FLUSHALL")
            await until(lambda: not held(pools[0]) or server.command("KEYS", "*:e"), 60)
            await holds(pools, expected)
            lease = await pools[1].enter(ask())
            assert await granted(lease) == "a#1"  # b still drains
            for each in (*leases, lease):
                assert each.settle()
            await holds(pools, {"a#1": (0, 0, 0), "b#1": (0, 0, 0)})
            assert [store["late_ends"] for pool in pools if isinstance(store := pool.state()["store"], dict)] == [0, 0]


@in_both_orders
@pytest.mark.parametrize("lost", ["e", "i", "n", "y"])
async def test_the_loss_of_one_key_leaves_no_one_waiting_and_no_ledger_wrong(server: RedisServer, lost: str) -> None:
    """A store that is full evicts one key and keeps the others: here the ledgers, or the claimants."""
    with server, redis.Redis(host=server.host, port=server.port) as client:
        async with replicas(server.url, 2, A, B) as pools:
            leases = [await pool.enter(ask()) for pool in pools]
            assert {await granted(lease) for lease in leases} == {"a#1", "b#1"}
            waiting = [await pools[0].enter(ask(tokens=95, hits=(("a#1", 1),))) for _ in range(3)]
            (key,) = client.keys(f"*:{lost}")
            client.delete(key)
            for lease in leases:
                lease.settle()
            for lease in waiting:
                await granted(lease)
                lease.settle()
            await holds(pools, {"a#1": (0, 0, 0), "b#1": (0, 0, 0)})


@pytest.mark.long
async def test_a_killed_replica_gives_back_what_it_held_and_its_engines_are_no_longer_named(
    server: RedisServer,
) -> None:
    with server:
        async with (
            replicas(server.url, 1, A, B) as (survivor,),
            replicas(server.url, 1, A, B._replace(id="c#1")) as (dead,),
        ):
            lease = await dead.enter(ask(tokens=60, prompt=9, hits=(("c#1", 9),)))
            assert await granted(lease) == "c#1"
            await holds([survivor], {"a#1": (0, 0, 0), "b#1": (0, 0, 0), "c#1": (60, 1, 1)})
            assert dead._session
            dead._session._task.cancel()
            await until(lambda: set(held(survivor)) == {"a#1", "b#1"}, 60, "its engines are gone with it")
            assert survivor.named_engines() == {}
            assert survivor.state()["capacity"] == {"tokens": 200, "requests": 20}


@in_both_orders
@pytest.mark.long
@pytest.mark.parametrize("mode", [StoreLoss.DIVIDE, StoreLoss.CLOSED])
async def test_without_the_store_no_engine_holds_more_than_it_can(server: RedisServer, mode: StoreLoss) -> None:
    with server:
        async with replicas(server.url, 3, A, B, on_store_loss=mode) as pools:
            before = [await pool.enter(ask(tokens=20)) for pool in pools]
            for pool in pools:
                await until(lambda pool=pool: sum(tokens for tokens, *_ in held(pool).values()) == 60, 60)
            server.kill()
            for pool in pools:
                await until(lambda pool=pool: pool.status.state is not StoreState.SHARED, 60)
            if mode is StoreLoss.CLOSED:
                with pytest.raises(StoreUnavailable):
                    await pools[0].enter(ask())
            else:
                leases = [await pool.enter(ask(tokens=10)) for pool in pools for _ in range(12)]
                engines = [lease.grant.engine for lease in (*before, *leases) if lease.grant]
                on = {name: sum(engine == name for engine in engines) for name in ("a#1", "b#1")}
                tokens = {
                    name: sum(
                        lease.ask.tokens for lease in (*before, *leases) if lease.grant and lease.grant.engine == name
                    )
                    for name in ("a#1", "b#1")
                }
                assert max(tokens.values()) <= 100
                assert max(on.values()) <= 10
                assert sum(tokens.values()) > 100
                assert all(len(pool.engines()) == 2 for pool in pools)
                for lease in leases[:3]:
                    lease.prefilled()
            server.restart()
            for pool in pools:
                await until(lambda pool=pool: pool.status.state is StoreState.SHARED, 60)
            tokens_of = {it.id: it.held_tokens for it in pools[0].engines()}
            assert max(tokens_of.values()) <= 100
            for lease in before:
                assert lease.settle()


@pytest.mark.hasty
@pytest.mark.long
async def test_a_paused_store_is_the_store_again(server: RedisServer) -> None:
    with server:
        async with replicas(server.url, 2, A, B) as pools:
            lease = await pools[0].enter(ask(prompt=9))
            server.pause()
            for pool in pools:
                await until(lambda pool=pool: pool.status.state is not StoreState.SHARED, 60)
            lease.prefilled()
            own = await pools[1].enter(ask(prompt=4))
            assert await granted(own) in ("a#1", "b#1")
            server.resume()
            for pool in pools:
                await until(lambda pool=pool: pool.status.state is StoreState.SHARED, 60)
            await until(lambda: sum(it.unprefilled_tokens for it in pools[0].engines()) == 4, 60)
            own.settle()
            lease.settle()
            await holds(pools, {"a#1": (0, 0, 0), "b#1": (0, 0, 0)})


async def test_another_weight_and_other_shares_reach_the_script(server: RedisServer) -> None:
    with server:
        async with replicas(server.url, 1, A, B) as (pool,):
            first = await pool.enter(ask(tokens=60, prompt=15))
            assert await granted(first) == "a#1"
            first.prefilled()
            assert await granted(await pool.enter(ask(prompt=8, hits=(("a#1", 8),)))) == "a#1"
            pool.change_weight(1)
            pool.change_policy(pool._sizes.policy)
            root = protocol.root_key("fleet", has_engines=True, **ORDER)
            await until(
                lambda: '"low"],1,' in str(server.command("HGET", root, "rules")), 60, "the weight in the store"
            )
            assert await granted(await pool.enter(ask(prompt=3, hits=(("a#1", 3),)))) == "b#1"


@pytest.mark.long
async def test_a_three_master_cluster_carries_the_pools_of_several_models_on_several_nodes(tmp_path: Path) -> None:
    names = ["default/llama-70b", "default/qwen-7b", "default/mixtral", "default/phi", "default/gemma"]
    with cluster(first_binary(), tmp_path) as nodes:
        for node in nodes.nodes:  # or the others stop serving, too, a second after one is gone
            node.command("CONFIG", "SET", "cluster-require-full-coverage", "no")
        owners = {name: nodes.owner_of(protocol.root_key(name, has_engines=True, **ORDER)) for name in names}
        assert len({owner.port for owner in owners.values()}) == 3
        opened = [replicas(nodes.url, 2, A, B, name=name) for name in names]
        pools = {name: await each.__aenter__() for name, each in zip(names, opened, strict=True)}
        try:
            for name in names:
                leases = [await pools[name][number % 2].enter(ask(prompt=5)) for number in range(4)]
                assert [await granted(lease) for lease in leases] == ["a#1", "b#1", "a#1", "b#1"]
                key = protocol.root_key(name, has_engines=True, **ORDER)
                assert owners[name].command("EXISTS", key) == 1
            for name in names:
                await holds(pools[name], {"a#1": (20, 2, 10), "b#1": (20, 2, 10)})
            owners[names[0]].kill()
            for pool in pools[names[0]]:
                await until(lambda pool=pool: pool.status.state is not StoreState.SHARED, 60)
            others = [name for name in names if owners[name] is not owners[names[0]]]
            assert others
            for name in others:
                for pool in pools[name]:
                    assert pool.status.state is StoreState.SHARED
        finally:
            for each in opened:
                await each.__aexit__(None, None, None)
