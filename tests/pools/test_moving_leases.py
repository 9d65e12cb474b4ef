"""Leases that change their size while they run, in every pool: who gets in, what the store has, and what it costs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from oracle import Oracle, Policy
from sidecar.pools.fleet import FleetPool
from sidecar.pools.local import LocalPool
from sidecar.pools.redis.batch import MOST_RESIZES, SHRINKS_WITHIN_S, BatchQueue
from sidecar.pools.redis.protocol import BEAT_S, END, RESIZE

from sidecar.errors import RequestTooLarge, TenantLimit
from sidecar.policy.model import Limits
from sidecar.policy.rules import Shares, pool_rules
from sidecar.policy.store import store_address
from sidecar.pools import Ask, Lease, Pool
from sidecar.pools.base import new_lease
from sidecar.pools.engines import WEIGHT_PERCENT, EngineOffer
from sidecar.pools.ledger_pool import LedgerPool
from sidecar.pools.redis import RedisFleetPool, RedisPool, connector
from tests.pools.conftest import in_both_orders
from tests.pools.fleet_scripted import engines_policy
from tests.pools.harness import Clock, Harness, ask, policy_of, simple
from tests.pools.load import until
from tests.support.examples import examples
from tests.support.redis_servers import RedisServer, first_binary

anyio = pytest.mark.anyio
SHARES = (Shares("high"), Shares("low"))
CAPACITY = 100
ENGINE = EngineOffer("a#1", tokens=CAPACITY, requests=1_000)
KINDS = ["local", "fleet", "core", "core fleet", "redis", "redis fleet"]


@asynccontextmanager
async def opened(kind: str, server: RedisServer, name: str = "moving") -> AsyncIterator[Pool]:
    """A pool of 100 tokens of every kind."""
    one, several = replace(simple(tokens=CAPACITY), pool=name), replace(engines_policy(SHARES), pool=name)
    pool: Any
    if kind == "local":
        pool = LocalPool(one)
    elif kind == "fleet":
        pool = FleetPool(several)
    elif kind == "core":
        pool = LedgerPool(one)
    elif kind == "core fleet":
        pool = LedgerPool(several, weight_percent=WEIGHT_PERCENT)
    elif kind == "redis":
        pool = RedisPool(one, connector(store_address(server.url), name))
    else:
        pool = RedisFleetPool(several, connector(store_address(server.url), name, has_engines=True))
    if "fleet" in kind:
        pool.set_engines([ENGINE])
    try:
        await pool.open()
        await until(lambda: not pool.readiness(), what="the pool is open: a busy machine may greet too late")
        yield pool
    finally:
        await pool.close()


async def quiet(pool: Any) -> None:
    """Returns when the pool has done all that was asked of it."""
    await asyncio.sleep(0)
    if not isinstance(pool, RedisPool):
        return
    for _ in range(2):  # the first answer may be that of a call that was on its way
        before = pool._last
        pool._batches.wake()
        await until(lambda before=before: pool._last is not before, 60, "an answer")


def held(pool: Pool) -> int:
    tiers: Any = pool.state()["tiers"]
    return sum(tier["held"]["tokens"] for tier in tiers)


def stored(server: RedisServer) -> list[int]:
    """The size of every lease in the store, of any pool."""
    with redis.Redis(host=server.host, port=server.port) as client:
        records = [text for key in client.keys("*:r:*") for text in client.hgetall(key).values()]
    return sorted(int(text.split()[2]) for text in records if text.startswith(b"L"))


# -- who gets in


@anyio
@pytest.mark.parametrize("kind", KINDS)
async def test_a_smaller_lease_lets_others_in_and_growth_is_never_refused(kind: str, redis_server: RedisServer) -> None:
    async with opened(kind, redis_server, f"smaller {kind}".replace(" ", "-")) as pool:
        running = await pool.enter(ask(tokens=80))
        await running.wait()
        first, second = await pool.enter(ask(tokens=30)), await pool.enter(ask(tokens=30))
        assert (first.grant, second.grant) == (None, None)
        assert running.resize(70)
        await quiet(pool)
        assert (first.grant is not None, second.grant) == (True, None)
        assert running.resize(500)
        await quiet(pool)
        assert held(pool) == 530
        first.settle()
        await quiet(pool)
        assert second.grant is None, "the leases hold more than the pool"
        assert running.resize(71)
        await quiet(pool)
        assert second.grant is None
        assert running.resize(70)
        await quiet(pool)
        assert second.grant is not None
        assert [running.settle(), running.resize(1), held(pool) > 0] == [True, False, True]
        with pytest.raises(ValueError, match="at least 1 token, not 0"):
            second.resize(0)


@anyio
@pytest.mark.parametrize("kind", KINDS)
async def test_a_lease_that_is_handed_back_asks_for_what_it_held_last(kind: str, redis_server: RedisServer) -> None:
    async with opened(kind, redis_server, f"back {kind}".replace(" ", "-")) as pool:
        blocker = await pool.enter(ask(tokens=60))
        lease = await pool.enter(ask(tokens=40, tier=1))
        await lease.wait()
        lease.resize(90)
        lease.resize(30)
        blocker.resize(75)
        lease.hand_back()
        await quiet(pool)
        assert lease.grant is None, "30 do not fit beside 75"
        blocker.resize(70)
        await quiet(pool)
        assert lease.grant is not None
        assert held(pool) == 100


@in_both_orders
@anyio
async def test_a_chosen_lease_that_shrinks_or_grows_waits_again_with_its_last_size(harness: Harness) -> None:
    tiers = (Shares("high", preempt_after_us=0), Shares("low", preemptible=True))
    policy = policy_of(pool_rules(tokens=CAPACITY, requests=None, tiers=tiers, max_preemptions=2))
    clock = Clock()
    pool = await harness.pool(policy, clock)
    low = await pool.enter(ask(tier=1, tokens=90))
    chosen: list[None] = []
    low.on_preempt = lambda: chosen.append(None)
    high = await pool.enter(ask(tokens=60))
    await harness.quiet(pool)
    assert (len(chosen), high.grant) == (1, None)
    low.resize(95)
    low.resize(50)
    low.requeue()
    await harness.quiet(pool)
    assert high.grant is not None
    assert low.grant is None
    high.resize(50)
    await harness.quiet(pool)
    assert low.grant is not None, "it holds 50 now"
    assert held(pool) == 100


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("enter"), st.integers(0, 1), st.integers(1, CAPACITY)),
        st.tuples(st.just("resize"), st.integers(0, 30), st.integers(1, 90)),
        st.tuples(st.just("resize"), st.integers(0, 30), st.integers(1, 3 * CAPACITY)),
        st.tuples(st.sampled_from(["end", "leave", "hand_back"]), st.integers(0, 30)),
    ),
    min_size=10,
    max_size=40,
)


class Compared:
    """A pool beside the slow, literal oracle. Every operation is followed by a decision of both."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.oracle = Oracle(Policy((CAPACITY, None), SHARES))
        self.leases: dict[str, Lease] = {}
        self.now_us = 0

    async def play(self, step: tuple[Any, ...]) -> None:
        self.now_us += 1
        held_before = {request.id for request in self.oracle.held()}
        if step[0] == "enter":
            name = str(len(self.leases))
            self.leases[name] = await self.pool.enter(ask(step[1], step[2]))
            self.oracle.submit(name, tier=step[1], tokens=step[2], now_us=self.now_us, tenant="t")
        else:
            self._change(*step)
        is_over_full = self.oracle.used()[0] > CAPACITY
        self.oracle.dispatch(self.now_us)
        await quiet(self.pool)
        ours = {name for name, lease in self.leases.items() if lease.grant is not None and not lease.is_over}
        assert ours == {request.id for request in self.oracle.held()}, step
        assert not is_over_full or ours <= held_before
        assert held(self.pool) == self.oracle.used()[0] == sum(self.leases[name].ask.tokens for name in ours), step

    def _change(self, verb: str, which: int, tokens: int = 0) -> None:
        found = self.oracle.waiting() if verb == "leave" else self.oracle.held()
        if not found:
            return
        name = found[which % len(found)].id
        lease = self.leases[name]
        if verb == "resize":
            assert lease.resize(tokens)
            self.oracle.resize(name, tokens)
        elif verb == "end":
            assert lease.settle()
            self.oracle.settle(name, self.now_us)
        elif verb == "leave":
            lease.leave()
            self.oracle.cancel(name)
        elif lease.ask.tokens <= CAPACITY:  # else it is refused: the pool could never admit it
            lease.hand_back()
            self.oracle.hand_back(name, self.now_us)


