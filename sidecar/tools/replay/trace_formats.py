"""One request of a trace, as its format says it, before it has words, a tier or an engine."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Annotated, Any, Literal

import msgspec

BLOCK_TOKENS = 512
"""Tokens that one of a row's hash ids stands for, as in the Mooncake traces and AIPerf's default."""
MOST_TOKENS = 100_000_000


class BadRow(ValueError):
    """A line that is no row; the text says what is wrong and what would be right."""


@dataclass(frozen=True, slots=True)
class Row:
    """`at_s` is when it is sent, in seconds; None for a turn that is sent when the one before has been answered.

    Its prompt is one of these: `input_tokens` to be made up (with equal blocks where `hash_ids` are equal), `text`,
    `messages`, or the whole body as `payload`. `output_tokens` is None where the engine decides. Rows of one `session`
    are turns of a conversation; `is_delta` says that the turns before, and their answers, come before its `messages`.
    `extra` goes into the body as it is. `priority` is what the row says about its tier: a name, or a number.
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

    def at(self, at_s: float | None) -> Row:
        """The same request at another time."""
        return replace(self, at_s=at_s)


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
    extra: dict[str, Any] | None = None
    tier: Any = None
    priority: Any = None


_decode = msgspec.json.Decoder(_MooncakeRow).decode


def read_row(line: str, number: int) -> Row:
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
    return Row(
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
    """What the row says about its tier; taken out of `extra`, because how it is asked for is the replay's choice."""
    said = [found.tier, found.priority, *(extra.pop(name, None) for name in _TIER_FIELDS)]
    values = [value for value in said if value is not None]
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
    said, path = match.groups()
    return f"{path}: {said[:1].lower()}{said[1:]}" if path else f"no JSON object of the right form: {said}"
