"""Something happens at each await of a request, of a block or of a shadow in turn, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from sidecar.events import Observed
from sidecar.lengths.token_estimates import Estimator
from sidecar.policy.choices import Mode
from sidecar.policy.model import Policy
from sidecar.pools import Ask, Pool
from tests.support.middleware import Recorder, TestedMiddleware
from tests.support.virtual_time import run_virtually, virtual_now_us


class World:
    """A controller, and one task in it by a plan. `step` is called at each await: of these there are `steps`."""

    task: asyncio.Task[None]

    def __init__(self, plan: str, policy: Policy, app: Any) -> None:
        self.plan, self.policy, self.steps = plan, policy, 0
        self.recorder, self.observed = Recorder(), list[Observed]()
        self.pool = Pool(policy, virtual_now_us)
        self.sidecar = TestedMiddleware(
            app,
            policy=policy,
            pool=self.pool,
            dialect=policy.engine(policy.carrier),
            estimator=Estimator(),
            observer=self.recorder,
            observed=self.observed.append,
        )
        self.happens: Callable[[Any], None] = lambda _: None
        self.at, self.is_late = -1, False

    def step(self, number: int, waits_for: Any) -> None:
        """Lets it happen meanwhile, or in the tick in which what is awaited is there."""
        self.steps = number + 1
        if number == self.at and self.is_late and waits_for is not None:
            waits_for.add_done_callback(lambda _: self.happens(self))
        elif number == self.at:
            asyncio.get_running_loop().call_soon(self.happens, self)

    async def begin(self) -> None:
        """Begins the task."""
        raise NotImplementedError

    async def play(self) -> None:
        """Plays the plan, until nothing can be left of the task."""
        other = await self.pool.enter(Ask(0, "other", 1, 10, 1)) if "waits" in self.plan else None
        await self.begin()
        if other is not None:
            other.settle(1)
        if "preempted" in self.plan:
            important = await self.pool.enter(Ask(0, "other", 1, 10, 1))
            await asyncio.sleep(2)
            important.settle(1) or important.leave()
        await asyncio.sleep(2 * 3600)
        state = self.pool.state()
        assert (state["leases"], state["waiting"], len(self.sidecar.watchdog)) == (0, 0, 0)
        assert self.task.done()
        await self.check()

    async def check(self) -> None:
        """What else must be so then."""
        raise NotImplementedError


AnyWorld = TypeVar("AnyWorld", bound=World)


def at_every_await(new: Callable[[], AnyWorld], happens: Callable[[Any], None]) -> Iterator[AnyWorld]:
    """The world in which nothing happens, and those in which it does, at one await after the other."""

    async def played(at: int, *, is_late: bool) -> AnyWorld:
        world = new()
        world.happens, world.at, world.is_late = happens, at, is_late
        await world.play()
        return world

    untouched = run_virtually(played(-1, is_late=False))
    yield untouched
    for at in range(untouched.steps):
        for is_late in (False, True):
            yield run_virtually(played(at, is_late=is_late))


def is_canceled(world: World) -> None:
    """Something cancels the task."""
    world.task.cancel()


def enforces(world: World) -> None:
    """The policy is changed."""
    world.sidecar.change_policy(replace(world.policy, mode=Mode.ENFORCE))


def observes(world: World) -> None:
    """The policy is changed."""
    world.sidecar.change_policy(replace(world.policy, mode=Mode.OBSERVE))


def all_pass(world: World) -> None:
    """The policy is changed."""
    world.sidecar.change_policy(replace(world.policy, mode=Mode.PASS))
