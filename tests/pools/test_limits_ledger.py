"""Tenants' limits in pools over one ledger in a real store: they are asked with the bid, in one round trip."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import redis

from sidecar.errors import QueueFull, StoreUnavailable, TenantLimit
from sidecar.policy.model import Limits
from sidecar.pools import Ask
from sidecar.pools.calls import ALONE_US, HEARTBEAT_US, Call, Reply
from sidecar.pools.ledger_pool import LedgerPool
from sidecar.pools.redis import script
from tests.pools.core_harness import with_shares
from tests.pools.harness import Clock, simple
from tests.support.redis_servers import RedisServer, first_binary

pytestmark = pytest.mark.anyio
TOKENS = Limits(tokens_per_minute=600)
TWO = Limits(concurrent_requests=2)


def asks(limits: Limits | None, tokens: int = 10, **more: Any) -> Ask:
    return Ask(0, "t", 1, tokens, 1, limits=limits, **more)


class SlowLink:
    """A link whose answers come in a later turn of the event loop, or do not come."""

    heartbeat_us, lazy_us, knew, near = 1_800_000, 20_000, 0, None

    def __init__(self, client: Any, clock: Clock) -> None:
        self.client, self.clock, self.calls, self.is_cut = client, clock, list[Call](), False
        self.loses_answers = False
        self._hash = client.script_load(script.script(script.texts()))

    def send(self, call: Call, user: Any) -> None:
        self.calls.append(call)
        asyncio.get_running_loop().call_soon(self._answer, call, user)

    def _answer(self, call: Call, user: Any) -> None:
        if self.is_cut:
            user.unanswered()
            return
        told = self.client.evalsha(self._hash, 1, "ledger:{p}", msgspec.msgpack.encode(call), self.clock.us + 10**9)
        if self.loses_answers:
            user.unanswered()
        else:
            user.answered(msgspec.msgpack.decode(told, type=Reply))

    async def close(self) -> None:
        pass


class Replicas:
    """Some on one clock of the test's."""

    def __init__(self, client: Any, count: int, tokens: int = 100_000, **more: Any) -> None:
        self.clock = Clock()
        self.links = [SlowLink(client, self.clock) for _ in range(count)]
        policy = with_shares(simple(tokens=tokens, **more))
        self.pools = [LedgerPool(policy, self.clock, link=link, who=f"r{n}") for n, link in enumerate(self.links)]

    async def quiet(self) -> None:
        for _ in range(40):
            for pool in self.pools:
                pool._run()
            await asyncio.sleep(0)

    async def pass_s(self, seconds: float, *silent: LedgerPool) -> None:
        for _ in range(round(seconds)):
            self.clock.advance(1)
            for _ in range(20):
                for pool in self.pools:
                    if pool not in silent:
                        pool._run()
                await asyncio.sleep(0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with RedisServer(first_binary(), tmp_path_factory.mktemp("server")) as running:
        yield redis.Redis(port=running.port)


@pytest.fixture
def client(server: Any) -> Any:
    server.flushall()
    return server


async def test_a_limited_request_is_decided_and_admitted_by_one_call(client: Any) -> None:
    all_of_them = Replicas(client, 3)
    await all_of_them.pass_s(6)
    pool, link = all_of_them.pools[0], all_of_them.links[0]
    calls = len(link.calls)
    lease = await pool.enter(asks(TOKENS, 400))
    assert lease.grant is not None
    assert (len(link.calls) - calls, len(link.calls[-1].metered), len(link.calls[-1].bids)) == (1, 1, 1)
    with pytest.raises(TenantLimit, match="200 are left"):
        await all_of_them.pools[1].enter(asks(TOKENS, 300))
    lower = await all_of_them.pools[1].enter(asks(TOKENS, 300, downgrade=1))
    assert (lower.tier, lower.allowance is not None and lower.allowance.is_downgraded) == (1, True)
    lease.settle(100)
    all_of_them.clock.advance(0.02)
    await all_of_them.quiet()
    left = await all_of_them.pools[2].allowance("t", TOKENS)
    assert left is not None
    assert left.tokens is not None
    assert left.tokens.left == 500
    assert all_of_them.pools[1].state()["waiting"] == 0


async def test_what_a_killed_replica_had_is_free_when_it_is_dead(client: Any) -> None:
    all_of_them = Replicas(client, 3)
    await all_of_them.pass_s(6)
    killed, other, _ = all_of_them.pools
    for _ in range(2):
        await killed.enter(asks(TWO))
    with pytest.raises(TenantLimit, match="2 requests waiting or running"):
        await other.enter(asks(TWO))
    await all_of_them.pass_s(9, killed)
    with pytest.raises(TenantLimit):
        await other.enter(asks(TWO))
    await all_of_them.pass_s(3, killed)
    assert (await other.enter(asks(TWO))).grant is not None


async def test_nothing_is_left_of_a_client_that_leaves_before_the_verdict(client: Any) -> None:
    all_of_them = Replicas(client, 1)
    await all_of_them.pass_s(6)
    (pool,) = all_of_them.pools
    tasks = [asyncio.ensure_future(pool.enter(asks(TWO, 100_000))) for _ in range(3)]
    await asyncio.sleep(0)  # the first is asked, the others wait for its answer
    for task in tasks:
        task.cancel()
    assert [type(it) for it in await asyncio.gather(*tasks, return_exceptions=True)] == [asyncio.CancelledError] * 3
    all_of_them.clock.advance(0.02)
    await all_of_them.quiet()
    held = [await pool.enter(asks(TWO)) for _ in range(2)]
    assert all(lease.grant is not None for lease in held)
    assert (pool.state()["leases"], pool.state()["waiting"]) == (2, 0)


async def test_a_full_queue_refuses_after_the_limits_and_charges_nothing(client: Any) -> None:
    all_of_them = Replicas(client, 1, max_waiting=1)
    await all_of_them.pass_s(6)
    (pool,) = all_of_them.pools
    for _ in range(2):
        await pool.enter(asks(None, 100_000))
        await all_of_them.quiet()
    with pytest.raises(QueueFull):
        await pool.enter(asks(TOKENS, 300))
    with pytest.raises(TenantLimit):
        await pool.enter(asks(TOKENS, 601))
    left = await pool.allowance("t", TOKENS)
    assert left is not None
    assert left.tokens is not None
    assert left.tokens.left == 600


async def test_a_lost_answer_charges_once_and_without_the_store_each_has_its_part(client: Any) -> None:
    all_of_them = Replicas(client, 2)
    await all_of_them.pass_s(6)
    pool, link = all_of_them.pools[0], all_of_them.links[0]
    entering = asyncio.ensure_future(pool.enter(asks(TOKENS, 300)))
    await asyncio.sleep(0)
    link.loses_answers = True
    await asyncio.sleep(0)
    link.loses_answers = False
    await all_of_them.quiet()
    lease = await asyncio.wait_for(entering, 60)
    left = await pool.allowance("t", TOKENS)
    assert (left is not None and left.tokens is not None and left.tokens.left) == 300
    for it in all_of_them.links:
        it.is_cut = True
    await all_of_them.pass_s((HEARTBEAT_US + ALONE_US) / 1e6 + 2)
    assert await pool.allowance("t", TOKENS) is None
    with pytest.raises(StoreUnavailable, match="part of the limits of tenant t"):
        await pool.enter(asks(TOKENS, 301))
    part = await pool.enter(asks(TOKENS, 300))
    with pytest.raises(TenantLimit, match="300 tokens per minute: 0 are left"):
        await pool.enter(asks(TOKENS, 300))
    assert part.settle(0)
    assert lease.settle(0)
    assert (await pool.enter(asks(TOKENS, 300))).grant is not None
    for it in all_of_them.links:
        it.is_cut = False
    await all_of_them.pass_s(6)
    left = await pool.allowance("t", TOKENS)
    assert (left is not None and left.tokens is not None and left.tokens.left) == 600
