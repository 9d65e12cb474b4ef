"""Whatever happens at any await of a request, nothing is left of it: no lease, ticket, task, running call or story."""

from __future__ import annotations

import asyncio
import json
import types
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sidecar.admission.answer import EngineCall
from sidecar.admission.handover import CALL_KEY
from sidecar.admission.request import RequestHandler
from sidecar.admission.usage import UsageReader
from sidecar.events import Event, Received
from sidecar.policy.choices import Mode
from sidecar.policy.compiler import load
from sidecar.policy.model import Policy
from sidecar.pools.base import Ask, Lease
from tests.support.middleware import CHAT, Caller, Guarded, Recorder, Story, answer, chat, chunk, start, whole_body

pytestmark = pytest.mark.anyio

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
PLANS = [
    "as it comes", "waits", "waits with comments", "preempted", "waits with comments, preempted", "handed back",
    "waits with comments, handed back", "upload", "waits, upload", "upload, handed back", "background",
    "waits, background", "background, handed back",
]  # fmt: skip
PATIENCE_S = 60


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    file = tmp_path / "policy.yaml"
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
    """Streams an answer, once it may. An attempt that is aborted ends; the first may say that it reached no engine."""

    def __init__(self, *, hands_back: bool) -> None:
        self.calls = 0
        self.may_end = asyncio.Event()
        self._hands_back = hands_back

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.calls += 1
        message = {"more_body": True}
        while message.get("more_body", False):
            message = await receive()
            if message["type"] == "http.disconnect":
                return
        if self._hands_back and self.calls == 1 and CALL_KEY in scope:
            scope[CALL_KEY].may_run, scope[CALL_KEY].is_handed_back = False, True
        elif await self._may_answer(receive):
            await start(send, content_type=b"text/event-stream")
            for number in range(2):
                await chunk(send, b'data: {"n": %d}\n\n' % number)
                await asyncio.sleep(0)
            await chunk(send, b"", more=False)

    async def _may_answer(self, receive: Callable[[], Coroutine[Any, Any, Any]]) -> bool:
        left, ended = asyncio.create_task(receive()), asyncio.create_task(self.may_end.wait())
        try:
            await asyncio.wait((left, ended), return_when=asyncio.FIRST_COMPLETED)
            return not left.done()
        finally:
            left.cancel()
            ended.cancel()


class World:
    """One request, and all that happens to it by a plan. `task` is the request's."""

    task: asyncio.Task[None]

    def __init__(self, plan: str, policy: Policy) -> None:
        self.plan, self.policy = plan, policy
        if "comments" in plan:
            self.policy = replace(policy, keep_alive_s=0.001)
        self.engine = Engine(hands_back="handed back" in plan)
        self.guarded = Guarded(self.engine, self.policy)
        self.body, path = json.dumps(chat(stream=True)).encode(), CHAT
        headers = [(b"x-priority", b"batch")]
        if "upload" in plan:
            self.body, path = b"x" * 3000, UPLOAD
            headers += [(b"content-type", b"audio/wav"), (b"content-length", b"3000")]
        elif "background" in plan:
            asked = {"model": "m", "input": "hi", "stream": True, "background": True}
            self.body, path = json.dumps(asked).encode(), RESPONSES
        self.caller = Caller(self.guarded.sidecar, path=path, headers=headers)
        self._other: Lease | None = None

    async def run(self, at: Step) -> None:
        """Returns when the request is over, and nothing of it is left."""
        if "waits" in self.plan:
            self._other = await self.guarded.pool.enter(Ask(0, "other", 1, 10, 1))
        self.task = asyncio.create_task(self._request(at))
        driven = asyncio.create_task(self._drive())
        await asyncio.wait((self.task,), timeout=PATIENCE_S)
        assert self.task.done(), "it hangs"
        await driven
        await self.guarded.sidecar.background.close()
        await self.guarded.nothing_left()
        assert {it.running for it in self.guarded.sidecar.gain.speeds.engines.values()} <= {0}
        assert {it.running for it in self.guarded.sidecar.lease_sizes._engines.values()} <= {0}

    async def _request(self, at: Step) -> None:
        await stepped(self.guarded.sidecar(self.caller.scope, self.caller._receive, self.caller._send), at)

    async def _drive(self) -> None:
        half = len(self.body) // 2
        self._feed(self.body[:half], more=True)
        await asyncio.sleep(0)
        if "upload" not in self.plan:
            self._feed(self.body[half:], more=False)
        if self._other is not None:
            await self._until(lambda: self.caller.sent if "comments" in self.plan else self.guarded.waiting)
            self._other.settle(1)
        if "upload" in self.plan:
            await self._until(lambda: self.guarded.sidecar.is_draining)
            self._feed(self.body[half:], more=False)
        if "preempted" in self.plan:
            await self._until(lambda: False)
            other = await self.guarded.pool.enter(Ask(0, "other", 1, 10, 1))
            await asyncio.wait_for(other.wait(), PATIENCE_S)
            other.settle(1)
            await self._until(lambda: self.engine.calls > 1 or self.guarded.sidecar.passes_all, is_called=False)
        self.engine.may_end.set()

    def _feed(self, body: bytes, *, more: bool) -> None:
        self.caller.incoming.put_nowait({"type": "http.request", "body": body, "more_body": more})

    async def _until(self, holds: Callable[[], Any], *, is_called: bool = True) -> None:
        """Until that is so, the engine was called, or the request is over."""
        while not (self.task.done() or holds() or (is_called and self.engine.calls)):  # noqa: ASYNC110  # no event for all
            await asyncio.sleep(0)


