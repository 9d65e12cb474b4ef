"""Azure's LLM inference traces (2023 and 2024): `TIMESTAMP,ContextTokens,GeneratedTokens`, a request a line."""

from __future__ import annotations

import re
from datetime import datetime, timezone

from sidecar.replay.row import MOST_TOKENS, BadRow, Row

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens"
_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d)?")


def is_head(line: str) -> bool:
    """Whether this is the first line of such a file."""
    return [name.strip().strip('"').lower() for name in line.split(",")] == HEAD.lower().split(",")


def read_row(line: str, number: int) -> Row:
    """Raises BadRow. Times are seconds since the epoch, to be counted from the first."""
    fields = [field.strip().strip('"') for field in line.split(",")]
    if len(fields) != 3:
        raise BadRow(f"{len(fields)} fields; each line has three: {HEAD}")
    time, context, generated = fields
    return Row(
        line=number,
        at_s=_seconds(time),
        input_tokens=_tokens("ContextTokens", context),
        output_tokens=_tokens("GeneratedTokens", generated),
    )


def _seconds(text: str) -> float:
    """The files have seven digits of a second, more than Python reads."""
    match = _TIME.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        day, time, fraction, zone = match.groups()
        moment = datetime.fromisoformat(f"{day}T{time}{'+00:00' if zone in (None, 'Z') else zone}")
    except ValueError:
        raise BadRow(f"TIMESTAMP: {text[:40]!r} is no time like 2023-11-16 18:17:03.9799600") from None
    return moment.astimezone(timezone.utc).timestamp() + float(fraction or 0.0)


def _tokens(name: str, text: str) -> int:
    if not text.isdecimal() or not text.isascii() or not 0 < int(text[:12]) <= MOST_TOKENS:
        raise BadRow(f"{name}: {text[:40]!r} is no number of tokens, from 1 to {MOST_TOKENS}")
    return int(text)
