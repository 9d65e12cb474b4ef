"""The setup of logging: destination, level and format, for our own process and mounted in another application."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, TextIO

from sidecar.telemetry.logs.formats import JsonFormatter, TextFormatter
from sidecar.telemetry.logs.request_log import one_of
from sidecar.telemetry.logs.writer import LineWriter

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
    with _written(logging.getLogger(), settings, others, stream), _leveled(OURS, _number(settings.level)):
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
        with _written(ours, settings, _number(settings.level), stream):
            yield
    finally:
        ours.propagate = propagated


@contextmanager
def _written(logger: logging.Logger, settings: LogSettings, level: int, stream: TextIO | None) -> Iterator[None]:
    """The logger has our handler instead of its own."""
    writer = LineWriter(sys.stderr if stream is None else stream)
    writer.setFormatter(FORMATTERS[settings.format]())
    before = logger.handlers[:]
    logger.handlers[:] = [writer]
    try:
        with _leveled(logger.name if logger.parent else None, level):
            yield
    finally:
        logger.handlers[:] = before
        writer.end()


@contextmanager
def _leveled(name: str | None, level: int) -> Iterator[None]:
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
