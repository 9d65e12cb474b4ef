"""Quick `send` of one request's response: uvicorn's, in fewer steps where nothing has to be waited for.

- A chunk of a stream that its client reads quickly is written at once, and `SENT` is returned: no coroutine is made.
- An app that asks for the response's `chunk_path` needs no message for a chunk either.
- A disconnect is reported to an app that asks for it, without a task that waits for it.
- A head whose message has `BODY_FOLLOWS` goes out with the first bytes of the body, in one write.
- A response in HTTP/1.0 has no chunks.
- The headers of a response are searched together for what HTTP forbids; uvicorn searches each name and each value.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from sidecar.proxy.hop_headers import can_be_written
from sidecar.sending import BODY_FOLLOWS, CLIENT_KEY, SENT, SendChunk

_FRAMING = frozenset((b"connection", b"content-length", b"transfer-encoding"))
_WITHOUT_BODY = frozenset((204, 304))
_HAS_CHUNKS = "1.1"
_LONGEST_LENGTH = 18
"""Digits of a Content-Length: an exabyte."""


def quick(app: Callable[..., Awaitable[None]]) -> Any:  # uvicorn and Starlette type an app differently
    """The app, with such a `send`. Only for requests that uvicorn's httptools protocol serves."""

    def with_quick_send(scope: Scope, receive: Receive, send: Any) -> Awaitable[None]:
        cycle: RequestResponseCycle = send.__self__
        scope[CLIENT_KEY] = Client(cycle)
        if scope["http_version"] < _HAS_CHUNKS:
            send = _until_the_end(cycle)
        elif scope["method"] != "HEAD":
            send = _Response(cycle).send
        return app(scope, receive, send)

    return with_quick_send


def _until_the_end(cycle: RequestResponseCycle) -> Send:
    """The `send` of a request in HTTP/1.0, which has no chunks. Where the response has no length, the end of the
    connection ends it (RFC 9112, section 6.3); uvicorn would send chunks.
    """
    has_length = False

    async def send(message: Message) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            cycle.keep_alive, cycle.chunked_encoding = False, None if has_length else False
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await cycle.send(cast("Any", message))

    return send


class _Response:
    """The `send` of one request. uvicorn's own serves everything else."""

    __slots__ = ("_cycle", "_flow", "_rest", "_send_chunk", "_transport")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._transport = cycle.transport
        self._rest = cast("Send", cycle.send)
        self._send_chunk: SendChunk | None = None

    def send(self, message: Message) -> Awaitable[None]:
        """See ASGI's `send`."""
        if message.get("more_body") and self._is_in_chunks():
            if body := message.get("body"):
                return self._chunk_sender()(body, b"%x\r\n%b\r\n" % (len(body), body))
            return SENT
        if message["type"] == "http.response.start" and self._has_begun(message):
            return SENT
        return self._rest(message)

    def chunk_path(self) -> SendChunk | None:
        """See `sending.chunk_path`."""
        return self._chunk_sender() if self._is_in_chunks() else None

    def _is_in_chunks(self) -> bool:
        """Whether the head has gone out, and the body goes in chunks."""
        cycle = self._cycle
        return bool(cycle.chunked_encoding) and cycle.transport is self._transport

    def _has_begun(self, message: Message) -> bool:
        """Sends the head as uvicorn does. False where uvicorn has to: for what is rare, and for its errors."""
        cycle, flow, status, headers = self._cycle, self._flow, message["status"], message.get("headers")
        has_to_wait = flow.write_paused or cycle.disconnected or cycle.response_started
        if has_to_wait or cycle.access_log or cycle.default_headers or status not in STATUS_LINE:
            return False
        if not isinstance(headers, list) or not can_be_written(headers):
            return False
        lines, length = [STATUS_LINE[status]], None
        for mixed_name, value in headers:
            name = mixed_name.lower()
            if name in _FRAMING:
                if name != b"content-length" or length is not None or not _is_length(value):
                    return False
                length = int(value)
            lines += (name, b": ", value, b"\r\n")
        if not cycle.keep_alive:
            lines.append(b"connection: close\r\n")
        if length is not None:
            cycle.expected_content_length, cycle.chunked_encoding = length, False
        elif status not in _WITHOUT_BODY:
            cycle.chunked_encoding = True
            lines.append(b"transfer-encoding: chunked\r\n")
        lines.append(b"\r\n")
        cycle.response_started, cycle.waiting_for_100_continue = True, False
        if message.get(BODY_FOLLOWS):
            cycle.transport = cast("asyncio.Transport", _HeldHead(cycle, b"".join(lines)))
        else:
            cycle.transport.write(b"".join(lines))
        return True

    def _chunk_sender(self) -> SendChunk:
        """A closure, because a method costs more."""
        if self._send_chunk is None:
            cycle, flow, write, rest = self._cycle, self._flow, self._transport.write, self._rest

            def send_chunk(body: bytes, framed: bytes) -> Awaitable[None]:
                if flow.write_paused or cycle.disconnected or cycle.response_complete:
                    return rest({"type": "http.response.body", "body": body, "more_body": True})
                write(framed)
                return SENT

            self._send_chunk = send_chunk
        return self._send_chunk


class Client:
    """See `ClientWatch`. The protocol calls `left`, too."""

    __slots__ = ("_flow", "_has_left", "_on_disconnect")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._flow = cycle.flow
        self._has_left = cycle.disconnected
        self._on_disconnect: Callable[[], None] | None = None

    def begin(self, on_disconnect: Callable[[], None]) -> None:
        """See `ClientWatch.begin`. Reading goes on, as it does in uvicorn's `receive`: it may wait behind a body."""
        self._flow.resume_reading()
        if self._has_left:
            on_disconnect()
        else:
            self._on_disconnect = on_disconnect

    def end(self) -> None:
        """See `ClientWatch.end`."""
        self._on_disconnect = None

    def left(self) -> None:
        """See `ClientWatch.left`."""
        self._has_left = True
        on_disconnect, self._on_disconnect = self._on_disconnect, None
        if on_disconnect is not None:
            on_disconnect()

    @property
    def is_slow(self) -> bool:
        """See `ClientWatch.is_slow`."""
        return bool(self._flow.write_paused)


class _HeldHead:
    """Stands for the transport of a request until the body's first bytes: the head goes out with them."""

    __slots__ = ("_cycle", "_head", "_transport")

    def __init__(self, cycle: RequestResponseCycle, head: bytes) -> None:
        self._cycle = cycle
        self._transport = cycle.transport
        self._head = head

    def write(self, data: bytes) -> None:
        self._cycle.transport = self._transport
        self._transport.write(self._head + data)

    def close(self) -> None:
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()


def _is_length(value: bytes) -> bool:
    return value.isdigit() and len(value) <= _LONGEST_LENGTH
