"""Whatever happens at any await of a request, nothing is left of it: no lease, ticket, task, running call or story."""

from __future__ import annotations

import asyncio
import json
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sidecar.admission.answer import EngineCall
from sidecar.admission.request import RequestHandler
from sidecar.admission.usage import UsageReader
from sidecar.events import Event, Received
from sidecar.policy.model import Policy
from sidecar.pools.base import Ask, Lease
from tests.support.anywhere import (
    RESPONSES,
    UPLOAD,
    Engine,
    World,
    all_pass,
    at_every_await,
    is_canceled,
    observes,
    rules,
    stepped,
)
from tests.support.middleware import CHAT, Caller, Guarded, Recorder, Story, answer, chat, whole_body

pytestmark = pytest.mark.anyio

PLANS = [
    "as it comes", "waits", "waits with comments", "preempted", "waits with comments, preempted", "handed back",
    "waits with comments, handed back", "upload", "waits, upload", "upload, handed back", "background",
    "waits, background", "background, handed back",
]  # fmt: skip
PATIENCE_S = 60


class Breaking(World):
    """One request. An upload comes slowly: its end when it may be at the engine already."""

    def __init__(self, plan: str, policy: Policy) -> None:
        if "comments" in plan:
            policy = replace(policy, keep_alive_s=0.1)
        super().__init__(plan, policy, Engine(plan))
        self.body, path = json.dumps(chat(stream=True)).encode(), CHAT
        headers = [(b"x-priority", b"batch")]
        if "upload" in plan:
            self.body, path = b"x" * 3000, UPLOAD
            headers += [(b"content-type", b"audio/wav"), (b"content-length", b"3000")]
        elif "background" in plan:
            asked = {"model": "m", "input": "hi", "stream": True, "background": True}
            self.body, path = json.dumps(asked).encode(), RESPONSES
        self.caller = Caller(self.sidecar, path=path, headers=headers)

    async def begin(self) -> None:
        app = self.sidecar(self.caller.scope, self.caller._receive, self.caller._send)
        self.task = asyncio.create_task(stepped(app, self.step))  # type: ignore[arg-type]
        half = len(self.body) // 2
        self._feed(self.body[:half], more=True)
        later_s = 1.0 if "upload" in self.plan else 0.1
        asyncio.get_running_loop().call_later(later_s, lambda: self._feed(self.body[half:], more=False))
        await asyncio.sleep(0.5)

    async def check(self) -> None:
        await self.sidecar.background.close()
        assert self.pool._requests.all() == []
        assert {it.running for it in self.sidecar.gain.speeds.engines.values()} <= {0}
        assert {it.running for it in self.sidecar.lease_sizes._engines.values()} <= {0}
        self.recorder.check()

    def _feed(self, body: bytes, *, more: bool) -> None:
        self.caller.incoming.put_nowait({"type": "http.request", "body": body, "more_body": more})


def leaves(world: Breaking) -> None:
    world.caller.leave()


def stops(world: Breaking) -> None:
    world.sidecar.is_draining = True
    world.task.cancel()


def drains(world: Breaking) -> None:
    world.sidecar.is_draining = True
    world.sidecar.watchdog.give_up()


def is_looked_at(world: Breaking) -> None:
    for watched in tuple(world.sidecar.watchdog._watched):
        watched.check()


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    "happens",
    [
        is_canceled,
        leaves,
        *(pytest.param(it, marks=pytest.mark.long) for it in (stops, drains, is_looked_at, all_pass, observes)),
    ],
)
def test_whatever_happens_at_any_await_nothing_is_left(
    plan: str, happens: Callable[[Breaking], None], tmp_path: Path
) -> None:
    policy = rules(tmp_path)
    for world in at_every_await(lambda: Breaking(plan, policy), happens):
        if world.at < 0 or happens not in (is_canceled, stops, leaves):
            assert world.task.exception() is None
            assert world.caller.sent[-1]["more_body"] is False


