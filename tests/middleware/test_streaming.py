"""A response passes as it comes: one send for one send, at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from sidecar.events import FirstByte, Outcome, Settled
from sidecar.sending import SENT, chunk_path
from sidecar.server.http_protocol import BoundedHttpProtocol
from tests.support.middleware import CHAT, SMALL, App, Caller, Guarded, chat, chunk, guarding, key, policy, start
from tests.support.wire import connected, post

pytestmark = pytest.mark.anyio

EVENT = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'


def streaming(
    events: int,
    *,
    last: bytes = b"data: [DONE]\n\n",
    between: Callable[[], Awaitable[object]] = lambda: asyncio.sleep(0),
) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await App()(scope, receive, send)
            return
        await receive()
        await start(send, content_type=b"text/event-stream")
        for _ in range(events):
            await chunk(send, EVENT)
            await between()
        await chunk(send, last, more=False)

    return app


async def test_every_event_arrives_when_it_is_sent() -> None:
    seen: asyncio.Queue[None] = asyncio.Queue()

    async def until_it_is_seen() -> None:
        await asyncio.wait_for(seen.get(), 60)  # the next one is not sent before the client has this one

    async with (
        guarding(streaming(8, last=b"", between=until_it_is_seen)) as guarded,
        connected(guarded.port) as (reader, writer),
    ):
        writer.write(post(CHAT, SMALL))
        await reader.readuntil(b"\r\n\r\n")
        for _ in range(8):
            await asyncio.wait_for(reader.readuntil(EVENT + b"\r\n"), 60)
            seen.put_nowait(None)
        assert (await reader.read()).endswith(b"0\r\n\r\n")


async def test_one_send_of_the_app_is_one_send_to_the_server() -> None:
    guarded = Guarded(streaming(5), policy())
    caller = Caller(guarded.sidecar, SMALL)
    await caller.run()
    sent = [(message["body"], message["more_body"]) for message in caller.sent[1:]]
    assert sent == [*[(EVENT, True)] * 5, (b"data: [DONE]\n\n", False)]
    assert caller.sent[1]["body"] is EVENT
    assert guarded.leases == 0


async def test_a_slow_client_slows_the_app_and_nothing_piles_up() -> None:
    sent = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal sent
        if scope["type"] == "lifespan":
            await App()(scope, receive, send)
            return
        await receive()
        await start(send)
        for _ in range(200):
            await chunk(send, b"x" * 100_000)
            sent += 1
        await chunk(send, b"", more=False)

    async with guarding(app) as guarded, connected(guarded.port) as (reader, writer):
        writer.write(post(CHAT, SMALL))
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.1)
        stalled_at = sent
        await asyncio.sleep(0.1)
        assert sent == stalled_at < 200
        assert guarded.leases == 1
        while await reader.read(1 << 20):
            pass
        assert sent == 200


async def test_the_lease_is_given_back_behind_the_last_byte() -> None:
    leases: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await start(send)
        leases.append(guarded.leases)
        await chunk(send, b"one")
        leases.append(guarded.leases)
        await chunk(send, b"two", more=False)
        leases.append(guarded.leases)

    guarded = Guarded(app, policy())
    await Caller(guarded.sidecar, SMALL).run()
    assert leases == [1, 1, 0]


@pytest.mark.parametrize(
    ("last", "used", "counts"),
    [
        (b"data: [DONE]\n\n", None, (None, None)),
        (b'data: {"usage":{"prompt_tokens":11,"completion_tokens":4}}\n\n', 15, (11, 4)),
    ],
)
async def test_what_a_stream_cost_is_reported(last: bytes, used: int | None, counts: Any) -> None:
    guarded = Guarded(streaming(5, last=last), policy())
    await Caller(guarded.sidecar, SMALL).run()
    settled: Settled = guarded.recorder.stories[0].one(Settled)
    assert (settled.input_tokens, settled.output_tokens) == counts
    assert settled.outcome is Outcome.COMPLETED
    assert settled.status == 200
    if used is None:  # an event is about a token: five, and the one that says it is done
        assert 6 < settled.tokens_used < 40
    else:
        assert settled.tokens_used == used


async def test_the_first_byte_is_the_bodys_and_is_reported_once() -> None:
    guarded = Guarded(streaming(3), policy())
    await Caller(guarded.sidecar, SMALL).run()
    story = guarded.recorder.stories[0]
    assert story.kinds == ["Classified", "Admitted", "FirstByte", "Settled"]
    assert story.one(FirstByte).status == 200


async def test_an_empty_response_has_no_first_byte() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await start(send, 204)
        await chunk(send, b"", more=False)

    guarded = Guarded(app, policy())
    await Caller(guarded.sidecar, SMALL).run()
    assert guarded.recorder.stories[0].kinds == ["Classified", "Admitted", "Settled"]


async def test_any_kind_of_bytes_passes_as_it_is() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await start(send)
        await chunk(send, memoryview(b"data: one"))  # type: ignore[arg-type]  # Starlette lets apps send these
        await chunk(send, bytearray(b"data: two"), more=False)  # type: ignore[arg-type]

    guarded = Guarded(app, policy())
    caller = Caller(guarded.sidecar, SMALL)
    await caller.run()
    assert [bytes(message["body"]) for message in caller.sent[1:]] == [b"data: one", b"data: two"]
    assert guarded.recorder.ends == ["completed"]


async def test_messages_that_are_no_body_pass() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "trailers": True})
        await chunk(send, b"x", more=False)
        await send({"type": "http.response.trailers", "headers": [(b"x-t", b"1")], "more_trailers": False})

    guarded = Guarded(app, policy())
    caller = Caller(guarded.sidecar, SMALL)
    await caller.run()
    assert caller.sent[0]["trailers"] is True
    assert caller.sent[-1]["headers"] == [(b"x-t", b"1")]


async def test_the_openai_client_streams_through_it() -> None:
    from openai import AsyncOpenAI

    async with guarding(streaming(4)) as guarded:
        async with AsyncOpenAI(api_key="sk-acme", base_url=f"http://127.0.0.1:{guarded.port}/v1") as client:
            stream = await client.chat.completions.create(**chat(), stream=True)
            assert [part.choices[0].delta.content async for part in stream] == ["x"] * 4
        assert guarded.recorder.stories[0].one(Settled).outcome is Outcome.COMPLETED


def quickly_streaming(events: int, *, is_quick: bool, paths: list[bool]) -> Any:
    """Streams as the proxy does, by chunks without messages where it can."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await App()(scope, receive, send)
            return
        await receive()
        await start(send, content_type=b"text/event-stream")
        paths.append(chunk_path(send) is not None)
        await chunk(send, EVENT)
        path = chunk_path(send)
        paths.append(path is not None)
        for _ in range(events - 1):
            if path is None or not is_quick:
                await chunk(send, EVENT)
            else:
                await path(EVENT, b"%x\r\n%b\r\n" % (len(EVENT), EVENT))
        await chunk(send, COUNTED, more=False)

    return app


