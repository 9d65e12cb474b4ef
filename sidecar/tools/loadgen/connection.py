"""One request on one connection, opened before the request's time, so that connecting is never measured.

It is an `asyncio.Protocol` around httptools' parser, because the client shares the machine's cores with the engine it
measures: a token costs one callback, and its time is taken as soon as its bytes arrive.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

# -- Answer parser: when the first token came, how many followed, and what went wrong.
#
# It does no I/O and has no clock: the caller passes bytes together with the moment at which they came.
#
# The definition of the first token is a choice. Engines open a chat stream with a chunk that says the role and has
# no text. vLLM sends it together with the first token; others may send it when the request arrives. So it does not
# count. The first event that carries text (`content`, `reasoning_content`, `reasoning`, `text`, or tool calls)
# counts. A later event of a choice without text counts as well: a model with a byte-level vocabulary, and above all
# one with random weights, generates tokens that are a part of a character, for which the engine sends an empty
# delta. Where a complete answer had neither (its first token ended it), the first event of any choice counts.
#
# An answer that does not stream has no first token: its client sees all of it at once.

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


_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Target:
    """A server: where it listens, and what comes before every path."""

    host: str
    port: int
    authority: str
    prefix: str
    tls: ssl.SSLContext | None

    @staticmethod
    def of(url: str) -> Target:
        """Reads a server's address. Raises ValueError, with a line that says what would be right."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in _DEFAULT_PORTS or not parts.hostname or port == -1 or not url.isprintable():
            raise ValueError(f"{url!r} is no server's address; write one like http://127.0.0.1:8000")
        if parts.query or parts.fragment or " " in url:
            raise ValueError(f"{url!r} has more than an address and a path; write one like http://127.0.0.1:8000")
        return Target(
            host=parts.hostname,
            port=_DEFAULT_PORTS[parts.scheme] if port is None else port,
            authority=parts.netloc.rpartition("@")[2],
            prefix=parts.path.rstrip("/"),
            tls=ssl.create_default_context() if parts.scheme == "https" else None,
        )

    def head(self, path: str, headers: Mapping[str, str]) -> bytes:
        """The lines of a POST up to its length. Raises ValueError for a header that would not stay one."""
        lines = [f"POST {self.prefix}{path} HTTP/1.1", f"host: {self.authority}", "connection: close"]
        if "content-type" not in {name.lower() for name in headers}:
            lines.append("content-type: application/json")
        for name, value in headers.items():
            if not f"{name}{value}".isprintable() or not name or ":" in name:
                raise ValueError(f"{name!r}: {value!r} is no header")
            lines.append(f"{name}: {value}")
        return "".join(f"{line}\r\n" for line in lines).encode()


class ClientConnection(asyncio.Protocol):
    """The server's answer to one request; `done` is set at its end, however it comes."""

    def __init__(self) -> None:
        self.done = asyncio.get_running_loop().create_future()
        self.answer: ClientAnswer | None = None
        self.error: str | None = None
        self.ended_s = 0.0
        self._transport: asyncio.BaseTransport | None = None
        self._is_closed = False
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._has_length = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        if self._is_closed:
            self.close()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserCallbackError) as error:
            self.end(f"the answer is not HTTP: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        if self.answer is None:
            self.end("the connection was closed before an answer came" + (f" ({error})" if error else ""))
        elif not self.done.done():
            self._complete(in_order=error is None and not self._has_length)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser; a header that comes twice is joined, as HTTP says."""
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        self._headers[key] = f"{self._headers[key]}, {text}" if key in self._headers else text

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        status = self._parser.get_status_code()
        if status < 200:  # an interim answer: the real one follows on the same connection
            self._headers.clear()
            return
        self._has_length = "content-length" in self._headers or "transfer-encoding" in self._headers
        self.answer = ClientAnswer(status, self._headers)

    def on_body(self, body: bytes) -> None:
        """Called by the parser."""
        assert self.answer is not None
        self.answer.feed(body, time.monotonic())

    def on_message_complete(self) -> None:
        """Called by the parser."""
        if self.answer is not None:
            self._complete(in_order=True)

    def send(self, request: bytes) -> None:
        """Sends the request."""
        assert isinstance(self._transport, asyncio.WriteTransport)
        self._transport.write(request)

    def end(self, error: str) -> None:
        """Closes the connection at once, so that the server stops working on the request."""
        if not self.done.done():
            self.error = error
            self._settle()

    def close(self) -> None:
        """Closes the connection at once, without a word about it; also one that is only being opened."""
        self._is_closed = True
        if self._transport is not None:
            self._transport.abort()  # type: ignore[attr-defined]  # socket transports have it, their base does not

    def _complete(self, *, in_order: bool) -> None:
        if self.done.done():
            return
        assert self.answer is not None
        self.answer.end(in_order=in_order)
        self._settle()

    def _settle(self) -> None:
        self.ended_s = time.monotonic()
        self.done.set_result(None)
        self.close()


async def connect(target: Target, timeout_s: float) -> ClientConnection | str:
    """Opens a connection. Gives one line that says why there is none, where there is none."""
    connection = ClientConnection()
    opening = asyncio.get_running_loop().create_connection(lambda: connection, target.host, target.port, ssl=target.tls)
    try:
        await asyncio.wait_for(opening, timeout_s)
    except asyncio.TimeoutError:  # in Python 3.10 not yet the builtin TimeoutError
        return f"cannot connect to {target.authority}: no answer within {timeout_s:g} s"
    except OSError as error:
        return f"cannot connect to {target.authority}: {error.strerror or error}"
    except asyncio.CancelledError:
        connection.close()  # it may just have been made
        raise
    return connection
