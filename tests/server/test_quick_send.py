"""The quick `send` of the sidecar's own server, and its client watch: an app on one side, raw bytes on the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from sidecar.sending import BODY_FOLLOWS, CLIENT_KEY, SENT, chunk_path
from sidecar.server.http_protocol import BoundedHttpProtocol
from sidecar.server.quick_send import _Response
from tests.support.serving import Served, serving
from tests.support.wire import connected, exchange, get, post

pytestmark = pytest.mark.anyio

START = {"type": "http.response.start", "status": 200, "headers": []}
WITH_LENGTH = {**START, "headers": [(b"content-length", b"2")]}
HEAD = b"HTTP/1.1 200 OK\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"


class Counted(BoundedHttpProtocol):
    """Counts the writes to the transport."""

    writes: list[bytes]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn's narrowing
        super().connection_made(transport)
        type(self).writes = []
        self.flow = type(self.flow)(transport)
        self.transport = _Counting(transport, self.writes)  # type: ignore[assignment]


class _Counting:
    def __init__(self, transport: asyncio.Transport, writes: list[bytes]) -> None:
        self._transport = transport
        self._writes = writes

    def write(self, data: bytes) -> None:
        self._writes.append(bytes(data))
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def body(part: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": part, "more_body": more}


@asynccontextmanager
async def served(app: Callable[..., Awaitable[None]]) -> AsyncIterator[Served]:
    async with serving(app, http=Counted, lifespan="off", access_log=False) as server:  # as the sidecar's servers
        yield server


async def test_chunks_are_written_as_they_are_sent_and_no_one_has_to_wait() -> None:
    waited: list[bool] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        for part in (b"one", b"", b"three"):
            sent = send(body(part))
            waited.append(sent is not SENT)
            await sent
        await send(body(b"four", more=False))

    async with served(app) as server:
        assert await exchange(server.port, get("/")) == (HEAD + b"3\r\none\r\n5\r\nthree\r\n4\r\nfour\r\n0\r\n\r\n")
    assert waited == [False, False, False]
    assert Counted.writes == [HEAD, b"3\r\none\r\n", b"5\r\nthree\r\n", b"4\r\nfour\r\n0\r\n\r\n"]


@pytest.mark.parametrize(
    ("method", "start", "answer"),
    [
        ("GET", {**START, BODY_FOLLOWS: True}, b"\r\n\r\nok"),
        ("GET", WITH_LENGTH, b"content-length: 2\r\nconnection: close\r\n\r\nok"),
        ("HEAD", START, b"\r\n\r\n"),
    ],
)
async def test_before_http_1_1_there_are_no_chunks_and_the_connections_end_ends_the_response(
    method: str, start: dict[str, Any], answer: bytes
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(start)
        assert chunk_path(send) is None
        for part in (b"o", b"", b"k"):
            await send(body(part))
        await send(body(b"", more=False))

    async with served(app) as server:
        for version in ("0.9", "1.0"):
            asked = f"{method} / HTTP/{version}\r\nconnection: keep-alive\r\n\r\n".encode()
            answered = await asyncio.wait_for(exchange(server.port, asked), 60)
            assert b"connection: close" in answered
            assert answered.endswith(answer)
            assert b"transfer-encoding" not in answered


@pytest.mark.parametrize("more", [False, True])
async def test_a_head_whose_body_follows_goes_out_with_it_and_another_at_once(more: bool) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        start = {**START, BODY_FOLLOWS: True} if scope["path"] == "/follows" else START
        await send(start)
        await send(body(b"one", more=more))
        if more:
            await send(body(b"", more=False))

    async with served(app) as server:
        first = await exchange(server.port, get("/follows"))
        together = Counted.writes
        assert await exchange(server.port, get("/")) == first
    end = [b"0\r\n\r\n"] if more else []
    assert together == [b"".join([HEAD, b"3\r\none\r\n", *([] if more else [b"0\r\n\r\n"])]), *end]
    assert Counted.writes == [HEAD, b"".join([b"3\r\none\r\n", *([] if more else [b"0\r\n\r\n"])]), *end]


async def test_a_head_with_a_length_goes_out_with_its_body_and_the_connection_is_kept() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({**WITH_LENGTH, BODY_FOLLOWS: True})
        await send(body(b"ok", more=False))

    async with served(app) as server, connected(server.port) as (reader, writer):
        for _ in range(2):
            writer.write(post(close=False))
            assert await reader.readuntil(b"ok") == b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
        assert len(Counted.writes) == 2


async def test_a_head_whose_app_fails_before_the_body_closes_the_connection() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({**START, BODY_FOLLOWS: True})
        raise RuntimeError("broke off")

    async with served(app) as server:
        assert await asyncio.wait_for(exchange(server.port, post(close=False)), 2) == b""


async def test_a_response_to_head_has_a_head_only() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({**START, "headers": [(b"transfer-encoding", b"chunked")]})
        await send(body(b"one"))
        await send(body(b"", more=False))

    async with served(app) as server:
        answer = await exchange(server.port, get("/").replace(b"GET", b"HEAD"))
    assert answer.endswith(b"\r\n\r\n")
    assert b"one" not in answer


async def test_a_client_that_does_not_read_is_waited_for() -> None:
    waited = asyncio.Event()
    sent_bytes = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal sent_bytes
        await send(START)
        for _ in range(1000):
            sent = send(body(b"x" * 65536))
            if sent is not SENT:
                waited.set()
            await sent
            sent_bytes += 65536
        await send(body(b"", more=False))

    async with served(app) as server, connected(server.port) as (reader, writer):
        writer.write(get("/"))
        await asyncio.wait_for(waited.wait(), 5)
        await asyncio.sleep(0.1)
        assert sent_bytes < 24 * 2**20
        answer = await asyncio.wait_for(reader.read(), 20)
    assert answer.count(b"x") == 1000 * 65536
    assert answer.endswith(b"0\r\n\r\n")


async def test_what_no_server_allows_is_an_error_as_before() -> None:
    raised: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in (body(b"too soon"), START, body(b"one"), START, body(b"", more=False), body(b"late")):
            try:
                await send(message)
            except RuntimeError as error:  # noqa: PERF203  # each is an error of its own
                raised.append(str(error))

    async with served(app) as server:
        assert (await exchange(server.port, get("/"))) == HEAD + b"3\r\none\r\n0\r\n\r\n"
    assert len(raised) == 3


# The client watch


def watching(log: list[str], *, reads: bool = True) -> Callable[..., Awaitable[None]]:
    """An app that notes a disconnect, and answers when the client asks for it or has disconnected."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        while reads and (await receive()).get("more_body"):
            pass
        left = asyncio.Event()
        scope[CLIENT_KEY].begin(lambda: (log.append(f"{path} left"), left.set()))
        if path == "/answered":
            await send(WITH_LENGTH)
            await send(body(b"ok", more=False))
        else:
            await asyncio.wait_for(left.wait(), 5)
            assert (await receive())["type"] == "http.disconnect"
            log.append(f"{path} received")

    return app


