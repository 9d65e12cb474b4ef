"""Start and end of the processes of a scenario: the emulated engine, the upstream, the gateways."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.real import NotReady
from benchmarks.peers.setting import Gateway
from benchmarks.processes import command as sidecar

READY_WITHIN_S = 90.0
ENDS_WITHIN_S = 15.0


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, below those that the system gives to clients."""
    found: list[int] = []
    for port in range(20_000 + os.getpid() % 5_000, 32_000):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError("no free ports between 20000 and 32000")


@contextlib.contextmanager
def ending(process: subprocess.Popen[Any]) -> Iterator[None]:
    """Ends a process at the end of the block, with SIGTERM first."""
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


@contextlib.contextmanager
def ending_group(process: subprocess.Popen[Any]) -> Iterator[None]:
    """The same for a process that leads a session of its own, with all that it started."""
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5.0)


@contextlib.contextmanager
def no_process() -> Iterator[subprocess.Popen[str]]:
    """A process that does nothing, for a gateway that is none."""
    with subprocess.Popen(["sleep", "infinity"], text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@dataclass(frozen=True, slots=True)
class Command:
    """A peer's command, the port and the page that answers when it is ready, where it logs, and its own variables."""

    line: Sequence[str]
    port: int
    page: str
    log: Path
    variables: Mapping[str, str] = field(default_factory=dict)


def started(running: ExitStack, command: Command) -> Gateway:
    """Starts a peer's command and returns when its page answers. Raises NotReady."""
    with command.log.open("wb") as output:
        process = subprocess.Popen(
            command.line,
            env={**os.environ, **command.variables},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    running.enter_context(ending_group(process))
    url = f"http://127.0.0.1:{command.port}"
    deadline_s = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline_s and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url + command.page, timeout=2.0):
            return Gateway(url, process)
        time.sleep(0.2)
    tail = command.log.read_text(errors="replace")[-2_000:]
    raise NotReady(f"{command.line[0]} did not get ready; its log ends with\n{tail}")


def engine(*options: str) -> AbstractContextManager[Sequence[str]]:
    """An emulated engine on a free port; its address is the only one."""
    return sidecar("emulate", "--port", "0", *options)


def state(engine_url: str) -> Mapping[str, Any]:
    """The emulated engine's own account: `now`, `most` and `counts`."""
    with urllib.request.urlopen(f"{engine_url}/_emulator", timeout=10.0) as response:
        found: Mapping[str, Any] = json.load(response)
    return found
