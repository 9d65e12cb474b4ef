"""An engine added from one file: `check`, `explain`, `serve` and `doctor` use it as they use those of the package.

The engine is an entry point of an installed distribution, and the commands are processes. The server that plays the
engine is a real HTTP server, which serves its waiting requests by the priority that it is sent.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from importlib.metadata import EntryPoint
from pathlib import Path

import aiohttp
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from sidecar.engines import ENGINES, Dynamo, Vllm
from sidecar.engines.registry import GROUP, added
from tests.engines.invented import Invented
from tests.support.commands import address, command
from tests.support.each import each
from tests.support.serving import serving

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[2]
POLICY = """\
engine: invented
capacity: {from: engine}
anonymous: high
default_tier: normal
sources: [engine, header, key]
engine_levels: {high: 0, normal: 100, batch: 500}
tiers: {high: {reserve: 20%}, normal: {}, batch: {}}
"""
HEADER = "x-invented-urgency"
SLOTS = 4


class InventedServer:
    """The server of an invented engine. `headers` and `bodies` are what it received."""

    def __init__(self) -> None:
        self.headers: list[dict[str, str]] = []
        self.bodies: list[dict[str, object]] = []
        self.running = 0
        self._waiting: list[tuple[float, int, asyncio.Event]] = []
        self._arrivals = itertools.count()
        self.app = Starlette(
            routes=[
                Route("/v1/models", self.models),
                Route("/metrics", self.metrics),
                Route("/version", self.version),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/inspect", self.inspect, methods=["POST"]),
            ]
        )

    async def models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "m", "owned_by": "invented-labs", "max_model_len": 4096}]})

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": "7.1"})

    async def metrics(self, request: Request) -> Response:
        waiting = len(self._waiting)
        return PlainTextResponse(
            f"invented_kv_tokens 100000\ninvented_slots {SLOTS}\n"
            f'invented_running{{rank="0"}} {self.running}\ninvented_waiting{{rank="0"}} {waiting}\n'
        )

    async def inspect(self, request: Request) -> Response:
        return JSONResponse({"inspected": True})

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        self.headers.append(dict(request.headers))
        self.bodies.append(body)
        try:
            urgency = float(request.headers.get(HEADER, body.get("priority", 0)))
        except ValueError:
            return JSONResponse({"error": {"message": "no number"}}, 400)
        return StreamingResponse(self._tokens(urgency, body["max_tokens"]), media_type="text/event-stream")

    async def _tokens(self, urgency: float, tokens: int) -> AsyncIterator[str]:
        if self.running >= SLOTS:
            turn = asyncio.Event()
            heapq.heappush(self._waiting, (urgency, next(self._arrivals), turn))
            await turn.wait()
        else:
            self.running += 1
        try:
            for _ in range(tokens):
                await asyncio.sleep(0.004)
                yield _event({"choices": [{"index": 0, "delta": {"content": "a "}, "finish_reason": None}]})
            yield _event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
            usage = {"prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": 5 + tokens}
            yield _event({"choices": [], "usage": usage})
            yield "data: [DONE]\n\n"
        finally:
            if self._waiting:
                heapq.heappop(self._waiting)[2].set()
            else:
                self.running -= 1


def _event(chunk: dict[str, object]) -> str:
    return f"data: {json.dumps({'id': 'c', 'object': 'chat.completion.chunk', 'model': 'm', **chunk})}\n\n"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path of new processes with a distribution that has the engine; and a policy."""
    info = tmp_path / "invented_engine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: invented-engine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\ninvented = tests.engines.invented:Invented\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), str(ROOT))))
    (tmp_path / "policy.yaml").write_text(POLICY)
    return tmp_path


