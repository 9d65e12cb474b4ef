"""Servers that start several processes of one app: each would have a pool of its own, and no one would notice."""

from __future__ import annotations

import importlib
import importlib.util
import json
import multiprocessing
import re
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sidecar.server.workers import ServerProcesses, refuse_several, server_processes
from tests.server.launched import running, write_app
from tests.support.ports import free_ports
from tests.support.redis_servers import free_port

NO_STORE = "redis://127.0.0.1:9/0"
"""Nothing listens there. A shared pool starts without its store, and reports that."""
UVICORN = ("uvicorn", "main:app", "--port", "{port}")
GUNICORN = ("gunicorn", "main:app", "-b", "127.0.0.1:{port}", "--no-control-socket", "-k")
HYPERCORN = ("hypercorn", "main:app", "-b", "127.0.0.1:{port}")
GRANIAN = ("granian", "--interface", "asgi", "main:app", "--port", "{port}")
CONFIG = "workers = 2\n"
LONG = pytest.mark.long


def command(arguments: Sequence[str]) -> list[str]:
    """With a free port; skips where the server is not installed."""
    for package in {arguments[0], *(["uvicorn_worker"] if "uvicorn_worker.UvicornWorker" in arguments else [])}:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install -e '.[dev]'")
    port = free_port()
    return [argument.format(port=port) for argument in arguments]


def skip_where_uvicorn_restarts_for_ever() -> None:
    """An older uvicorn starts a process anew that refused to start, and so never ends."""
    if not hasattr(importlib.import_module("uvicorn.supervisors.multiprocess"), "STARTUP_FAILURE"):
        pytest.skip("this uvicorn never ends where its processes do not start")


@LONG
@pytest.mark.parametrize(
    ("arguments", "variables", "supervisor"),
    [
        ((*UVICORN, "--workers", "2"), {}, "uvicorn"),
        pytest.param(UVICORN, {"WEB_CONCURRENCY": "2"}, "uvicorn", marks=pytest.mark.soak),
        ((*GUNICORN, "uvicorn_worker.UvicornWorker", "--preload", "-c", "config.py"), {}, "gunicorn"),
        pytest.param((*GUNICORN, "asgi"), {"WEB_CONCURRENCY": "2"}, "gunicorn", marks=pytest.mark.soak),
        ((*HYPERCORN, "-w", "2"), {}, "hypercorn"),
        ((*GRANIAN, "--workers", "2"), {}, "granian"),
    ],
)
def test_two_processes_without_a_store_do_not_start(
    tmp_path: Path, arguments: tuple[str, ...], variables: dict[str, str], supervisor: str
) -> None:
    if supervisor == "uvicorn":
        skip_where_uvicorn_restarts_for_ever()
    write_app(tmp_path)
    (tmp_path / "config.py").write_text(CONFIG)
    with running(tmp_path, *command(arguments), **variables) as server:
        said = server.ended()
    assert (
        f"2 server processes of {supervisor} share this engine, and each would admit a whole pool of its own: "
        "set SIDECAR_STORE=redis://HOST:6379/0 so that they share one" in said
    )
    assert "SIDECAR_PROCESSES=1" in said
    assert not re.search(r"(?i)startup complete", said)


@LONG
@pytest.mark.parametrize(
    ("arguments", "variables", "started"),
    [(["--reload"], {}, 1), ([], {"SIDECAR_PROCESSES": "1"}, 2)],
    ids=["reload", "the operator's word"],
)
def test_one_process_starts_and_so_do_two_with_the_operators_word(
    tmp_path: Path, arguments: list[str], variables: dict[str, str], started: int
) -> None:
    write_app(tmp_path)
    with running(tmp_path, *command([*UVICORN, *arguments, "--workers", "2"]), **variables) as server:
        said = server.until("Application startup complete", started)
    assert "server processes" not in said


@LONG
def test_services_that_run_beside_each_other_are_one_process_each(tmp_path: Path) -> None:
    """Also where they serve the same port (SO_REUSEPORT), or a process manager started them with a common variable."""
    write_app(tmp_path)
    (tmp_path / "shared.py").write_text(
        "import socket, sys, uvicorn\n"
        "listener = socket.socket()\n"
        "listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)\n"
        "listener.bind(('127.0.0.1', int(sys.argv[1])))\n"
        "uvicorn.Server(uvicorn.Config('main:app')).run(sockets=[listener])\n"
    )
    port = str(free_port())
    with running(tmp_path, "shared", port) as first, running(tmp_path, "shared", port) as second:
        for server in (first, second):
            assert "server processes" not in server.until("Application startup complete")


