"""Whether a pool ever holds more than it has, with more requests at once than it has room for."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

import uvloop

from benchmarks.redis_setup import NORMAL, Figure, replica, shipped_policy
from sidecar.policy.model import Policy
from sidecar.policy.rules import Shares, pool_rules
from sidecar.policy.store import store_address
from sidecar.pools import Ask
from sidecar.pools.redis import Connect, RedisPool, connector
from sidecar.pools.redis.connection import ANSWER_WITHIN_S, StoreConnection
from sidecar.pools.redis.protocol import Argument, is_ok, read_reply
from sidecar.pools.redis.script import source
from sidecar.pools.redis.wire import Answered

POOL_TOKENS = 10_000
REPLICAS, AT_ONCE_EACH = 5, 100
ASK = Ask(NORMAL, "acme", 1, 1_000, 1)
HOLD_S = (0.002, 0.010)


@dataclass
class Seen:
    """The most tokens that were held at once: as the script said in any answer, and as the requests counted."""

    by_script: int = 0
    by_requests: int = 0
    answers: int = 0
    held: int = 0

    def change(self, tokens: int) -> None:
        """A request begins or ends to hold so much."""
        self.held += tokens
        self.by_requests = max(self.by_requests, self.held)


class RecordingConnection(StoreConnection):
    """Notes what every answer says is held, which the script computes behind all operations of its call."""

    def __init__(self, client: Any, pool: str, seen: Seen) -> None:
        super().__init__(client, pool, source())
        self._seen = seen

    async def call(self, arguments: Sequence[Argument], within_s: float = ANSWER_WITHIN_S) -> Any:
        """See `Connection.call`."""
        answer = await super().call(arguments, within_s)
        self._look_at(answer)
        return answer

    def send(self, arguments: Sequence[Argument], answered: Answered) -> None:
        """See `Connection.send`."""

        def came(answer: Any) -> None:
            self._look_at(answer)
            answered(answer)

        super().send(arguments, came)

    def _look_at(self, answer: Any) -> None:
        if not isinstance(answer, Exception) and is_ok(answer):
            self._seen.answers += 1
            self._seen.by_script = max(self._seen.by_script, read_reply(answer).held_tokens)


def limit(url: str, quick: bool) -> Figure:
    """The most tokens held at once by 500 requests of 1,000 each, from five replicas, in a pool of 10,000."""
    return uvloop.run(_limit(url, times=1 if quick else 5))


async def _limit(url: str, times: int) -> Figure:
    policy, seen = _policy(), Seen()
    connect = _watched(url, policy, seen)
    async with AsyncExitStack() as stack:
        pools = [await stack.enter_async_context(replica(url, policy, connect)) for _ in range(REPLICAS)]
        await asyncio.gather(*(_request(pool, seen, times) for pool in pools for _ in range(AT_ONCE_EACH)))
    requests = REPLICAS * AT_ONCE_EACH
    parts = {
        "requests": requests * times,
        "answers looked at": seen.answers,
        "most held, by the requests' own count": seen.by_requests,
    }
    most = max(seen.by_script, seen.by_requests)
    if most < POOL_TOKENS:
        raise RuntimeError(f"never more than {most} were held: the pool was not full, and could not overflow")
    return Figure(f"most tokens held at once, {requests} requests of {ASK.tokens:,} tokens", most, POOL_TOKENS, parts)


async def _request(pool: RedisPool, seen: Seen, times: int) -> None:
    luck = random.Random(2)
    for _ in range(times):
        lease = await pool.enter(ASK)
        await lease.wait()
        seen.change(ASK.tokens)
        await asyncio.sleep(luck.uniform(*HOLD_S))
        seen.change(-ASK.tokens)
        lease.settle()


def _policy() -> Policy:
    policy = shipped_policy("limit")
    tiers = tuple(Shares(tier.name) for tier in policy.tiers)
    return replace(policy, rules=pool_rules(tokens=POOL_TOKENS, requests=None, tiers=tiers))


def _watched(url: str, policy: Policy, seen: Seen) -> Connect:
    plain = connector(store_address(url), policy.pool)

    async def connect() -> StoreConnection:
        return RecordingConnection((await plain())._client, policy.pool, seen)

    return connect
