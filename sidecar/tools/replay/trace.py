"""Trace of any format: rows, each a request with a time and a size.

The formats are mooncake_trace JSONL as NVIDIA's AIPerf reads it, and Azure's LLM inference CSV (2023 and 2024). The
first line of a file decides its format, never its name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

BURST_REQUESTS, BURST_INPUT_TOKENS, BURST_OUTPUT_TOKENS = 120, 64, 32
"""The built-in burst: 40 requests for each of three tiers, each long enough to hold its place for a while."""
MOST_BURST_REQUESTS = 100_000
LONGEST_S = 7 * 24 * 3600.0
MOST_PROBLEMS = 20
"""Most problems reported of one file: more than these are one mistake, many times."""
_BURST = re.compile(r"burst(?::(\d{1,9})(?::(\d{1,9}):(\d{1,9}))?)?")
_BURST_FORM = (
    f"write burst:REQUESTS or burst:REQUESTS:INPUT:OUTPUT, tokens from 1 and at most {MOST_BURST_REQUESTS} requests"
)
_BOM = b"\xef\xbb\xbf"


class BadTrace(ValueError):
    """A trace that cannot be played. The text has one line for each mistake, with the file and the line."""


@dataclass(frozen=True, slots=True)
class Trace:
    """`rows` in the order of the file; `format` for people. The first row that has a time has it at 0."""

    name: str
    format: str
    rows: Sequence[TraceRow] = field(repr=False)


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
        form = f"; for the built-in burst {_BURST_FORM}" if name.startswith("burst") else ""
        raise BadTrace(f"{name}: cannot be read ({error.strerror or error}){form}") from None


def _burst(name: str, requests: int, input_tokens: int, output_tokens: int, limit: int | None) -> Trace:
    if not 0 < requests <= MOST_BURST_REQUESTS or input_tokens < 1 or output_tokens < 1:
        raise BadTrace(f"{name}: {_BURST_FORM}")
    count = requests if limit is None else min(limit, requests)
    rows = [
        TraceRow(line=n + 1, at_s=0.0, input_tokens=input_tokens, output_tokens=output_tokens) for n in range(count)
    ]
    return Trace(name, "burst at t=0", rows)


def _read(name: str, file: Iterable[bytes], limit: int | None) -> Trace:
    """Rows come one for each line that is not empty, after an Azure file's head."""
    lines = ((number, _text(line, number)) for number, line in enumerate(file, 1))
    numbered = ((number, text) for number, text in lines if not isinstance(text, str) or text.strip())
    problems: list[str] = []
    rows: list[TraceRow] = []
    read: Callable[[str, int], TraceRow] | None = None
    for number, text in numbered:
        if limit is not None and len(rows) >= limit:
            break
        try:
            if isinstance(text, BadRow):
                raise text
            if read is None:
                read = _reader(text)
                if read is read_azure_row:
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
    return Trace(name, "Azure CSV" if read is read_azure_row else "mooncake_trace", _from_zero(name, rows))


def _text(line: bytes, number: int) -> str | BadRow:
    """A line as text; a problem is kept, and reported in its turn."""
    line = line.removeprefix(_BOM) if number == 1 else line
    try:
        return line.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        return BadRow(f"byte {error.start + 1} is no UTF-8; a trace is a text file, not packed and not binary")


def _reader(first: str) -> Callable[[str, int], TraceRow]:
    if first.lstrip().startswith("{"):
        return read_mooncake_row
    if is_head(first):
        return read_azure_row
    raise BadRow(
        "this is the first line of no trace that is known: mooncake_trace JSONL begins with {, "
        f"Azure's CSV with {HEAD}"
    )


def _from_zero(name: str, rows: Sequence[TraceRow]) -> Sequence[TraceRow]:
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


BLOCK_TOKENS = 512
"""Tokens that one of a row's hash ids stands for, as in the Mooncake traces and AIPerf's default."""
MOST_TOKENS = 100_000_000


