"""The engine watch, before emulated engines over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette

from sidecar.app import AdmissionMiddleware
from sidecar.engines import Engine, TensorRtLlm, Vllm
from sidecar.engines import watch as engine_watch
from sidecar.engines.watch import EngineState, EngineWatch
from sidecar.proxy.proxy import ReverseProxy
from sidecar.tools.emulator import Emulator, EmulatorConfig
from tests.support.engine import Connection, answering, raw_engine
from tests.support.middleware import CHAT, answer, chat, chunk, start
from tests.support.redis_servers import free_port
from tests.support.serving import serving
from tests.support.waiting import until
from tests.support.wire import exchange, post

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
async def watch_of(folder: Path, port: int, kind: str = "vllm") -> AsyncIterator[tuple[EngineWatch, int]]:
    path = folder / "policy.yaml"
    path.write_text(POLICY.format(engine=kind))
    middleware = AdmissionMiddleware(ReverseProxy(f"http://127.0.0.1:{port}"), path)
    async with serving(middleware) as served:
        yield middleware.controller.engine_watch, served.port


async def test_an_engine_that_answers_is_up_at_once(tmp_path: Path) -> None:
    port = free_port()
    async with engine(port), watch_of(tmp_path, port) as (watch, _):
        assert (watch.state, watch.is_usable, watch.reason) == (EngineState.UP, True, None)
        assert watch.readiness() == ()
        assert watch.notices() == ()
        assert watch.document()["answers"] == "vllm"


async def test_an_engine_that_comes_later_is_used_then(tmp_path: Path) -> None:
    port = free_port()
    async with watch_of(tmp_path, port) as (watch, _):
        changes: list[bool] = []
        watch.on_change.append(lambda: changes.append(watch.is_usable))
        assert watch.state is EngineState.DOWN
        assert watch.reason == f"connection refused by http://127.0.0.1:{port}"
        async with engine(port):
            await until(lambda: watch.is_usable)
        assert changes == [True]


async def test_another_engine_that_comes_later_is_never_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING")
    port = free_port()
    async with watch_of(tmp_path, port) as (watch, _):
        changes: list[tuple[bool, int | None]] = []
        watch.on_change.append(lambda: changes.append((watch.is_usable, watch.up)))
        async with engine(port, TensorRtLlm):
            await until(lambda: watch.state is EngineState.MISMATCH)
            assert "is TensorRT-LLM (/v1/models says so), but the policy says engine: vllm" in watch.readiness()[0]
            assert "policy.yaml:1); write engine: tensorrt-llm" in watch.readiness()[0]
        await until(lambda: watch.state is EngineState.DOWN)
        async with engine(port):
            await until(lambda: watch.state is EngineState.UP)
        assert changes == [(False, 0), (False, 0), (True, 1)]
    events = [getattr(record, "event", "") for record in caplog.records]
    assert [event for event in events if event.startswith("engine_")] == [
        *("engine_down", "engine_mismatch", "engine_down", "engine_up")
    ]


async def test_a_request_that_cannot_connect_holds_the_others_for_milliseconds_where_the_engine_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_watch, "RETRY_EVERY_S", 3600)
    port = free_port()
    async with engine(port), watch_of(tmp_path, port) as (watch, _):
        watch.unreachable("a lost packet")
        assert (watch.state, watch.reason, watch.is_usable) == (EngineState.DOWN, "a lost packet", False)
        await until(lambda: watch.is_usable)  # it is asked at once


# -- signs of life


class RudeEngine:
    """An engine that streams as long as `streams` is set, and answers its health page as `health` says; None: never.

    `asked` counts the probes.
    """

    def __init__(self, health: int | None) -> None:
        self.health = health
        self.asked = 0
        self.streams = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] == "/v1/models":
            await answer(send, b'{"data": [{"id": "m", "owned_by": "vllm"}]}')
        elif scope["path"] == "/health":
            self.asked += 1
            if self.health is None:
                await asyncio.sleep(600)
            await answer(send, b"", self.health or 200)
        else:
            await start(send)
            while self.streams.is_set():
                await chunk(send, b"a token")
                await asyncio.sleep(0.01)
            await chunk(send, b"", more=False)


@pytest.fixture
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"PROBE_EVERY_S": 0.05, "RETRY_EVERY_S": 0.05, "ANSWER_WITHIN_S": 0.5}.items():
        monkeypatch.setattr(engine_watch, name, seconds)


@pytest.mark.usefixtures("_in_a_hurry")
@pytest.mark.parametrize("health", [None, 502, 503, 504])
async def test_a_busy_engine_is_up_while_its_responses_flow_and_down_when_they_end(
    health: int | None, tmp_path: Path
) -> None:
    engine = RudeEngine(health=200)
    async with serving(engine, lifespan="off") as upstream, watch_of(tmp_path, upstream.port) as (watch, port):
        assert watch.is_usable
        engine.streams.set()
        asking = asyncio.create_task(exchange(port, post(CHAT, json.dumps(chat(stream=True)).encode())))
        await asyncio.sleep(0.1)
        engine.health = health
        changes: list[EngineState] = []
        watch.on_change.append(lambda: changes.append(watch.state))
        asked = engine.asked
        await until(lambda: engine.asked > asked + 4)
        assert changes == []
        engine.streams.clear()
        await asking
        await until(lambda: not watch.is_usable)
        said = "GET /health was not answered within 0.5 s" if health is None else f"GET /health answered {health}"
        assert watch.reason is not None
        assert watch.reason.startswith(said)
        engine.health = 200
        await until(lambda: watch.is_usable)


@pytest.mark.usefixtures("_in_a_hurry")
async def test_one_slow_health_page_is_no_death(tmp_path: Path) -> None:
    engine = RudeEngine(health=200)
    async with serving(engine, lifespan="off") as upstream, watch_of(tmp_path, upstream.port) as (watch, _):
        changes: list[EngineState] = []
        watch.on_change.append(lambda: changes.append(watch.state))
        engine.health, asked = None, engine.asked
        await until(lambda: engine.asked > asked)
        engine.health, asked = 200, engine.asked
        await until(lambda: engine.asked > asked + 4)
        assert changes == []


@pytest.mark.parametrize("health", [200, 401, 404, 500])
async def test_any_answer_of_the_engines_own_is_life(health: int, tmp_path: Path) -> None:
    engine = RudeEngine(health=health)
    async with serving(engine, lifespan="off") as upstream, watch_of(tmp_path, upstream.port) as (watch, _):
        assert watch.state is EngineState.UP


async def test_an_engine_that_no_page_names_is_used_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with raw_engine(answering()) as upstream, watch_of(tmp_path, upstream.port) as (watch, _):
        assert (watch.state, watch.is_usable) == (EngineState.UP, True)
        said = f"no page of {upstream.url} says which engine answers there; the policy's vllm is used as it is"
        assert watch.notices()[0].startswith(said)
        assert [one.message for one in caplog.records if one.message.startswith("no page")] == list(watch.notices())


async def test_an_unknown_engine_is_no_mismatch_of_none(tmp_path: Path) -> None:
    port = free_port()
    async with engine(port), watch_of(tmp_path, port, "none") as (watch, _):
        assert (watch.state, watch.notices()) == (EngineState.UP, ())


@pytest.mark.parametrize(("kind", "is_news"), [("vllm", True), ("none", False)])
async def test_an_app_that_names_no_engine_is_news_where_the_policy_names_one(
    kind: str, is_news: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY.format(engine=kind))
    with caplog.at_level("INFO", "sidecar.engine"):
        async with serving(AdmissionMiddleware(Starlette(), path)):
            said = "the app in this process names no engine; the policy's vllm is used"
            assert [one.message for one in caplog.records if "names no engine" in one.message] == [said] * is_news


async def test_metrics_that_are_read_once_only_are_not_read(tmp_path: Path) -> None:
    """trtllm-serve takes its figures away from every other collector when /metrics is read."""
    async with raw_engine(answering()) as upstream, watch_of(tmp_path, upstream.port, "tensorrt-llm") as (watch, _):
        assert watch.is_usable
        targets = [asked.target for asked in upstream.own]
        assert b"/prometheus/metrics" in targets
        assert b"/metrics" not in targets


async def test_the_engines_key_goes_with_the_sidecars_own_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIDECAR_ENGINE_KEY", "sk-of-the-engine-0123456789")
    async with raw_engine(answering()) as upstream, watch_of(tmp_path, upstream.port):
        assert {asked.target for asked in upstream.own} >= {b"/health", b"/v1/models"}
        assert all(asked.all(b"authorization") == [b"Bearer sk-of-the-engine-0123456789"] for asked in upstream.own)


# -- what is wrong, in words


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:9", "connection refused by http://127.0.0.1:9"),
        ("http://localhost:9", "connection refused by http://localhost:9"),
        ("http://no-such-host.invalid:8000", "the name in http://no-such-host.invalid:8000 cannot be resolved"),
    ],
)
async def test_the_reason_says_what_is_wrong(url: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY.format(engine="vllm"))
    middleware = AdmissionMiddleware(ReverseProxy(url), path)
    async with serving(middleware):
        watch = middleware.controller.engine_watch
        assert (watch.state, watch.is_usable) == (EngineState.DOWN, False)
        assert watch.reason is not None
        assert watch.reason.startswith(said)


async def test_a_failed_tls_handshake_is_called_that(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY.format(engine="vllm"))
    async with serving(RudeEngine(health=200), lifespan="off") as plain:
        middleware = AdmissionMiddleware(ReverseProxy(f"https://127.0.0.1:{plain.port}"), path)
        async with serving(middleware):
            assert str(middleware.controller.engine_watch.reason).startswith("TLS with https://127.0.0.1:")


async def test_a_port_that_closes_every_connection_is_down(tmp_path: Path) -> None:
    """So does a container runtime's proxy before a container that has ended."""

    async def closes(connection: Connection) -> None:
        connection.abort()

    async with raw_engine(closes) as upstream, watch_of(tmp_path, upstream.port) as (watch, _):
        assert watch.state is EngineState.DOWN
        assert watch.reason == f"{upstream.url}: it closed the connection before it answered"
