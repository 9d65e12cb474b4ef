"""The whole sidecar with `capacity: {from: engine}`: a reverse proxy before an emulated engine, over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from sidecar.app import AdmissionMiddleware
from sidecar.engines import Dynamo, Engine, Sglang, TensorRtLlm, Vllm
from sidecar.proxy.proxy import ReverseProxy
from sidecar.tools.emulator import Emulator, EmulatorConfig, StepModel
from tests.support.serving import serving
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

POLICY = """\
engine: {engine}
capacity: {{from: engine, fraction: 100%, waiting: {waiting}}}
tiers: {{high: {{}}, normal: {{}}, batch: {{}}}}
anonymous: high
"""


class Sidecar:
    """A sidecar over a network before an engine that a test can replace."""

    def __init__(self, middleware: AdmissionMiddleware, url: str, session: aiohttp.ClientSession) -> None:
        self.middleware = middleware
        self._url = url
        self._session = session

    async def ask(self, max_wait: str = "1m", **fields: Any) -> tuple[int, dict[str, Any]]:
        body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, **fields}
        async with self._session.post(
            f"{self._url}/v1/chat/completions", json=body, headers={"x-admission-max-wait": max_wait}
        ) as response:
            return response.status, json.loads(await response.read())

    async def embed(self, inputs: list[list[int]]) -> tuple[int, dict[str, Any]]:
        async with self._session.post(f"{self._url}/v1/embeddings", json={"model": "m", "input": inputs}) as response:
            return response.status, json.loads(await response.read())

    def pool(self) -> Any:
        return self.middleware.controller.state()["pool"]


@asynccontextmanager
async def engine_of(engine: type[Engine], **steps: Any) -> AsyncIterator[tuple[Emulator, str]]:
    emulator = Emulator(EmulatorConfig(engine=engine, steps=StepModel(step_us=2_000, **steps)))
    async with serving(emulator.app) as served:
        yield emulator, served.url


@asynccontextmanager
async def sidecar_of(
    folder: Path, engine: type[Engine], upstream: str, waiting: int = 4, more: str = ""
) -> AsyncIterator[Sidecar]:
    path = folder / "policy.yaml"
    path.write_text(POLICY.format(engine=engine.name, waiting=waiting) + more)
    middleware = AdmissionMiddleware(ReverseProxy(upstream), path)
    async with serving(middleware) as served, aiohttp.ClientSession() as session:
        yield Sidecar(middleware, served.url, session)


@pytest.mark.long
async def test_the_pool_of_a_dry_run_is_not_held_back_by_the_queue_that_the_dry_run_lets_grow(tmp_path: Path) -> None:
    async with (
        engine_of(Vllm, max_sequences=2, kv_tokens=9_000_000) as (emulator, url),
        sidecar_of(tmp_path, Vllm, url, waiting=3, more="mode: observe\n") as sidecar,
    ):
        flood = [asyncio.ensure_future(sidecar.ask(max_tokens=400)) for _ in range(12)]
        await until(lambda: (sidecar.pool()["engine"]["waiting"] or 0) > 3)
        for _ in range(3):  # two readings above the target would hold it back
            await until(lambda: sidecar.pool()["engine"]["read_s_ago"] > 0.05)
            await until(lambda: sidecar.pool()["engine"]["read_s_ago"] < 0.05)
            assert not sidecar.pool()["engine"]["held_back"]
            assert emulator.engine.waiting > 3
        assert [status for status, _ in await asyncio.gather(*flood)] == [200] * 12


@pytest.mark.parametrize("engine", [Sglang, TensorRtLlm, Dynamo])
async def test_the_pool_is_as_large_as_the_engine_behind_the_network_says(tmp_path: Path, engine: type[Engine]) -> None:
    async with (
        engine_of(engine, max_sequences=6, kv_tokens=900) as (_, url),
        sidecar_of(tmp_path, engine, url) as sidecar,
    ):
        assert sidecar.pool()["capacity"] == {"tokens": 900, "requests": 10}
        assert (await sidecar.ask())[0] == 200
        status, refusal = await sidecar.ask(max_tokens=2000)
        assert (status, refusal["error"]["code"]) == (400, "request_too_large")


async def test_lists_of_inputs_do_not_fill_the_engines_own_queue(tmp_path: Path) -> None:
    """The engine queues each input as a request: were a list one sequence of the pool, one client could fill it."""
    async with (
        engine_of(Sglang, max_sequences=6, kv_tokens=9_000_000) as (emulator, url),
        sidecar_of(tmp_path, Sglang, url, waiting=4) as sidecar,
    ):
        flood = [asyncio.ensure_future(sidecar.embed([[1] * 400] * 10)) for _ in range(30)]
        small = asyncio.ensure_future(sidecar.ask())
        most = 0
        while not all(one.done() for one in flood):
            most = max(most, emulator.engine.running + emulator.engine.waiting)
            assert not sidecar.pool()["engine"]["held_back"]
            await asyncio.sleep(0.001)
        assert most == 10, "as many as the pool has"
        assert [status for status, _ in await asyncio.gather(*flood, small)] == [200] * 31
        status, answer = await sidecar.embed([[1] * 10] * 200)
        assert (status, len(answer["data"])) == (200, 200), "a longer one than the pool holds all of it"


async def test_an_engine_that_starts_after_its_sidecar_is_waited_for_with_an_answer(tmp_path: Path) -> None:
    async with engine_of(Sglang, max_sequences=6, kv_tokens=900) as (_, url):
        pass  # its port is free again, and no one listens on it
    async with sidecar_of(tmp_path, Sglang, url) as sidecar:
        status, refusal = await sidecar.ask()
        assert (status, refusal["error"]["code"]) == (503, "capacity_unknown")
        reasons = sidecar.middleware.controller.readiness()
        assert any("has not reported its capacity yet" in reason for reason in reasons)


async def test_a_lost_engine_leaves_its_capacity_behind(tmp_path: Path) -> None:
    async with engine_of(Sglang, max_sequences=6, kv_tokens=900) as (_, url):
        sidecar_context = sidecar_of(tmp_path, Sglang, url)
        sidecar = await sidecar_context.__aenter__()
    try:
        await until(sidecar.middleware.controller.notices)
        assert "going on with 900 tokens and 10 requests" in sidecar.middleware.controller.notices()[0]
        status, refusal = await sidecar.ask(max_wait="1s")
        assert (status, refusal["error"]["code"]) == (503, "no_engine")
        assert sidecar.pool()["leases"] == 0
    finally:
        await sidecar_context.__aexit__(None, None, None)
