"""Whatever happens at any await of a lease from Python: it is given back, and reported once."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from sidecar.errors import Draining
from sidecar.leases import Admission, HeldLease, LeasePreempted
from sidecar.policy.model import Policy
from tests.support.anywhere import World, all_pass, at_every_await, is_canceled, observes, rules, stepped

WAITS_S: dict[str, list[float]] = {
    "block": [0],
    "block, waits": [1],
    "block, preempted": [0],
    "run": [0],
    "run, waits": [1],
    "run, preempted": [0, 3],
    "run, waits, preempted": [1, 3],
}
"""The plans, and the waits of each before the attempts at its work."""


async def nothing(scope: object, receive: object, send: object) -> None:
    """An app that no request reaches."""


class Leasing(World):
    """One lease. It is `done` once its work is; `waits_s` are the waits before each attempt at it."""

    def __init__(self, plan: str, policy: Policy) -> None:
        super().__init__(plan, policy, nothing)
        self.done, self.waits_s = 0, list[float]()

    async def begin(self) -> None:
        self.task = asyncio.create_task(stepped(self._held(), self.step))  # type: ignore[arg-type]
        await asyncio.sleep(1)

    async def _held(self) -> None:
        admission = Admission(self.sidecar)
        if "run" in self.plan:
            await admission.run(self._work, tier="batch", tokens=100)
            return
        async with admission.lease(tier="batch", tokens=100) as lease:
            await self._work(lease)

    async def _work(self, lease: HeldLease) -> None:
        self.waits_s.append(lease.queue_wait_s)
        await asyncio.sleep(3)
        lease.keep()
        lease.resize(200)
        await asyncio.sleep(1)
        lease.used(150)
        self.done += 1

    async def check(self) -> None:
        assert len(self.recorder.stories) <= 1
        self.recorder.check()


def drains(world: World) -> None:
    world.sidecar.drain()
    world.sidecar.watchdog.give_up()


@pytest.mark.parametrize("plan", WAITS_S)
@pytest.mark.parametrize("happens", [is_canceled, drains, all_pass, observes])
def test_whatever_happens_at_any_await_it_is_given_back(
    plan: str, happens: Callable[[World], None], tmp_path: Path
) -> None:
    policy = rules(tmp_path)
    for world in at_every_await(lambda: Leasing(plan, policy), happens):
        if world.at < 0:
            assert world.waits_s == pytest.approx(WAITS_S[plan])
            assert (type(world.task.exception()) is LeasePreempted) == (plan == "block, preempted")
        elif world.task.cancelled():
            assert happens is is_canceled
        else:
            error = world.task.exception()
            assert (world.done == 1) == (error is None)
            assert isinstance(error, types.NoneType | LeasePreempted) or (happens is drains and type(error) is Draining)
