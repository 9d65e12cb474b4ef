"""Mounted engines in this process: an emulated engine with the middleware around it, and starts that fail."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from sidecar.app import AdmissionMiddleware
from sidecar.engines import Sglang, TensorRtLlm, Vllm
from sidecar.engines.base import Engine
from sidecar.fleet.mounted_engine import engine_of_process
from sidecar.proxy.proxy import ReverseProxy
from sidecar.tools.emulator import Emulator, EmulatorConfig, StepModel
from tests.support.serving import serving
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

POLICY = """\
engine: {engine}
engines: {{{engines}}}
tiers: {{high: {{preempt_after: 20ms}}, low: {{preemptible: true}}}}
default_tier: low
anonymous: high
sources: [header]
abort_latency: 20ms
"""
CHAT = "/v1/chat/completions"


def mounted(folder: Path, app: Any, engines: str, engine: type[Engine] = Vllm) -> AdmissionMiddleware:
    """Raises what its construction says: no event loop runs here."""
    path = folder / "policy.yaml"
    path.write_text(POLICY.format(engine=engine.name, engines=engines))
    return AdmissionMiddleware(app, path, retry_handlers=True)


async def asked(client: aiohttp.ClientSession, url: str) -> int:
    return (await answered(client, url, "high"))[0]


async def answered(client: aiohttp.ClientSession, url: str, tier: str) -> tuple[int, dict[str, str]]:
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    async with client.post(url + CHAT, json=body, headers={"x-priority": tier}) as response:
        await response.read()
        return response.status, dict(response.headers)


@pytest.mark.parametrize("engine", [Vllm, Sglang, TensorRtLlm])
async def test_an_engine_says_its_own_capacity(tmp_path: Path, engine: type[Engine]) -> None:
    emulator = Emulator(
        EmulatorConfig(engine=engine, steps=StepModel(step_us=2_000, max_sequences=3, kv_tokens=40_000))
    )
    engines = "mounted: true, slow_start: 0s, capacity: {from: engine, fraction: 100%, waiting: 0, requests: 3}"
    middleware = await asyncio.to_thread(mounted, tmp_path, emulator.app, engines, engine)
    async with serving(middleware) as served, aiohttp.ClientSession() as client:
        pool: Any = middleware.controller.state()["pool"]
        assert pool["capacity"] == {"tokens": 40_000, "requests": 3}
        assert await asyncio.gather(*(asked(client, served.url) for _ in range(8))) == [200] * 8
        (row,) = middleware.controller.engines.documents() if middleware.controller.engines else ()
        assert (row.state, row.in_flight, row.held.requests, row.mounted) == ("ready", 0, 0, True)


async def test_a_preempted_request_waits_and_is_counted_once(tmp_path: Path) -> None:
    emulator = Emulator(EmulatorConfig(engine=Vllm, steps=StepModel(step_us=50_000, chunk_tokens=1)))
    middleware = await asyncio.to_thread(
        mounted, tmp_path, emulator.app, "mounted: true, slow_start: 0s, capacity: {tokens: 10k, requests: 1}"
    )
    async with serving(middleware) as served, aiohttp.ClientSession() as client:
        low = asyncio.ensure_future(answered(client, served.url, "low"))
        view = middleware.controller.engines
        assert view is not None
        await until(lambda: view.documents()[0].in_flight == 1)
        assert await asked(client, served.url) == 200
        status, headers = await low
        assert (status, headers["x-admission-preempted"]) == (200, "1")
        (row,) = view.documents()
        assert (row.in_flight, row.held.requests, row.unprefilled_tokens) == (0, 0, 0)


@pytest.mark.parametrize(
    ("engines", "said"),
    [
        (
            "static: [{name: a, url: http://a:8000}]",
            "the policy names engines by their addresses (`engines: {static: ...}`), and an app that mounts the "
            "middleware sends none of its requests there",
        ),
        ("dns: {name: 'vllm:8000'}", "the policy names engines by their addresses (`engines: {dns: ...}`)"),
    ],
)
def test_engines_behind_a_proxy_are_not_mounted(tmp_path: Path, engines: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        mounted(tmp_path, Emulator(EmulatorConfig(engine=Vllm)).app, engines)


@pytest.mark.parametrize("app", [None, ReverseProxy("http://127.0.0.1:9")])
def test_mounted_engines_need_the_app_that_is_one(tmp_path: Path, app: Any) -> None:
    with pytest.raises(ValueError, match="the policy's engines are mounted"):
        mounted(tmp_path, app, "mounted: true")


def test_a_name_that_is_none_fails_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDECAR_ENGINE_NAME", "gpu 1")
    with pytest.raises(ValueError, match=r'^SIDECAR_ENGINE_NAME: "gpu 1" is not an'):
        mounted(tmp_path, Emulator(EmulatorConfig(engine=Vllm)).app, "mounted: true")


def test_the_name_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine_of_process({"SIDECAR_ENGINE_NAME": "gpu-1"})[0] == "gpu-1"
    for host, begins in (("gpu-1", "gpu-1-"), ("_a b", "a-b-"), ("", "engine-"), ("x" * 200, "x" * 58 + "-")):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        first, second = engine_of_process({}), engine_of_process({})
        assert (first[0].startswith(begins), len(first[0]) <= 63, first[1]) == (True, True, 1)
        assert first != second


def test_a_process_that_begins_later_in_one_second_is_a_later_incarnation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process starts in less than a second: two with one name and one number would be one engine to the pool."""
    clock_ns = iter((1_795_690_000_000_123_456, 1_795_690_000_000_124_456))
    monkeypatch.setattr("time.time_ns", lambda: next(clock_ns))
    first, second = (engine_of_process({"SIDECAR_ENGINE_NAME": "gpu-1"}) for _ in range(2))
    assert (first, second) == (("gpu-1", 1_795_690_000_000_123), ("gpu-1", 1_795_690_000_000_124))


async def test_several_processes_of_one_engine_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a store, too: each of them would offer the whole engine."""
    monkeypatch.setenv("SIDECAR_STORE", "redis://127.0.0.1:9/0")
    monkeypatch.setenv("SIDECAR_PROCESSES", "2")
    middleware = await asyncio.to_thread(mounted, tmp_path, Emulator(EmulatorConfig(engine=Vllm)).app, "mounted: true")
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "lifespan.startup"}

    async def send(message: Any) -> None:
        sent.append(message)

    with pytest.raises(ValueError, match="2 server processes share this engine"):
        await middleware({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, receive, send)
    assert "each would offer the pool all of it" in sent[0]["message"]
