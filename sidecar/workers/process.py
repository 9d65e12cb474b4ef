"""One worker as the supervisor sees it: its process, how far it has come, and the way to its admin pages."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path

import aiohttp
import msgspec

from sidecar.serving import ServeSettings
from sidecar.telemetry.logs.setup import LogSettings
from sidecar.workers.channel import Begin, Command, Report, Stage, line, report_of
from sidecar.workers.restarts import Restarts, how_it_ended

# The path is set first: `python -c` would find modules in the working directory before those of this process.
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[3:]; from sidecar.workers.worker import main; sys.exit(main(*sys.argv[1:3]))"
)
_ASK_WITHIN_S = 2.0
"""The longest time for a worker's answer to the supervisor's own questions."""

_log = logging.getLogger("sidecar.workers")


class WorkerState(Enum):
    """`STARTED`: its app is up, and it does not listen yet. `DOWN`: there is no process."""

    DOWN = "down"
    STARTING = "starting"
    STARTED = "started"
    SERVING = "serving"


class Ending(msgspec.Struct, frozen=True):
    """How a process ended: in words, and for how long it had served. `reason` is its own, empty where it gave none."""

    how: str
    served_s: float
    reason: str = ""
    is_policy: bool = False


class WorkerProcess:
    """One of the workers, over its restarts. `on_change` is called at each change of `state`."""

    def __init__(self, number: int, folder: Path, on_change: Callable[[], None], listener: int | None) -> None:
        self.number = number
        self.state = WorkerState.DOWN
        self.reason = ""
        self.restarts = Restarts()
        self._since_s = time.monotonic()
        self._socket = str(folder / f"worker-{number}.sock")
        self._on_change = on_change
        self._listener = listener
        self._process: asyncio.subprocess.Process | None = None
        self._channel: asyncio.StreamWriter | None = None
        self._session: aiohttp.ClientSession | None = None

    @property
    def pid(self) -> int | None:
        """Of the process that runs now."""
        return None if self._process is None or self.state is WorkerState.DOWN else self._process.pid

    @property
    def is_serving(self) -> bool:
        """Whether it listens."""
        return self.state is WorkerState.SERVING

    @property
    def since_s(self) -> float:
        """For how long it has been in its state."""
        return time.monotonic() - self._since_s

    @property
    def session(self) -> aiohttp.ClientSession:
        """For requests to its admin pages: any host's name leads there."""
        if self._session is None:
            # Without a limit on connections: every viewer of the live page has one.
            connector = aiohttp.UnixConnector(self._socket, limit=0)
            self._session = aiohttp.ClientSession(
                connector=connector,
                timeout=aiohttp.ClientTimeout(total=None, connect=_ASK_WITHIN_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
            )
        return self._session

    async def ask(self, path: str, accept: str = "*/*") -> tuple[int, bytes] | None:
        """The status and body of one of its admin pages; None where it does not answer."""
        if self.state not in (WorkerState.STARTED, WorkerState.SERVING):
            return None
        within = aiohttp.ClientTimeout(total=_ASK_WITHIN_S)
        try:
            async with self.session.get(f"http://worker{path}", headers={"accept": accept}, timeout=within) as answer:
                return answer.status, await answer.read()
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
            return None

    async def run(self, settings: ServeSettings, log: LogSettings, environment: Mapping[str, str]) -> Ending:
        """Starts a process, and returns when it has ended."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                begin = Begin(self.number, settings, log, self._socket, self._listener)
                self._process = await self._start(begin, theirs, environment)
            except OSError as error:
                ours.close()
                self.reason = f"its process cannot be started: {error.strerror}"
                return Ending(self.reason, 0.0)
        self._change(WorkerState.STARTING)
        reader, self._channel = await asyncio.open_unix_connection(sock=ours)
        failed = await self._follow(reader)
        code = await self._process.wait()
        served_s = self.since_s if self.is_serving else 0.0
        self._channel.close()
        self._channel = None
        ending = Ending(how_it_ended(code), served_s, *((failed.reason, failed.is_policy) if failed else ()))
        self.reason = ending.reason or f"its process {ending.how}"
        self._change(WorkerState.DOWN)
        return ending

    def tell(self, command: Command) -> None:
        """Sends a command, if there is a process."""
        if self._channel is not None:
            self._channel.write(line(command))

    def kill(self) -> None:
        """Ends the process at once, if there is one."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Ends the connections to its pages."""
        if self._session is not None:
            await self._session.close()

    async def _start(
        self, begin: Begin, channel: socket.socket, environment: Mapping[str, str]
    ) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _PROGRAM, str(channel.fileno()), msgspec.json.encode(begin).decode()),
            *sys.path,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=(channel.fileno(), *(() if self._listener is None else (self._listener,))),
            start_new_session=True,  # a terminal's Ctrl-C and end are for the supervisor alone
        )

    async def _follow(self, reader: asyncio.StreamReader) -> Report | None:
        """Reads its reports to their end. Returns the one that says why it could not begin."""
        failed = None
        with contextlib.suppress(ConnectionError):
            while received := await reader.readline():
                report = report_of(received)
                if report.stage is Stage.FAILED:
                    failed = report
                else:
                    self._change(WorkerState(report.stage.value))
        return failed

    def _change(self, state: WorkerState) -> None:
        self.state, self._since_s = state, time.monotonic()
        if state in (WorkerState.STARTED, WorkerState.SERVING):
            self.reason = ""
        if state is WorkerState.SERVING:
            _log.info("worker %d serves, process %d", self.number, self.pid, extra={"event": "worker_serves"})
        self._on_change()
