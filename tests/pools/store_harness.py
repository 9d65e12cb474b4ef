"""What the contract suite needs of a pool over a ledger in a store: a script that holds nothing back, and its calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count

from sidecar.policy.model import Policy
from sidecar.policy.store import store_address
from sidecar.pools import Pool
from sidecar.pools.calls import Call, Reply
from sidecar.pools.member import LAZY_US
from sidecar.pools.redis import RedisLink, ledger_connector
from sidecar.pools.redis.connection import Connect
from tests.pools.harness import Clock
from tests.support.redis_servers import RedisServer
from tests.support.shared_pools import patient_library

_names = count(1)


class WatchedLink(RedisLink):
    """A link of which a test knows whether all was answered. The heartbeat is the test's: see `StoreHarness.poke`."""

    heartbeat_us, lazy_us = 10**15, LAZY_US
    is_busy = False

    def send(self, call: Call, user: Pool) -> None:
        self.is_busy = True
        super().send(call, _Watched(self, user))


class _Watched:
    def __init__(self, link: WatchedLink, user: Pool) -> None:
        self._link, self._user, self.woken = link, user, user.woken

    def answered(self, reply: Reply) -> None:
        self._link.is_busy = False
        self._user.answered(reply)

    def unanswered(self, why: str) -> None:
        self._link.is_busy = False
        self._user.unanswered(why)


class StoreHarness:
    """Pools in some store. Pools of one harness share what they hold. Beside each, `others` idle replicas run."""

    def __init__(self, connect: Callable[[str], Connect], others: int = 0) -> None:
        self.name = f"test-{next(_names)}"
        self._connect, self._others = connect, others
        self._pools: list[tuple[Pool, WatchedLink]] = []

    async def pool(self, policy: Policy, clock: Clock | None = None) -> Pool:
        for _ in range(self._others):
            await self._one(policy, clock)
        return await self._one(policy, clock)

    async def _one(self, policy: Policy, clock: Clock | None) -> Pool:
        policy = replace(policy, pool=self.name)
        link = WatchedLink(self._connect(self.name), self.name, library=patient_library(), clock=clock)
        pool = Pool(policy, link=link) if clock is None else Pool(policy, clock, link=link)
        change_policy = pool.change_policy
        pool.change_policy = lambda policy: change_policy(replace(policy, pool=self.name))  # type: ignore[method-assign]
        self._pools.append((pool, link))
        await pool.open()
        await self.quiet(pool)
        return pool

    async def quiet(self, pool: Pool) -> None:
        end_s = time.monotonic() + 60
        for _ in range(3):
            for each, link in self._pools:
                each._member._call_by(each.now_us())  # also what may be told later
                each._run()
                while link.is_busy:
                    assert time.monotonic() < end_s
                    await asyncio.sleep(0)
            await asyncio.sleep(0.001)  # what was published meanwhile

    async def poke(self, pool: Pool) -> None:
        await self.quiet(pool)

    async def close(self) -> None:
        for pool, _ in self._pools:
            await pool.close()


def on_server(server: RedisServer, others: int = 0) -> StoreHarness:
    """Pools on a real server."""
    return StoreHarness(lambda name: ledger_connector(store_address(server.url), name), others)
