"""One worker: the process that the supervisor starts. It is `sidecar serve` on a port that others listen on, too.

It ends when the supervisor is gone: its end of their channel closes then. A signal for it alone, or for all processes
of a service, ends it in order; only the supervisor ends it at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from sidecar.composition.serving import Serving
from sidecar.policy.passing import load_or_pass
from sidecar.policy.problems import PolicyError
from sidecar.server import CannotServe
from sidecar.server.certificate import new_certificate
from sidecar.server.listeners import listening
from sidecar.server.server import Signals, run, serve_on
from sidecar.server.unix_address import socket_path
from sidecar.tasks import is_set_within
from sidecar.telemetry.logs.setup import own_logging
from sidecar.workers.process import CUT, Begin, Report, WorkerState

READY_LOOK_S = 0.05
ALONE_S = 5
"""The longest life without a supervisor: two seconds to cut requests off, and some for a start that hangs."""

_Reporter = Callable[[Report], None]


def main(begin: str) -> int:
    """Serves until the supervisor or a signal ends it. Standard input is the channel; `begin` is a `Begin` in JSON."""
    settings = msgspec.json.decode(begin, type=Begin)
    logging.LogRecord.worker = settings.worker  # type: ignore[attr-defined]  # a field of every line
    with socket.socket(fileno=0) as channel:
        threading.Thread(target=_end_alone, args=(channel, settings.pages), daemon=True).start()
        report = partial(_report, channel)
        with own_logging(settings.log):
            failure = _serve(settings, report)
        if failure is not None:
            report(Report(WorkerState.DOWN, str(failure), isinstance(failure, PolicyError)))
    return 0 if failure is None else 1


def _end_alone(channel: socket.socket, pages: str) -> None:
    """Ends this process when the supervisor is gone, and with it what could restart, reload or end this process."""
    with contextlib.suppress(OSError):  # it had not read all reports
        channel.recv(1)  # nothing is sent to this end
    signal.alarm(ALONE_S)  # the system ends the process then, whatever hangs in it
    shutil.rmtree(Path(socket_path(pages) or pages).parent, ignore_errors=True)
    os.kill(os.getpid(), CUT)


def _report(channel: socket.socket, report: Report) -> None:
    with contextlib.suppress(OSError):  # the supervisor is gone
        channel.sendall(msgspec.json.encode(report) + b"\n")


def _serve(begin: Begin, report: _Reporter) -> Exception | None:
    """Serves. Returns why it could not begin."""
    try:
        serving = Serving(begin.settings, load_or_pass(begin.settings.policy, os.environ).policy)
        run(_serve_shared(begin, serving, report))
    except (CannotServe, ValueError) as error:
        return error
    serving.end()
    return None


async def _serve_shared(begin: Begin, serving: Serving, report: _Reporter) -> None:
    settings, signals = begin.settings, Signals(serving.served.reload, CUT)

    async def until_ready() -> None:
        report(Report(WorkerState.STARTED))
        while begin.waits and not signals.first.is_set() and serving.readiness():
            await is_set_within(signals.first, READY_LOOK_S)

    with socket.socket(fileno=begin.listener) as clients, listening(begin.pages, 0) as pages, signals.caught():
        await serve_on(
            serving.served,
            clients,
            pages,
            end=signals,
            grace_s=settings.grace_s,
            before_listening=until_ready,
            on_ready=lambda: report(Report(WorkerState.SERVING)),
            certificate=new_certificate(settings.tls_cert, settings.tls_key),
        )
