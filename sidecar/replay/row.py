"""One request of a trace, as its format says it, before it has words, a tier or an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

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
