"""Whatever happens at any await of an observed request, or of its shadow: it passes, and nothing is left of either."""

from __future__ import annotations

import asyncio
import json
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sidecar.admission.dry_run.shadow import ShadowRequest
from sidecar.events import Settled
from sidecar.policy.choices import Mode
from sidecar.policy.model import Policy
from tests.support.anywhere import (
    UPLOAD,
    Engine,
    World,
    all_pass,
    at_every_await,
    enforces,
    is_canceled,
    rules,
    stepped,
)
from tests.support.middleware import CHAT, Caller, chat

PLANS = ["as it comes", "waits", "preempted", "upload", "waits, upload", "fails", "waits, fails", "refused, waits"]


class Observing(World):
    """One observed request. `part` is what is stepped through."""

    def __init__(self, plan: str, policy: Policy, part: str) -> None:
        super().__init__(plan, replace(policy, mode=Mode.OBSERVE), Engine(plan))
        self.part = part
        self.body = b"x" * 3000 if "upload" in plan else json.dumps(chat(stream=True)).encode()
        headers = [(b"x-priority", b"batch"), (b"content-length", b"%d" % len(self.body))]
        if "upload" in plan:
            headers.append((b"content-type", b"audio/wav"))
        self.caller = Caller(self.sidecar, path=UPLOAD if "upload" in plan else CHAT, headers=headers)
        self.closing: asyncio.Future[None] | None = None

    async def begin(self) -> None:
        if self.part == "shadow":
            ShadowRequest.run = lambda shadow: stepped(RUN(shadow), self.step)  # type: ignore[method-assign,assignment]
        half = len(self.body) // 2
        app = self.sidecar(self.caller.scope, self.caller._receive, self.caller._send)
        self.task = asyncio.create_task(stepped(app, self.step) if self.part == "request" else app)  # type: ignore[arg-type]
        self.caller.incoming.put_nowait({"type": "http.request", "body": self.body[:half], "more_body": True})
        await asyncio.sleep(0.1)
        self.caller.incoming.put_nowait({"type": "http.request", "body": self.body[half:], "more_body": False})
        await asyncio.sleep(0.4)

    async def check(self) -> None:
        """It was reported once; another request finds an engine in which nothing is left."""
        assert len(self.sidecar.shadows) == 0
        (story,), (_,) = self.recorder.stories, self.observed
        assert isinstance(story.end, Settled)
        assert story.kinds.count("FirstByte") <= 1
        if self.sidecar.is_draining:
            return
        self.sidecar.change_policy(self.policy)
        caller = Caller(self.sidecar, self.body, path=self.caller.scope["path"], headers=self.caller.scope["headers"])
        await asyncio.gather(caller.run(), return_exceptions=True)
        assert sum(held.arrivals for held in self.sidecar.engine_times.counted().values()) == 0
        await asyncio.sleep(60)


RUN = ShadowRequest.run


@pytest.fixture(autouse=True)
def unstepped() -> Iterator[None]:
    yield
    ShadowRequest.run = RUN  # type: ignore[method-assign]


def leaves(world: Observing) -> None:
    world.caller.leave()


def reloads(world: Observing) -> None:
    world.sidecar.change_policy(replace(world.policy, generation="other"))


def stops(world: Observing) -> None:
    world.sidecar.drain()
    world.closing = asyncio.ensure_future(world.sidecar.shadows.close())


@pytest.mark.parametrize("part", ["request", "shadow"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("happens", [is_canceled, leaves, enforces, all_pass, reloads, stops])
def test_whatever_happens_at_any_await_it_passes_and_nothing_is_left(
    part: str, plan: str, happens: Callable[[Observing], None], tmp_path: Path
) -> None:
    policy = rules(tmp_path)
    for world in at_every_await(lambda: Observing(plan, policy, part), happens):
        if happens in (is_canceled, leaves):
            assert world.task.cancelled() or isinstance(
                world.task.exception(), ZeroDivisionError | AssertionError | types.NoneType
            )
        elif "fails" in plan:
            assert isinstance(world.task.exception(), ZeroDivisionError)
        else:
            assert world.task.exception() is None
            assert world.caller.sent[-1]["more_body"] is False
            assert (b"x-admission-mode", b"observe") in world.caller.sent[0]["headers"]
