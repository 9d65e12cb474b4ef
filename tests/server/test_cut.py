"""Requests that a stopping server cuts off: a second signal, or the end of the grace. Real processes, real signals."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.server.launched import running, write_app
from tests.support.engine import Connection, raw_engine
from tests.support.middleware import write_policy
from tests.support.process import Running, python
from tests.support.redis_servers import free_port

pytestmark = pytest.mark.anyio

TERM, INT = signal.SIGTERM, signal.SIGINT
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
BODY: dict[str, Any] = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}


async def script(connection: Connection) -> None:
    """Begins a stream where one is asked for; never answers else."""
    request = await connection.request()
    if b'"stream"' in request.body:
        await connection.send(STREAM)
        await connection.send_chunk(b"data: first\n\n")
    await connection.hung_up()


@asynccontextmanager
async def sidecar(folder: Path, grace: str = "60s", more: str = "") -> AsyncIterator[tuple[Running, str, str]]:
    path = write_policy(folder, more, requests="3")
    serve = ["-m", "sidecar.cli", "serve", "--policy", str(path), "--port", "0", "--admin-port", "0", "--grace", grace]
    async with raw_engine(script) as engine, python(*serve, "--upstream", engine.url) as process:
        proxy = (await process.line(r"proxy on (http://127.0.0.1:\d+)$"))[1]
        yield process, proxy, (await process.line(r"admin on (http://127.0.0.1:\d+)$"))[1]


async def asked(
    client: aiohttp.ClientSession, url: str, begun: asyncio.Event | None = None, **more: Any
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body; a body that was cut short ends with the marker `<cut>`. Sets `begun` at its start."""
    async with client.post(url, json={**BODY, **more}) as answer:
        headers = {name.lower(): value for name, value in answer.headers.items()}
        body = b""
        try:
            async for chunk in answer.content.iter_any():
                body += chunk
                if begun is not None:
                    begun.set()
        except aiohttp.ClientPayloadError:
            body += b"<cut>"
        return answer.status, headers, body


async def until(condition: Any) -> None:
    for _ in range(1000):
        if await condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it did not come to pass")


async def state(client: aiohttp.ClientSession, admin: str) -> dict[str, Any]:
    async with client.get(f"{admin}/state") as page:
        shown: dict[str, Any] = await page.json()
    return shown


async def under_way(client: aiohttp.ClientSession, url: str, admin: str) -> list[asyncio.Task[Any]]:
    """A stream, one in each shape without a first byte, and two that wait, in this order."""
    tasks, begun = [], asyncio.Event()
    sent: tuple[tuple[str, dict[str, Any]], ...] = (
        (CHAT, {"stream": True}), (CHAT, {}), (MESSAGES, {}), (CHAT, {}), (MESSAGES, {})
    )  # fmt: skip
    for count, (path, more) in enumerate(sent, start=1):
        tasks.append(asyncio.ensure_future(asked(client, url + path, begun, **more)))

        async def is_under_way(count: int = count) -> bool:
            return bool((await state(client, admin))["under_way"] == count)

        await until(is_under_way)
    await asyncio.wait_for(begun.wait(), 30)  # the stream's first byte
    return tasks


async def check_answers(tasks: list[asyncio.Task[Any]]) -> None:
    (streamed, *others) = [await asyncio.wait_for(task, 30) for task in tasks]
    assert (streamed[0], streamed[2]) == (200, b"data: first\n\n<cut>")
    for number, (status, headers, body) in enumerate(others):
        error = json.loads(body)["error"]
        assert (status, error["code"], headers["retry-after"]) == (503, "draining", "1")
        assert "stopped before" in error["message"] or "still waited" in error["message"]
        assert headers["x-request-id"]
        is_anthropic = number % 2 == 1
        assert error["type"] == ("overloaded_error" if is_anthropic else "server_error")


@pytest.mark.parametrize("second", [(TERM, INT), pytest.param((INT, TERM, INT), marks=pytest.mark.soak)])
async def test_a_second_signal_answers_503_in_one_line(tmp_path: Path, second: tuple[signal.Signals, ...]) -> None:
    async with sidecar(tmp_path) as (process, url, admin), aiohttp.ClientSession() as client:
        tasks = await under_way(client, url, admin)
        process.signal(second[0])

        async def is_draining() -> bool:
            return bool((await state(client, admin))["draining"])

        await until(is_draining)
        for number in second[1:]:
            process.signal(number)
        await check_answers(tasks)
        assert await process.exit_code() == 0
        check_log(await process.errors(), 5, "a second signal came")


