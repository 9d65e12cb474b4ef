"""Room is free when the engine has released it, not when the client has gone: engines that count their own peak."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from sidecar.composition import AdmissionMiddleware
from sidecar.emulator import Emulator, EmulatorConfig, StepModel
from sidecar.policy.policy import EngineName
from tests.support.door import CHAT, chat
from tests.support.process import python
from tests.support.serving import serving
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
    steps = StepModel(step_s=0.02, max_num_seqs=1000)
    return Emulator(EmulatorConfig(engine=EngineName(engine), steps=steps, abort_latency_s=seconds))


async def hang_up(port: int, body: bytes = ENDLESS) -> None:
    """One client that hangs up when it has had enough."""
    with suppress(ConnectionError):
        async with connected(port) as (reader, writer):
            writer.write(post(CHAT, body))
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(reader.read(), PATIENCE_S)


async def attack(port: int, seconds: float) -> None:
    """Clients that hang up and come back at once."""
    end_s = asyncio.get_running_loop().time() + seconds

    async def client() -> None:
        while asyncio.get_running_loop().time() < end_s:
            await hang_up(port)

    await asyncio.gather(*(client() for _ in range(CLIENTS)))


async def until(condition: Callable[[], Any], patience_s: float = 15) -> None:
    end_s = asyncio.get_running_loop().time() + patience_s
    while not condition():
        assert asyncio.get_running_loop().time() < end_s, "never happened"
        await asyncio.sleep(0.005)


async def state(port: int) -> Any:
    async with aiohttp.request("GET", f"http://127.0.0.1:{port}/state") as answer:
        return await answer.json()


@asynccontextmanager
async def mounted(app: Any, folder: Path, engine: str, more: str = "", pool: int = POOL) -> AsyncIterator[Any]:
    middleware = AdmissionMiddleware(app, write_policy(folder, engine, more, pool))
    async with serving(middleware) as served:
        yield middleware, served.port


@pytest.mark.parametrize(
    ("engine", "notices_after_s", "more", "attacked_for_s"),
    [
        ("sglang", 4.0, "", 6.0),
        ("tensorrt-llm", 1.0, "", 4.0),
        ("vllm", 0.1, "", 3.0),
        ("none", 1.0, "abort_latency: 1.5s", 4.0),
    ],
)
async def test_clients_that_hang_up_do_not_drive_the_engine_past_the_pool(
    tmp_path: Path, engine: str, notices_after_s: float, more: str, attacked_for_s: float
) -> None:
    emulator = engine_that_notices_after(notices_after_s, "sglang" if engine == "none" else engine)
    policy = write_policy(tmp_path, engine, more)
    async with serving(emulator.app) as upstream:
        arguments = ["--upstream", upstream.url, "--policy", str(policy), "--port", "0", "--admin-port", "0"]
        async with python("-m", "sidecar.cli", "serve", *arguments) as sidecar:
            port, admin = [int((await sidecar.line(r"http://127\.0\.0\.1:(\d+)"))[1]) for _ in range(2)]
            await attack(port, attacked_for_s)
            while (await state(admin))["pool"]["leases"]:  # noqa: ASYNC110  # a state of another process
                await asyncio.sleep(0.05)
            assert (await state(admin))["aborting"] == {"requests": 0, "tokens": 0}
    assert emulator.engine.peak == POOL
    assert emulator.engine.aborted > POOL  # the room was given again


@pytest.mark.parametrize(
    ("engine", "notices_after_s", "more"),
    [("tensorrt-llm", 1.0, ""), ("sglang", 1.0, "abort_latency: 1.5s"), ("none", 1.0, "abort_latency: 1.5s")],
)
async def test_nor_do_they_where_the_app_returns_before_its_engine_has_aborted(
    tmp_path: Path, engine: str, notices_after_s: float, more: str
) -> None:
    emulator = engine_that_notices_after(notices_after_s, "sglang" if engine == "none" else engine)
    async with mounted(emulator.app, tmp_path, engine, more) as (middleware, port):
        await attack(port, 3)
        await until(lambda: middleware.state()["pool"]["leases"] == 0)
    assert emulator.engine.peak == POOL
    assert emulator.engine.aborted > POOL
