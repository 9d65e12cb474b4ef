"""What a client's connection may cost before anybody knows who it is: bounded in bytes and in time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from sidecar.server import http_protocol
from sidecar.server.http_protocol import BoundedHttpProtocol
from tests.support.each import each
from tests.support.middleware import CHAT, SMALL, Answer, App, Guarded, chunk, guarding, policy, start
from tests.support.wire import connected, exchange, get, post

pytestmark = pytest.mark.anyio

PIECE = b"x-a: " + b"a" * 1000 + b"\r\n"
CHUNKED = b"POST %s HTTP/1.1\r\nhost: sidecar\r\ntransfer-encoding: chunked\r\n\r\n" % CHAT.encode()
WHOLE_CHUNK = b"%x\r\n%s\r\n" % (len(SMALL), SMALL)


@asynccontextmanager
async def sidecar(app: App | None = None, engine: str = "none") -> AsyncIterator[Guarded]:
    async with guarding(app or App(), policy(engine=engine), http=BoundedHttpProtocol) as guarded:
        yield guarded


async def read_all(reader: asyncio.StreamReader) -> bytes:
    return await asyncio.wait_for(reader.read(), 60)


@each("beginning", [b"GET / HTTP/1.1\r\nx: ", b"GET /", b"GET / HTTP/1.1\r\nhost: sidecar\r\n"])
async def test_a_head_without_end_is_cut_off(beginning: bytes) -> None:
    """Whatever it is that never ends: a value, a target, the list of headers."""
    async with sidecar() as guarded, connected(guarded.port) as (reader, writer):
        writer.write(beginning)
        for _ in range(80):
            writer.write(PIECE if beginning.endswith(b"sidecar\r\n") else b"a" * 1000)
        answer = Answer.parsed(await read_all(reader))
    assert answer.is_error(431, "headers_too_large", "65536 bytes", "less")
    assert answer.headers["connection"] == "close"


async def test_a_client_that_sends_on_after_a_refusal_still_reads_it() -> None:
    """A connection that is closed with unread bytes is reset: the client's system drops what it has not read yet."""
    async with sidecar() as guarded, connected(guarded.port) as (reader, writer):
        writer.write(b"GET /" + b"a" * 80_000)
        await asyncio.sleep(0.1)  # it is refused
        for _ in range(20):
            writer.write(b"a" * 50_000)
            await asyncio.sleep(0.005)
        answer = Answer.parsed(await read_all(reader))
        assert answer.is_error(431, "headers_too_large")
        began_s = time.monotonic()
        while not writer.is_closing() and time.monotonic() < began_s + 60:  # it is read for a moment, not for ever
            writer.write(b"a")
            await asyncio.sleep(0.05)
        assert time.monotonic() - began_s < 30


async def test_a_large_head_that_comes_at_once_is_refused_too() -> None:
    async with sidecar() as guarded:
        answer = Answer.parsed(await exchange(guarded.port, get("/", *["x-a: " + "a" * 1000] * 66)))
        assert answer.is_error(431, "headers_too_large")
        fits = Answer.parsed(await exchange(guarded.port, post(CHAT, SMALL, *["x-a: " + "a" * 1000] * 60)))
        assert fits.status == 200


@pytest.mark.parametrize("framing", [WHOLE_CHUNK + b"0\r\n" + PIECE * 80, WHOLE_CHUNK + b"1;" + b"e" * 80_000])
async def test_trailers_and_extensions_without_end_are_cut_off(framing: bytes) -> None:
    async with sidecar() as guarded, connected(guarded.port) as (reader, writer):
        writer.write(CHUNKED)
        for at in range(0, len(framing), 10_000):
            writer.write(framing[at : at + 10_000])
            await writer.drain()
            await asyncio.sleep(0.001)
        answer = await read_all(reader)
    assert answer.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 400 "))