class Raising(Story):
    """Fails at one of its events."""

    fails_at = 0

    def on_event(self, event: Event) -> None:
        super().on_event(event)
        if len(self.events) == self.fails_at:
            raise ZeroDivisionError


@pytest.mark.parametrize("plan", [plan for plan in PLANS if "comments" not in plan])
def test_nor_where_what_observes_it_fails(plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def received(recorder: Recorder, event: Received) -> Story:
        recorder.stories.append(Raising(event))
        return recorder.stories[-1]

    def played() -> Breaking:
        return next(at_every_await(lambda: Breaking(plan, policy), is_canceled))

    policy = rules(tmp_path)
    monkeypatch.setattr(Recorder, "received", received)
    events = len(played().recorder.stories[0].events)
    monkeypatch.setattr(Recorder, "check", lambda _: None)
    for at in range(1, events):  # nothing comes after the last
        monkeypatch.setattr(Raising, "fails_at", at)
        assert isinstance(played().task.exception(), ZeroDivisionError)


async def test_an_error_after_a_complete_answer_adds_nothing_to_it(tmp_path: Path) -> None:
    async def app(_: Any, __: Any, send: Any) -> None:
        await answer(send, b"{}")
        raise ZeroDivisionError

    guarded = Guarded(app, replace(rules(tmp_path), keep_alive_s=0.001))
    other = await guarded.pool.enter(Ask(0, "other", 1, 10, 1))
    caller = Caller(guarded.sidecar, json.dumps(chat(stream=True)).encode())
    task = caller.begin()
    while not caller.sent:  # noqa: ASYNC110  # until a comment has begun the answer
        await asyncio.sleep(0)
    other.settle(1)
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(task, PATIENCE_S)
    assert [message.get("more_body") for message in caller.sent].index(False) == len(caller.sent) - 1
    assert guarded.recorder.ends == ["completed"]
    await guarded.nothing_left()


class Route:
    """To an engine that breaks the connection, but computes on: the request waits for its abort, and then again."""

    hits, barred, replay = (), (), None
    usage: UsageReader
    _call: EngineCall

    def call(self) -> EngineCall:
        self.usage, self._call = UsageReader(), EngineCall()
        return self._call

    def begin(self, _: Lease, send: Any) -> Any:
        return send

    def failed(self, _: Exception) -> bool:
        self._call.is_handed_back = True
        return True

    async def waits_again(self) -> bool:
        return True

    def first_byte(self) -> None:
        """Nothing to do."""

    def ended(self) -> None:
        """Nothing to do."""


async def test_an_upload_that_waits_for_another_engine_is_not_late_meanwhile(tmp_path: Path) -> None:
    calls = 0

    async def app(_: Any, receive: Any, send: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ZeroDivisionError
        await whole_body(receive)
        await answer(send, b"{}")

    guarded = Guarded(app, replace(rules(tmp_path), abort_latency_s=3600.0))
    object.__setattr__(guarded.sidecar, "routing", types.SimpleNamespace(route=lambda _: Route()))
    caller = Caller(guarded.sidecar, path=UPLOAD)
    caller.scope["headers"] = [(b"content-type", b"audio/wav"), (b"content-length", b"8")]
    task = caller.begin()
    while not guarded.sidecar.pending_aborts.held().requests:  # noqa: ASYNC110  # no event says so
        await asyncio.sleep(0)
    (handler,) = guarded.sidecar.watchdog._watched
    assert isinstance(handler, RequestHandler)
    with an_hour_later(handler):
        handler.check()
    await guarded.sidecar.pending_aborts.close(waits=False)
    caller.incoming.put_nowait({"type": "http.request", "body": b"12345678", "more_body": False})
    await asyncio.wait_for(task, PATIENCE_S)
    assert (caller.status, calls) == (200, 2)
    await guarded.nothing_left()


@contextmanager
def an_hour_later(handler: RequestHandler) -> Iterator[None]:
    """An hour later, for one request."""
    now_us = handler._now_us
    handler._now_us = lambda: now_us() + 3_600_000_000
    yield
    handler._now_us = now_us
