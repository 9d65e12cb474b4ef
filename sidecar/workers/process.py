"""One worker as the supervisor sees it: its process, what the two tell each other, and the way to its admin pages.

A worker's standard input is one end of a pair of sockets. It reports there by one JSON object a line, and it closes
when the supervisor is gone, however that ended. The supervisor sends signals: SIGTERM for an end in order, `CUT` for
one at once, SIGHUP to read the policy's files.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import time
from collections.abc import Callable, Mapping
from enum import Enum
from signal import Signals

import msgspec

from sidecar.composition.serving import ServeSettings
from sidecar.proxy.proxy import ReverseProxy
from sidecar.telemetry.logs.setup import LogSettings
from sidecar.workers.restarts import Restarts, how_it_ended

CUT = Signals.SIGUSR1
"""Not a second SIGTERM: a service manager sends that to every process of a service, beside the supervisor."""

# The path is set first: `python -c` would find modules in the working directory before those of this process.
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[2:]; from sidecar.workers.worker import main; sys.exit(main(sys.argv[1]))"
)
_log = logging.getLogger("sidecar.workers")


class Begin(msgspec.Struct, frozen=True):
    """Settings that a worker is started with.

    `pages` is the address of its admin pages, a Unix socket in the supervisor's folder; `listener` is the descriptor of
    the clients' socket. A worker that `waits` listens when it can admit requests: others serve meanwhile, and one that
    listens gets its share of connections.
    """

    worker: int
    settings: ServeSettings
    log: LogSettings
    pages: str
    listener: int
    waits: bool


class WorkerState(Enum):
    """`STARTED`: its app is up, and it does not listen yet. `DOWN`: there is no process, or it could not begin."""

    DOWN = "down"
    STARTING = "starting"
    STARTED = "started"
    SERVING = "serving"


class Report(msgspec.Struct, frozen=True):
    """A worker's report. With `DOWN` there is a `reason`, and whether the policy's files are that reason."""

    state: WorkerState
    reason: str = ""
    is_policy: bool = False


class WorkerProcess:
    """One of the workers, over its restarts. `address` is that of its pages.

    `on_change` gets this object when its state has changed. `failed` says why the last process could not begin, where
    it could not.
    """

    def __init__(self, number: int, address: str, on_change: Callable[[WorkerProcess], None]) -> None:
        self.number = number
        self.state = WorkerState.DOWN
        self.reason = ""
        self.restarts = Restarts()
        self.failed: Report | None = None
        self.address = address
        self.pages = ReverseProxy(address)
        self._on_change = on_change
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

    async def run(self, begin: Begin, listener: socket.socket, environment: Mapping[str, str]) -> float:
        """Starts a process, which alone has the `listener` then. Returns, when it has ended, for how long it served."""
        self.failed = None
        ours, theirs = socket.socketpair()
        try:
            with theirs, listener:
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-c", _PROGRAM, msgspec.json.encode(begin).decode(), *sys.path),
                    env=environment,
                    stdin=theirs.fileno(),
                    pass_fds=(begin.listener,),
                    start_new_session=True,  # a terminal's Ctrl-C and end are for the supervisor alone
                )
        except OSError as error:
            ours.close()
            self.reason = f"its process cannot be started: {error.strerror}"
            return 0.0
        self._change(WorkerState.STARTING)
        # A line may be long: the mistakes of a policy are as many as it has lines.
        reader, channel = await asyncio.open_unix_connection(sock=ours, limit=sys.maxsize)
        await self._follow(reader)
        code = await self._process.wait()
        channel.close()
        served_s = self.since_s if self.is_serving else 0.0
        self.reason = f"its process {how_it_ended(code)}" if self.failed is None else self.failed.reason
        self._change(WorkerState.DOWN)
        return served_s

    def send(self, number: Signals) -> None:
        """Sends a signal, if there is a process."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _follow(self, reader: asyncio.StreamReader) -> None:
        """Reads its reports to their end."""
        with contextlib.suppress(ConnectionError):
            while received := await reader.readline():
                report = msgspec.json.decode(received, type=Report)
                if report.state is WorkerState.DOWN:
                    self.failed = report
                else:
                    self._change(report.state)

    def _change(self, state: WorkerState) -> None:
        self.state, self._since_s = state, time.monotonic()
        if state in (WorkerState.STARTED, WorkerState.SERVING):
            self.reason = ""
        if state is WorkerState.SERVING:
            _log.info("worker %d serves, process %d", self.number, self.pid, extra={"event": "worker_serves"})
        self._on_change(self)