@pytest.mark.parametrize("size", [0, 100, 65_537, 1_000_000])
async def test_a_disconnect_is_reported_behind_a_body_of_any_size(size: int) -> None:
    log: list[str] = []
    async with served(watching(log)) as server:
        async with connected(server.port) as (_, writer):
            writer.write(post("/x", b"x" * size))
            await writer.drain()
            await asyncio.sleep(0.1)
            assert log == []
        await asyncio.sleep(0.1)
    assert log == ["/x left", "/x received"]


async def test_a_disconnect_after_the_response_is_reported_to_no_one() -> None:
    log: list[str] = []
    async with served(watching(log)) as server:
        async with connected(server.port) as (reader, writer):
            writer.write(post("/answered", close=False))
            await reader.readuntil(b"ok")
        await asyncio.sleep(0.05)
    assert log == []


async def test_a_disconnect_is_reported_to_a_request_with_another_pipelined_behind_it() -> None:
    log: list[str] = []
    async with served(watching(log)) as server:
        async with connected(server.port) as (_, writer):
            writer.write(post("/first", close=False) + post("/second", close=False))
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.1)
    assert log[:2] == ["/first left", "/first received"]


async def test_a_disconnect_before_the_watch_begins_is_reported_at_once_and_none_after_its_end() -> None:
    log: list[str] = []
    has_left = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        client = scope[CLIENT_KEY]
        client.begin(lambda: log.append("first"))
        client.end()
        await has_left.wait()
        await asyncio.sleep(0.05)
        client.begin(lambda: log.append("second"))

    async with served(app) as server:
        async with connected(server.port) as (_, writer):
            writer.write(post())
            await asyncio.sleep(0.05)
        has_left.set()
        await asyncio.sleep(0.1)
    assert log == ["second"]


async def test_a_disconnect_is_reported_once_to_a_request_with_no_http_behind_it() -> None:
    log: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope[CLIENT_KEY].begin(lambda: log.append("left"))
        await asyncio.sleep(0.1)  # longer than the connection

    async with served(app) as server:
        async with connected(server.port) as (_, writer):
            writer.write(post(close=False) + b"\x00 no HTTP\r\n\r\n")
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.1)
    assert log == ["left"]


# The path of chunks without messages