class BadRow(ValueError):
    """A line that is no row; the text says what is wrong and what would be right."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """`at_s` is when it is sent, in seconds; None for a turn that is sent when the one before has been answered.

    Its prompt is one of these: `input_tokens` to be made up (with equal blocks where `hash_ids` are equal), `text`,
    `messages`, or the whole body as `payload`. `output_tokens` is None where the engine decides. Rows of one `session`
    are turns of a conversation; `is_delta` says that the turns before, and their answers, come before its `messages`.
    `extra` goes into the body as it is. `priority` is what the row says about its tier: a name, or a number. It has
    `deadline_s` to wait, None for no deadline.
    """

    line: int
    at_s: float | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    hash_ids: tuple[int, ...] = ()
    text: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Any] | None = None
    payload: Mapping[str, Any] | None = None
    is_delta: bool = True
    session: str | None = None
    delay_s: float = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict)
    priority: str | float | None = None
    deadline_s: float | None = None

    def at(self, at_s: float | None) -> TraceRow:
        """Copy of the row at another time."""
        return replace(self, at_s=at_s)


HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens"
_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d)?")


def is_head(line: str) -> bool:
    """True if this is the first line of such a file."""
    return [name.strip().strip('"').lower() for name in line.split(",")] == HEAD.lower().split(",")


def read_azure_row(line: str, number: int) -> TraceRow:
    """Raises BadRow. Times are seconds since the epoch, to be counted from the first."""
    fields = [field.strip().strip('"') for field in line.split(",")]
    if len(fields) != 3:
        raise BadRow(f"{len(fields)} fields; each line has three: {HEAD}")
    time, context, generated = fields
    return TraceRow(
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


LATEST_MS = 1e15
_Tokens = Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]
_Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=LATEST_MS)]
_PATH = re.compile(r"^(.*?)(?: - at `\$\.?(.*)`)?$", re.DOTALL)
_TIER_FIELDS = ("tier", "priority")


class _MooncakeRow(msgspec.Struct):
    timestamp: _Milliseconds | None = None
    input_length: _Tokens | None = None
    output_length: _Tokens | None = None
    hash_ids: list[int] | None = None
    text_input: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    payload: dict[str, Any] | None = None
    message_mode: Literal["history", "delta"] = "history"
    session_id: str | int | None = None
    delay: _Milliseconds | None = None
    deadline: _Milliseconds | None = None
    extra: dict[str, Any] | None = None
    tier: Any = None
    priority: Any = None


_decode = msgspec.json.Decoder(_MooncakeRow).decode


def read_mooncake_row(line: str, number: int) -> TraceRow:
    """Raises BadRow."""
    try:
        found = _decode(line)
    except RecursionError:
        raise BadRow("it is nested too deeply") from None
    except msgspec.MsgspecError as error:
        raise BadRow(_sentence(str(error))) from None
    _check_input(found)
    _check_messages(found)
    extra = dict(found.extra or {})
    return TraceRow(
        line=number,
        at_s=None if found.timestamp is None else found.timestamp / 1000,
        input_tokens=found.input_length,
        output_tokens=found.output_length,
        hash_ids=tuple(found.hash_ids or ()),
        text=found.text_input,
        messages=found.messages,
        tools=found.tools,
        payload=found.payload,
        is_delta=found.payload is None and (found.messages is None or found.message_mode == "delta"),
        session=None if found.session_id is None else str(found.session_id),
        delay_s=(found.delay or 0.0) / 1000,
        deadline_s=None if found.deadline is None else found.deadline / 1000,
        priority=_priority(found, extra),
        extra=extra,
    )


def _check_input(found: _MooncakeRow) -> None:
    kinds = ("input_length", "text_input", "messages", "payload")
    given = [kind for kind in kinds if getattr(found, kind) is not None]
    if len(given) != 1:
        raise BadRow(f"it has {' and '.join(given) or 'no prompt'}; a row has one of {', '.join(kinds)}")
    if found.hash_ids:
        if found.input_length is None:
            raise BadRow(f"hash_ids: only rows with input_length have them, not those with {given[0]}")
        blocks = -(-found.input_length // BLOCK_TOKENS)
        if len(found.hash_ids) != blocks:
            raise BadRow(
                f"hash_ids: {len(found.hash_ids)} of them, but an input_length of {found.input_length} has {blocks} "
                f"blocks of {BLOCK_TOKENS} tokens"
            )


def _check_messages(found: _MooncakeRow) -> None:
    if found.tools is not None and found.messages is None:
        raise BadRow("tools: only rows with messages have them")
    if found.messages is not None and not (found.messages and all("role" in message for message in found.messages)):
        raise BadRow("messages: write at least one, each with a role")
    if found.payload is not None and not found.payload:
        raise BadRow("payload: is empty")
    if found.message_mode == "delta" and found.messages is None:
        raise BadRow('message_mode: "delta" is for rows with messages')


def _priority(found: _MooncakeRow, extra: dict[str, Any]) -> str | float | None:
    """The row's tier; taken out of `extra`, because the replay decides how to ask for it."""
    written = [found.tier, found.priority, *(extra.pop(name, None) for name in _TIER_FIELDS)]
    values = [value for value in written if value is not None]
    if not values:
        return None
    value = values[0]
    if isinstance(value, bool) or not isinstance(value, str | int | float) or any(other != value for other in values):
        shown = msgspec.json.encode(values if len(values) > 1 else value).decode()[:80]
        raise BadRow(f"priority: {shown} is no tier; write a tier's name, or a number from 0 to 1")
    return value


def _sentence(error: str) -> str:
    match = _PATH.match(error)
    assert match is not None
    problem, path = match.groups()
    return f"{path}: {problem[:1].lower()}{problem[1:]}" if path else f"no JSON object of the right form: {problem}"
