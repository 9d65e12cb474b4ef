"""Token usage of a response, read as it passes: the engine's `usage`, or the number of a stream's chunks.

OpenAI's engines send `usage` last (and null before it, in a stream that was asked for it). Anthropic's API sends the
input's usage in the first event and the output's in the last. Both are found by the member's name in the bytes that
pass, and the body is not kept. Generated text cannot be mistaken for it: there the name's quotes are escaped.
"""

from __future__ import annotations

import re

import msgspec

_NAME = b'"usage"'
_OBJECT = re.compile(rb'"usage"\s*:\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})')
LONGEST = 4096
"""Bytes of an unfinished `usage` object that are kept; real ones have a few hundred."""


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None


_decode = msgspec.json.Decoder(_Usage).decode


class UsageReader:
    """The usage of one response so far. `chunks` counts the events of a stream: about one generated token each."""

    __slots__ = ("_carried", "chunks", "has_begun", "input_tokens", "output_tokens")

    def __init__(self) -> None:
        self.input_tokens: int | None = None
        self.output_tokens: int | None = None
        self.chunks = 0
        self.has_begun = False
        self._carried = b""

    def feed(self, body: bytes | memoryview) -> None:
        """Takes the next bytes of the response, as they were sent."""
        self.has_begun = True
        if isinstance(body, memoryview):  # Starlette lets apps send these
            body = bytes(body)
        self.chunks += body.count(b"data:")
        window = self._carried + body
        at, rest = window.find(_NAME), 0
        while at >= 0:
            found = _OBJECT.match(window, at)
            if found is not None:
                self._take(found.group(1))
            elif len(window) - at < LONGEST and window.find(_NAME, at + 1) < 0:
                self._carried = window[at:]  # the object may be cut in two
                return
            rest = at + len(_NAME) if found is None else found.end()
            at = window.find(_NAME, rest)
        self._carried = window[max(rest, len(window) - len(_NAME) + 1) :]  # the name itself may be

    def used_tokens(self, prompt_tokens: int) -> int:
        """The engine's own count; without one the prompt's estimate and, for a stream, a token per chunk."""
        used = prompt_tokens if self.input_tokens is None else self.input_tokens
        return used + (self.chunks if self.output_tokens is None else self.output_tokens)

    def charged_tokens(self, prompt_tokens: int, status: int | None) -> int | None:
        """The tokens to charge the tenant for. None where neither the response nor its failure says how many."""
        is_counted = self.input_tokens is not None or self.output_tokens is not None or self.chunks > 0
        is_known = is_counted or (status is not None and status >= 400)
        return self.used_tokens(prompt_tokens) if is_known else None

    def _take(self, raw: bytes) -> None:
        try:
            usage = _decode(raw)
        except msgspec.MsgspecError:
            return  # an engine's own form of usage: the estimate stands
        seen_input = usage.input_tokens if usage.prompt_tokens is None else usage.prompt_tokens
        seen_output = usage.output_tokens if usage.completion_tokens is None else usage.completion_tokens
        self.input_tokens = self.input_tokens if seen_input is None else seen_input
        self.output_tokens = self.output_tokens if seen_output is None else seen_output
