"""A response passes as it comes: one send for one send, at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

from sidecar import AdmissionMiddleware
from sidecar.admission.usage import UsageReader
from sidecar.events import Outcome, Settled
from sidecar.proxy.proxy import ReverseProxy
from sidecar.server import http_protocol
from sidecar.server.http_protocol import BoundedHttpProtocol
from tests.support.engine import Connection, RawEngine, Script, raw_engine
from tests.support.middleware import (
    CHAT,
    SMALL,
    Answer,
    App,
    Caller,
    Guarded,
    chat,
    chunk,
    guarding,
    key,
    policy,
    start,
)
from tests.support.serving import serving
from tests.support.wire import connected, exchange, post

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


COUNTED = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":500}}\n\ndata: [DONE]\n\n'
SLO = "30s}, slo: {ttft: 1s, tpot: 100ms}, gain: {weight: 4"
PREEMPTIBLE = "1000}, preemptible: true, slo: {ttft: 1s"


async def proxied(raw: RawEngine, http: Any, more: str = "", **settings: str) -> tuple[bytes, Settled]:
    """A stream from the engine through the proxy: what its client saw, and how it was settled."""
    proxy = ReverseProxy(raw.url)
    async with guarding(proxy, policy(more, **settings), http=http, lifespan="off") as guarded:
        who = key("nightly") if settings.get("max_requests") else key("acme")
        answer = await guarded.ask(chat(stream=True, max_tokens=1000), who)
        await guarded.until(stories=1)
        await guarded.nothing_left()
        end = guarded.recorder.stories[0].end
    await proxy.close()
    assert isinstance(end, Settled)
    return answer.body, end


def engine_of(events: Iterable[bytes], passed: Passed, *, breaks_off: bool = False) -> Script:
    """An engine that sends one event when the one before has passed."""

    async def script(connection: Connection) -> None:
        await connection.request()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        await connection.send(head)
        passed.read_bytes = sent_bytes = 0
        for one in events:
            await connection.send(b"%x\r\n%b\r\n" % (len(one), one))
            sent_bytes += len(one)
            while passed.read_bytes < sent_bytes:  # noqa: ASYNC110  # no event says so
                await asyncio.sleep(0)
        if not breaks_off:
            await connection.send(b"0\r\n\r\n")
            await connection.hung_up()

    return script


@dataclass
class Passed:
    """The bytes of a stream that were read as they passed, and its chunks that went the short way."""

    read_bytes: int = 0
    written: list[bytes] = field(default_factory=list)


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> Passed:
    """What passes in the test."""
    found = Passed()
    write, feed = http_protocol._write, UsageReader.feed

    def noted(cycle: Any, body: bytes) -> bool:
        if is_written := write(cycle, body):
            found.written.append(body)
        return is_written

    def fed(usage: UsageReader, body: bytes) -> bool:
        found.read_bytes += len(body)
        return feed(usage, body)

    monkeypatch.setattr(http_protocol, "_write", noted)
    monkeypatch.setattr(UsageReader, "feed", fed)
    return found


@pytest.mark.parametrize("settings", [{}, {"engine": "vllm"}, {"max_wait": SLO}, {"max_requests": PREEMPTIBLE}])
async def test_chunks_that_are_written_are_read_and_answered_as_those_that_are_sent(
    settings: dict[str, str], passed: Passed
) -> None:
    async with raw_engine(engine_of([*[EVENT] * 500, COUNTED], passed)) as raw:
        body, end = await proxied(raw, BoundedHttpProtocol, **settings)
        assert passed.written[:499] == [EVENT] * 499  # the first is sent
        passed.written.clear()
        assert (await proxied(raw, "httptools", **settings))[0] == body
        assert not passed.written
    asked = b"data: [DONE]\n\n" if "engine" in settings else COUNTED  # the client did not ask for the usage
    assert body == EVENT * 500 + asked
    assert (end.outcome, end.tokens_used, end.input_tokens, end.output_tokens) == (Outcome.COMPLETED, 507, 7, 500)


async def test_a_stream_that_breaks_off_was_counted_by_the_chunks_that_were_written(passed: Passed) -> None:
    async with raw_engine(engine_of([EVENT] * 100, passed, breaks_off=True)) as raw:
        _, end = await proxied(raw, BoundedHttpProtocol)
    assert passed.written == [EVENT] * 99
    assert end.output_tokens is None
    assert end.tokens_used >= 100


async def test_an_observed_stream_is_sent_chunk_by_chunk(passed: Passed) -> None:
    async with raw_engine(engine_of([*[EVENT] * 50, COUNTED], passed)) as raw:
        sidecar = AdmissionMiddleware(ReverseProxy(raw.url), policy("mode: observe\n"))
        async with serving(sidecar, http=BoundedHttpProtocol) as served:
            body = json.dumps(chat(stream=True)).encode()
            answer = Answer.parsed(await exchange(served.port, post(CHAT, body, key("acme"))))
    assert not passed.written
    assert answer.body == EVENT * 50 + COUNTED
