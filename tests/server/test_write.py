"""What the sidecar's own server adds to uvicorn's `send`: chunks that are written at once, and HTTP/1.0."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from sidecar.admission.handover import WRITE_KEY, Write
from sidecar.server.http_protocol import BoundedHttpProtocol
from tests.support.serving import Served, serving
from tests.support.wire import connected, exchange, get, post

pytestmark = pytest.mark.anyio

START = {"type": "http.response.start", "status": 200, "headers": []}
WITH_LENGTH = {**START, "headers": [(b"content-length", b"2")]}
HEAD = b"HTTP/1.1 200 OK\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"


def body(part: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": part, "more_body": more}


@asynccontextmanager
async def served(app: Callable[..., Awaitable[None]]) -> AsyncIterator[Served]:
    async with serving(app, http=BoundedHttpProtocol, lifespan="off", access_log=False) as server:
        yield server


def own(scope: Any) -> Write:
    write: Write = scope[WRITE_KEY]
    return write


async def test_chunks_are_written_after_the_head_and_before_the_end_alone() -> None:
    taken: list[bool] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        write = own(scope)
        taken.append(write(b"too soon"))
        await send(START)
        taken.append(write(b"one"))
        await send(body(b"two"))
        taken.append(write(b"three"))
        await send(body(b"four", more=False))
        taken.append(write(b"late"))

    async with served(app) as server:
        answer = await exchange(server.port, get("/"))
    assert answer == HEAD + b"3\r\none\r\n3\r\ntwo\r\n5\r\nthree\r\n4\r\nfour\r\n0\r\n\r\n"
    assert taken == [False, True, True, False]


async def test_a_body_of_a_length_is_sent() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(WITH_LENGTH)
        assert not own(scope)(b"ok")
        await send(body(b"ok", more=False))

    async with served(app) as server:
        assert (await exchange(server.port, get("/"))).endswith(b"\r\n\r\nok")


@pytest.mark.parametrize("before", [b"", b"GET /first HTTP/1.1\r\nhost: a\r\n\r\n"])
@pytest.mark.parametrize(
    ("method", "start", "answer"),
    [
        ("GET", START, b"\r\n\r\nok"),
        ("GET", WITH_LENGTH, b"content-length: 2\r\nconnection: close\r\n\r\nok"),
        ("HEAD", START, b"\r\n\r\n"),
    ],
)
async def test_before_http_1_1_there_are_no_chunks_and_the_connections_end_ends_the_response(
    before: bytes, method: str, start: dict[str, Any], answer: bytes
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/first":
            await send(WITH_LENGTH)
            await send(body(b"ok", more=False))
            return
        assert WRITE_KEY not in scope
        await send(start)
        for part in (b"o", b"", b"k"):
            await send(body(part))
        await send(body(b"", more=False))

    async with served(app) as server:
        for version in ("0.9", "1.0"):
            asked = f"{method} / HTTP/{version}\r\nconnection: keep-alive\r\n\r\n".encode()
            answered = await asyncio.wait_for(exchange(server.port, before + asked), 60)
            assert b"connection: close" in answered
            assert answered.endswith(answer)
            assert b"transfer-encoding" not in answered


async def test_a_response_to_head_has_a_head_only() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert WRITE_KEY not in scope
        await send({**START, "headers": [(b"transfer-encoding", b"chunked")]})
        await send(body(b"one"))
        await send(body(b"", more=False))

    async with served(app) as server:
        answer = await exchange(server.port, get("/").replace(b"GET", b"HEAD"))
    assert answer.endswith(b"\r\n\r\n")
    assert b"one" not in answer


async def test_nothing_is_written_to_a_client_that_does_not_read_or_that_has_left() -> None:
    full, ended = asyncio.Event(), asyncio.Event()
    part, most = b"x" * 65536, 24 * 2**20

    async def app(scope: Any, receive: Any, send: Any) -> None:
        write, written_bytes = own(scope), 0
        await receive()
        await send(START)
        while write(part):
            written_bytes += len(part)
            assert written_bytes < most
        full.set()
        await send(body(part))  # waits until the client has read, or left
        assert (await receive())["type"] == "http.disconnect"
        assert not write(part)
        ended.set()

    async with served(app) as server:
        async with connected(server.port) as (_, writer):
            writer.write(get("/"))
            await asyncio.wait_for(full.wait(), 60)
            writer.transport.abort()
        await asyncio.wait_for(ended.wait(), 60)


async def test_chunks_go_on_when_a_slow_client_has_read() -> None:
    part = b"x" * 65536

    async def app(scope: Any, receive: Any, send: Any) -> None:
        write = own(scope)
        await send(START)
        for _ in range(500):
            if not write(part):
                await send(body(part))
        await send(body(b"", more=False))

    async with served(app) as server, connected(server.port) as (reader, writer):
        writer.write(get("/"))
        answer = await asyncio.wait_for(reader.read(), 60)
    assert answer.count(b"x") == 500 * len(part)
    assert answer.endswith(b"0\r\n\r\n")


# Disconnects


@pytest.mark.parametrize("size", [0, 100, 65_537, 1_000_000])
@pytest.mark.parametrize("after", [b"", post("/second", close=False), b"\x00 no HTTP\r\n\r\n"])
async def test_a_disconnect_is_reported_after_a_body_of_any_size_and_with_anything_pipelined_behind(
    size: int, after: bytes
) -> None:
    began, left = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] != "/first":
            return
        while (message := await receive())["type"] == "http.request":
            if not message["more_body"]:
                began.set()
        assert message["type"] == "http.disconnect"
        began.set()  # no HTTP is a disconnect, too
        left.set()

    async with served(app) as server:
        async with connected(server.port) as (_, writer):
            writer.write(post("/first", b"x" * size, close=False) + after)
            await asyncio.wait_for(began.wait(), 60)
        await asyncio.wait_for(left.wait(), 60)