async def compare(kind: str, server: RedisServer, steps: list[tuple[Any, ...]]) -> None:
    async with opened(kind, server) as pool:
        compared = Compared(pool)
        for step in steps:
            await compared.play(step)
        if kind.startswith("redis"):
            assert stored(server) == sorted(request.held_tokens for request in compared.oracle.held())


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@given(steps=STEPS)
@settings(
    max_examples=examples(4),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
def test_every_pool_admits_as_the_literal_rules_do_whatever_size_leases_take(
    kind: str, redis_server: RedisServer, steps: list[tuple[Any, ...]]
) -> None:
    with redis.Redis(host=redis_server.host, port=redis_server.port) as client:
        client.flushall()
    asyncio.run(compare(kind, redis_server, steps))


def test_a_pool_that_forgets_shrinking_is_noticed(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    monkeypatch.setattr(BatchQueue, "resize", lambda *_, **__: None)
    steps = [("enter", 0, 90), ("enter", 0, 30), ("resize", 0, 10)]
    with pytest.raises(AssertionError):
        asyncio.run(compare("redis", redis_server, steps))


# -- what it costs


@anyio
async def test_many_shrinks_of_one_tick_are_one_decision() -> None:
    pool = LocalPool(simple(tokens=1_000))
    leases = [await pool.enter(ask(tokens=100)) for _ in range(10)]
    waiting = [await pool.enter(ask(tokens=90)) for _ in range(2)]
    decisions: list[int] = []
    decide = pool._runtime.dispatch
    pool._runtime.dispatch = lambda now_us: (decisions.append(now_us), decide(now_us))[1]  # type: ignore
    for lease in leases:
        lease.resize(120)
    await asyncio.sleep(0)
    assert decisions == []
    for lease in leases:
        lease.resize(90)
    assert waiting[0].grant is None
    await asyncio.sleep(0)
    assert (len(decisions), waiting[0].grant is not None, waiting[1].grant) == (1, True, None)
    for lease in leases:
        lease.resize(90)  # as they were
    await asyncio.sleep(0)
    assert len(decisions) == 1
    await pool.close()


def operations_of(queue: BatchQueue) -> list[Any]:
    return list(queue.take().arguments)


def granted(number: int, tokens: int) -> Lease:
    lease = new_lease(None, number, ask(tokens=tokens), 0)  # type: ignore[arg-type]
    lease.grant = object()  # type: ignore[assignment]
    return lease


def sized(lease: Lease, tokens: int, queue: BatchQueue, *, is_awaited: bool = False) -> None:
    freed = lease.ask.tokens - tokens
    lease.ask = ask(tokens=tokens)
    queue.resize(lease, freed, is_awaited=is_awaited)


@anyio
async def test_the_last_size_of_each_lease_is_said_and_none_of_one_that_is_over() -> None:
    queue = BatchQueue()
    one, other = granted(1, 50), granted(2, 50)
    for tokens in (60, 10, 40):
        sized(one, tokens, queue)
    sized(other, 20, queue)
    queue.end(other, None, None)
    batch = queue.take()
    assert batch.arguments == [RESIZE, 1, 40, END, 2]
    assert batch.freed_tokens == 10 + 50, "what the store has of them"
    assert operations_of(queue) == []
    sized(one, 70, queue)
    queue.requeue(one, 0)
    batch = queue.take()
    assert RESIZE not in batch.arguments
    assert batch.freed_tokens == 40
    sized(one, 80, queue)
    queue.take_all()
    assert operations_of(queue) == [], "a statement says the size"


@anyio
async def test_a_call_takes_so_many_sizes_and_the_next_follows_at_once() -> None:
    queue = BatchQueue()
    for number in range(MOST_RESIZES + 1):
        sized(granted(number, 50), 10, queue)
    queue.wake()
    assert len(operations_of(queue)) == 3 * MOST_RESIZES
    await asyncio.wait_for(queue.filled(), 60)
    assert len(operations_of(queue)) == 3
    assert not queue._reason.is_set()


@anyio
async def test_sizes_of_an_idle_pool_cost_no_call_and_the_store_has_the_last_with_the_next_heartbeat(
    redis_server: RedisServer,
) -> None:
    async with opened("redis", redis_server, "idle") as pool:
        assert isinstance(pool, RedisPool)
        leases = [await pool.enter(ask(tokens=5)) for _ in range(10)]
        await quiet(pool)
        calls, began_s = pool.round_trips, asyncio.get_running_loop().time()
        for tokens in range(1, 201):
            for lease in leases:
                lease.resize(tokens)
            await asyncio.sleep(0.005)
        for lease in leases:
            lease.resize(7)
        await until(lambda: held(pool) == 70, what="the last sizes")
        took_s = asyncio.get_running_loop().time() - began_s
        assert pool.round_trips - calls <= 1 + took_s / (0.9 * BEAT_S)


@anyio
@pytest.mark.alone
async def test_a_waiting_request_hears_of_room_within_a_quarter_of_a_second_for_four_calls_a_second(
    redis_server: RedisServer,
) -> None:
    async with opened("redis", redis_server, "busy") as pool, opened("redis", redis_server, "busy") as other:
        assert isinstance(pool, RedisPool)
        running = await pool.enter(ask(tokens=100))
        waiting = await other.enter(ask(tokens=10))
        await quiet(pool)
        calls = pool.round_trips
        running.resize(200)
        running.resize(99)
        await asyncio.sleep(0.02)
        assert pool.round_trips == calls
        for tokens in range(98, 92, -1):
            running.resize(tokens)
            await asyncio.sleep(0.05)
        assert waiting.grant is None
        assert 1 <= pool.round_trips - calls <= 3
        running.resize(90)
        await asyncio.wait_for(waiting.wait(), 4 * SHRINKS_WITHIN_S)
        assert held(pool) <= 100


# -- the store is lost and comes back


@anyio
async def test_the_last_size_counts_in_a_part_and_in_the_statement_after_it(tmp_path: Path) -> None:
    server = RedisServer(first_binary(), tmp_path)
    server.start()
    try:
        async with opened("redis", server) as pool:
            assert isinstance(pool, RedisPool)
            lease = await pool.enter(ask(tokens=60))
            waiting = await pool.enter(ask(tokens=60))
            lease.resize(95)  # the store never hears of it
            server.kill()
            await until(lambda: pool._partition is not None, 60, "the part")
            assert held(pool) == 95
            lease.resize(90)
            lease.resize(40)
            await until(lambda: waiting.grant is not None, 60, "the part has room")
            waiting.resize(33)
            server.restart()
            await until(lambda: not pool.readiness() and pool._outage is None, 20, "the store")
            await quiet(pool)
            assert stored(server) == [33, 40]
            assert held(pool) == 73
    finally:
        server.stop()


# -- the most that a request may use


@anyio
async def test_the_size_limit_counts_the_most_and_room_what_is_held(harness: Harness) -> None:
    pool = await harness.pool(simple(tokens=100), Clock())
    leases = [await pool.enter(Ask(0, "t", 1, 25, 1, most=100)) for _ in range(5)]
    assert [lease.grant is not None for lease in leases] == [True, True, True, True, False]
    with pytest.raises(RequestTooLarge, match=r"would hold 101 tokens \(prompt and maximum output\)"):
        await pool.enter(Ask(0, "t", 1, 25, 1, most=101))
    with pytest.raises(RequestTooLarge, match="would hold 101 tokens"):
        await pool.enter(Ask(0, "t", 1, 101, 1, most=50))
    reported = leases[4].wait()
    pool.change_rules(simple(tokens=99).rules)
    with pytest.raises(RequestTooLarge, match="allows 99, the whole pool"):
        await reported


@anyio
@pytest.mark.parametrize("used", [None, 30, 250])
async def test_a_tenant_is_charged_the_most_and_then_what_was_used(harness: Harness, used: int | None) -> None:
    limits = Limits(tokens_per_minute=600)

    def asks(most: int) -> Ask:
        return Ask(0, "t", 1, 20, 1, limits=limits, most=most)

    pool = await harness.pool(simple(tokens=100_000), Clock())
    lease = await pool.enter(asks(200))
    assert lease.allowance is not None
    assert lease.allowance.tokens is not None
    assert lease.allowance.tokens.left == 400
    with pytest.raises(TenantLimit, match=r"400 are left, and this request counts for 401 tokens \(prompt and"):
        await pool.enter(asks(401))
    lease.resize(35)
    lease.settle(used)
    await harness.quiet(pool)
    last = await pool.enter(asks(0))
    assert last.allowance is not None
    assert last.allowance.tokens is not None
    assert last.allowance.tokens.left == 600 - (200 if used is None else used) - 20
