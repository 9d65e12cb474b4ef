"""Requests that come and go on several replicas of one pool, and what all of them together held at any moment."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sidecar.errors import AdmissionError
from sidecar.policy.choices import StoreLoss
from sidecar.policy.model import Policy
from sidecar.policy.store import store_address
from sidecar.pools import Pool
from sidecar.pools.base import Clock, monotonic_us
from sidecar.pools.redis import RedisLink, ledger_connector
from sidecar.tasks import timeout
from tests.pools.harness import ask
from tests.support.waiting import until

LONGEST_WAIT_S = 30.0
"""No request of these tests may wait longer, whatever is done to the store."""

RISING = 0.3
"""Part of the requests that rise as they wait, if they still do: whatever is done to the store, none is lost."""


@dataclass
class Load:
    """The requests, all of one size and held for some time, and what became of them."""

    pools: Sequence[Pool]
    tokens: int = 10
    held_s: tuple[float, float] = (0.005, 0.03)
    tiers: int = 2
    seed: int = 1
    held: int = 0
    peak: int = 0
    admitted: int = 0
    longest_wait_s: float = 0.0
    refused: Counter[str] = field(default_factory=Counter)
    by_pool: Counter[int] = field(default_factory=Counter)
    is_over: bool = False

    async def run(self, workers: int) -> None:
        """Each worker sends one request after the other, over the pools in turn, until `is_over`."""
        luck = random.Random(self.seed)
        tasks = [self._work(index % len(self.pools), random.Random(luck.random())) for index in range(workers)]
        await asyncio.gather(*tasks)

    async def _work(self, index: int, luck: random.Random) -> None:
        while not self.is_over:
            await self._send(index, luck)

    async def _send(self, index: int, luck: random.Random) -> None:
        try:
            await self.one(index, luck)
        except AdmissionError as refusal:
            self.refused[refusal.code] += 1
            await asyncio.sleep(0.02)

    async def one(self, index: int, luck: random.Random) -> None:
        """One request: it gets in, or raises why not."""
        loop = asyncio.get_running_loop()
        came_s = loop.time()
        wanted = ask(luck.randrange(self.tiers), self.tokens, tenant=luck.choice("xyz"))
        lease = await self.pools[index].enter(wanted)
        try:
            async with timeout(LONGEST_WAIT_S):
                granted = lease.wait()
                if lease.tier and luck.random() < RISING:
                    await asyncio.sleep(0)
                    self.pools[index].rise(lease, lease.tier - 1)
                await granted
        finally:
            self.longest_wait_s = max(self.longest_wait_s, loop.time() - came_s)
        self.held += self.tokens
        self.peak = max(self.peak, self.held)
        self.admitted += 1
        self.by_pool[index] += 1
        try:
            await asyncio.sleep(luck.uniform(*self.held_s))
        finally:
            self.held -= self.tokens
            assert lease.settle()

    @contextlib.asynccontextmanager
    async def going_on(self, workers: int) -> AsyncIterator[None]:
        """Runs while the block does, and then to the end of every request."""
        running = asyncio.ensure_future(self.run(workers))
        try:
            yield
        finally:
            self.is_over = True
            await asyncio.wait_for(running, LONGEST_WAIT_S + 5)


def replica(
    url: str, policy: Policy, clock: Clock = monotonic_us, *, name: str = "faults", takes_over: bool = False
) -> Pool:
    """A pool in the store at `url`, as the product makes it."""
    policy = replace(policy, pool=name)
    return Pool(policy, clock, link=RedisLink(ledger_connector(store_address(url), name), name), takes_over=takes_over)


def beat(pool: Pool) -> None:
    """States all at once, as with a heartbeat."""
    pool._member._heartbeat_us = 0
    pool._run()


@contextlib.asynccontextmanager
async def replicas(
    policy: Policy,
    urls: Sequence[str],
    *,
    on_loss: StoreLoss = StoreLoss.DIVIDE,
    clocks: Sequence[Clock] = (),
    name: str = "faults",
) -> AsyncIterator[list[Pool]]:
    """Pools that share one store, opened; each by an address of its own."""
    policy = replace(policy, on_store_loss=on_loss)
    pools = [replica(url, policy, clocks[i] if clocks else monotonic_us, name=name) for i, url in enumerate(urls)]
    try:
        await asyncio.gather(*(pool.open() for pool in pools))
        await heard_of_each_other(pools)
        yield pools
    finally:
        await asyncio.gather(*(pool.close() for pool in pools))


async def heard_of_each_other(pools: Sequence[Pool]) -> None:
    """Returns when every pool knows how many there are, and a new pool is not on hold any more."""
    for pool in pools:
        beat(pool)
    await until(lambda: all((store_of(pool)["replicas"] or len(pools)) >= len(pools) for pool in pools))
    await until(
        lambda: not any(pool._member.pool.reply is not None and pool._member.pool.reply.on_hold for pool in pools)
    )


def store_of(pool: Pool) -> Any:
    """What a pool says of its store."""
    return pool.state()["store"]


async def nothing_left(pools: Sequence[Pool]) -> None:
    """Fails unless, at a next heartbeat, neither the store nor a replica has a lease or a ticket left."""

    def is_empty() -> bool:
        states: list[Any] = [pool.state() for pool in pools]
        return all(
            (state["leases"], state["waiting"], *state["store"]["own"].values()) == (0, 0, 0, 0)
            and all(tier["held"]["tokens"] == 0 == tier["queued"]["tokens"] for tier in state["tiers"])
            for state in states
        )

    def is_empty_after_a_beat() -> bool:
        for pool in pools:
            beat(pool)
        return is_empty()

    await until(is_empty_after_a_beat, what="leases or tickets are left")


async def recovered(pools: Sequence[Pool]) -> float:
    """Waits until every pool shares the store again."""
    return await until(lambda: all(pool.status.state.value == "shared" for pool in pools), what="not shared again")
