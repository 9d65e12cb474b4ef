"""Writes log lines on a thread of its own: whoever reads them may stall, and the event loop goes on.

A container's log is a pipe. When its reader stops reading, the pipe is full after 64 KiB, and the next write waits; in
the event loop that is an outage. Here lines wait in a bounded queue; beyond it they are counted, and the count is told.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from contextlib import suppress
from typing import NamedTuple, TextIO

from sidecar.telemetry.logs.flood import WINDOW_S, Flood
from sidecar.telemetry.logs.request_log import REQUESTS

MOST_WAITING = 10_000
"""Lines: some 3 MB."""
PATIENCE_S = 1.0
"""How long the end of the process waits for what is not written yet."""


class _Kind(NamedTuple):
    logger: str
    level: int
    message: str


class LineWriter(logging.Handler):
    """A handler for a process that is ours. `end` it: the thread would wait for lines for as long as the process lives.

    Of one message of one logger only so many lines are written a second, as an engine that is down makes one for each
    request; those of requests are bounded where they are made, by tier and code.
    """

    def __init__(self, stream: TextIO, most_waiting: int = MOST_WAITING) -> None:
        super().__init__()
        self._stream = stream
        self._lines: queue.Queue[str | threading.Event | None] = queue.Queue(most_waiting)
        self._counting = threading.Lock()
        self._flood: Flood[_Kind] = Flood()
        self._lost = 0
        threading.Thread(target=self._write_all, name="sidecar-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler.emit`."""
        try:
            if record.name == REQUESTS or self._allows(record):
                self._put(self.format(record))
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Returns when everything is written, or after some `PATIENCE_S`."""
        self._tell_what_is_missing()
        written = threading.Event()
        try:
            self._lines.put(written, timeout=PATIENCE_S)
        except queue.Full:
            return
        written.wait(PATIENCE_S)

    def end(self) -> None:
        """Writes what is left, and ends the thread."""
        self.flush()
        with suppress(queue.Full):
            self._lines.put_nowait(None)

    def _allows(self, record: logging.LogRecord) -> bool:
        with self._counting:
            return self._flood.allows(_Kind(record.name, record.levelno, str(record.msg)))

    def _put(self, line: str) -> None:
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            with self._counting:
                self._lost += 1

    def _write_all(self) -> None:
        told_s = time.monotonic()
        while True:
            try:
                line = self._lines.get(timeout=WINDOW_S)
            except queue.Empty:
                line = ""
            if line is None:
                return
            if isinstance(line, threading.Event):
                line.set()
            elif line:
                self._write(line)
            if time.monotonic() - told_s >= WINDOW_S:
                told_s = time.monotonic()
                self._tell_what_is_missing()

    def _write(self, line: str) -> None:
        with suppress(OSError, ValueError):  # closed: there is nobody left to tell
            self._stream.write(line + "\n")
            self._stream.flush()

    def _tell_what_is_missing(self) -> None:
        with self._counting:
            left_out, lost, self._lost = self._flood.left_out(), self._lost, 0
        for kind, count in left_out:
            self._say(kind.logger, kind.level, f"left out {count} more lines like this: {kind.message}", count)
        if lost:
            self._say(__name__, logging.WARNING, f"lost {lost} lines: nobody read them in time", lost)

    def _say(self, logger: str, level: int, message: str, count: int) -> None:
        fields = {"event": "left_out", "left_out": count}
        record = {"name": logger, "levelno": level, "levelname": logging.getLevelName(level), "msg": message, **fields}
        self._put(self.format(logging.makeLogRecord(record)))
