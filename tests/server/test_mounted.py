"""A sidecar that a server constructs from its environment alone: admin pages, telemetry, and what fails the start."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from fastapi import FastAPI
from opentelemetry.util._once import Once

from sidecar.app import AdmissionMiddleware
from sidecar.server.mounted import processes
from tests.support.middleware import write_policy
from tests.support.ports import free_ports
from tests.support.redis_servers import free_port
from tests.support.serving import serving

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith(("SIDECAR_", "OTEL_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SIDECAR_POLICY", str(write_policy(tmp_path)))
    for signal, name in (("trace", "TRACER"), ("metrics._internal", "METER")):  # a mounted start sets the process's own
        monkeypatch.setattr(f"opentelemetry.{signal}._{name}_PROVIDER", None)
        monkeypatch.setattr(f"opentelemetry.{signal}._{name}_PROVIDER_SET_ONCE", Once())


def guarded() -> FastAPI:
    """As vLLM does it: the class, and nothing else."""
    app = FastAPI()
    app.add_middleware(AdmissionMiddleware)
    return app


async def test_the_admin_pages_live_as_long_as_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("SIDECAR_ADMIN_PORT", str(port))
    admin = f"http://127.0.0.1:{port}"
    async with aiohttp.ClientSession() as client:
        async with serving(guarded()), client.get(f"{admin}/readyz") as page:
            assert await page.json() == {"status": "ready", "reasons": [], "notices": []}
        with pytest.raises(aiohttp.ClientConnectionError):
            await client.get(f"{admin}/healthz")


async def test_all_of_it_has_ended_when_the_server_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server may end its event loop, and so the process, at this very message."""
    port = free_port()
    monkeypatch.setenv("SIDECAR_ADMIN_PORT", str(port))
    listens: dict[str, bool] = {}
    messages = iter(({"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}))

    async def receive() -> Any:
        await asyncio.sleep(0.01)  # the pages' server takes the connection that was tried out
        return next(messages)

    async def send(message: Any) -> None:
        with socket.socket() as probe:
            listens[message["type"]] = probe.connect_ex(("127.0.0.1", port)) == 0

    await guarded()({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, receive, send)
    assert listens == {"lifespan.startup.complete": True, "lifespan.shutdown.complete": False}


async def test_two_processes_take_a_port_each_and_one_more_finds_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDECAR_PROCESSES", "2")
    monkeypatch.setenv("SIDECAR_STORE", "redis://127.0.0.1:9/0")
    first = free_ports(2)
    monkeypatch.setenv("SIDECAR_ADMIN_PORT", str(first))
    async with serving(guarded()), serving(guarded()), aiohttp.ClientSession() as client:
        for port in (first, first + 1):
            async with client.get(f"http://127.0.0.1:{port}/healthz") as page:
                assert page.status == 200
        said = started("").stderr
    assert f"cannot listen on 127.0.0.1:{first + 1}" in said
    assert f"the last of 2 from {first} on" in said


def started(more: str) -> subprocess.CompletedProcess[str]:
    """A server in a process of its own, which must fail to start. `more` is what the module does besides."""
    code = (
        "import uvicorn\nfrom tests.server.test_mounted import guarded\n"
        f"app = guarded()\n{more}\nuvicorn.run(app, port=0, log_level='info')"
    )
    return python(code)


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Runs it in a process of its own, from the repository's root."""
    command = [sys.executable, "-c", code]
    root = Path(__file__).parents[2]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=30, check=False)


@pytest.mark.parametrize(
    ("variable", "value", "more", "said"),
    [
        ("SIDECAR_ADMIN_PORT", "98765", "", "SIDECAR_ADMIN_PORT: '98765' is not a port"),
        ("SIDECAR_ADMIN_PORT", "{taken}", "", "cannot listen on 127.0.0.1:{taken}: Address already in use"),
        ("SIDECAR_PROCESSES", "many", "", "SIDECAR_PROCESSES: 'many' is no number of processes; write 1 or more"),
        ("OTEL_TRACES_EXPORTER", "zipkin", "", 'OTEL_TRACES_EXPORTER: "zipkin" is not supported'),
        (
            "",
            "",
            "from types import SimpleNamespace\napp.state.args = SimpleNamespace(api_server_count=2)",
            "2 server processes share this engine, and each would admit a whole pool of its own: set SIDECAR_STORE=",
        ),
    ],
)
def test_what_is_wrong_with_the_environment_fails_the_start(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, more: str, said: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        if variable:
            monkeypatch.setenv(variable, value.format(taken=port))
        ended = started(more)
    assert ended.returncode != 0
    assert said.format(taken=port) in ended.stderr
    assert "Application startup failed" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("SIDECAR_ADMIN_PORT", "{taken}", "CannotServe: cannot listen on 127.0.0.1:{taken}"),
        ("SIDECAR_POLICY", "nowhere", "PolicyError: nowhere: there is no such file"),
    ],
)
def test_a_failed_start_ends_starlettes_test_client(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, said: str
) -> None:
    """It waits for the app's end after `lifespan.startup.failed`, and goes on where the app raises nothing."""
    code = (
        "from starlette.testclient import TestClient\nfrom tests.server.test_mounted import guarded\n"
        "with TestClient(guarded()): print('started')"
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv(variable, value.format(taken=port))
        ended = python(code)
    assert ended.stdout == ""
    assert said.format(taken=port) in ended.stderr.splitlines()[-1]


async def test_a_failed_start_says_the_same_to_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server without a lifespan never hears of it, and its log must not grow with each request."""
    monkeypatch.setenv("SIDECAR_POLICY", "nowhere")
    app, depths = guarded(), []
    for _ in range(3):
        with pytest.raises(ValueError, match="nowhere") as raised:
            await asyncio.wait_for(_asked(app), 5)
        depths.append(len(raised.traceback))
    assert depths[2] == depths[1]


async def _asked(app: FastAPI) -> None:
    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        return None

    await app({"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": b""}, receive, send)


def test_the_logging_of_the_process_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvicorn's configuration replaces it unless told not to: the server's access log would be gone."""
    monkeypatch.setenv("SIDECAR_ADMIN_PORT", "0")
    before = "import logging\nbefore = logging.getLogger('uvicorn.access')\n"
    code = (
        "import asyncio, logging, uvicorn\nfrom tests.server.test_mounted import guarded\n"
        "server = uvicorn.Server(uvicorn.Config(guarded(), port=0, log_level='info'))\n"
        f"{before}handlers, level = list(before.handlers), before.level\n"
        "async def main():\n"
        "    serving = asyncio.ensure_future(server.serve())\n"
        "    while not server.started: await asyncio.sleep(0.01)\n"
        "    print(before.handlers == handlers, before.level == level, logging.getLogger('uvicorn.error').level)\n"
        "    server.should_exit = True\n"
        "    await serving\n"
        "asyncio.run(main())"
    )
    ended = python(code)
    assert ended.stdout.split() == ["True", "True", "20"], ended.stderr
    assert "sidecar: admin on http://127.0.0.1:" in ended.stderr


async def test_a_policy_that_is_passed_leaves_the_environment_to_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("SIDECAR_ADMIN_PORT", str(port))
    app = FastAPI()
    app.add_middleware(AdmissionMiddleware, policy=os.environ["SIDECAR_POLICY"])
    async with serving(app), aiohttp.ClientSession() as client:
        with pytest.raises(aiohttp.ClientConnectionError):
            await client.get(f"http://127.0.0.1:{port}/healthz")


def test_the_server_says_how_many_processes_there_are() -> None:
    def told(count: object) -> dict[str, object]:
        return {"app": SimpleNamespace(state=SimpleNamespace(args=SimpleNamespace(api_server_count=count)))}

    assert processes(told(3), {"SIDECAR_PROCESSES": "2"}) == 3
    assert processes(told(None), {"SIDECAR_PROCESSES": "2"}) == 2
    assert processes({}, {}) == 1


def test_spans_are_sent_when_the_server_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    code = (
        "import asyncio, aiohttp\nfrom tests.server.test_mounted import guarded\n"
        "from tests.support.serving import serving\n"
        "async def main():\n"
        "    async with serving(guarded()) as served, aiohttp.ClientSession() as client:\n"
        "        async with client.post(served.url + '/v1/completions', json={'prompt': 'hi'}) as answer:\n"
        "            print(answer.status)\n"
        "asyncio.run(main())"
    )
    ended = python(code)
    assert '"name": "admission"' in ended.stdout, ended.stderr
