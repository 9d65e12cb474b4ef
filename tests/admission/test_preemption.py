"""A running request gives its room to a more important one, and its client notices nothing but the wait."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from starlette.requests import Request

from sidecar.events import Admitted, Outcome, Preempted, Settled
from sidecar.policy.model import Policy
from tests.support.middleware import CHAT, App, Guarded, answer, chat, chunk, guarding, start, whole_body
from tests.support.waiting import until
from tests.support.wire import connected, post

pytestmark = pytest.mark.anyio

PREEMPT_AFTER_S = 0.05
TIERS = """\
engine: none
capacity: {{requests: {requests}}}
tiers:
  critical: {{preempt_after: 50ms}}
  batch: {{preemptible: true}}
max_preemptions: {most}
default_tier: batch
anonymous: critical
sources: [header]
disconnect_grace: 2s
{more}
"""
CRITICAL = "x-priority: critical"


def rules(tmp_path: Any, requests: int = 1, most: int = 2, more: str = "") -> Policy:
    from sidecar.policy.compiler import load

    file = tmp_path / "policy.yaml"
    file.write_text(TIERS.format(requests=requests, most=most, more=more))
    return load(file)


class Engine(App):
    """Runs a request until it is let go, or until the client leaves, as a serving app does."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end = asyncio.Event()
        self.calls: list[tuple[str, bytes]] = []
        self.stopped = 0
        self.has_begun = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        body = await whole_body(receive)
        self.calls.append((scope["admission"].tier, body))
        self.has_begun.set()
        if scope["admission"].tier == "critical":
            await answer(send, b'"critical"')
        elif await self.runs_to_its_end(scope, receive, send):
            await self.respond(send)
        else:
            self.stopped += 1

    async def runs_to_its_end(self, scope: Any, receive: Any, send: Any) -> bool:
        del scope, send
        left = asyncio.ensure_future(receive())
        ended = asyncio.ensure_future(self.may_end.wait())
        await asyncio.wait((left, ended), return_when=asyncio.FIRST_COMPLETED)
        for task in (left, ended):
            task.cancel()
        return not left.done() or left.cancelled()

    async def respond(self, send: Any) -> None:
        await answer(send, b'"batch"')

    @property
    def tiers(self) -> list[str]:
        return [tier for tier, _ in self.calls]


