"""Starts the servers of a benchmark, each a uvicorn process of its own."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sidecar.policy.compiler import shipped_policies

START_WITHIN_S = 60.0


@dataclass(frozen=True, slots=True)
class Server:
    """One running server on loopback."""

    port: int
    process: subprocess.Popen[bytes]


@contextlib.contextmanager
def started(names: Sequence[str], apps: str = "overhead_apps") -> Iterator[Mapping[str, Server]]:
    """Runs factories of the module `apps` by name, and ends them."""
    servers = {name: _start(f"benchmarks.{apps}:{name}") for name in names}
    try:
        for server in servers.values():
            _wait_for(server.port)
        yield servers
    finally:
        for server in servers.values():
            server.process.terminate()
        for server in servers.values():
            server.process.wait()


def _start(factory: str) -> Server:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", factory, "--factory", "--port", str(port)]
    command += ["--interface", "asgi3", "--loop", "uvloop", "--http", "httptools", "--no-access-log"]
    command += ["--log-level", "warning"]
    environment = {**os.environ, "SIDECAR_POLICY": str(shipped_policies())}
    return Server(port, subprocess.Popen(command, env=environment))


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + START_WITHIN_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise RuntimeError(f"no server answered on port {port} within {START_WITHIN_S:g} s")
