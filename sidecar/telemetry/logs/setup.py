"""The setup of logging: destination, level and format, for our own process and mounted in another application."""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from logging.handlers import QueueHandler, QueueListener
from typing import Any, NamedTuple, TextIO

from sidecar.telemetry.logs.formats import JsonFormatter, TextFormatter
from sidecar.telemetry.logs.request_log import REQUESTS, WINDOW_S, FloodGuard, one_of

# -- The writer of log lines, on a thread of its own: the lines' reader may stall, and the event loop goes on.
#
# A container's log is a pipe. When its reader stops reading, the pipe is full after 64 KiB, and the next write
# waits; in the event loop that is an outage. Here lines wait in a bounded queue; beyond it they are counted, and the
# count is written later. The queue and the thread are the standard library's; by hand are the bounds, and an end
# that does not wait for a reader that stalls, which `QueueListener.stop` does.

MOST_WAITING = 10_000
"""Lines: some 3 MB."""
PATIENCE_S = 1.0
"""How long the end of the process waits for lines that are not written yet."""


class _MessageKind(NamedTuple):
    logger: str
    level: int
    message: str


class LineWriter(QueueHandler):
    """A handler for a process that is ours. `end` it: the thread would wait for lines for as long as the process lives.

    Of one message of one logger only so many lines are written a second, as an engine that is down makes one for each
    request; those of requests are bounded where they are made, by tier and code.
    """

    def __init__(self, stream: TextIO, most_waiting: int = MOST_WAITING) -> None:
        self._lines: queue.Queue[str | threading.Event | None] = queue.Queue(most_waiting)
        super().__init__(self._lines)
        self._counting = threading.Lock()
        self._flood: FloodGuard[_MessageKind] = FloodGuard()
        self._lost = 0
        self._has_ended = False
        self._listener = _LineListener(self._lines, stream, self._write_counts)
        self._listener.start()

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler.emit`."""
        try:
            if record.name == REQUESTS or self._allows(record):
                self.enqueue(self.prepare(record))
        except Exception:
            self.handleError(record)

    def prepare(self, record: logging.LogRecord) -> str:
        """The line: a record would keep the arguments of its message."""
        return self.format(record)

    def enqueue(self, record: Any) -> None:
        """See `QueueHandler.enqueue`; a line for which there is no room is counted."""
        try:
            self._lines.put_nowait(record)
        except queue.Full:
            with self._counting:
                self._lost += 1

    def flush(self) -> None:
        """Returns when everything is written, or after some `PATIENCE_S`; after the end at once."""
        if self._has_ended:  # `logging` flushes every handler when the process ends; no thread would answer
            return
        self._write_counts()
        written = threading.Event()
        with suppress(queue.Full):
            self._lines.put(written, timeout=PATIENCE_S)
            written.wait(PATIENCE_S)

    def end(self) -> None:
        """Writes what is left, and ends the thread."""
        self.flush()
        self._has_ended = True
        with suppress(queue.Full):
            self._listener.enqueue_sentinel()

    def _allows(self, record: logging.LogRecord) -> bool:
        with self._counting:
            return self._flood.allows(_MessageKind(record.name, record.levelno, str(record.msg)))

    def _write_counts(self) -> None:
        with self._counting:
            left_out, lost, self._lost = self._flood.left_out(), self._lost, 0
        for kind, count in left_out:
            self._write_count(kind.logger, kind.level, f"left out {count} more lines like this: {kind.message}", count)
        if lost:
            self._write_count(__name__, logging.WARNING, f"lost {lost} lines: they were not read in time", lost)

    def _write_count(self, logger: str, level: int, message: str, count: int) -> None:
        fields = {"event": "left_out", "left_out": count}
        record = {"name": logger, "levelno": level, "levelname": logging.getLevelName(level), "msg": message, **fields}
        self.enqueue(self.format(logging.makeLogRecord(record)))


class _LineListener(QueueListener):
    """Writes the lines, and once in a window the counts. Its thread is a daemon."""

    def __init__(self, lines: queue.Queue[Any], stream: TextIO, write_counts: Callable[[], None]) -> None:
        super().__init__(lines)
        self._lines = lines
        self._stream = stream
        self._write_counts = write_counts
        self._counted_s = time.monotonic()

    def dequeue(self, block: bool) -> Any:  # noqa: ARG002  # the standard library's signature
        while True:
            if time.monotonic() - self._counted_s >= WINDOW_S:
                self._counted_s = time.monotonic()
                self._write_counts()
            with suppress(queue.Empty):
                return self._lines.get(timeout=WINDOW_S)

    def handle(self, record: Any) -> None:
        if isinstance(record, threading.Event):
            record.set()
            return
        with suppress(OSError, ValueError):  # closed: it has no reader any more
            self._stream.write(record + "\n")
            self._stream.flush()


LEVEL_VARIABLE, FORMAT_VARIABLE = "SIDECAR_LOG_LEVEL", "SIDECAR_LOG_FORMAT"
LEVELS = ("debug", "info", "warning", "error")
FORMATTERS = {"json": JsonFormatter, "text": TextFormatter}
OURS = "sidecar"
"""The logger above all of ours."""


class LogSettings(NamedTuple):
    """`level` is one of `LEVELS`, `format` of `FORMATTERS`."""

    level: str
    format: str


def log_settings(
    environment: Mapping[str, str], level: str | None = None, format: str | None = None, *, stream: TextIO | None = None
) -> LogSettings:
    """The settings by argument, else by the environment; else INFO, as text to a terminal and as JSON elsewhere.

    Raises ValueError with what would be right.
    """
    stream = sys.stderr if stream is None else stream
    usual = "text" if stream.isatty() else "json"
    return LogSettings(
        level or one_of(environment, LEVEL_VARIABLE, LEVELS) or "info",
        format or one_of(environment, FORMAT_VARIABLE, tuple(FORMATTERS)) or usual,
    )


@contextmanager
def own_logging(settings: LogSettings, stream: TextIO | None = None) -> Iterator[None]:
    """Takes over the logging of the process while the block runs: every logger's lines go to standard error.

    Of other libraries' loggers only warnings are written, and errors. Python's own warnings are lines, too.
    """
    others = max(logging.WARNING, _number(settings.level))
    with _write_to(logging.getLogger(), settings, others, stream), _set_level(OURS, _number(settings.level)):
        logging.captureWarnings(True)
        try:
            yield
        finally:
            logging.captureWarnings(False)


@contextmanager
def mounted_logging(environment: Mapping[str, str], stream: TextIO | None = None) -> Iterator[None]:
    """In another application's process: nothing, as its own logging decides, unless one of the variables is set.

    Then our lines, and no others, go to standard error while the block runs. Raises ValueError, as `log_settings`.
    """
    if not any(environment.get(name, "").strip() for name in (LEVEL_VARIABLE, FORMAT_VARIABLE)):
        yield
        return
    settings = log_settings(environment, stream=stream)
    ours = logging.getLogger(OURS)
    propagated, ours.propagate = ours.propagate, False
    try:
        with _write_to(ours, settings, _number(settings.level), stream):
            yield
    finally:
        ours.propagate = propagated


@contextmanager
def _write_to(logger: logging.Logger, settings: LogSettings, level: int, stream: TextIO | None) -> Iterator[None]:
    """The logger has our handler instead of its own."""
    writer = LineWriter(sys.stderr if stream is None else stream)
    writer.setFormatter(FORMATTERS[settings.format]())
    before = logger.handlers[:]
    logger.handlers[:] = [writer]
    try:
        with _set_level(logger.name if logger.parent else None, level):
            yield
    finally:
        logger.handlers[:] = before
        writer.end()


@contextmanager
def _set_level(name: str | None, level: int) -> Iterator[None]:
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


def _number(level: str) -> int:
    number = logging.getLevelName(level.upper())
    assert isinstance(number, int)
    return number
