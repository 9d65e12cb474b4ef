"""Room is free when the engine has released it, not when the client has gone: engines that count their own peak."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from sidecar.app import AdmissionMiddleware
from sidecar.engines import ENGINES
from sidecar.engines.base import abort_latency
from sidecar.tools.emulator import Emulator, EmulatorConfig, StepModel
from sidecar.tools.emulator.engine import EmulatedEngine
from tests.support.middleware import CHAT, chat
from tests.support.process import python
from tests.support.serving import serving
from tests.support.waiting import until
from tests.support.wire import connected, post

pytestmark = pytest.mark.anyio

POOL, CLIENTS, PATIENCE_S = 8, 16, 0.3
POLICY = """\
engine: {engine}
capacity: {{requests: {pool}}}
tiers: {{high: {{}}, normal: {{}}}}
anonymous: normal
{more}
"""
ENDLESS = json.dumps(chat(stream=True, max_tokens=100_000)).encode()


def write_policy(folder: Path, engine: str, more: str = "", pool: int = POOL) -> Path:
    path = folder / "policy.yaml"
    path.write_text(POLICY.format(engine=engine, more=more, pool=pool))
    return path


def engine_that_notices_after(seconds: float, engine: str = "sglang") -> Emulator:
    """Computes everything at once, and computes on for so long after a disconnect."""
    steps = StepModel(step_us=20_000, max_sequences=1000)
    return Emulator(EmulatorConfig(engine=ENGINES[engine], steps=steps, abort_latency_s=seconds))


async def hang_up(port: int, body: bytes = ENDLESS) -> None:
    """One client that hangs up when it has had enough."""
    with suppress(ConnectionError):
        async with connected(port) as (reader, writer):
            writer.write(post(CHAT, body))
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(reader.read(), PATIENCE_S)


async def attack(port: int, engine: EmulatedEngine) -> None:
    """Clients that hang up and come back at once, until the engine has aborted twice what the pool holds."""
    end_s = asyncio.get_running_loop().time() + 300

    async def client() -> None:
        while engine.aborted < 2 * POOL:
            assert asyncio.get_running_loop().time() < end_s, "the room did not come free"
            await hang_up(port)

    await asyncio.gather(*(client() for _ in range(CLIENTS)))


async def state(port: int) -> Any:
    async with aiohttp.request("GET", f"http://127.0.0.1:{port}/state") as answer:
        return await answer.json()


@asynccontextmanager
async def mounted(app: Any, folder: Path, engine: str, more: str = "", pool: int = POOL) -> AsyncIterator[Any]:
    middleware = AdmissionMiddleware(app, write_policy(folder, engine, more, pool))
    async with serving(middleware) as served:
        yield middleware, served.port


@pytest.mark.parametrize(
    ("engine", "notices_after_s", "more"),
    [
        # The engine is faster than we think, by more than a busy machine is late.
        pytest.param("sglang", 2.0, "", marks=pytest.mark.soak),
        pytest.param("tensorrt-llm", 0.4, "", marks=pytest.mark.long),
        pytest.param("vllm", 0.1, "abort_latency: 1s", marks=pytest.mark.long),
        pytest.param("none", 1.0, "", marks=pytest.mark.soak),
    ],
)
async def test_clients_that_disconnect_do_not_drive_the_engine_past_the_pool(
    tmp_path: Path, engine: str, notices_after_s: float, more: str
) -> None:
    emulator = engine_that_notices_after(notices_after_s, "sglang" if engine == "none" else engine)
    policy = write_policy(tmp_path, engine, more)
    async with serving(emulator.app) as upstream:
        arguments = ["--upstream", upstream.url, "--policy", str(policy), "--port", "0", "--admin-port", "0"]
        async with python("-m", "sidecar.cli", "serve", *arguments) as sidecar:
            port, admin = [int((await sidecar.line(r"http://127\.0\.0\.1:(\d+)"))[1]) for _ in range(2)]
            await attack(port, emulator.engine)
            while (await state(admin))["pool"]["leases"]:  # noqa: ASYNC110  # a state of another process
                await asyncio.sleep(0.05)
            assert (await state(admin))["aborting"] == {"requests": 0, "tokens": 0}
    assert emulator.engine.peak == POOL


@pytest.mark.parametrize(
    ("engine", "notices_after_s", "more"),
    [
        pytest.param("tensorrt-llm", 0.4, "", marks=pytest.mark.long),
        pytest.param("sglang", 2.0, "", marks=pytest.mark.soak),
        pytest.param("none", 0.4, "abort_latency: 1.5s", marks=pytest.mark.long),
    ],
)
async def test_nor_do_they_where_the_app_returns_before_its_engine_has_aborted(
    tmp_path: Path, engine: str, notices_after_s: float, more: str
) -> None:
    emulator = engine_that_notices_after(notices_after_s, "sglang" if engine == "none" else engine)
    async with mounted(emulator.app, tmp_path, engine, more) as (middleware, port):
        await attack(port, emulator.engine)
        await until(lambda: middleware.controller.state()["pool"]["leases"] == 0)
    assert emulator.engine.peak == POOL


async def test_an_app_whose_call_ends_with_the_abort_frees_its_room_with_it(tmp_path: Path) -> None:
    """As vLLM's does."""
    emulator = engine_that_notices_after(0.0, "vllm")
    async with mounted(emulator.app, tmp_path, "vllm") as (middleware, port):
        for _ in range(POOL):
            async with connected(port) as (reader, writer):
                writer.write(post(CHAT, ENDLESS))
                await asyncio.wait_for(reader.readuntil(b"data:"), 60)
            assert middleware.controller.pending_aborts.held() == (0, 0)
    assert emulator.engine.peak == 1


ASKED_EVERY_S = {"sglang": 4.0, "tensorrt-llm": 1.0, "vllm": 0.1, "dynamo": 0.1}
"""How late each notices a disconnect at worst, as read in its source or seen."""


@pytest.mark.parametrize("engine", [*ASKED_EVERY_S, "none"])
def test_each_engine_is_given_the_time_that_it_needs_and_a_step(engine: str) -> None:
    dialect = ENGINES[engine]()
    slowest_s = max(ASKED_EVERY_S.values())
    assert dialect.abort_latency_s > ASKED_EVERY_S.get(engine, slowest_s)
    proxied = abort_latency(dialect, None, is_proxied=True)
    assert proxied.due_us(5_000_000, 3_000_000) == 5_000_000 + round(dialect.abort_latency_s * 1e6)
    ends_with_its_call = engine in ("vllm", "none")
    in_process = abort_latency(dialect, None, is_proxied=False)
    assert in_process.due_us(5_000_000, 3_000_000) == 3_000_000 + (
        0 if ends_with_its_call else round(dialect.abort_latency_s * 1e6)
    )
    assert abort_latency(dialect, 7.0, is_proxied=False).due_us(5_000_000, 3_000_000) == 10_000_000
    assert abort_latency(dialect, 7.0, is_proxied=False).due_us(5_000_000, None) == 12_000_000
    assert abort_latency(dialect, 7.0, is_proxied=True).due_us(5_000_000, 3_000_000) == 12_000_000
