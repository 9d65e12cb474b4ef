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
from urllib.parse import urlsplit

import httptools

from sidecar.tools.loadgen.answer import ClientAnswer

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
