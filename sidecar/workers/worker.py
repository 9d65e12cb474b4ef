"""One worker: the process that the supervisor starts. It is `sidecar serve` on a port that others listen on, too.

It ends when the supervisor is gone: its end of their channel closes then. A signal for it alone, or for all processes
of a service, ends it in order; only the supervisor ends it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sidecar.policy.passing import load_or_pass
from sidecar.policy.problems import PolicyError
from sidecar.server import CannotServe
from sidecar.server.certificate import certificate_of
from sidecar.server.listeners import sharing
from sidecar.server.server import End, run, serve_on
from sidecar.serving import Serving
from sidecar.tasks import is_set_within
from sidecar.telemetry.logs.setup import own_logging
from sidecar.telemetry.setup import TelemetryError
from sidecar.workers.channel import Begin, Command, Report, Stage, command_of, line

READY_LOOK_S = 0.05
ALONE_S = 5.0
"""The longest life without a supervisor: two seconds to cut requests off, and some for a start that hangs."""


def main(descriptor: str, begin: str) -> int:
    """Serves until the supervisor or a signal ends it. `descriptor` is the channel's; `begin` is a `Begin` in JSON."""
    settings = msgspec.json.decode(begin, type=Begin)
    _mark_log_lines(settings.worker)
    with socket.socket(fileno=int(descriptor)) as channel:
        with own_logging(settings.log):
            failure = _serve(settings, channel)
        if failure is not None:
            report = Report(Stage.FAILED, str(failure), isinstance(failure, PolicyError))
            channel.setblocking(True)
            with contextlib.suppress(OSError):  # the supervisor is gone
                channel.sendall(line(report))
    return 0 if failure is None else 1


def _mark_log_lines(worker: int) -> None:
    make = logging.getLogRecordFactory()

    def marked(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        record.worker = worker
        return record

    logging.setLogRecordFactory(marked)


def _serve(begin: Begin, channel: socket.socket) -> Exception | None:
    """Serves. Returns why it could not begin."""
    try:
        serving = Serving(begin.settings, load_or_pass(begin.settings.policy, os.environ).policy)
        run(_serve_shared(begin, serving, channel))
    except (CannotServe, TelemetryError, ValueError) as error:
        return error
    serving.end()
    return None


async def _serve_shared(begin: Begin, serving: Serving, channel: socket.socket) -> None:
    settings = begin.settings
    certificate = certificate_of(settings.tls_cert, settings.tls_key)
    with _clients(begin) as clients, _private(begin.pages) as pages:
        control = _Control(serving.reload)

        def opened() -> None:
            serving.opened()
            control.report(Stage.SERVING)

        async with control.connected(channel):
            await serve_on(
                _HeldStart(serving.middleware, lambda: control.may_listen(serving.readiness)),
                clients,
                serving.pages,
                pages,
                end=control,
                drain=serving.drain,
                drained=serving.drained,
                grace_s=settings.grace_s,
                on_ready=opened,
                certificate=certificate,
            )


def _clients(begin: Begin) -> contextlib.AbstractContextManager[socket.socket]:
    if begin.listener is None:
        return sharing(begin.settings.host, begin.settings.port)
    return socket.socket(fileno=begin.listener)


@contextlib.contextmanager
def _private(path: str) -> Iterator[socket.socket]:
    """A socket bound to a path in the supervisor's folder, which other users cannot enter."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        Path(path).unlink(missing_ok=True)  # of the worker before
        listener.bind(path)
        yield listener


class _Control(End):
    """The worker's end of the channel."""

    def __init__(self, reload: Callable[[], None]) -> None:
        super().__init__()
        self._reload = reload
        self._is_told_to_listen = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None

    @contextlib.asynccontextmanager
    async def connected(self, channel: socket.socket) -> Any:
        """Follows the supervisor and the process's own signals while the block runs."""
        loop = asyncio.get_running_loop()
        # A copy, because the failure is reported after the loop has ended.
        reader, self._writer = await asyncio.open_unix_connection(sock=channel.dup())
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.first.set)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        following = asyncio.ensure_future(self._follow(reader))
        try:
            yield
        finally:
            following.cancel()
            self._writer.close()

    def report(self, stage: Stage) -> None:
        """Tells the supervisor."""
        assert self._writer is not None
        self._writer.write(line(Report(stage)))

    async def may_listen(self, readiness: Callable[[], Sequence[str]]) -> None:
        """Returns when this worker can admit requests, or is told to listen all the same, or to end.

        The others go on meanwhile: a worker that listens gets its share of the connections.
        """
        self.report(Stage.STARTED)
        while not (self._is_told_to_listen.is_set() or self.first.is_set()) and readiness():
            await is_set_within(self._is_told_to_listen, READY_LOOK_S)

    async def _follow(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while received := await reader.readline():
                self._obey(command_of(received))
        # The supervisor is gone, and with it what could restart, reload or end this process.
        alone = threading.Timer(ALONE_S, os._exit, (1,))
        alone.daemon = True
        alone.start()
        self.first.set()
        self.second.set()

    def _obey(self, command: Command) -> None:
        if command is Command.LISTEN:
            self._is_told_to_listen.set()
        elif command is Command.RELOAD:
            self._reload()
        else:
            self.first.set()
            if command is Command.CUT:
                self.second.set()


class _HeldStart:
    """Around the app: its start is complete when `until` returns, too. The server listens after that."""

    def __init__(self, app: ASGIApp, until: Callable[[], Awaitable[None]]) -> None:
        self._app = app
        self._until = until

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one ASGI scope."""
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return

        async def held(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                await self._until()
            await send(message)

        await self._app(scope, receive, held)
