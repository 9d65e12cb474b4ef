"""Replicas of one ledger in this process, on a clock of a test's: answers come later, get lost, or do not come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from sidecar.policy.model import Policy
from sidecar.pools import Pool
from sidecar.pools.base import PeerReport
from sidecar.pools.calls import HEARTBEAT_US, Call
from sidecar.pools.ledger import Ledger
from sidecar.pools.member import LAZY_US
from tests.pools.harness import Clock


class ScriptedLink:
    """The way of one replica to a shared ledger."""

    heartbeat_us, lazy_us, is_shared, round_trips, near = HEARTBEAT_US, LAZY_US, True, 0, None

    def __init__(self, ledger: Callable[[], Ledger], clock: Clock) -> None:
        self._ledger, self._clock = ledger, clock
        self.calls: list[Call] = []
        self.is_cut = self.loses_answers = False

    def send(self, call: Call, user: Pool) -> None:
        self.calls.append(call)
        asyncio.get_running_loop().call_soon(self._answer, call, user)

    def _answer(self, call: Call, user: Pool) -> None:
        if self.is_cut:
            user.unanswered("cut off")
            return
        reply = self._ledger().execute(call, self._clock() + 10**9)[0]
        if self.loses_answers:
            user.unanswered("lost")
        else:
            user.answered(reply)

    async def share(self, who: str, report: bytes) -> Mapping[str, PeerReport]:
        return {}

    async def close(self) -> None:
        pass


class Replicas:
    """Some of one pool. All that they do, they do when the test lets time pass, or asks for it."""

    def __init__(self, policy: Policy, count: int = 2, **more: Any) -> None:
        self.clock, self.ledger = Clock(), Ledger()
        self.links = [ScriptedLink(lambda: self.ledger, self.clock) for _ in range(count)]
        self.pools = [Pool(policy, self.clock, link=it, **more) for it in self.links]

    async def quiet(self) -> None:
        """Lets all calls that are due now be made and answered."""
        for _ in range(40):
            for pool in self.pools:
                pool._begin()
                pool._run()
            await asyncio.sleep(0)

    async def joined(self) -> Replicas:
        """All are in the pool, know each other, and nothing is on hold."""
        await self.quiet()
        await self.pass_s(6)
        return self

    async def pass_s(self, seconds: float, *, without: Pool | None = None) -> None:
        """Lets time pass, by tenths of a second. One replica may stand still."""
        for _ in range(round(seconds * 10)):
            self.clock.advance(0.1)
            for _ in range(6):
                for pool in self.pools:
                    if pool is not without:
                        pool._run()
                await asyncio.sleep(0)

    def cut(self, *, is_cut: bool = True) -> None:
        """The store cannot be reached by any, or again by all."""
        for link in self.links:
            link.is_cut = is_cut