async def sidecar(*arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "sidecar.cli", *arguments]
    return await asyncio.to_thread(subprocess.run, argv, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.long
async def test_check_reads_a_policy_of_the_engine(installed: Path) -> None:
    good = await sidecar("check", str(installed))
    assert good.returncode == 0, good.stderr + good.stdout
    assert "engine invented" in good.stdout
    path = installed / "policy.yaml"
    for wrong, said in (
        (POLICY.replace("normal: 100, batch: 500", "normal: 100, batch: 50"), "invented serves lower numbers first"),
        (POLICY.replace("batch: 500", "batch: 20000"), "invented's priorities go from 0 to 10000"),
        (POLICY.replace("engine: invented", "engine: inventde"), "invented"),
    ):
        path.write_text(wrong)
        bad = await sidecar("check", str(installed))
        assert bad.returncode == 1
        assert said in bad.stdout + bad.stderr


@pytest.mark.long
async def test_explain_says_how_the_engine_gets_the_priority(installed: Path) -> None:
    asked = ("--path", "/v1/chat/completions", "--header", f"{HEADER}: 60")
    ended = await sidecar("explain", str(installed), *asked, "--json", "-")
    assert ended.returncode == 0, ended.stderr
    explained = json.loads(ended.stdout)
    assert explained["tier"] == "normal", "60 is more than 0 and at most 100"
    assert explained["engine"] == {"name": "invented", "priority": 100, "headers": {HEADER: "100"}, "member": None}


@pytest.mark.long
async def test_init_writes_a_policy_for_it(installed: Path) -> None:
    written = installed / "written"
    ended = await sidecar("init", str(written), "--engine", "invented", "--requests", "8")
    assert ended.returncode == 0, ended.stderr
    assert "engine: invented\n" in (written / "policy.yaml").read_text()
    assert "sidecar emulate" not in ended.stdout, "it cannot be emulated"
    assert (await sidecar("check", str(written))).returncode == 0


async def test_serve_sends_the_engine_its_priority_and_no_client_does(installed: Path) -> None:
    engine = InventedServer()
    async with serving(engine.app) as upstream:
        served = ("serve", "--policy", str(installed), "--upstream", upstream.url, "--port", "0", "--admin-port", "0")
        with command(*served) as process:
            url = await asyncio.to_thread(address, process)
            async with aiohttp.ClientSession(url) as client:
                body = {"model": "m", "max_tokens": 2, "stream": True, "messages": [{"role": "user", "content": "a"}]}
                headers = {HEADER: "60", "x-invented-admin-user": "root"}
                async with client.post("/v1/chat/completions", json=body | {"priority": 0}, headers=headers) as answer:
                    assert answer.status == 200
                    assert "[DONE]" in await answer.text()
                    assert answer.headers["x-admission-tier"] == "normal"
                async with client.post("/v1/inspect", json={}) as answer:
                    assert answer.status == 200, "the engine's harmless path"
                async with client.post("/v1/invent", json={}) as answer:
                    assert answer.status == 404, "a path on which the engine generates, and that is not guarded"
    assert engine.headers[0][HEADER] == "100"
    assert "x-invented-admin-user" not in engine.headers[0]
    assert "priority" not in engine.bodies[0]


@pytest.mark.long
async def test_doctor_sees_that_its_priority_works(installed: Path) -> None:
    engine = InventedServer()
    async with serving(engine.app) as upstream:
        ended = await sidecar("doctor", "--upstream", upstream.url, "--policy", str(installed), "--json", "-")
    figures = json.loads(ended.stdout)
    assert (ended.returncode, figures["verdict"]) == (0, "works"), figures["conditions"]
    assert (figures["engine"], figures["identity"]["engine"], figures["facts"]["version"]) == (
        "invented",
        "invented",
        "7.1",
    )
    assert figures["gauges_before"]["max_running"] == SLOTS
    assert figures["fields"][0]["way"] == f"header {HEADER}"
    assert figures["fields"][1]["way"] == "body field priority"
    assert figures["findings"] == []


class Nameless:
    """No engine at all."""


class Taken(Vllm):
    """An engine with the name of another."""


class Unprefixed(Invented):
    """An engine that would have the sidecar take credentials out of requests."""

    header = b"authorization"


class Undecoded(Invented):
    """An engine with a member that no request is searched for."""

    untrusted_members = (("urgency",),)


class Renamed(Dynamo):
    """One that is right."""

    name = "dynamo-fork"


@each("kind", [Nameless, Taken, Unprefixed, Undecoded, "Missing"])
def test_an_engine_with_a_mistake_is_left_out_with_a_warning(
    kind: type | str, caplog: pytest.LogCaptureFixture
) -> None:
    name = kind if isinstance(kind, str) else kind.__name__
    assert added([EntryPoint(name="x", value=f"{__name__}:{name}", group=GROUP)]) == []
    assert f"the engine {__name__}:{name} cannot be used" in caplog.text


def test_an_engine_without_a_mistake_is_added() -> None:
    assert added([EntryPoint(name="x", value=f"{__name__}:Renamed", group=GROUP)]) == [Renamed]
    assert "invented" not in ENGINES, "not installed in this process"
    assert Invented.check_carrier(Invented.carriers[0]) is None  # type: ignore[func-returns-value]