@pytest.mark.parametrize("start", [START, WITH_LENGTH])
async def test_chunks_may_go_without_messages_once_the_head_is_out_and_the_body_goes_in_chunks(start: Any) -> None:
    paths: list[bool] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        paths.append(chunk_path(send) is not None)
        await send({**start, BODY_FOLLOWS: True})
        paths.append(chunk_path(send) is not None)
        await send(body(b"o", more=True))
        path = chunk_path(send)
        paths.append(path is not None)
        if path is not None:
            assert path(b"k", b"1\r\nk\r\n") is SENT
        await send(body(b"" if path else b"k", more=False))

    async with served(app) as server:
        answer = await exchange(server.port, get("/"))
        await exchange(server.port, get("/").replace(b"GET", b"HEAD"))
    assert answer.endswith(b"1\r\no\r\n1\r\nk\r\n0\r\n\r\n" if start is START else b"\r\n\r\nok")
    assert paths == [False, False, start is START, False, False, False]


async def test_a_wrapper_of_someone_else_gets_every_message() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def wrapper(message: Any) -> None:
            await send({**message, "body": message["body"].upper()} if "body" in message else message)

        await wrapper(START)
        assert chunk_path(send) is not None
        assert chunk_path(wrapper) is None
        await wrapper(body(b"one", more=False))

    async with served(app) as server:
        assert (await exchange(server.port, get("/"))).endswith(b"3\r\nONE\r\n0\r\n\r\n")


async def test_chunks_without_messages_wait_for_a_client_that_does_not_read_and_end_with_it() -> None:
    waited, ended = asyncio.Event(), asyncio.Event()
    sent_bytes = 0
    part = b"x" * 65536

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal sent_bytes
        await send(START)
        path = chunk_path(send)
        assert path is not None
        while (await_it := path(part, b"10000\r\n" + part + b"\r\n")) is SENT:
            sent_bytes += len(part)
        waited.set()
        await await_it
        writes = len(Counted.writes)
        for _ in range(3):
            await path(part, b"10000\r\n" + part + b"\r\n")
        assert len(Counted.writes) == writes
        ended.set()

    async with served(app) as server:
        async with connected(server.port) as (_, writer):
            writer.write(get("/"))
            await asyncio.wait_for(waited.wait(), 5)
            await asyncio.sleep(0.1)
            assert sent_bytes < 24 * 2**20
            writer.transport.abort()
        await asyncio.wait_for(ended.wait(), 5)


# The head


HEADS: list[Any] = [
    {"status": 200},
    {"status": 200, "headers": []},
    {"status": 299, "headers": [(b"X-Mixed", b"a"), (b"x-mixed", b"\tb\xff "), (b"set-cookie", b"")]},
    {"status": 204, "headers": [(b"x-id", b"1")]},
    {"status": 304, "headers": [(b"content-length", b"5")]},
    {"status": 503, "headers": [(b"content-length", b"2")]},
    {"status": 200, "headers": [(b"content-length", b"02"), (b"content-length", b"2")]},
    {"status": 200, "headers": [(b"content-length", b"2"), (b"transfer-encoding", b"chunked")]},
    {"status": 200, "headers": [(b"transfer-encoding", b"chunked"), (b"content-length", b"2")]},
    {"status": 200, "headers": [(b"Connection", b"close"), (b"content-length", b"2")]},
    {"status": 200, "headers": [(b"connection", b"keep-alive")]},
    {"status": 200, "headers": ((b"content-length", b"2"), (b"x-id", b"1"))},
    {"status": 200, "headers": [(b"content-length", b"+2")]},
    {"status": 200, "headers": [(b"", b"a")]},
]
MISTAKES: list[Any] = [
    {"status": 200, "headers": [(b"content-length", b"2\r\nx: y")]},
    {"status": 200, "headers": [(b"x", b"a\nb")]},
    {"status": 200, "headers": [(b"x y", b"a")]},
    {"status": 200, "headers": [(b"content-length", b"9" * 5000)]},
    {"status": 600},
]


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("head", [*HEADS, *MISTAKES])
async def test_a_head_is_the_one_that_uvicorn_writes(head: Any, is_kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        follows = {BODY_FOLLOWS: True} if scope["path"] == "/follows" else {}
        await send({"type": "http.response.start", **head, **follows})
        await send(body(b"" if head["status"] in {204, 304} else b"ok", more=False))

    answers: list[bytes] = []
    for is_ours in (True, False):
        if not is_ours:
            monkeypatch.setattr(_Response, "_has_begun", lambda *_: False)
        for path in ("/", "/follows"):
            async with served(app) as server, connected(server.port) as (reader, writer):
                request = get(path).replace(b"connection: close\r\n", b"") if is_kept else get(path)
                assert (b"connection" in request) is not is_kept
                writer.write(request)
                if is_kept:
                    await asyncio.sleep(0.05)
                    writer.write(get(path))  # the connection is in the same state after either
                answers.append(await asyncio.wait_for(reader.read(), 5))
    assert len(set(answers)) == 1
    assert (answers[0] == b"") is (head in MISTAKES)
