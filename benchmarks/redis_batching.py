"""What batching brings: round trips per request, and throughput against one call for every enter and every settle."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

import uvloop
from redis.asyncio import ConnectionPool, Redis

from benchmarks.redis_setup import NORMAL, Figure, plain_client, replica, shipped_policy
from sidecar.policy.model import Policy
from sidecar.pools import Ask
from sidecar.pools.redis import RedisPool, protocol
from sidecar.pools.redis.script import source

AT_ONCE = 256
ASK = Ask(NORMAL, "acme", 1, 1_000, 1)
HOLD_S = (0.002, 0.008)
ROOM_FOR_ALL = 10
"""So many times the shipped pool: none waits in it, so that both designs do the same for every request."""

Pairs = Callable[[int], Awaitable[None]]
"""Does so many enters and settles."""


def round_trips(url: str, quick: bool) -> Figure:
    """Calls per request, with 256 requests at once in a pool that has room for half of them."""
    return uvloop.run(_round_trips(url, 2 if quick else 20))


def throughput(url: str, quick: bool) -> Figure:
    """Pairs of enter and settle per second from one process, against one EVALSHA each."""
    return uvloop.run(_throughput(url, rounds=3 if quick else 9, pairs_each=4 if quick else 12))


async def _round_trips(url: str, requests_each: int) -> Figure:
    luck = random.Random(1)
    async with replica(url, shipped_policy("round-trips")) as pool:
        before, waited = pool.round_trips, 0

        async def caller() -> None:
            nonlocal waited
            for _ in range(requests_each):
                lease = await pool.enter(ASK)
                waited += lease.grant is None
                await lease.wait()
                await asyncio.sleep(luck.uniform(*HOLD_S))
                lease.settle()

        await asyncio.gather(*(caller() for _ in range(AT_ONCE)))
        await all_settled(pool)
        calls, requests = pool.round_trips - before, AT_ONCE * requests_each
    parts = {"requests": requests, "calls": calls, "requests that waited": waited}
    return Figure(f"round trips per request, {AT_ONCE} at once in one replica", calls / requests, 0.031, parts)


async def all_settled(pool: RedisPool) -> None:
    """Returns when the store has answered that none holds anything."""
    while pool.state()["leases"]:  # noqa: ASYNC110 - the pool does not report that it is idle
        await asyncio.sleep(0)  # one pass of the loop, in which an answer may come


async def _throughput(url: str, rounds: int, pairs_each: int) -> Figure:
    async with (
        replica(url, shipped_policy("batched", ROOM_FOR_ALL)) as pool,
        plain_client(url) as client,
        CallEach(client, shipped_policy("call-each", ROOM_FOR_ALL)) as single,
    ):
        both: tuple[Pairs, Pairs] = (lambda pairs: _batched(pool, pairs), single.pairs)
        for pairs in both:
            await pairs(2)
        seen = [[await _per_second(pairs, pairs_each) for pairs in both] for _ in range(rounds)]
    ratio = statistics.median(batched / each for batched, each in seen)
    parts = {
        "pairs/s, batched": statistics.median(batched for batched, _ in seen),
        "pairs/s, a call each": statistics.median(each for _, each in seen),
        "lowest ratio of a round": min(batched / each for batched, each in seen),
    }
    return Figure(f"enter + settle per second, {AT_ONCE} at once, to a call each", ratio, 3, parts, at_least=True)


async def _per_second(pairs: Pairs, pairs_each: int) -> float:
    began = time.perf_counter()
    await pairs(pairs_each)
    return AT_ONCE * pairs_each / (time.perf_counter() - began)


async def _batched(pool: RedisPool, pairs_each: int) -> None:
    async def caller() -> None:
        for _ in range(pairs_each):
            lease = await pool.enter(ASK)
            await lease.wait()
            lease.settle()

    await asyncio.gather(*(caller() for _ in range(AT_ONCE)))
    await all_settled(pool)


class CallEach:
    """The same script, called for every single operation: on connections of its own settings, as many as callers."""

    def __init__(self, client: Any, policy: Policy) -> None:
        settings = client.connection_pool.connection_kwargs
        self._client: Any = Redis(connection_pool=ConnectionPool(max_connections=AT_ONCE, **settings))
        self._policy = policy
        self._ids = count(1)
        self._sha = ""

    async def __aenter__(self) -> CallEach:
        self._sha = await self._client.script_load(source())
        await self._call(protocol.SYNC, 1, protocol.rules_text(self._policy, self._policy.rules), 1, 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._call(protocol.BYE, 0)
        await self._client.aclose()
        await self._client.connection_pool.aclose()

    async def pairs(self, pairs_each: int) -> None:
        """Every caller enters and settles so often."""
        await asyncio.gather(*(self._caller(pairs_each) for _ in range(AT_ONCE)))

    async def _caller(self, pairs_each: int) -> None:
        for _ in range(pairs_each):
            lease_id = next(self._ids)
            enter = (protocol.ENTER, lease_id, ASK.tier, ASK.tenant, ASK.weight, ASK.tokens, ASK.requests)
            answer = await self._call(protocol.CALL, 0, *enter)
            granted = b" ".join(answer[3]) if isinstance(answer, list) else answer
            if not granted.endswith(b"%d" % lease_id):
                raise RuntimeError(f"a request was to be admitted as it came, and the answer was {answer}")
            await self._call(protocol.CALL, 0, protocol.END, lease_id)

    async def _call(self, kind: bytes, *arguments: protocol.Argument) -> Any:
        root = protocol.root_key(self._policy.pool)
        answer: Any = await self._client.evalsha(self._sha, 1, root, kind, "call-each", 1, *arguments)
        if not protocol.is_ok(answer):
            raise RuntimeError(f"the script answered {answer}")
        return answer