@LONG
def test_two_processes_with_a_store_start_and_each_has_an_admin_port(tmp_path: Path) -> None:
    write_app(tmp_path)
    variables = {"SIDECAR_STORE": NO_STORE, "SIDECAR_ADMIN_PORT": str(free_ports(2))}
    with running(tmp_path, *command((*UVICORN, "--workers", "2")), **variables) as server:
        said = server.until("sidecar: admin on http", 2)
        assert "server processes" not in server.until("Application startup complete", 2)
    assert len(set(re.findall(r"admin on http://127.0.0.1:(\d+)", said))) == 2


@LONG
def test_a_new_process_takes_the_admin_port_when_the_one_that_it_replaces_has_ended(tmp_path: Path) -> None:
    """gunicorn starts the new one first (SIGHUP). A start that fails for the taken port would end the whole server."""
    write_app(tmp_path)
    variables = {"SIDECAR_ADMIN_PORT": str(free_port())}
    arguments = command((*GUNICORN, "uvicorn_worker.UvicornWorker", "-w", "1"))
    with running(tmp_path, *arguments, **variables) as server:
        assert "server processes" not in server.until("Application startup complete")
        port = int(arguments[3].rpartition(":")[2])
        with closing(HTTPConnection("127.0.0.1", port, timeout=60)) as client:
            body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True})
            client.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
            assert client.getresponse().read(5) == b"data:"
            server.signal(signal.SIGHUP)
            server.until("the pages of this process come when the port is free")
        server.until("sidecar: admin on http", 2)
        assert server.process.poll() is None


@LONG
def test_without_a_lifespan_the_requests_are_refused(tmp_path: Path) -> None:
    write_app(tmp_path)
    port = free_port()
    arguments = ("uvicorn", "main:app", "--port", str(port), "--workers", "2", "--lifespan", "off")
    with running(tmp_path, *arguments) as server:
        server.until("Started server process", 2)
        assert status_of(port) == 500
        server.until("2 server processes of uvicorn share this engine")


def status_of(port: int) -> int:
    for _ in range(200):
        with closing(HTTPConnection("127.0.0.1", port, timeout=60)) as client:
            try:
                client.request("GET", "/v1/models")
            except ConnectionRefusedError:
                time.sleep(0.1)
            else:
                return client.getresponse().status
    raise AssertionError("no answer")


# -- what the number is read from


def lifespan(count: object) -> dict[str, object]:
    return {"app": SimpleNamespace(state=SimpleNamespace(args=SimpleNamespace(api_server_count=count)))}


def test_the_server_says_how_many_processes_there_are() -> None:
    assert server_processes(lifespan(3), {"SIDECAR_PROCESSES": "2"}).number == 3
    assert server_processes(lifespan(None), {"SIDECAR_PROCESSES": "2"}).number == 2
    assert server_processes({}, {}) == ServerProcesses(1)


def test_without_a_supervisor_the_error_names_no_switch() -> None:
    with pytest.raises(ValueError, match="2 server processes share this engine") as refused:
        refuse_several(ServerProcesses(2), is_shared=False, is_engine=False)
    assert "SIDECAR_PROCESSES" not in str(refused.value)


def test_another_librarys_configuration_is_not_a_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = SimpleNamespace(workers=8)
    monkeypatch.setattr(multiprocessing.current_process(), "_kwargs", {"config": config}, raising=False)
    assert server_processes({}, {}) == ServerProcesses(1)


@pytest.mark.parametrize(
    ("arguments", "variables", "number"),
    [
        (["granian", "--workers", "3", "main:app"], {}, 3),
        (["granian", "--workers=3", "main:app"], {}, 3),
        (["granian", "main:app"], {"GRANIAN_WORKERS": "3"}, 3),
        (["granian", "--workers", "1", "main:app"], {"GRANIAN_WORKERS": "3"}, 1),
        (["granian", "main:app", "--workers"], {}, 1),
    ],
)
def test_granian_that_does_not_fork_is_read_from_its_command_line(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], variables: dict[str, str], number: int
) -> None:
    """As from Python 3.14 on, and on macOS."""
    monkeypatch.setattr(multiprocessing.current_process(), "_name", "granian-worker")
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.delenv("GRANIAN_WORKERS", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert server_processes({}, {}) == ServerProcesses(number, "granian")


# -- a limit of the server's own


@LONG
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*UVICORN, "--limit-concurrency", "7"), "limit_concurrency=7"),
        ((*GUNICORN, "worker.Limited"), "limit_concurrency=7"),
        ((*GRANIAN, "--backpressure", "7"), "backpressure=7"),
    ],
)
def test_a_limit_of_the_servers_own_is_found(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    write_app(tmp_path)
    (tmp_path / "worker.py").write_text(
        "from uvicorn_worker import UvicornWorker\n"
        "class Limited(UvicornWorker):\n"
        "    CONFIG_KWARGS = {'limit_concurrency': 7}\n"
    )
    with running(tmp_path, *command(arguments), SIDECAR_LOG_FORMAT="text") as server:
        server.until(rf"own limit \({said}\)")
