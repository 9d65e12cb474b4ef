"""Whatever happens at any await of a lease from Python: it is given back, and reported once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sidecar.errors import Draining
from sidecar.leases import Admission, HeldLease, LeasePreempted
from sidecar.policy.compiler import load
from sidecar.policy.model import Mode, Policy
from sidecar.pools import Ask, Pool
from sidecar.tokens import Estimator
from tests.admission.test_broken_off_anywhere import POLICY, stepped
from tests.support.middleware import Recorder, TestedMiddleware
from tests.support.virtual_time import run_virtually, virtual_now_us

PLANS = ["block", "block, waits", "block, preempted", "run", "run, waits", "run, preempted", "run, waits, preempted"]


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    file = tmp_path / "policy.yaml"
    file.write_text(POLICY)
    return load(file)


async def nothing(scope: object, receive: object, send: object) -> None:
    """An app that no request reaches."""


class World:
    """One lease, in virtual time. `steps` are its awaits."""

    task: asyncio.Task[None]

    def __init__(self, plan: str, policy: Policy) -> None:
        self.plan, self.policy, self.steps = plan, policy, 0
        self.recorder, self.pool = Recorder(), Pool(policy, virtual_now_us)
        self.sidecar = TestedMiddleware(
            nothing,
            policy=policy,
            pool=self.pool,
            dialect=policy.engine(policy.carrier),
            estimator=Estimator(),
            observer=self.recorder,
        )
        self.done = 0

    async def run(self, happens: Callable[[World], None] | None, at: int, *, is_late: bool) -> None:
        """Plays the lease, until nothing can be left of it."""

        def step(number: int, waits_for: Any) -> None:
            self.steps = number + 1
            if happens is None or number != at:
                return
            if is_late and waits_for is not None:
                waits_for.add_done_callback(lambda _: happens(self))
            else:
                asyncio.get_running_loop().call_soon(happens, self)

        other = await self.pool.enter(Ask(0, "other", 1, 10, 1)) if "waits" in self.plan else None
        self.task = asyncio.create_task(stepped(self._held(), step))  # type: ignore[arg-type]
        await asyncio.sleep(1)
        if other is not None:
            other.settle(1)
        if "preempted" in self.plan:
            important = await self.pool.enter(Ask(0, "other", 1, 10, 1))
            await asyncio.sleep(2)
            important.settle(1) or important.leave()
        await asyncio.sleep(3600)

    async def _held(self) -> None:
        admission = Admission(self.sidecar)
        if "run" in self.plan:
            await admission.run(self._work, tier="batch", tokens=100)
            return
        async with admission.lease(tier="batch", tokens=100) as lease:
            await self._work(lease)

    async def _work(self, lease: HeldLease) -> None:
        await asyncio.sleep(3)
        lease.keep()
        lease.resize(200)
        await asyncio.sleep(1)
        lease.used(150)
        self.done += 1

    def check(self) -> None:
        """That it was given back, and reported once."""
        state = self.pool.state()
        assert (state["leases"], state["waiting"], len(self.sidecar.watchdog)) == (0, 0, 0)
        assert self.task.done()
        assert self.task.cancelled() or not isinstance(self.task.exception(), RuntimeError)
        assert len(self.recorder.stories) <= 1
        self.recorder.check()


def is_canceled(world: World) -> None:
    world.task.cancel()


def drains(world: World) -> None:
    world.sidecar.drain()
    world.sidecar.watchdog.give_up()


def all_pass(world: World) -> None:
    world.sidecar.change_policy(replace(world.policy, mode=Mode.PASS))


def observes(world: World) -> None:
    world.sidecar.change_policy(replace(world.policy, mode=Mode.OBSERVE))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("happens", [is_canceled, drains, all_pass, observes])
def test_whatever_happens_at_any_await_it_is_given_back(
    plan: str, happens: Callable[[World], None], policy: Policy
) -> None:
    async def played(at: int, *, is_late: bool) -> World:
        world = World(plan, policy)
        await world.run(happens if at >= 0 else None, at, is_late=is_late)
        world.check()
        return world

    for at in range(run_virtually(played(-1, is_late=False)).steps):
        for is_late in (False, True):
            world = run_virtually(played(at, is_late=is_late))
            if happens is is_canceled:
                continue
            error = world.task.exception()
            assert (world.done == 1) == (error is None)
            assert error is None or isinstance(
                error, LeasePreempted | (Draining if happens is drains else LeasePreempted)
            )
