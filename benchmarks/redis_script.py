"""What one operation costs inside the server, with few and with many tickets waiting."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, count, cycle, islice
from random import Random
from typing import Any

import uvloop

from benchmarks.redis_setup import BATCH, HIGH, LOW, NORMAL, Figure, plain_client, shipped_policy
from sidecar.policy.model import Order, Policy
from sidecar.pools import Ask
from sidecar.pools.redis import protocol
from sidecar.pools.redis.script import source
from sidecar.scheduling.gain import GainFigures

FEW, MANY = 100, 100_000
TIERS = (HIGH, NORMAL, LOW, BATCH)
TENANTS = 200
TOKENS = 2_500
"""160 requests of it fill the shipped pool in both dimensions."""
PAIRS = 16
"""Of an enter and an end; so a call has 32 operations."""
FILL_PER_CALL = 500
DEADLINE_US = 120_000_000


def script_cost(url: str, quick: bool) -> Figure:
    """Server microseconds of an operation with 100,000 waiting, to those with 100."""
    return uvloop.run(_script_cost(url, 10_000 if quick else MANY, rounds=10 if quick else 40))


async def _script_cost(url: str, many: int, rounds: int) -> Figure:
    async with plain_client(url) as client:
        queues = [Queue(client, waiting) for waiting in (FEW, many)]
        for queue in queues:
            await queue.fill()
        seen = []
        for number in range(rounds + 1):
            order = queues if number % 2 else queues[::-1]
            costs = {queue.waiting: await queue.microseconds_each(calls=25) for queue in order}
            seen += [costs] if number else []  # the first round warms up
        for queue in queues:
            await queue.empty()
    parts = {f"us, {waiting:,} waiting": statistics.median(costs[waiting] for costs in seen) for waiting in (FEW, many)}
    ratio = statistics.median(costs[many] / costs[FEW] for costs in seen)
    return Figure(f"the script's cost of an operation, {many:,} to {FEW} waiting", ratio, 1.5, parts)


class Queue:
    """A full pool with `waiting` tickets in front of it, from many tenants of several tiers.

    Each pair of operations is a newcomer at the back and the end of the oldest lease, which admits the next request.
    The next newcomer is of the tier that was admitted: so the queue keeps its length, and every tier its part of it.
    """

    def __init__(self, client: Any, waiting: int, *, is_by_gain: bool = False, tenants: int = TENANTS) -> None:
        self.waiting = waiting
        self._client = client
        order = Order.GAIN if is_by_gain else Order.LEVEL
        self._policy = _without_bounds(shipped_policy(f"waiting-{waiting}-{order}").ordered_by(order))
        self._root = protocol.root_key(self._policy.pool, is_by_gain=is_by_gain)
        self._source = source(is_by_gain=is_by_gain)
        self._is_by_gain = is_by_gain
        self._tenants = tenants
        self._luck = Random(7)
        self._sha = ""
        self._ids = count(1)
        self._tiers: dict[int, int] = {}
        self._leases: deque[int] = deque()
        self._next_tiers: Sequence[int] = (TIERS * PAIRS)[:PAIRS]

    async def fill(self) -> None:
        """Makes the pool, and lets enter until so many wait."""
        self._sha = await self._client.script_load(self._source)
        reply = await self._call(protocol.SYNC, 1, protocol.rules_text(self._policy, self._policy.rules), 1, 0)
        while missing := self.waiting - reply.waiting:
            tiers = islice(cycle(TIERS), min(missing, FILL_PER_CALL))
            enters = chain.from_iterable(map(self._enter, tiers))
            reply = await self._call(protocol.CALL, 0, *enters)
            self._leases += [lease_id for lease_id, _ in reply.grants]

    async def empty(self) -> None:
        """The replica says good-bye: the pool has nothing left."""
        await self._call(protocol.BYE, 0)

    async def microseconds_each(self, calls: int) -> float:
        """What the server spent on one operation, in so many calls."""
        before_us = await self._spent_us()
        for _ in range(calls):
            await self._pairs()
        return (await self._spent_us() - before_us) / (calls * 2 * PAIRS)

    async def _pairs(self) -> None:
        arguments: list[protocol.Argument] = []
        for tier in self._next_tiers:
            arguments += [*self._enter(tier), protocol.END, self._leases.popleft()]
        reply = await self._call(protocol.CALL, 0, *arguments)
        admitted = [lease_id for lease_id, _ in reply.grants]
        if len(admitted) != PAIRS or reply.waiting != self.waiting:
            raise RuntimeError(f"{len(admitted)} were admitted for {PAIRS}, and {reply.waiting} wait")
        self._leases += admitted
        self._next_tiers = [self._tiers.pop(lease_id) for lease_id in admitted]

    def _enter(self, tier: int) -> list[protocol.Argument]:
        lease_id = next(self._ids)
        self._tiers[lease_id] = tier
        said: list[protocol.Argument] = [
            protocol.ENTER,
            lease_id,
            tier,
            f"tenant-{lease_id % self._tenants}",
            1,
            TOKENS,
            1,
        ]
        return [*protocol.gain(lease_id, self._figures(tier)), *said] if self._is_by_gain else said

    def _figures(self, tier: int) -> Ask:
        """Deadlines in two minutes, a fraction of what the queue needs: nearly all are urgent, and densities fall."""
        tokens = self._luck.randrange(10, 1000)
        figures = GainFigures(2 ** (BATCH - tier), tokens, 250 * tokens + 50_000, DEADLINE_US, 0, 30_000)
        return Ask(tier, "", 1, TOKENS, 1, 0, gain=figures)

    async def _call(self, kind: bytes, *arguments: protocol.Argument) -> protocol.Reply:
        answer = await self._client.evalsha(self._sha, 1, self._root, kind, "crowd", 1, *arguments)
        if not protocol.is_ok(answer):
            raise RuntimeError(f"the script answered {answer}")
        return protocol.read_reply(answer)

    async def _spent_us(self) -> int:
        figures = await self._client.info("commandstats")
        return int(figures["cmdstat_evalsha"]["usec"])


def _without_bounds(policy: Policy) -> Policy:
    """Any number may wait in every tier."""
    return replace(policy, tiers=tuple(replace(tier, max_waiting=None) for tier in policy.tiers))