COUNTED = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":500}}\n\ndata: [DONE]\n\n'
SLO = "30s}, slo: {ttft: 1s, tpot: 100ms}, gain: {weight: 4"
PREEMPTIBLE = "1000}, preemptible: true, slo: {ttft: 1s"


@pytest.mark.parametrize("settings", [{}, {"engine": "vllm"}, {"max_wait": SLO}, {"max_requests": PREEMPTIBLE}])
async def test_chunks_without_messages_are_read_and_answered_as_with_them(settings: dict[str, str]) -> None:
    answers, ends = [], []
    for is_quick in (True, False):
        paths: list[bool] = []
        app = quickly_streaming(500, is_quick=is_quick, paths=paths)
        async with guarding(app, policy(**settings), http=BoundedHttpProtocol) as guarded:
            who = key("nightly") if settings.get("max_requests") else key("acme")
            answer = await guarded.ask(chat(stream=True, max_tokens=1000), who)
            answers.append(answer.body)
            await guarded.nothing_left()
            end = guarded.recorder.stories[0].end
            assert isinstance(end, Settled)
            ends.append((end.outcome, end.tokens_used, end.input_tokens, end.output_tokens))
        assert paths == [False, True]
    asked = b"data: [DONE]\n\n" if "engine" in settings else COUNTED  # the client did not ask for the usage
    assert answers[0] == answers[1] == EVENT * 500 + asked
    assert ends == [(Outcome.COMPLETED, 507, 7, 500)] * 2


async def test_a_stream_that_breaks_off_was_counted_by_its_chunks_without_messages() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await start(send, content_type=b"text/event-stream")
        await chunk(send, EVENT)
        path = chunk_path(send)
        assert path is not None
        for _ in range(99):
            assert path(EVENT, b"%x\r\n%b\r\n" % (len(EVENT), EVENT)) is SENT
        raise RuntimeError("broke off")

    async with guarding(app, http=BoundedHttpProtocol, lifespan="off") as guarded:
        await guarded.ask(chat(stream=True, max_tokens=1000))
        await guarded.until(leases=0, stories=1)
        end = guarded.recorder.stories[0].end
    assert isinstance(end, Settled)
    assert end.output_tokens is None
    assert end.tokens_used >= 100
