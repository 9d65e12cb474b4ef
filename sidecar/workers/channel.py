"""What the supervisor and a worker say to each other: one JSON object a line, through a pair of sockets.

The worker's end of it has a second purpose: it closes when the supervisor is gone, however that ended.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from sidecar.serving import ServeSettings
from sidecar.telemetry.logs.setup import LogSettings


class Begin(msgspec.Struct, frozen=True):
    """What a worker is started with. `pages` is the path of the socket that its admin pages are served on.

    `listener` is the descriptor of the clients' socket where all workers listen on one: a Unix socket.
    """

    worker: int
    settings: ServeSettings
    log: LogSettings
    pages: str
    listener: int | None


class Command(Enum):
    """What the supervisor tells a worker: listen, although it is not ready; end in order, or at once; read the policy's
    files.
    """

    LISTEN = "listen"
    DRAIN = "drain"
    CUT = "cut"
    RELOAD = "reload"


class Stage(Enum):
    """How far a worker has come: its app is up, it listens, it could not begin."""

    STARTED = "started"
    SERVING = "serving"
    FAILED = "failed"


class Report(msgspec.Struct, frozen=True):
    """What a worker reports. With `FAILED` there is a `reason`, and whether the policy's files are that reason."""

    stage: Stage
    reason: str = ""
    is_policy: bool = False


_encode = msgspec.json.Encoder().encode
_report = msgspec.json.Decoder(Report).decode
_command = msgspec.json.Decoder(Command).decode


def line(message: Report | Command) -> bytes:
    """A message as it travels."""
    return _encode(message) + b"\n"


def report_of(received: bytes) -> Report:
    """The report in a line."""
    return _report(received)


def command_of(received: bytes) -> Command:
    """The command in a line."""
    return _command(received)
