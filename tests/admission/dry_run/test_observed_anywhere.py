"""Whatever happens at any await of an observed request, or of its shadow: it passes, and nothing is left of either."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sidecar.admission.dry_run.shadow import ShadowRequest
from sidecar.events import Observed, Settled
from sidecar.policy.compiler import load
from sidecar.policy.model import Mode, Policy
from sidecar.pools import Ask, Pool
from sidecar.tokens import Estimator
from tests.admission.test_broken_off_anywhere import POLICY, UPLOAD, stepped
from tests.support.middleware import CHAT, Caller, Recorder, TestedMiddleware, answer, chat, chunk, start, whole_body
from tests.support.virtual_time import run_virtually, virtual_now_us

PLANS = ["as it comes", "waits", "preempted", "upload", "waits, upload", "fails", "waits, fails", "refused, waits"]


class Engine:
    """Streams an answer of three seconds, fails after one, or refuses."""

    def __init__(self, plan: str) -> None:
        self._plan = plan

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await whole_body(receive)
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
    """One observed request, in virtual time. `steps` are the awaits of what is stepped through."""

    def __init__(self, plan: str, policy: Policy, part: str) -> None:
        self.plan, self.part, self.policy = plan, part, replace(policy, mode=Mode.OBSERVE)
        self.recorder, self.observed, self.steps = Recorder(), list[Observed](), 0
        self.pool = Pool(self.policy, virtual_now_us)
        self.sidecar = TestedMiddleware(
            Engine(plan),
            policy=self.policy,
            pool=self.pool,
            dialect=self.policy.engine(self.policy.carrier),
            estimator=Estimator(),
            observer=self.recorder,
            observed=self.observed.append,
        )
        is_upload = "upload" in plan
        self.body = b"x" * 3000 if is_upload else json.dumps(chat(stream=True)).encode()
        headers = [(b"x-priority", b"batch"), (b"content-length", b"%d" % len(self.body))]
        if is_upload:
            headers.append((b"content-type", b"audio/wav"))
        self.caller = Caller(self.sidecar, path=UPLOAD if is_upload else CHAT, headers=headers)
        self.task: asyncio.Task[None]
        self.closing: asyncio.Future[None] | None = None

    async def run(self, happens: Callable[[World], None] | None, at: int, *, is_late: bool) -> None:
        """Plays the request, until nothing can be left of it."""

        def step(number: int, waits_for: Any) -> None:
            self.steps = number + 1
            if happens is None or number != at:
                return
            if is_late and waits_for is not None:
                waits_for.add_done_callback(lambda _: happens(self))
            else:
                asyncio.get_running_loop().call_soon(happens, self)

        if self.part == "shadow":
            ShadowRequest.run = lambda shadow: stepped(RUN(shadow), step)  # type: ignore[method-assign,assignment]
        other = await self.pool.enter(Ask(0, "other", 1, 10, 1)) if "waits" in self.plan else None
        half = len(self.body) // 2
        app = self.sidecar(self.caller.scope, self.caller._receive, self.caller._send)
        self.task = asyncio.create_task(stepped(app, step) if self.part == "request" else app)  # type: ignore[arg-type]
        self.caller.incoming.put_nowait({"type": "http.request", "body": self.body[:half], "more_body": True})
        await asyncio.sleep(0.1)
        self.caller.incoming.put_nowait({"type": "http.request", "body": self.body[half:], "more_body": False})
        await asyncio.sleep(0.4)
        if other is not None:
            other.settle(1)
        if "preempted" in self.plan:
            important = await self.pool.enter(Ask(0, "other", 1, 10, 1))
            await asyncio.sleep(2)
            important.settle(1) or important.leave()
        await asyncio.sleep(2 * 3600)

    def check(self) -> None:
        """That it was reported once, and nothing is left."""
        state = self.pool.state()
        assert (state["leases"], state["waiting"]) == (0, 0)
        assert (len(self.sidecar.shadows), len(self.sidecar.watchdog)) == (0, 0)
        assert self.task.done()
        assert self.task.cancelled() or not isinstance(self.task.exception(), RuntimeError)
        (story,) = self.recorder.stories
        assert isinstance(story.end, Settled)
        assert len(self.observed) == 1
        assert story.kinds.count("FirstByte") <= 1

    async def again(self) -> None:
        """Another request finds an engine in which nothing is left."""
        self.sidecar.change_policy(self.policy)
        caller = Caller(self.sidecar, self.body, path=self.caller.scope["path"], headers=self.caller.scope["headers"])
        await asyncio.gather(caller.run(), return_exceptions=True)
        assert sum(held.arrivals for held in self.sidecar.engine_times.counted().values()) == 0
        await asyncio.sleep(60)


RUN = ShadowRequest.run


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    file = tmp_path / "policy.yaml"
    file.write_text(POLICY)
    return load(file)


@pytest.fixture(autouse=True)
def unstepped() -> Iterator[None]:
    yield
    ShadowRequest.run = RUN  # type: ignore[method-assign]


def is_canceled(world: World) -> None:
    world.task.cancel()


def leaves(world: World) -> None:
    world.caller.leave()


def enforces(world: World) -> None:
    world.sidecar.change_policy(replace(world.policy, mode=Mode.ENFORCE))


def all_pass(world: World) -> None:
    world.sidecar.change_policy(replace(world.policy, mode=Mode.PASS))


def reloads(world: World) -> None:
    world.sidecar.change_policy(replace(world.policy, generation="other"))


def stops(world: World) -> None:
    world.sidecar.drain()
    world.closing = asyncio.ensure_future(world.sidecar.shadows.close())


@pytest.mark.parametrize("part", ["request", "shadow"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("happens", [is_canceled, leaves, enforces, all_pass, reloads, stops])
def test_whatever_happens_at_any_await_it_passes_and_nothing_is_left(
    part: str,
    plan: str,
    happens: Callable[[World], None],
    policy: Policy,
) -> None:
    async def played(at: int, *, is_late: bool) -> World:
        world = World(plan, policy, part)
        await world.run(happens if at >= 0 else None, at, is_late=is_late)
        world.check()
        if not world.sidecar.is_draining:
            await world.again()
        return world

    for at in range(run_virtually(played(-1, is_late=False)).steps):
        for is_late in (False, True):
            world = run_virtually(played(at, is_late=is_late))
            if happens in (is_canceled, leaves):
                continue
            if "fails" in plan:
                assert isinstance(world.task.exception(), ZeroDivisionError)
            else:
                assert world.task.exception() is None
                assert world.caller.sent[-1]["more_body"] is False
                assert (b"x-admission-mode", b"observe") in world.caller.sent[0]["headers"]
