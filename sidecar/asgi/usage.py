"""Reads what a response cost as it passes: the engine's `usage`, and the chunks of a stream, without keeping the body.

OpenAI's engines put `usage` last (and null before, in a stream that was asked for it); Anthropic's put the input's in
the first event and the output's in the last. Both are found by looking for the member's name in the bytes that go by.
Inside generated text the name's quotes are escaped, so it cannot be mistaken.
"""

from __future__ import annotations

import re

import msgspec

_NAME = b'"usage"'
_OBJECT = re.compile(rb'"usage"\s*:\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})')
LONGEST = 4096
"""Bytes of a `usage` object that is still awaited; the real ones have a few hundred."""


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None


_decode = msgspec.json.Decoder(_Usage).decode


class UsageReader:
    """One response's cost so far. `chunks` counts the events of a stream: about one generated token each."""

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
        """The engine's own count; else the prompt's estimate and, for a stream, a token per chunk."""
        used = prompt_tokens if self.input_tokens is None else self.input_tokens
        return used + (self.chunks if self.output_tokens is None else self.output_tokens)

    def _take(self, raw: bytes) -> None:
        try:
            usage = _decode(raw)
        except msgspec.MsgspecError:
            return  # an engine's own idea of usage: the estimate stands
        seen_input = usage.input_tokens if usage.prompt_tokens is None else usage.prompt_tokens
        seen_output = usage.output_tokens if usage.completion_tokens is None else usage.completion_tokens
        self.input_tokens = self.input_tokens if seen_input is None else seen_input
        self.output_tokens = self.output_tokens if seen_output is None else seen_output
