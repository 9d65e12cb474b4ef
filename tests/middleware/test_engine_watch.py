"""The engine watch, before emulated engines over real sockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sidecar.app import AdmissionMiddleware
from sidecar.engines import Engine, TensorRtLlm, Vllm
from sidecar.middleware.engine_watch import EngineState, EngineWatch
from sidecar.proxy.proxy import ReverseProxy
from sidecar.tools.emulator import Emulator, EmulatorConfig
from tests.support.ports import free_port
from tests.support.serving import serving

pytestmark = pytest.mark.anyio
POLICY = """\
engine: {engine}
capacity: {{tokens: 100k, requests: 8}}
tiers: {{high: {{}}, normal: {{}}, batch: {{}}}}
anonymous: high
"""


@asynccontextmanager
async def engine(port: int, kind: type[Engine] = Vllm) -> AsyncIterator[None]:
    async with serving(Emulator(EmulatorConfig(engine=kind)).app, port=port):
        yield


@asynccontextmanager
async def watch_of(folder: Path, port: int, kind: str = "vllm") -> AsyncIterator[EngineWatch]:
    path = folder / "policy.yaml"
    path.write_text(POLICY.format(engine=kind))
    middleware = AdmissionMiddleware(ReverseProxy(f"http://127.0.0.1:{port}"), path)
    async with serving(middleware):
        yield middleware.controller.engine_watch


async def until(condition: Callable[[], bool], within_s: float = 5.0) -> float:
    """Waits for it. Returns how long that took, in seconds."""
    began_s = time.monotonic()
    while not condition():
        assert time.monotonic() - began_s < within_s
        await asyncio.sleep(0.005)
    return time.monotonic() - began_s


async def test_an_engine_that_answers_is_up_at_once(tmp_path: Path) -> None:
    port = free_port()
    async with engine(port), watch_of(tmp_path, port) as watch:
        assert (watch.state, watch.is_usable, watch.reason) == (EngineState.UP, True, None)
        assert watch.readiness() == ()
        assert watch.notices() == ()
        assert watch.document()["answers"] == "vllm"


async def test_an_engine_that_comes_later_is_used_then(tmp_path: Path) -> None:
    port = free_port()
    async with watch_of(tmp_path, port) as watch:
        changes: list[bool] = []
        watch.on_change.append(lambda: changes.append(watch.is_usable))
        assert watch.state is EngineState.DOWN
        assert watch.reason == f"connection refused by http://127.0.0.1:{port}"
        async with engine(port):
            await until(lambda: watch.is_usable)
        assert changes == [True]


async def test_another_engine_that_comes_later_is_never_used(tmp_path: Path) -> None:
    port = free_port()
    async with watch_of(tmp_path, port) as watch:
        changes: list[bool] = []
        watch.on_change.append(lambda: changes.append(watch.is_usable))
        async with engine(port, TensorRtLlm):
            await until(lambda: watch.state is EngineState.MISMATCH)
            assert "is TensorRT-LLM (/v1/models says so), but the policy says engine: vllm" in watch.readiness()[0]
            assert "policy.yaml:1); write engine: tensorrt-llm" in watch.readiness()[0]
        await until(lambda: watch.state is EngineState.DOWN)
        async with engine(port):
            await until(lambda: watch.state is EngineState.UP)
        assert changes == [False, False, True]


async def test_a_request_that_cannot_connect_holds_the_others_for_milliseconds_where_the_engine_answers(
    tmp_path: Path,
) -> None:
    port = free_port()
    async with engine(port), watch_of(tmp_path, port) as watch:
        watch.unreachable("a lost packet")
        assert (watch.state, watch.reason, watch.is_usable) == (EngineState.DOWN, "a lost packet", False)
        assert await until(lambda: watch.is_usable) < 0.3
