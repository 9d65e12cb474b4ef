"""Answer parser: when the first token came, how many followed, and what went wrong.

It does no I/O and has no clock: the caller passes bytes together with the moment at which they came.

The definition of the first token is a choice. Engines open a chat stream with a chunk that says the role and has no
text. vLLM sends it together with the first token; others may send it when the request arrives. So it does not count.
The first event that carries text (`content`, `reasoning_content`, `reasoning`, `text`, or tool calls) counts. A later
event of a choice without text counts as well: a model with a byte-level vocabulary, and above all one with random
weights, generates tokens that are a part of a character, for which the engine sends an empty delta. Where a complete
answer had neither (its first token ended it), the first event of any choice counts.

An answer that does not stream has no first token: its client sees all of it at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

MOST_BYTES = 4 * 2**20
"""Kept of an answer that does not stream, and of one event: more is read and forgotten, or ends the answer."""
LONGEST_ERROR = 300
"""Characters of an engine's own words that are passed on."""
_TEXT_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls")


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: Any = None


class _Choice(msgspec.Struct):
    delta: dict[str, Any] | None = None
    message: dict[str, Any] | None = None
    text: str | None = None
    finish_reason: Any = None


class _Event(msgspec.Struct):
    """A chunk of a stream, or a whole answer. Other fields are skipped."""

    id: str | None = None
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class ClientAnswer:
    """One answer, from its head to its end. `error` is None as long as nothing is wrong with it."""

    def __init__(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        self.headers = headers
        self.request_id: str | None = None
        self.first_token_s: float | None = None
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.error: str | None = None
        self._text: list[str] = []
        self._is_stream = headers.get("content-type", "").lower().startswith("text/event-stream")
        self._is_success = 200 <= status < 300
        self._buffer = bytearray()
        self._data: list[bytes] = []
        self._opened_s: float | None = None
        self._token_events = 0
        self._usage_tokens: int | None = None
        self._is_finished = False

    @property
    def output_tokens(self) -> int:
        """Output tokens by the engine's usage, or else the number of events with a token; 0 for an answer without
        either.
        """
        return self._token_events if self._usage_tokens is None else self._usage_tokens

    @property
    def text(self) -> str:
        """The model's text, of its first choice."""
        return "".join(self._text)

    def feed(self, data: bytes, now_s: float) -> None:
        """Takes bytes of the body, cut anywhere."""
        if not (self._is_stream and self._is_success):
            if len(self._buffer) < MOST_BYTES:
                self._buffer += data
            return
        self._buffer += data
        *lines, rest = bytes(self._buffer).split(b"\n")
        self._buffer[:] = rest
        for line in lines:
            self._line(line.rstrip(b"\r"), now_s)
        if len(rest) > MOST_BYTES:
            self.fail(f"an event of the answer is longer than {MOST_BYTES} bytes")

    def end(self, *, in_order: bool) -> None:
        """The body has ended; `in_order` says whether HTTP's own framing says so too."""
        if self.error is None and not in_order:
            self.fail("the connection was closed in the middle of the answer")
        elif self._is_stream and self._is_success:
            self._end_stream()
        else:
            self._end_whole()

    def fail(self, error: str) -> None:
        """Notes what went wrong; what was noted first stays."""
        if self.error is None:
            self.error = error

    def _line(self, line: bytes, now_s: float) -> None:
        """One line of the event stream: data lines are collected until an empty line ends the event."""
        if line.startswith(b"data:"):
            self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
        elif not line and self._data:
            data = b"\n".join(self._data)
            self._data.clear()
            self._event(data, now_s)

    def _event(self, data: bytes, now_s: float) -> None:
        if data == b"[DONE]":
            self._is_finished = True
            return
        if (event := self._read(data, "an event of the answer cannot be read")) is None:
            return
        for index, choice in enumerate(event.choices or ()):
            self._chunk(choice, now_s, is_first_choice=index == 0)
        # SGLang reports an overload like this, under a 200 that was sent before it was known; the emulator follows its
        # versions that send the bare object, without `error` around it.
        may_be_problem = event.error is not None or (event.choices is None and event.usage is None)
        if may_be_problem and (problem := read_problem(data)):
            self.fail(problem)

    def _read(self, data: bytes, mistake: str) -> _Event | None:
        """An event, or a whole answer, after its usage was noted; None, and the answer has failed, for another text."""
        try:
            event = _decode(data)
        except (msgspec.MsgspecError, RecursionError):
            self.fail(f"{mistake}: {_show(data)}")
            return None
        self.request_id = self.request_id or event.id
        if event.usage is not None:
            self.prompt_tokens = event.usage.prompt_tokens
            self.cached_tokens = _cached_tokens(event.usage.prompt_tokens_details)
            self._usage_tokens = event.usage.completion_tokens
        return event

    def _chunk(self, choice: _Choice, now_s: float, *, is_first_choice: bool) -> None:
        delta = choice.delta or {}
        has_text = bool(choice.text) or any(delta.get(name) for name in _TEXT_FIELDS)
        self._opened_s = now_s if self._opened_s is None else self._opened_s
        self._is_finished = self._is_finished or choice.finish_reason is not None
        if has_text or ("role" not in delta and choice.finish_reason is None):
            self._token_events += 1
            self.first_token_s = now_s if self.first_token_s is None else self.first_token_s
        content = choice.text if choice.text is not None else delta.get("content")
        if is_first_choice and isinstance(content, str) and content:
            self._text.append(content)

    def _end_stream(self) -> None:
        if not self._is_finished:
            self.fail("the stream ended before the answer was complete")
        elif self.error is None and self.first_token_s is None:
            self.first_token_s = self._opened_s

    def _end_whole(self) -> None:
        body = bytes(self._buffer)
        if not self._is_success:
            reason = (read_problem(body) or _show(body)).removeprefix(f"{self.status}: ")
            self.fail(f"HTTP {self.status}: {reason}" if reason else f"HTTP {self.status}")
            return
        if (event := self._read(body, "the answer is no JSON object")) is None:
            return
        message = (event.choices[0].message or {}) if event.choices else {}
        content = event.choices[0].text if event.choices and event.choices[0].text else message.get("content")
        if isinstance(content, str):
            self._text.append(content)
        if event.error is not None:
            self.fail(read_problem(body) or "an error without a message")


def read_problem(body: bytes) -> str | None:
    """A JSON error body in one line: its code where it has one, and its message. None for anything else.

    Understands OpenAI's `{"error": {"message", "code"}}`, TensorRT-LLM's `{"error": "..."}`, the bare
    `{"message", "code"}` of SGLang, and FastAPI's `{"detail": ...}`.
    """
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        return None
    if not isinstance(decoded, dict):
        return None
    inner = decoded.get("error", decoded)
    if not isinstance(inner, dict):
        return _one_line(str(inner))
    message = inner.get("message", inner.get("detail"))
    if message is None:
        return None
    text = message if isinstance(message, str) else msgspec.json.encode(message).decode()
    code = inner.get("code")
    return _one_line(text if code is None else f"{code}: {text}")


def _one_line(text: str) -> str:
    joined = " ".join(text.split())
    return joined if len(joined) <= LONGEST_ERROR else joined[: LONGEST_ERROR - 1] + "…"


def _show(data: bytes) -> str:
    return _one_line(data[: 4 * LONGEST_ERROR].decode("utf-8", "replace"))


def _cached_tokens(details: object) -> int | None:
    found = details.get("cached_tokens") if isinstance(details, Mapping) else None
    return found if isinstance(found, int) else None
