"""Messages between the supervisor and a worker.

A worker's standard input is one end of a pair of sockets. It reports there by one JSON object a line, and it closes
when the supervisor is gone, however that ended. The supervisor sends signals: SIGTERM for an end in order, `CUT` for
one at once, SIGHUP to read the policy's files.
"""

from __future__ import annotations

import signal
from enum import Enum

import msgspec

from sidecar.composition.serving import ServeSettings
from sidecar.telemetry.logs.setup import LogSettings

CUT = signal.SIGUSR1
"""Not a second SIGTERM: a service manager sends that to every process of a service, beside the supervisor."""


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
