"""One worker as the supervisor sees it: its process, how far it has come, and the way to its admin pages."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from signal import Signals
from typing import NamedTuple

import msgspec

from sidecar.proxy.proxy import ReverseProxy
from sidecar.server.unix_address import SCHEME
from sidecar.workers.channel import Begin, Report, WorkerState
from sidecar.workers.restarts import Restarts, how_it_ended

# The path is set first: `python -c` would find modules in the working directory before those of this process.
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[3:]; from sidecar.workers.worker import main; sys.exit(main(*sys.argv[1:3]))"
)
_log = logging.getLogger("sidecar.workers")


class ProcessEnd(NamedTuple):
    """How a process ended: for how long it had served, and its last report where that says why it could not begin."""

    served_s: float
    failed: Report | None


class WorkerProcess:
    """One of the workers, over its restarts. `on_serving` is called when it listens."""

    def __init__(self, number: int, pages: Path, on_serving: Callable[[], None]) -> None:
        self.number = number
        self.state = WorkerState.DOWN
        self.reason = ""
        self.restarts = Restarts()
        self.socket = str(pages)
        self.pages = ReverseProxy(f"{SCHEME}{pages}")
        self._on_serving = on_serving
        self._since_s = time.monotonic()
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """Of the process that runs now."""
        return None if self._process is None or self.state is WorkerState.DOWN else self._process.pid

    @property
    def is_serving(self) -> bool:
        """True if it listens."""
        return self.state is WorkerState.SERVING

    @property
    def since_s(self) -> float:
        """For how long it has been in its state."""
        return time.monotonic() - self._since_s

    async def run(self, begin: Begin, listener: socket.socket, environment: Mapping[str, str]) -> ProcessEnd:
        """Starts a process, and returns when it has ended. The process alone has the `listener` then."""
        ours, theirs = socket.socketpair()
        try:
            with theirs, listener:
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-c", _PROGRAM, str(theirs.fileno()), msgspec.json.encode(begin).decode()),
                    *sys.path,
                    env=environment,
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), begin.listener),
                    start_new_session=True,  # a terminal's Ctrl-C and end are for the supervisor alone
                )
        except OSError as error:
            ours.close()
            self.reason = f"its process cannot be started: {error.strerror}"
            return ProcessEnd(0.0, None)
        self._change(WorkerState.STARTING)
        # A line may be long: the mistakes of a policy are as many as it has lines.
        reader, channel = await asyncio.open_unix_connection(sock=ours, limit=sys.maxsize)
        failed = await self._follow(reader)
        code = await self._process.wait()
        channel.close()
        ending = ProcessEnd(self.since_s if self.is_serving else 0.0, failed)
        self.reason = f"its process {how_it_ended(code)}" if failed is None else failed.reason
        self._change(WorkerState.DOWN)
        return ending

    def send(self, number: Signals) -> None:
        """Sends a signal, if there is a process."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _follow(self, reader: asyncio.StreamReader) -> Report | None:
        """Reads its reports to their end. Returns the one that says why it could not begin."""
        failed = None
        with contextlib.suppress(ConnectionError):
            while received := await reader.readline():
                report = msgspec.json.decode(received, type=Report)
                if report.state is WorkerState.DOWN:
                    failed = report
                else:
                    self._change(report.state)
        return failed

    def _change(self, state: WorkerState) -> None:
        self.state, self._since_s = state, time.monotonic()
        if state in (WorkerState.STARTED, WorkerState.SERVING):
            self.reason = ""
        if state is WorkerState.SERVING:
            _log.info("worker %d serves, process %d", self.number, self.pid, extra={"event": "worker_serves"})
            self._on_serving()
