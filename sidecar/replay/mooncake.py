"""mooncake_trace JSONL, as NVIDIA's AIPerf reads it: its fields, their meaning and what goes together.

Read from AIPerf's `MooncakeTrace` and the page "Trace Replay with Mooncake Traces". A row has one of `input_length`
(with `hash_ids` where prefixes are shared), `text_input`, `messages` (with `tools`) and `payload`. Times are
milliseconds. `extra` is merged into the body's top level, and wins. Fields that AIPerf does not know are let by; of
those, `tier` and `priority` say which tier the request has, in the row or in its `extra`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec

from sidecar.replay.row import BLOCK_TOKENS, MOST_TOKENS, BadRow, Row

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
