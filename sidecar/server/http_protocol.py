"""HTTP/1.1 protocol of the sidecar's own servers: uvicorn's (0.54, with httptools), with bounds and corrections.

- A request's head is bounded in bytes (431) and in time (408). Otherwise a connection could hold memory, or stay open,
  for ever, before the client has shown a key.
- Trailers are ignored. uvicorn appends them to the request's headers after these have been checked, so that a client
  could hand the engine a header that had been removed.
- An offer to upgrade is declined as RFC 9110 has it: by answering in HTTP/1.1. uvicorn would lose the request's body,
  and Java's client makes that offer (h2c) with every first request. The app sees by `upgrade` what was offered.
- A body in another transfer coding than chunks, two `Host` headers, and none in HTTP/1.1, are refused: a server after
  this one would not see the first, and might read the other `Host`.
- A disconnect is reported to the request that is served, even where the client has pipelined another request after it.
  uvicorn reports it to the last request only, so the first would hold its room, and the engine would compute on.
- A response in HTTP/1.0 has no chunks. uvicorn would send them.
- Bytes that are no HTTP are answered in the sidecar's error format, but never within another request's response. After
  that the server reads on for a moment: a connection that is closed with unread bytes is reset, and the answer lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import httptools
from starlette.types import Message, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from sidecar.admission.handover import WRITE_KEY
from sidecar.admission.responses import error_body, error_headers, send_error, speaks_anthropic
from sidecar.errors import AdmissionError, HeadTimeout, HeadTooLarge, InvalidHttp
from sidecar.events import Headers

MOST_HEAD_BYTES = 64 * 1024
"""What h11 allows; nginx's default is 32 KiB, node's 16. Also for trailers, and for what frames a chunk."""
MOST_PIPELINED = 8
"""After so many the server stops reading. uvicorn stops after one, but then it sees no disconnect."""
HEAD_WITHIN_S = 30.0
"""From the first byte of a head to its end. Before it a connection may be idle as long as between two requests."""
READ_ON_S = 1.0
"""After a refusal: several round trips for the client to see the answer, and to stop."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """Serves one connection. uvicorn makes it, by `Config(http=BoundedHttpProtocol)`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_in_head = True
        self._framing_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._has_refused = False
        self._cycles: list[RequestResponseCycle] = []
        self.on_lost: Callable[[BoundedHttpProtocol], None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn's own narrowing
        super().connection_made(transport)
        # As between two requests; uvicorn would wait for the first request for ever.
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._end_head()
        self._disconnect_unfinished()
        if self.on_lost is not None:
            self.on_lost(self)

    def data_received(self, data: bytes) -> None:
        if self._has_refused:
            return
        self._framing_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            own = error.__context__  # of a callback of ours
            self._refuse(own if isinstance(own, AdmissionError) else InvalidHttp(_NO_HTTP))
        if self._has_refused or self.transport.is_closing():
            return
        if self._framing_bytes > MOST_HEAD_BYTES:
            self._refuse(_too_large())
        elif self._is_in_head and self._framing_bytes and self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_WITHIN_S, self._refuse, _too_slow())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._check_head()
        self._end_head()
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:  # its task runs later
            self._cycles = [*self._unfinished(), self.cycle]
            _fit(self.cycle)
        if 0 < len(self.pipeline) <= MOST_PIPELINED:
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._framing_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._framing_bytes = 0
        self._is_in_head = True
        super().on_message_complete()

    def cut(self, error: AdmissionError) -> None:
        """Call this before the connection's requests are canceled: those without a response are answered `error`.

        uvicorn answers a canceled request with a 500, by a method of its own. An app may still answer first.
        """
        for cycle in self._unfinished():
            cycle.send_500_response = partial(_send_instead, cycle, error)  # type: ignore[method-assign]  # see above

    def _check_head(self) -> None:
        """Raises HeadTooLarge, and InvalidHttp for what RFC 9112 forbids and the parser accepts (sections 3.2, 6.1)."""
        names, values = zip(*self.headers, strict=True) if self.headers else ((), ())
        if sum(map(len, names)) + sum(map(len, values)) > MOST_HEAD_BYTES:
            raise _too_large()
        hosts = names.count(b"host")
        if b"" in names or hosts > 1 or self._values(names, b"transfer-encoding") - {b"chunked"}:
            raise InvalidHttp(_NO_HTTP)
        if not hosts and self.parser.get_http_version() >= _NEEDS_HOST:
            raise InvalidHttp(_NO_HOST)
        self.expect_100_continue = b"100-continue" in self._values(names, b"expect")

    def _values(self, names: Sequence[bytes], wanted: bytes) -> set[bytes]:
        """Values of one header in the head, in lower case."""
        if wanted not in names:
            return set()
        return {value.strip().lower() for name, value in self.headers if name == wanted}

    def _feed(self, data: bytes) -> None:
        while True:  # once more for each offer to upgrade
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:  # noqa: PERF203  # nearly always there is one round
                data = self._head_without_upgrade() + data[offer.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
            else:
                return

    def _should_upgrade(self) -> bool:
        return True  # so that uvicorn leaves this head to `_feed`

    def _head_without_upgrade(self) -> bytes:
        method = self.parser.get_method()
        if method == b"CONNECT":  # it has no path to serve
            raise httptools.HttpParserError("CONNECT")
        version = self.parser.get_http_version().encode()
        lines = [b"%s: %s\r\n" % header for header in _without_upgrade(self.headers)]
        return b"".join([b"%s %s HTTP/%s\r\n" % (method, self.url, version), *lines, b"\r\n"])

    def _refuse(self, error: AdmissionError) -> None:
        self._end_head()
        is_answering = any(cycle.response_started for cycle in self._unfinished())
        if is_answering:
            self.transport.close()
        elif not self._has_refused and not self.transport.is_closing():
            body = error_body(error)
            lines = [b"%s: %s\r\n" % header for header in error_headers(error, len(body), None)]
            status = b"HTTP/1.1 %d %s\r\n" % (error.status, _REASONS[error.status])
            self.transport.write(b"".join([status, *lines, b"connection: close\r\n\r\n", body]))
            if self.transport.can_write_eof():  # not in TLS
                self.transport.write_eof()
            self._has_refused = True
            self._disconnect_unfinished()  # nothing can be written any more
            self.loop.call_later(READ_ON_S, self.transport.close)

    def _disconnect_unfinished(self) -> None:
        for cycle in self._unfinished():
            cycle.disconnected = True
            cycle.message_event.set()

    def _unfinished(self) -> list[RequestResponseCycle]:
        """The requests without a complete response: the one that is served, and those pipelined after it."""
        return [cycle for cycle in self._cycles if not cycle.response_complete]

    def _end_head(self) -> None:
        self._is_in_head, self._framing_bytes = False, 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


_NEEDS_HOST = _HAS_CHUNKS = "1.1"
_NO_HTTP = "this is not an HTTP/1.1 request, or its parts contradict each other; send it as RFC 9112 has it"
_NO_HOST = "this HTTP/1.1 request has no `Host` header; name the server in it, as RFC 9112 has it"
_REASONS = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large"}


def _fit(cycle: RequestResponseCycle) -> None:
    """Gives a request a `send` that fits its version of HTTP, and the short way of chunks."""
    scope: Any = cycle.scope
    if scope["http_version"] < _HAS_CHUNKS:
        cycle.send = _until_the_end(cycle)  # type: ignore[method-assign, assignment]  # nothing else is asked before
    elif scope["method"] != "HEAD":
        scope[WRITE_KEY] = partial(_write, cycle)


def _until_the_end(cycle: RequestResponseCycle) -> Send:
    """The `send` of a request in HTTP/1.0, which has no chunks. Where the response has no length, the end of the
    connection ends it (RFC 9112, section 6.3).
    """
    send, has_length = cycle.send, False

    async def send_without_chunks(message: Message) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            cycle.keep_alive, cycle.chunked_encoding = False, None if has_length else False
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(cast("Any", message))

    return send_without_chunks


def _write(cycle: RequestResponseCycle, body: bytes) -> bool:
    """See `handover.Write`."""
    is_in_chunks = cycle.chunked_encoding and not cycle.response_complete
    if not is_in_chunks or cycle.disconnected or cycle.flow.write_paused:
        return False
    cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
    return True


async def _send_instead(cycle: RequestResponseCycle, error: AdmissionError) -> None:
    is_anthropic = speaks_anthropic(cycle.scope["path"])
    send = cast("Send", cycle.send)
    await send_error(send, error, anthropic=is_anthropic, headers=[(b"connection", b"close")])


def _without_upgrade(headers: Headers) -> Headers:
    kept = []
    for name, value in headers:
        if name == b"connection":  # the parser takes `upgrade` for an offer only where this names it
            tokens = [token for part in value.split(b",") if (token := part.strip()).lower() != b"upgrade"]
            kept.append((name, b", ".join(tokens)))
        else:
            kept.append((name, value))
    return kept


def _too_slow() -> HeadTimeout:
    return HeadTimeout(f"the request's headers did not arrive within {HEAD_WITHIN_S:g} s; send them faster")


def _too_large() -> HeadTooLarge:
    return HeadTooLarge(f"the request's headers are larger than {MOST_HEAD_BYTES} bytes; send less")