@pytest.mark.long
async def test_the_end_of_the_grace_does_the_same(tmp_path: Path) -> None:
    async with sidecar(tmp_path, grace="0.5s") as (process, url, admin), aiohttp.ClientSession() as client:
        tasks = await under_way(client, url, admin)
        process.signal(TERM)
        await check_answers(tasks)
        assert await process.exit_code() == 0
        check_log(await process.errors(), 3, "the grace is over")  # the two that waited were refused before


def check_log(errors: str, cut: int, reason: str) -> None:
    lines = [json.loads(line) for line in errors.splitlines()]
    events = [line["event"] for line in lines if line["event"] not in ("policy_warning", "refused")]
    assert events == [*["started"] * 2, "draining", "cut", "stopped"]
    assert [line["message"] for line in lines if line["event"] == "cut"] == [f"{cut} requests were cut off: {reason}"]


async def test_with_nothing_under_way_nothing_is_said(tmp_path: Path) -> None:
    async with sidecar(tmp_path) as (process, _url, _admin):
        process.signal(INT)
        process.signal(INT)
        assert await process.exit_code() == 0
        assert "cut" not in await process.errors()


@pytest.mark.long
async def test_in_observe_mode_and_on_other_paths_it_is_a_503_too(tmp_path: Path) -> None:
    more = "mode: observe\n"
    async with sidecar(tmp_path, more=more) as (process, url, _), aiohttp.ClientSession() as client:
        tasks = [asyncio.ensure_future(asked(client, url + path)) for path in (CHAT, "/tokenize", MESSAGES)]
        await asyncio.sleep(1)
        process.signal(INT)
        await asyncio.sleep(0.2)
        process.signal(INT)
        for task in tasks:
            status, headers, body = await asyncio.wait_for(task, 30)
            assert (status, headers["retry-after"]) == (503, "1")
            assert json.loads(body)["error"]["code"] == "draining"
        assert await process.exit_code() == 0
        assert "Traceback" not in await process.errors()


@pytest.mark.long
async def test_a_client_that_reads_nothing_does_not_hold_up_the_end(tmp_path: Path) -> None:
    """Its connection cannot be closed in order: the rest of its response is never sent."""

    async def flood(connection: Connection) -> None:
        await connection.request()
        await connection.send(STREAM)
        while True:
            await connection.send_chunk(b"x" * 65536)

    path = write_policy(tmp_path)
    serve = ["-m", "sidecar.cli", "serve", "--policy", str(path), "--port", "0", "--admin-port", "0"]
    async with raw_engine(flood) as engine, python(*serve, "--upstream", engine.url) as process:
        port = int((await process.line(r"proxy on http://127.0.0.1:(\d+)$"))[1])
        _reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
        body = json.dumps({**BODY, "stream": True})
        writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
        await asyncio.sleep(1)
        process.signal(INT)
        await asyncio.sleep(0.2)
        process.signal(INT)
        assert await process.exit_code() == 0
        assert "1 request was cut off: a second signal came" in await process.errors()
        writer.close()


@pytest.mark.long
async def test_a_mounted_request_without_a_first_byte_gets_the_503_at_uvicorns_second_signal(tmp_path: Path) -> None:
    write_app(tmp_path)
    port = free_port()
    with running(tmp_path, "uvicorn", "main:app", "--port", str(port)) as server:
        await asyncio.to_thread(server.until, "Uvicorn running on")
        async with aiohttp.ClientSession() as client:
            task = asyncio.ensure_future(asked(client, f"http://127.0.0.1:{port}{CHAT}", temperature=60))
            await asyncio.sleep(1)
            server.signal(INT)
            await asyncio.sleep(0.5)
            server.signal(INT)
            status, headers, body = await asyncio.wait_for(task, 30)
        assert (status, headers["retry-after"]) == (503, "1")
        assert json.loads(body)["error"]["code"] == "draining"
        await asyncio.to_thread(server.ended)