async def test_a_body_of_tiny_chunks_is_no_framing_without_end() -> None:
    app = App()
    body = b'{"messages":["%s"]}' % (b"h" * 20_000)
    async with sidecar(app) as guarded, connected(guarded.port) as (reader, writer):
        writer.write(CHUNKED.replace(b"host: sidecar", b"host: sidecar\r\nconnection: close"))
        writer.write(b"".join(b"1;extension=1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
        assert (await read_all(reader)).startswith(b"HTTP/1.1 200 ")
    assert app.seen[0].body == body


async def test_a_head_that_trickles_in_is_a_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_WITHIN_S", 0.1)
    async with sidecar() as guarded, connected(guarded.port) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nhost:")
        answer = Answer.parsed(await read_all(reader))
        assert answer.is_error(408, "headers_timeout", "0.1 s", "faster")


async def test_the_second_head_of_a_connection_may_not_trickle_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_WITHIN_S", 0.1)
    async with sidecar() as guarded, connected(guarded.port) as (reader, writer):
        writer.write(post(CHAT, SMALL, close=False))
        await asyncio.wait_for(reader.readuntil(b"\r\n0\r\n\r\n"), 60)
        await asyncio.sleep(0.15)  # nothing asked: this is for the keep-alive to bound
        writer.write(b"GET /")
        assert Answer.parsed(await read_all(reader)).is_error(408, "headers_timeout")


async def test_a_connection_on_which_no_one_asks_is_closed_as_one_between_two_requests() -> None:
    brief: Any = {"http": BoundedHttpProtocol, "timeout_keep_alive": 0.1}
    async with guarding(App(), policy(), **brief) as guarded, connected(guarded.port) as (reader, _):
        assert await read_all(reader) == b""


async def test_a_request_that_takes_long_is_not_a_slow_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_WITHIN_S", 0.05)
    app = App(is_held=True)
    async with sidecar(app) as guarded:
        asked = asyncio.create_task(guarded.ask())
        await guarded.until(leases=1)
        await asyncio.sleep(0.15)
        app.release()
        assert (await asked).status == 200


async def test_a_request_before_refused_bytes_is_disconnected_at_once_and_its_response_goes_nowhere(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The connection is read on for a moment, but nothing can be written to it any more."""
    monkeypatch.setattr(http_protocol, "READ_ON_S", 3600.0)  # the connection stays
    began, answered = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        began.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        await start(send)
        await chunk(send, b"too late", more=False)
        answered.set()

    behind = guarding(app, policy(engine="none"), http=BoundedHttpProtocol, lifespan="off")
    async with behind as guarded, connected(guarded.port) as (reader, writer):
        writer.write(post(CHAT, SMALL, close=False))
        await asyncio.wait_for(began.wait(), 60)
        writer.write(b"no HTTP\r\n\r\n")
        text = await read_all(reader)
        await asyncio.wait_for(answered.wait(), 60)
        assert Answer.parsed(text).is_error(400, "invalid_http")
    assert b"too late" not in text
    assert not caplog.records


@pytest.mark.parametrize("before", [b"", get("/next").replace(b"connection: close\r\n", b"")])
async def test_no_refusal_is_written_into_somebody_elses_response(before: bytes) -> None:
    """Garbage behind a request that is being answered ends the connection, and is not answered in the middle."""
    started = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await start(send)
        await chunk(send, b"first")
        started.set()
        while (await receive())["type"] != "http.disconnect":
            pass

    async with guarding(app, policy(grace="10ms"), http=BoundedHttpProtocol, lifespan="off") as guarded:
        async with connected(guarded.port) as (reader, writer):
            writer.write(post(CHAT, SMALL, close=False))
            await asyncio.wait_for(started.wait(), 60)
            writer.write(before + b"no HTTP at all\r\n\r\n")
            answer = await read_all(reader)
        assert answer.count(b"HTTP/1.1") == 1
        assert answer.endswith(b"5\r\nfirst\r\n")


@each("http", ["httptools", "h11", BoundedHttpProtocol])
@each("trailer", [b"x-override-priority: 99", b"authorization: Bearer sk-x", b"connection: x-a"])
async def test_no_trailer_becomes_a_header_behind_our_back(http: object, trailer: bytes) -> None:
    """uvicorn with httptools appends trailers to the headers of the scope, which were read before they came."""
    app = App()
    async with (
        guarding(app, policy(engine="sglang"), http=http) as guarded,
        connected(guarded.port) as (reader, writer),
    ):
        writer.write(CHUNKED.replace(b"host: sidecar", b"host: sidecar\r\nconnection: close\r\nx-a: 1") + WHOLE_CHUNK)
        await guarded.until(stories=1)
        writer.write(b"0\r\n%s\r\n\r\n" % trailer)
        assert (await read_all(reader)).startswith(b"HTTP/1.1 200 ")
    names = [name for name, _ in app.seen[0].scope["headers"]]
    assert trailer.partition(b":")[0] not in names[2:] or trailer.startswith(b"connection")
    assert app.seen[0].all(b"connection") == [b"close"]
    assert app.seen[0].all(b"x-override-priority") == app.seen[0].all(b"authorization") == []


async def test_who_leaves_a_pipelined_request_behind_holds_no_room_for_the_first() -> None:
    reported = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        reported.set()

    settings: Any = {"http": BoundedHttpProtocol, "lifespan": "off"}
    async with guarding(app, policy(), **settings) as guarded:
        async with connected(guarded.port) as (_, writer):
            writer.write(post(CHAT, SMALL, close=False))
            await guarded.until(leases=1)
            writer.write(post(CHAT, SMALL))
            await asyncio.sleep(0.05)
        await asyncio.wait_for(reported.wait(), 60)
        await guarded.until(leases=0)


async def test_each_of_several_offers_is_declined_by_itself() -> None:
    app = App()
    offer = ("connection: upgrade", "upgrade: websocket")
    whole = post(CHAT, SMALL, *offer, close=False) * 3 + post(CHAT, SMALL)
    async with sidecar(app) as guarded, connected(guarded.port) as (reader, writer):
        writer.write(whole)
        answer = await read_all(reader)
    assert answer.count(b"HTTP/1.1 200 ") == 4
    assert [seen.body for seen in app.seen] == [SMALL] * 4


async def test_in_http_1_1_a_host_is_named() -> None:
    async with sidecar() as guarded:
        for head in (b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nconnection: upgrade\r\nupgrade: websocket\r\n"):
            answer = Answer.parsed(await exchange(guarded.port, head + b"\r\n"))
            assert answer.is_error(400, "invalid_http", "`Host`")
        assert Answer.parsed(await exchange(guarded.port, b"GET / HTTP/1.0\r\n\r\n")).status == 200
        async with connected(guarded.port) as (reader, writer):
            writer.write(post(CHAT, SMALL, close=False))
            await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 60)
            writer.write(b"GET / HTTP/1.1\r\n\r\n")  # what the request before it named does not count
            assert Answer.parsed(await read_all(reader)).is_error(400, "invalid_http")
