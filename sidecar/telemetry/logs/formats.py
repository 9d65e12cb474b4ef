"""The formats of a log line: one JSON object for a container's log, or one line of text for a terminal.

A line stays one line, whatever a client, an engine or an exception has put in it. Of a record's fields only those known
here are shown, so no formatter writes fields that another library attached to its record.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from datetime import datetime, timezone

FIELDS = (
    "worker",
    "request_id",
    "trace_id",
    "span_id",
    "route",
    "client",
    "pool",
    "tier",
    "tenant",
    "key",
    "model",
    "engine",
    "code",
    "status",
    "queue_wait_s",
    "starvation_s",
    "preemptions",
    "engine_lost_s",
    "first_byte_s",
    "duration_s",
    "tokens_asked",
    "tokens_held",
    "tokens_used",
    "left_out",
)
"""In this order. `event` comes before them, and `message` after it."""

_is_unprintable = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class JsonFormatter(logging.Formatter):
    """`time` is RFC 3339 in UTC with milliseconds; `event` says what happened, None for other libraries' loggers."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _utc(record.created),
            "level": record.levelname.lower(),
            "event": _event(record),
            "logger": record.name,
            "message": record.getMessage(),
            **dict(_fields(record)),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        # In ASCII: no terminal takes anything in it for a command, and what is no character at all is legal, too.
        return json.dumps({name: _whole(value) for name, value in line.items()}, default=str)


class TextFormatter(logging.Formatter):
    """Local time, level, event, message, and the fields that the message does not say."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")
        message = record.getMessage()
        words = set(re.split(r"[\s:,]+", message))
        more = [f"{name}={_short(value)}" for name, value in _fields(record) if str(value) not in words]
        line = "  ".join([f"{at} {record.levelname:<7} {_event(record) or record.name}: {message}", *more])
        if record.exc_info:
            traceback = self.formatException(record.exc_info).splitlines()
            return "\n".join([one_line(line), *(f"  {one_line(inner)}" for inner in traceback)])
        return one_line(line)


def one_line(text: str) -> str:
    """The text without anything that ends a line, moves a terminal's cursor or turns the reading around."""
    return _is_unprintable.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _event(record: logging.LogRecord) -> str | None:
    """The event's name. An exception that a logger of ours logs is a defect of ours, and has no other name."""
    is_ours = record.name.partition(".")[0] == "sidecar"
    return getattr(record, "event", "defect" if is_ours and record.exc_info else None)


def _fields(record: logging.LogRecord) -> Iterator[tuple[str, object]]:
    return ((name, value) for name in FIELDS if (value := getattr(record, name, None)) is not None)


def _utc(created_s: float) -> str:
    at = datetime.fromtimestamp(created_s, timezone.utc)
    return at.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


def _short(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _whole(value: object) -> object:
    """Half a surrogate pair is no text for many who read JSON."""
    if isinstance(value, str) and not value.isascii():
        return value.encode("utf-8", "backslashreplace").decode()
    return value
