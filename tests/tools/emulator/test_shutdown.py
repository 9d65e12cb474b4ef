"""SIGTERM to a real process while it streams: what each engine does to its clients. Read in, or seen on, real ones."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from tests.support.process import Running, python

pytestmark = pytest.mark.anyio

STEP_MS = 20


@dataclass
class Served:
    """An engine of one slot: one request streams, others wait."""

    process: Running
    url: str
    session: aiohttp.ClientSession

    async def stream(self, tokens: int, begun: asyncio.Event | None = None) -> list[Any]:
        """The events of one stream, and None at its end where the connection broke."""
        body = {"prompt": "x", "max_tokens": tokens, "stream": True, "stream_options": {"include_usage": True}}
        events: list[Any] = []
        async with self.session.post(f"{self.url}/v1/completions", json=body) as response:
            assert response.status == 200
            try:
                async for line in response.content:
                    if line.startswith(b"data: "):
                        text = line.removeprefix(b"data: ").strip()
                        events.append("[DONE]" if text == b"[DONE]" else json.loads(text))
                        if begun is not None:
                            begun.set()
            except aiohttp.ClientPayloadError:
                events.append(None)
        return events

    async def whole(self, tokens: int = 2) -> tuple[int, Any]:
        body = {"prompt": "x", "max_tokens": tokens}
        async with self.session.post(f"{self.url}/v1/completions", json=body) as response:
            return response.status, await response.json()

    async def health(self) -> int:
        async with self.session.get(f"{self.url}/health") as response:
            return response.status

    async def begun(self, tokens: int) -> asyncio.Task[list[Any]]:
        event = asyncio.Event()
        task = asyncio.create_task(self.stream(tokens, event))
        await asyncio.wait_for(event.wait(), 60)
        return task

    async def until_it_has(self, requests: int) -> None:
        """Waits until so many run or wait."""
        await self._until(lambda state: state["now"]["requests"] == requests)

    async def until_it_stops(self) -> None:
        await self._until(lambda state: state["is_stopping"])

    async def _until(self, is_so: Callable[[Any], bool]) -> None:
        for _ in range(3000):
            async with self.session.get(f"{self.url}/_emulator") as response:
                if is_so(state := await response.json()):
                    return
            await asyncio.sleep(0.01)
        raise AssertionError(state)


@asynccontextmanager
async def served(engine: str, *flags: str) -> AsyncIterator[Served]:
    arguments = ["--engine", engine, "--port", "0", "--max-num-seqs", "1", "--step-ms", str(STEP_MS), *flags]
    async with python("-m", "sidecar.cli", "emulate", *arguments) as process:
        url = (await process.line(r"http://127\.0\.0\.1:\d+"))[0]
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(30)) as session:
            yield Served(process, url, session)


async def refused(engine: Served) -> bool:
    """Whether no new connection is taken, in the end."""
    with suppress(aiohttp.ClientConnectionError):
        for _ in range(300):
            async with aiohttp.request("GET", f"{engine.url}/health"):
                await asyncio.sleep(0.01)
        return False
    return True


async def test_vllm_ends_every_request_at_once_as_if_it_were_complete() -> None:
    async with served("vllm") as engine:
        running = await engine.begun(10_000)
        waiting = asyncio.create_task(engine.stream(10))
        whole = asyncio.create_task(engine.whole())
        await engine.until_it_has(3)
        engine.process.signal(signal.SIGTERM)
        *_, last, usage, done = await running
        assert (last["choices"][0]["finish_reason"], done) == ("abort", "[DONE]")
        assert 0 < usage["usage"]["completion_tokens"] < 10_000
        assert [event if event == "[DONE]" else event["choices"] for event in await waiting] == [[], "[DONE]"]
        status, body = await whole
        assert (status, body["choices"][0]["finish_reason"], body["choices"][0]["text"]) == (200, "abort", "")
        assert await engine.process.exit_code() == 0


@pytest.mark.long
async def test_vllm_with_a_shutdown_timeout_drains_but_refuses_new_requests_while_it_looks_healthy() -> None:
    async with served("vllm", "--shutdown-timeout", "2s") as engine:
        short = await engine.begun(10)
        long = asyncio.create_task(engine.stream(10_000))
        await engine.until_it_has(2)
        engine.process.signal(signal.SIGTERM)
        await engine.until_it_stops()
        assert await engine.health() == 200
        status, body = await engine.whole()
        assert (status, body["error"]["message"]) == (500, "cannot schedule new futures after shutdown")
        assert (await short)[-3]["choices"][0]["finish_reason"] == "length"
        *_, error, done = await long
        assert (error["error"]["code"], done) == (500, "[DONE]")
        assert await engine.process.exit_code() == 0


async def test_sglang_serves_until_it_is_idle_and_says_that_it_is_not_healthy() -> None:
    async with served("sglang") as engine:
        running = await engine.begun(60)
        engine.process.signal(signal.SIGTERM)
        await engine.until_it_stops()
        assert await engine.health() == 503
        assert (await engine.whole())[0] == 200
        assert (await running)[-3]["choices"][0]["finish_reason"] == "length"
        assert await engine.process.exit_code() == 0


@pytest.mark.long
async def test_tensorrt_llm_takes_no_connection_and_finishes_what_runs() -> None:
    async with served("tensorrt-llm") as engine:
        running = await engine.begun(60)
        engine.process.signal(signal.SIGTERM)
        assert await refused(engine)
        assert not running.done()
        assert (await running)[-3]["choices"][0]["finish_reason"] == "length"
        assert await engine.process.exit_code() == 0


@pytest.mark.long
async def test_dynamo_breaks_the_streams_that_take_too_long() -> None:
    async with served("dynamo", "--shutdown-timeout", "1s") as engine:
        running = await engine.begun(10_000)
        engine.process.signal(signal.SIGTERM)
        assert await refused(engine)
        assert (await running)[-1] is None
        assert await engine.process.exit_code() == 0


async def test_ctrl_c_ends_it_whatever_runs() -> None:
    async with served("sglang") as engine:  # SIGTERM would wait for what runs
        running = await engine.begun(10_000)
        engine.process.signal(signal.SIGINT)
        assert await engine.process.exit_code() == 0
        await running
        assert "Traceback" not in await engine.process.errors()