class Busy(Engine):
    """Its second request holds the room until the first may end."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and len(self.calls) == 1:
            self.calls.append((scope["admission"].tier, await whole_body(receive)))
            await self.may_end.wait()
            await answer(send, b"{}")
        else:
            await super().__call__(scope, receive, send)


async def running(guarded: Guarded, engine: Engine, *headers: str, **members: Any) -> asyncio.Task[Any]:
    """A batch request that holds the whole pool."""
    asked = asyncio.create_task(guarded.ask(chat(**members), *headers))
    await asyncio.wait_for(engine.has_begun.wait(), 60)
    return asked


async def test_the_important_request_goes_in_and_the_other_is_served_after_all(tmp_path: Any) -> None:
    engine = Engine()
    async with guarding(engine, rules(tmp_path)) as guarded:
        batch = await running(guarded, engine, "x-request-id: bulk")
        critical = await guarded.ask(None, CRITICAL)
        assert (critical.status, critical.body) == (200, b'"critical"')
        assert not batch.done()
        engine.may_end.set()
        got = await batch
    assert (got.status, got.body) == (200, b'"batch"')
    assert got.headers["x-admission-preempted"] == "1"
    assert got.headers["x-request-id"] == "bulk"
    assert "x-admission-preempted" not in critical.headers
    assert float(critical.headers["x-admission-wait-ms"]) >= PREEMPT_AFTER_S * 1000
    assert engine.tiers == ["batch", "critical", "batch"]
    assert engine.calls[0] == engine.calls[2]  # the very same request, byte for byte
    assert engine.stopped == 1
    story = guarded.recorder.stories[0]
    assert story.kinds == ["Classified", "Admitted", "Preempted", "Queued", "Admitted", "FirstByte", "Settled"]
    first, again = (event for event in story.events if isinstance(event, Admitted))
    lost = story.one(Preempted)
    assert (lost.times, lost.admitted_us) == (1, first.at_us)
    assert again.queue_wait_us >= lost.at_us - first.at_us  # from its arrival on


async def test_its_first_byte_keeps_the_room(tmp_path: Any) -> None:
    class Streaming(Engine):
        async def runs_to_its_end(self, scope: Any, receive: Any, send: Any) -> bool:
            await start(send, content_type=b"text/event-stream")
            await chunk(send, b"data: 1\n\n")
            return await super().runs_to_its_end(scope, receive, send)

        async def respond(self, send: Any) -> None:
            await chunk(send, b"data: 2\n\n", more=False)

    engine = Streaming()
    async with guarding(engine, rules(tmp_path)) as guarded:
        async with connected(guarded.port) as (reader, writer):
            writer.write(post(CHAT, json.dumps(chat(stream=True)).encode()))
            await reader.readuntil(b"data: 1\n\n")
            critical = asyncio.create_task(guarded.ask(None, CRITICAL))
            await guarded.until(waiting=1)
            await asyncio.sleep(4 * PREEMPT_AFTER_S)
            assert engine.tiers == ["batch"]
            engine.may_end.set()
            rest = await reader.read()
            assert b"data: 2\n\n" in rest
        assert (await critical).status == 200
    assert engine.stopped == 0


async def test_a_head_that_is_sent_before_the_engine_begins_is_held_back(tmp_path: Any) -> None:
    class Hasty(Engine):
        async def runs_to_its_end(self, scope: Any, receive: Any, send: Any) -> bool:
            await start(send, content_type=b"text/event-stream")
            await chunk(send, b"")
            return await super().runs_to_its_end(scope, receive, send)

        async def respond(self, send: Any) -> None:
            await chunk(send, b"data: 1\n\n")
            await chunk(send, b"", more=False)

    engine = Hasty()
    async with guarding(engine, rules(tmp_path)) as guarded:
        batch = await running(guarded, engine, stream=True)
        assert (await guarded.ask(None, CRITICAL)).status == 200
        engine.may_end.set()
        got = await batch
    assert (got.status, got.body) == (200, b"data: 1\n\n")
    assert engine.tiers == ["batch", "critical", "batch"]


async def test_an_app_that_does_not_listen_keeps_its_room_and_its_answer(tmp_path: Any) -> None:
    class Deaf(Engine):
        async def runs_to_its_end(self, scope: Any, receive: Any, send: Any) -> bool:
            del scope, receive, send
            await self.may_end.wait()
            return True

    engine = Deaf()
    async with guarding(engine, rules(tmp_path)) as guarded:
        batch = await running(guarded, engine)
        critical = asyncio.create_task(guarded.ask(None, CRITICAL))
        await guarded.until(waiting=1)
        await asyncio.sleep(4 * PREEMPT_AFTER_S)
        engine.may_end.set()
        got = await batch
        assert (await critical).status == 200
    assert (got.status, got.body) == (200, b'"batch"')
    assert "x-admission-preempted" not in got.headers
    assert engine.tiers == ["batch", "critical"]


async def test_an_app_that_asks_now_and_then_hears_it_too(tmp_path: Any) -> None:
    class Polling(Engine):
        async def runs_to_its_end(self, scope: Any, receive: Any, send: Any) -> bool:
            request = Request(scope, receive, send)
            while not self.may_end.is_set():  # as trtllm-serve does
                if await request.is_disconnected():
                    return False
                await asyncio.sleep(0.01)
            return True

    engine = Polling()
    async with guarding(engine, rules(tmp_path)) as guarded:
        batch = await running(guarded, engine)
        assert (await guarded.ask(None, CRITICAL)).status == 200
        engine.may_end.set()
        assert (await batch).body == b'"batch"'
    assert (engine.tiers, engine.stopped) == (["batch", "critical", "batch"], 1)


@pytest.mark.parametrize("says", ["an error", "an answer"])
async def test_what_a_stopped_app_says_is_for_no_one(tmp_path: Any, says: str) -> None:
    class Talking(Engine):
        async def runs_to_its_end(self, scope: Any, receive: Any, send: Any) -> bool:
            if await super().runs_to_its_end(scope, receive, send):
                return True
            if says == "an error":
                raise RuntimeError("the engine aborted the request")
            await answer(send, b'{"error": "aborted"}', 499)
            return False

    engine = Talking()
    async with guarding(engine, rules(tmp_path)) as guarded:
        batch = await running(guarded, engine)
        assert (await guarded.ask(None, CRITICAL)).status == 200
        engine.may_end.set()
        got = await batch
    assert (got.status, got.body) == (200, b'"batch"')


async def test_the_room_is_free_only_when_the_engine_has_let_go(tmp_path: Any) -> None:
    engine = Engine()
    async with guarding(engine, rules(tmp_path, more="abort_latency: 300ms")) as guarded:
        batch = await running(guarded, engine)
        told_s = time.monotonic() + PREEMPT_AFTER_S
        critical = asyncio.create_task(guarded.ask(None, CRITICAL))
        await until(lambda: engine.stopped)
        assert guarded.leases == 1
        await critical
        assert time.monotonic() - told_s >= 0.3
        engine.may_end.set()
        assert (await batch).status == 200


async def test_a_client_that_leaves_while_its_engine_lets_go_is_gone_for_good(tmp_path: Any) -> None:
    engine = Engine()
    async with guarding(engine, rules(tmp_path, more="abort_latency: 600ms")) as guarded:
        async with connected(guarded.port) as (_, writer):
            writer.write(post(CHAT, json.dumps(chat()).encode()))
            await asyncio.wait_for(engine.has_begun.wait(), 60)
            told_s = time.monotonic() + PREEMPT_AFTER_S
            critical = asyncio.create_task(guarded.ask(None, CRITICAL))
            await until(lambda: engine.stopped)
        assert (await critical).status == 200
        assert time.monotonic() - told_s >= 0.6  # the client's leaving changes nothing for the engine
    assert engine.tiers == ["batch", "critical"]
    end = guarded.recorder.stories[0].end
    assert isinstance(end, Settled)
    assert end.outcome is Outcome.CLIENT_LEFT


async def test_a_client_that_leaves_while_it_waits_again_is_settled(tmp_path: Any) -> None:
    engine = Busy()
    async with guarding(engine, rules(tmp_path)) as guarded:
        async with connected(guarded.port) as (_, writer):
            writer.write(post(CHAT, json.dumps(chat()).encode()))
            await asyncio.wait_for(engine.has_begun.wait(), 60)
            critical = asyncio.create_task(guarded.ask(None, CRITICAL))
            await until(lambda: len(engine.calls) >= 2)
            await guarded.until(leases=1, waiting=1)
        await guarded.until(leases=1, waiting=0)
        engine.may_end.set()
        await critical
    story = guarded.recorder.stories[0]
    assert story.kinds == ["Classified", "Admitted", "Preempted", "Queued", "Settled"]
    assert isinstance(story.end, Settled)
    assert (story.end.outcome, story.end.error) == (Outcome.CLIENT_LEFT, "client_left")


async def test_no_one_is_preempted_more_often_than_the_policy_says(tmp_path: Any) -> None:
    engine = Engine()
    async with guarding(engine, rules(tmp_path, most=1)) as guarded:
        batch = await running(guarded, engine)
        assert (await guarded.ask(None, CRITICAL)).status == 200
        await until(lambda: engine.tiers.count("batch") >= 2)
        critical = asyncio.create_task(guarded.ask(None, CRITICAL))
        await guarded.until(waiting=1)
        await asyncio.sleep(4 * PREEMPT_AFTER_S)
        assert not critical.done()
        engine.may_end.set()
        assert (await batch).headers["x-admission-preempted"] == "1"
        assert (await critical).status == 200
    assert engine.stopped == 1


async def test_a_stream_that_is_preempted_hears_comments_while_it_waits_again(tmp_path: Any) -> None:
    class Slow(Busy):
        async def respond(self, send: Any) -> None:
            await start(send, content_type=b"text/event-stream")
            await chunk(send, b"data: 1\n\n", more=False)

    engine = Slow()
    async with guarding(engine, rules(tmp_path, more="keep_alive: 20ms")) as guarded:
        async with connected(guarded.port) as (reader, writer):
            writer.write(post(CHAT, json.dumps(chat(stream=True)).encode()))
            await asyncio.wait_for(engine.has_begun.wait(), 60)
            critical = asyncio.create_task(guarded.ask(None, CRITICAL))
            await reader.readuntil(b": queued, 0 ahead")
            engine.may_end.set()
            rest = await reader.read()
        await critical
    assert b"data: 1\n\n" in rest
    assert rest.count(b"HTTP/1.1") == 0


class SlowToStop(Engine):
    """Its first request ends on its own; a later one that is to stop goes on for a moment."""

    def __init__(self) -> None:
        super().__init__()
        self.first_may_end, self.may_stop, self.is_to_stop = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def runs_to_its_end(self, scope: Any, receive: Any, send: Any) -> bool:
        if len(self.calls) == 1:
            await self.first_may_end.wait()
            return True
        goes_on = await super().runs_to_its_end(scope, receive, send)
        if not goes_on:
            self.is_to_stop.set()
            await self.may_stop.wait()
        return goes_on


async def test_a_request_whose_room_is_free_again_when_it_stops_reports_its_wait_before_its_grant(
    tmp_path: Any,
) -> None:
    engine = SlowToStop()
    async with guarding(engine, rules(tmp_path, requests=2)) as guarded:
        first = await running(guarded, engine)
        engine.has_begun.clear()
        second = await running(guarded, engine, "x-request-id: bulk")
        critical = asyncio.create_task(guarded.ask(None, CRITICAL))
        await asyncio.wait_for(engine.is_to_stop.wait(), 60)
        engine.first_may_end.set()
        assert (await first).status == (await critical).status == 200
        engine.may_stop.set()
        engine.may_end.set()
        got = await second
    assert (got.status, got.headers["x-admission-preempted"]) == (200, "1")
    assert engine.tiers == ["batch", "batch", "critical", "batch"]
    (story,) = [story for story in guarded.recorder.stories if story.received.request_id == "bulk"]
    assert story.kinds == ["Classified", "Admitted", "Preempted", "Queued", "Admitted", "FirstByte", "Settled"]
    times = [event.at_us for event in story.events]
    assert times == sorted(times)
