"""A sidecar that a server constructs from its environment alone: admin pages, telemetry, and what fails the start."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
import uvicorn
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider

from sidecar.app import AdmissionMiddleware
from sidecar.policy.problems import PolicyError
from sidecar.server.server import CannotServe
from tests.support.in_process import start_failure
from tests.support.late import fastapi
from tests.support.middleware import SMALL, Caller, write_policy
from tests.support.ports import free_ports
from tests.support.redis_servers import free_port
from tests.support.serving import serving
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, no_providers: None, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith(("SIDECAR_", "OTEL_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SIDECAR_POLICY", str(write_policy(tmp_path)))


def guarded() -> fastapi.FastAPI:
    """As vLLM does it: the class, and nothing else."""
    app = fastapi.FastAPI()
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


async def test_all_of_it_has_ended_when_the_server_hears_so(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.long
def test_one_process_more_than_was_said_finds_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDECAR_PROCESSES", "2")
    monkeypatch.setenv("SIDECAR_STORE", "redis://127.0.0.1:9/0")
    first = free_ports(2)
    monkeypatch.setenv("SIDECAR_ADMIN_PORT", str(first))
    with socket.create_server(("127.0.0.1", first)), socket.create_server(("127.0.0.1", first + 1)):
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
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)


WRONG = [
    ("SIDECAR_ADMIN_PORT", "98765", "SIDECAR_ADMIN_PORT: '98765' is not a port"),
    ("SIDECAR_PROCESSES", "many", "SIDECAR_PROCESSES: 'many' is no number of processes; write 1 or more"),
    ("OTEL_TRACES_EXPORTER", "zipkin", 'OTEL_TRACES_EXPORTER: "zipkin" is not supported'),
]


async def test_what_is_wrong_with_the_environment_fails_the_start() -> None:
    told = {}
    for variable, value, _ in WRONG:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv(variable, value)
            told[variable] = await start_failure(guarded())
    assert [said for variable, _, said in WRONG if said not in str(told[variable])] == []


async def test_a_server_of_two_processes_fails_the_start() -> None:
    app = guarded()
    app.state.args = SimpleNamespace(api_server_count=2)
    said = "2 server processes share this engine, and each would admit a whole pool of its own: set SIDECAR_STORE="
    assert said in str(await start_failure(app))


async def test_a_limit_of_the_servers_own_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    for most in (None, 7):
        server = uvicorn.Server(uvicorn.Config(guarded(), port=0, limit_concurrency=most, log_config=None))
        running = asyncio.ensure_future(server.serve())
        await until(partial(getattr, server, "started"))
        server.should_exit = True
        await running
    (line,) = (record.getMessage() for record in caplog.records if "own limit" in record.getMessage())
    assert "(limit_concurrency=7) acts before admission and knows no tier" in line
    assert "beyond 7 connections or requests uvicorn answers 503" in line


def test_a_port_that_is_taken_ends_the_server_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("SIDECAR_ADMIN_PORT", str(port))
        ended = started("")
    assert ended.returncode != 0
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in ended.stderr
    assert "Application startup failed" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_failed_start_ends_starlettes_test_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the app's end after `lifespan.startup.failed`, and goes on where the app raises nothing."""
    client = pytest.importorskip(
        "starlette.testclient", reason="an older Starlette's client needs httpx", exc_type=RuntimeError
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("SIDECAR_ADMIN_PORT", str(port))
        with pytest.raises(CannotServe, match=f"cannot listen on 127.0.0.1:{port}"), client.TestClient(guarded()):
            pytest.fail("it started")
    monkeypatch.setenv("SIDECAR_POLICY", "nowhere")
    with pytest.raises(PolicyError, match="nowhere: there is no such file"), client.TestClient(guarded()):
        pytest.fail("it started")


async def test_a_failed_start_answers_every_request_and_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A server without a lifespan never hears of it, and its log must not grow with each request."""
    monkeypatch.setenv("SIDECAR_POLICY", "nowhere")
    app = guarded()
    for _ in range(3):
        caller = Caller(app, SMALL)
        await caller.run()
        assert (caller.status, caller.json["error"]["code"]) == (500, "not_started")
        assert "nowhere" not in caller.json["error"]["message"]  # the file's name is not for clients
    assert [record.getMessage()[:36] for record in caplog.records] == ["no request is served: nowhere: there"]


def test_the_logging_of_the_process_is_left_alone_and_spans_are_sent_when_the_server_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """uvicorn's configuration replaces it unless asked not to: the server's access log would be gone."""
    monkeypatch.setenv("SIDECAR_ADMIN_PORT", "0")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    before = "import logging\nbefore = logging.getLogger('uvicorn.access')\n"
    code = (
        "import asyncio, aiohttp, logging, uvicorn\nfrom tests.server.test_mounted import guarded\n"
        "server = uvicorn.Server(uvicorn.Config(guarded(), port=0, log_level='info'))\n"
        f"{before}handlers, level = list(before.handlers), before.level\n"
        "async def main():\n"
        "    serving = asyncio.ensure_future(server.serve())\n"
        "    while not server.started: await asyncio.sleep(0.01)\n"
        "    print(before.handlers == handlers, before.level == level, logging.getLogger('uvicorn.error').level)\n"
        "    url = 'http://127.0.0.1:%d' % server.servers[0].sockets[0].getsockname()[1]\n"
        "    async with aiohttp.ClientSession() as client:\n"
        "        await client.post(url + '/v1/completions', json={'prompt': 'hi'})\n"
        "    server.should_exit = True\n"
        "    await serving\n"
        "asyncio.run(main())"
    )
    ended = python(code)
    assert ended.stdout.split()[:3] == ["True", "True", "20"], ended.stderr
    assert "sidecar: admin on http://127.0.0.1:" in ended.stderr
    assert '"name": "admission"' in ended.stdout, ended.stderr


def passed() -> fastapi.FastAPI:
    """As the README has it: the middleware is constructed with its policy."""
    app = fastapi.FastAPI()
    app.add_middleware(AdmissionMiddleware, policy=os.environ["SIDECAR_POLICY"])
    return app


async def test_a_middleware_with_a_policy_has_the_admin_pages_too(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("SIDECAR_ADMIN_PORT", str(port))
    async with aiohttp.ClientSession() as client:
        async with serving(passed()) as served:
            async with client.post(served.url + "/v1/completions", json={"prompt": "hi"}) as answer:
                named = answer.headers["x-request-id"]
            for path, shown in (
                ("/", "<!doctype html>"),
                ("/metrics", "admission_admitted_total"),
                (f"/requests/{named}", named),
                ("/readyz", "ready"),
            ):
                async with client.get(f"http://127.0.0.1:{port}{path}") as page:
                    assert (page.status, shown in await page.text()) == (200, True), path
        with pytest.raises(aiohttp.ClientConnectionError):
            await client.get(f"http://127.0.0.1:{port}/healthz")


async def test_without_the_variable_it_leaves_the_process_alone() -> None:
    before = metrics.get_meter_provider()
    async with serving(passed()):
        assert metrics.get_meter_provider() is before


async def test_an_sdk_that_the_app_installs_while_it_starts_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may install one only once: ours must not be first."""
    port = free_port()
    monkeypatch.setenv("SIDECAR_ADMIN_PORT", str(port))
    own = MeterProvider()

    @asynccontextmanager
    async def lifespan(_: fastapi.FastAPI) -> AsyncIterator[None]:
        metrics.set_meter_provider(own)
        yield

    app = fastapi.FastAPI(lifespan=lifespan)
    app.add_middleware(AdmissionMiddleware, policy=os.environ["SIDECAR_POLICY"])
    async with serving(app), aiohttp.ClientSession() as client:
        assert metrics.get_meter_provider() is own
        async with client.get(f"http://127.0.0.1:{port}/metrics") as page:
            assert "this process had set up OpenTelemetry's metrics before" in await page.text()


async def test_a_mistake_in_the_apps_own_telemetry_is_a_line_and_no_failed_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SIDECAR_ADMIN_PORT", str(port := free_port()))
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "zipkin")
    url = f"http://127.0.0.1:{port}/metrics"
    async with serving(passed()), aiohttp.ClientSession() as client, client.get(url) as page:
        assert 'OTEL_TRACES_EXPORTER: "zipkin" is not supported' in await page.text()
    assert 'OTEL_TRACES_EXPORTER: "zipkin" is not supported' in caplog.text


