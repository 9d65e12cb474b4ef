"""One worker: the process that the supervisor starts. It is `sidecar serve` on a port that others listen on, too.

It ends when the supervisor is gone: its end of their channel closes then. A signal for it alone, or for all processes
of a service, ends it in order; only the supervisor ends it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from sidecar.composition.serving import Serving
from sidecar.policy.passing import load_or_pass
from sidecar.policy.problems import PolicyError
from sidecar.server import CannotServe
from sidecar.server.certificate import new_certificate
from sidecar.server.server import End, Served, run, serve_on
from sidecar.tasks import is_set_within
from sidecar.telemetry.logs.setup import own_logging
from sidecar.telemetry.setup import TelemetryError
from sidecar.workers.channel import CUT, Begin, Report, WorkerState

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
            report = Report(WorkerState.DOWN, str(failure), isinstance(failure, PolicyError))
            with contextlib.suppress(OSError):  # the supervisor is gone
                channel.sendall(report.line())
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
    end = _Supervised(channel, Path(begin.pages).parent)

    async def until_ready() -> None:
        end.report(WorkerState.STARTED)
        while begin.waits and not end.first.is_set() and serving.readiness():
            await is_set_within(end.first, READY_LOOK_S)

    with socket.socket(fileno=begin.listener) as clients, _bound_to(begin.pages) as pages, end.followed(serving.served):
        await serve_on(
            serving.served,
            clients,
            pages,
            end=end,
            grace_s=begin.settings.grace_s,
            before_listening=until_ready,
            on_ready=lambda: end.report(WorkerState.SERVING),
            certificate=new_certificate(begin.settings.tls_cert, begin.settings.tls_key),
        )


@contextlib.contextmanager
def _bound_to(path: str) -> Iterator[socket.socket]:
    """A socket bound to a path in the supervisor's folder, which other users cannot enter."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        Path(path).unlink(missing_ok=True)  # of the worker before
        listener.bind(path)
        yield listener


class _Supervised(End):
    """The end of a worker: by a signal, or with the supervisor, whose `folder` it removes then."""

    def __init__(self, channel: socket.socket, folder: Path) -> None:
        super().__init__()
        self._channel, self._folder = channel, folder

    def report(self, state: WorkerState) -> None:
        """Tells the supervisor how far this worker has come."""
        with contextlib.suppress(OSError):  # the supervisor is gone
            self._channel.sendall(Report(state).line())

    @contextlib.contextmanager
    def followed(self, served: Served) -> Iterator[None]:
        """Follows the supervisor and the signals while the block runs."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.first.set)
        loop.add_signal_handler(CUT, self._cut)
        if (reload := served.reload) is not None:
            loop.add_signal_handler(signal.SIGHUP, reload)
        loop.add_reader(self._channel, self._end_alone)  # nothing is sent to this end: it can be read when it closes
        try:
            yield
        finally:
            loop.remove_reader(self._channel)

    def _cut(self) -> None:
        self.first.set()
        self.second.set()

    def _end_alone(self) -> None:
        """The supervisor is gone, and with it what could restart, reload or end this process."""
        asyncio.get_running_loop().remove_reader(self._channel)
        shutil.rmtree(self._folder, ignore_errors=True)
        alone = threading.Timer(ALONE_S, os._exit, (1,))
        alone.daemon = True
        alone.start()
        self._cut()
