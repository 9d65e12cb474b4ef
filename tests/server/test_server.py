"""The server in a real process: it ends without cutting off anyone, and says clearly why it cannot begin."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sidecar.server.server import CannotServe, Served, run, serve
from tests.support.engine import Connection, RawEngine, Script, answering, raw_engine
from tests.support.process import Running, python
from tests.support.redis_servers import free_port
from tests.support.wire import connected, exchange, get, post

pytestmark = pytest.mark.anyio

APP = str(Path(__file__).parent / "draining_app.py")
STREAM = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@asynccontextmanager
async def sidecar(
    script: Script, grace_s: float = 60.0, port: int = 0
) -> AsyncIterator[tuple[Running, RawEngine, int, int]]:
    async with raw_engine(script) as engine, python(APP, engine.url, str(port), str(grace_s)) as process:
        sidecar_port = int((await process.line(r"^sidecar: proxy on http://127.0.0.1:(\d+)$"))[1])
        admin_port = int((await process.line(r"^sidecar: admin on http://127.0.0.1:(\d+)$"))[1])
        yield process, engine, sidecar_port, admin_port


def held_open(finish: asyncio.Event) -> Script:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(STREAM)
        await connection.send_chunk(b"first")
        await finish.wait()
        await connection.send_chunk(b"last")
        await connection.send_chunk(b"")

    return script


async def until_draining(admin_port: int) -> None:
    while b"draining" not in (answer := await exchange(admin_port, get("/readyz"))):
        assert answer.startswith(b"HTTP/1.1 200")


async def test_sigterm_refuses_new_requests_finishes_the_running_ones_and_exits_with_0() -> None:
    finish = asyncio.Event()
    async with sidecar(held_open(finish)) as (process, engine, port, admin_port):
        assert (await exchange(admin_port, get("/readyz"))).startswith(b"HTTP/1.1 200")
        async with connected(port) as (reader, writer):
            writer.write(post())
            await asyncio.wait_for(reader.readuntil(b"first"), 30)
            process.signal(signal.SIGTERM)
            await until_draining(admin_port)
            refused = await exchange(port, post())
            assert b'"code":"draining"' in refused
            assert b"retry-after: 1" in refused
            assert len(engine.requests) == 1
            assert (await exchange(admin_port, get("/healthz"))).startswith(b"HTTP/1.1 200")
            finish.set()
            assert (await asyncio.wait_for(reader.read(), 30)).endswith(b"last\r\n0\r\n\r\n")
        assert await process.exit_code() == 0
        assert await process.errors() == ""
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)


async def test_with_nothing_running_a_signal_ends_it_at_once() -> None:
    async with sidecar(answering()) as (process, _, port, _admin):
        # An idle keep-alive connection is no one who waits.
        async with connected(port) as (reader, writer):
            writer.write(post(close=False))
            await asyncio.wait_for(reader.readuntil(b"ok"), 30)
            asked_at_s = time.monotonic()
            process.signal(signal.SIGINT)
            assert await process.exit_code() == 0
            assert time.monotonic() - asked_at_s < 30
        assert await process.errors() == ""


async def test_an_engine_that_breaks_off_is_one_line_in_the_log() -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(STREAM)
        await connection.send_chunk(b"first")

    async with sidecar(script) as (process, _, port, _admin):
        assert not (await exchange(port, post())).endswith(b"0\r\n\r\n")
        process.signal(signal.SIGTERM)
        assert await process.exit_code() == 0
        errors = await process.errors()
    assert "the engine broke off in the middle of its answer" in errors
    assert len(errors.splitlines()) == 1


async def test_a_port_in_use_is_one_line_and_exit_code_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with python(APP, "http://127.0.0.1:1", str(port), "1") as process:
            assert await process.exit_code() == 1
            assert await process.errors() == f"cannot listen on 127.0.0.1:{port}: Address already in use\n"


def test_an_app_that_fails_to_start_ends_it_with_its_reason_and_leaves_no_port_open() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "lifespan.startup.failed", "message": "no policy"})

    admin_port = free_port()
    with pytest.raises(CannotServe, match=r"^no policy$"):
        run(serve(Served(app, app), address=("127.0.0.1", 0), admin=("127.0.0.1", admin_port), grace_s=1))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", admin_port))
