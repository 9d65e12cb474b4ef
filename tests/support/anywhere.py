"""Something happens at each await of a request, of a block or of a shadow in turn, in virtual time."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Coroutine, Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from sidecar.admission.handover import CALL_KEY
from sidecar.events import Observed
from sidecar.policy.choices import Mode
from sidecar.policy.compiler import load
from sidecar.policy.model import Policy
from sidecar.pools import Ask, Pool
from tests.support.middleware import CHAT, Recorder, TestedMiddleware, answer, chunk, start
from tests.support.virtual_time import run_virtually, virtual_now_us

UPLOAD, RESPONSES = "/v1/audio/transcriptions", "/v1/responses"
POLICY = f"""\
engine: none
capacity: {{tokens: 100k, requests: 1}}
tiers:
  critical: {{preempt_after: 1ms}}
  batch: {{preemptible: true, slo: {{ttft: 2s, tpot: 100ms}}, gain: {{weight: 4}}, queue: {{max_wait: 60s}}}}
max_preemptions: 3
default_tier: batch
anonymous: critical
sources: [header]
disconnect_grace: 10ms
background: hold
endpoints:
  {CHAT}: {{}}
  {RESPONSES}: {{}}
  {UPLOAD}: {{api: generic, tokens: {{base: 1000, per_kilobyte: 1}}}}
"""


def rules(folder: Path) -> Policy:
    """The policy that all are played under."""
    file = folder / "policy.yaml"
    file.write_text(POLICY)
    return load(file)


Step = Callable[[int, "asyncio.Future[Any] | None"], None]


@types.coroutine
def stepped(work: Coroutine[Any, Any, None], at: Step) -> Generator[Any, Any, None]:
    """Runs a coroutine. Calls `at` at each of its awaits, with the await's number and what it waits for."""
    number = 0
    resume: Callable[[], Any] = lambda: work.send(None)  # noqa: E731  # another at each await
    while True:
        try:
            waits_for = resume()
        except StopIteration:
            return
        at(number, waits_for)
        number += 1
        try:
            value = yield waits_for
        except BaseException as error:  # it is the coroutine's
            resume = lambda error=error: work.throw(error)  # noqa: E731
        else:
            resume = lambda value=value: work.send(value)  # noqa: E731


class Engine:
    """Streams an answer for three seconds. By its plan it fails or refuses after one, or hands the first call back."""

    def __init__(self, plan: str) -> None:
        self._plan, self._calls = plan, 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self._calls += 1
        message = {"more_body": True}
        while message.get("more_body", False):
            message = await receive()
            if message["type"] == "http.disconnect":
                return
        if "handed back" in self._plan and self._calls == 1 and CALL_KEY in scope:
            scope[CALL_KEY].may_run, scope[CALL_KEY].is_handed_back = False, True
            return
        left = asyncio.ensure_future(receive())
        try:
            await asyncio.wait((left,), timeout=1)
            if left.done():
                return
        finally:
            left.cancel()
        if "fails" in self._plan:
            raise ZeroDivisionError
        if "refused" in self._plan:
            await answer(send, b"{}", 503)
            return
        await start(send, content_type=b"text/event-stream")
        for number in range(2):
            await chunk(send, b'data: {"n": %d}\n\n' % number)
            await asyncio.sleep(1)
        await chunk(send, b"", more=False)


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