def is_canceled(world: World) -> None:
    world.task.cancel()


def leaves(world: World) -> None:
    world.caller.leave()


def stops(world: World) -> None:
    world.guarded.sidecar.is_draining = True
    world.task.cancel()


def drains(world: World) -> None:
    world.guarded.sidecar.is_draining = True
    world.guarded.sidecar.watchdog.give_up()


def is_looked_at(world: World) -> None:
    for watched in tuple(world.guarded.sidecar.watchdog._watched):
        watched.check()


def all_pass(world: World) -> None:
    world.guarded.sidecar.change_policy(replace(world.policy, mode=Mode.PASS))


def observes(world: World) -> None:
    world.guarded.sidecar.change_policy(replace(world.policy, mode=Mode.OBSERVE))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    "happens",
    [
        is_canceled,
        leaves,
        *(pytest.param(it, marks=pytest.mark.long) for it in (stops, drains, is_looked_at, all_pass, observes)),
    ],
)
async def test_whatever_happens_at_any_await_nothing_is_left(
    plan: str, happens: Callable[[World], None], policy: Policy
) -> None:
    awaits = 0

    def count(number: int, _: object) -> None:
        nonlocal awaits
        awaits = number + 1

    world = World(plan, policy)
    await world.run(count)
    assert world.task.exception() is None
    assert world.caller.sent[-1]["more_body"] is False
    for at in range(awaits):
        for is_at_its_end in (False, True):  # meanwhile, or in the tick in which what it waits for is there
            world = World(plan, policy)

            def step(number: int, waits_for: Any, at: int = at, late: bool = is_at_its_end, in_: World = world) -> None:
                if number == at and late and waits_for is not None:
                    waits_for.add_done_callback(lambda _: happens(in_))
                elif number == at:
                    asyncio.get_running_loop().call_soon(happens, in_)

            await world.run(step)
            if happens not in (is_canceled, stops, leaves):
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
async def test_nor_where_what_observes_it_fails(plan: str, policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    def received(recorder: Recorder, event: Received) -> Story:
        recorder.stories.append(Raising(event))
        return recorder.stories[-1]

    monkeypatch.setattr(Recorder, "received", received)
    world = World(plan, policy)
    await world.run(lambda *_: None)
    events = len(world.guarded.recorder.stories[0].events)
    monkeypatch.setattr(Recorder, "check", lambda _: None)
    for at in range(1, events):  # nothing comes after the last
        monkeypatch.setattr(Raising, "fails_at", at)
        world = World(plan, policy)
        await world.run(lambda *_: None)
        assert isinstance(world.task.exception(), ZeroDivisionError)


async def test_an_error_after_a_complete_answer_adds_nothing_to_it(policy: Policy) -> None:
    async def app(_: Any, __: Any, send: Any) -> None:
        await answer(send, b"{}")
        raise ZeroDivisionError

    guarded = Guarded(app, replace(policy, keep_alive_s=0.001))
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


async def test_an_upload_that_waits_for_another_engine_is_not_late_meanwhile(policy: Policy) -> None:
    calls = 0

    async def app(_: Any, receive: Any, send: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ZeroDivisionError
        await whole_body(receive)
        await answer(send, b"{}")

    guarded = Guarded(app, replace(policy, abort_latency_s=3600.0))
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
