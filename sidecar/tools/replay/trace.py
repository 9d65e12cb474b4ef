"""What a trace is, whatever its format: rows, each a request with a time and a size. And which format a file has.

A file's format is told from its first line, never from its name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from sidecar.tools.replay import trace_formats
from sidecar.tools.replay.trace_formats import BadRow, Row

BURST_REQUESTS, BURST_INPUT_TOKENS, BURST_OUTPUT_TOKENS = 120, 64, 32
"""The built-in burst: 40 requests for each of three tiers, each long enough to hold its place for a while."""
MOST_BURST_REQUESTS = 100_000
LONGEST_S = 7 * 24 * 3600.0
MOST_PROBLEMS = 20
"""Told of one file. Whoever has more has one mistake, many times."""
_BURST = re.compile(r"burst(?::(\d{1,9})(?::(\d{1,9}):(\d{1,9}))?)?")
_BOM = b"\xef\xbb\xbf"


class BadTrace(ValueError):
    """A trace that cannot be played. The text has one line for each mistake, with the file and the line."""


@dataclass(frozen=True, slots=True)
class Trace:
    """`rows` in the order of the file; `format` for people. The first row that has a time has it at 0."""

    name: str
    format: str
    rows: Sequence[Row] = field(repr=False)


def read_trace(name: str, limit: int | None = None) -> Trace:
    """The trace in a file, or the built-in `burst`, `burst:N`, `burst:N:INPUT:OUTPUT`. Raises BadTrace.

    `limit` reads no more than that many rows, from the first on.
    """
    if (burst := _BURST.fullmatch(name)) and not Path(name).exists():
        sizes = (BURST_REQUESTS, BURST_INPUT_TOKENS, BURST_OUTPUT_TOKENS)
        requests, inputs, outputs = (int(text or size) for text, size in zip(burst.groups(), sizes, strict=True))
        return _burst(name, requests, inputs, outputs, limit)
    try:
        with Path(name).open("rb") as file:
            return _read(name, file, limit)
    except OSError as error:
        raise BadTrace(f"{name}: cannot be read ({error.strerror or error})") from None


def _burst(name: str, requests: int, input_tokens: int, output_tokens: int, limit: int | None) -> Trace:
    if not 0 < requests <= MOST_BURST_REQUESTS or input_tokens < 1 or output_tokens < 1:
        raise BadTrace(
            f"{name}: write burst:REQUESTS or burst:REQUESTS:INPUT:OUTPUT, tokens from 1 and at most "
            f"{MOST_BURST_REQUESTS} requests"
        )
    count = requests if limit is None else min(limit, requests)
    rows = [Row(line=n + 1, at_s=0.0, input_tokens=input_tokens, output_tokens=output_tokens) for n in range(count)]
    return Trace(name, "burst at t=0", rows)


def _read(name: str, file: Iterable[bytes], limit: int | None) -> Trace:
    """Rows come one for each line that is not empty, after an Azure file's head."""
    lines = ((number, _text(line, number)) for number, line in enumerate(file, 1))
    numbered = ((number, text) for number, text in lines if not isinstance(text, str) or text.strip())
    problems: list[str] = []
    rows: list[Row] = []
    read: Callable[[str, int], Row] | None = None
    for number, text in numbered:
        if limit is not None and len(rows) >= limit:
            break
        try:
            if isinstance(text, BadRow):
                raise text
            if read is None:
                read = _reader(text)
                if read is trace_formats.read_row:
                    continue
            rows.append(read(text, number))
        except BadRow as problem:
            problems.append(f"{name}:{number}: {problem}")
            if read is None:
                break
    if problems:
        more = [f"{name}: and {len(problems) - MOST_PROBLEMS} more"] if len(problems) > MOST_PROBLEMS else []
        raise BadTrace("\n".join([*islice(problems, MOST_PROBLEMS), *more]))
    if not rows:
        raise BadTrace(f"{name}: no request in it; write mooncake_trace JSONL, or Azure's CSV")
    return Trace(name, "Azure CSV" if read is trace_formats.read_row else "mooncake_trace", _from_zero(name, rows))


def _text(line: bytes, number: int) -> str | BadRow:
    """A line as text; a problem is kept, to be told in its turn."""
    line = line.removeprefix(_BOM) if number == 1 else line
    try:
        return line.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        return BadRow(f"byte {error.start + 1} is no UTF-8; a trace is a text file, not packed and not binary")


def _reader(first: str) -> Callable[[str, int], Row]:
    if first.lstrip().startswith("{"):
        return trace_formats.read_row
    if trace_formats.is_head(first):
        return trace_formats.read_row
    raise BadRow(
        "this is the first line of no trace that is known: mooncake_trace JSONL begins with {, "
        f"Azure's CSV with {trace_formats.HEAD}"
    )


def _from_zero(name: str, rows: Sequence[Row]) -> Sequence[Row]:
    """Counts times from the earliest. Turns after a conversation's first may have none; the others must."""
    begun: set[str] = set()
    untimed = []
    for row in rows:
        if row.at_s is None and (row.session is None or row.session not in begun):
            untimed.append(row.line)
        begun |= {row.session} if row.session is not None else set()
    timed = [row.at_s for row in rows if row.at_s is not None]
    if untimed and timed:
        raise BadTrace(f"{name}:{untimed[0]}: timestamp: is missing; a request that begins a conversation needs one")
    start_s = min(timed, default=0.0)
    if max(timed, default=0.0) - start_s > LONGEST_S:
        raise BadTrace(f"{name}: it lasts more than a week; timestamps are milliseconds")
    # Without any time in the file everything is sent at once, as AIPerf does it without a schedule and a limit.
    return [row.at(0.0 if not timed else None if row.at_s is None else row.at_s - start_s) for row in rows]