async def test_the_second_policy_of_a_process_has_no_pages_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    another = AdmissionMiddleware(fastapi.FastAPI(), write_policy(tmp_path / "another", "pool: another\n"))
    port = free_port()
    monkeypatch.setenv("SIDECAR_ADMIN_PORT", str(port))
    url = f"http://127.0.0.1:{port}/healthz"
    warned = f"another middleware of this process has the admin port {port}"
    logger = logging.getLogger("uvicorn.error")
    logger.addHandler(caplog.handler)
    shown: dict[str, Any] = {"log_level": "warning", "log_config": None}  # the default takes the handler away
    try:
        async with aiohttp.ClientSession() as client:
            async with serving(passed(), **shown), serving(another, **shown), client.get(url) as page:
                assert page.status == 200
            assert warned in caplog.text
            caplog.clear()
            async with serving(passed(), **shown), client.get(url) as page:
                assert page.status == 200
        assert warned not in caplog.text
    finally:
        logger.removeHandler(caplog.handler)


async def test_an_app_without_a_lifespan_has_the_pages_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("SIDECAR_ADMIN_PORT", str(port))

    async def raising(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"

    async def silent(scope: Any, receive: Any, send: Any) -> None:
        return None

    url = f"http://127.0.0.1:{port}/readyz"
    for app in (raising, silent):
        sidecar = AdmissionMiddleware(app, policy=os.environ["SIDECAR_POLICY"])
        async with serving(sidecar), aiohttp.ClientSession() as client, client.get(url) as page:
            assert page.status == 200


async def test_a_middleware_that_no_lifespan_reaches_says_that_it_has_no_pages(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SIDECAR_ADMIN_PORT", str(free_port()))
    outer = fastapi.FastAPI()
    outer.mount("/llm", AdmissionMiddleware(fastapi.FastAPI(), policy=os.environ["SIDECAR_POLICY"]))
    async with serving(outer) as served, aiohttp.ClientSession() as client:
        for _ in range(2):
            async with client.get(served.url + "/llm/"):
                pass
    assert caplog.text.count("SIDECAR_ADMIN_PORT is set, and there are no admin pages") == 1
