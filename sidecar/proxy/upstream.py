"""Connections to the engine, with corrections of aiohttp's behavior."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from sidecar.engines.pages import REFUSED

# Below the 5 s after which uvicorn, and so trtllm-serve, vLLM and SGLang, closes an idle connection.
KEEPALIVE_S = 4.0
# A network connects in milliseconds; 5 s outlast one lost SYN and its repetitions after 1 s and 2 s.
CONNECT_TIMEOUT_S = 5.0
# Read ahead per response: aiohttp stops reading from the engine at twice this, which is uvicorn's own limit for bodies.
_READ_AHEAD_BYTES = 64 * 1024
# For a line or a field of the engine's response; aiohttp's own 8190 is less than the engine's server allows.
_MAX_HEADER_BYTES = 64 * 1024
# A connection that was closed before it was written to fails within a round trip. See `may_be_stale`.
_STALE_WITHIN_S = 0.2

# A larger body in one piece is written in one go by aiohttp, with a warning.
_LARGE_BODY_BYTES = 2**20
_AUTO_HEADERS = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")

# Whether this task's last request opened a connection of its own.
_on_fresh_connection: ContextVar[bool] = ContextVar("on_fresh_connection")


class Upstream:
    """One engine's address and the pool of connections to it, which the first request opens.

    The pool belongs to the event loop that it was opened in. Raises ValueError for an invalid address.
    """

    def __init__(
        self, url: str, *, connect_timeout_s: float, response_timeout_s: float | None, keepalive_s: float
    ) -> None:
        self.url = _validated(url)
        self.connect_timeout_s = connect_timeout_s
        self._timeout = aiohttp.ClientTimeout(total=None, connect=connect_timeout_s, sock_read=response_timeout_s)
        self._keepalive_s = keepalive_s
        self._session: aiohttp.ClientSession | None = None

    async def request(
        self, method: str, target: str, headers: CIMultiDict[str], body: bytes | AsyncIterator[bytes] | None
    ) -> aiohttp.ClientResponse:
        """Sends one request unchanged, and returns at the response's headers. Raises aiohttp's exceptions."""
        if isinstance(body, bytes) and len(body) > _LARGE_BODY_BYTES:
            headers["content-length"] = str(len(body))
            body = _slices(body)
        if self._session is None:
            self._session = self._open()
        _on_fresh_connection.set(False)
        url = URL(self.url + target, encoded=True)
        response = await self._session.request(method, url, headers=headers, data=body, allow_redirects=False)
        _break_with_its_connection(response)
        return response

    async def close(self) -> None:
        """Closes the connections. A request that comes later opens new ones."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _open(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            # No limit here: the admission controller decides how many requests run at once.
            connector=_Connector(limit=0, keepalive_timeout=self._keepalive_s),
            timeout=self._timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=_AUTO_HEADERS,
            auto_decompress=False,
            read_bufsize=_READ_AHEAD_BYTES,
            max_line_size=_MAX_HEADER_BYTES,
            max_field_size=_MAX_HEADER_BYTES,
        )


def may_be_stale(error: aiohttp.ClientConnectionError, elapsed_s: float) -> bool:
    """Whether this task's last request used a connection that the engine closed at that moment.

    So it is when the connection had been used before, not one byte came back, and it broke `elapsed_s` after it was
    written to, within a round trip. An engine that took the request and then failed takes longer.
    """
    if elapsed_s > _STALE_WITHIN_S or _on_fresh_connection.get() or isinstance(error, aiohttp.ServerTimeoutError):
        return False
    # aiohttp puts what it could parse of a response in place of the message.
    return not isinstance(error, aiohttp.ServerDisconnectedError) or isinstance(error.message, str)


def connect_trouble(url: str, error: aiohttp.ClientError, within_s: float) -> str:
    """Why no connection to `url` could be made, in words for the operator. `within_s` is the timeout of connecting."""
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return f"no connection to {url} within {within_s:g} s"
    cause = getattr(error, "os_error", None)
    if isinstance(error, aiohttp.ClientSSLError) or isinstance(cause, ssl.SSLError):
        return f"TLS with {url} failed: {getattr(error, 'certificate_error', None) or cause}"
    if isinstance(cause, socket.gaierror):
        return f"the name in {url} cannot be resolved: {cause.strerror}"
    if isinstance(cause, ConnectionRefusedError):
        return f"{REFUSED} {url}"
    reason = None if cause is None or not cause.errno else os.strerror(cause.errno)
    return f"no connection to {url}: {reason or cause or type(error).__name__}"


class Traffic:
    """Responses of the engine to admitted requests, as a sign of life. It costs a request two entries in a mapping."""

    def __init__(self) -> None:
        self._begun = 0
        self._begun_before = 0
        self._read: dict[aiohttp.StreamReader, int] = {}

    def began(self, content: aiohttp.StreamReader) -> None:
        """A response begins."""
        self._begun += 1
        self._read[content] = 0

    def ended(self, content: aiohttp.StreamReader) -> None:
        """A response ends, in any way."""
        self._read.pop(content, None)

    def has_flowed(self) -> bool:
        """Whether a response has begun, or more of one was read, since the last call."""
        has_flowed, self._begun_before = self._begun != self._begun_before, self._begun
        for content, before in self._read.items():
            has_flowed |= content.total_bytes > before
            self._read[content] = content.total_bytes
        return has_flowed


def said(error: Exception | None) -> str:
    """An error's text for a log. aiohttp's repr of a bad response would show the request's headers and its key."""
    message = error.message if isinstance(error, aiohttp.ClientResponseError) else str(error or "")
    return f"{type(error).__name__}: {message}" if error else "no error"


class _Connector(aiohttp.TCPConnector):
    """Notes when a request had to open a connection; such a connection was not stale."""

    async def _create_connection(self, *args: Any, **kwargs: Any) -> Any:  # aiohttp types it with private names
        _on_fresh_connection.set(True)
        return await super()._create_connection(*args, **kwargs)


def _break_with_its_connection(response: aiohttp.ClientResponse) -> None:
    """Wakes the reader of a response whose connection is gone.

    aiohttp does so itself but for one case: when its compiled parser finds the chunks' framing broken, it closes the
    connection silently (3.14.5; tests/proxy/test_workarounds.py). The client would wait for ever.
    """
    content, connection = response.content, response.connection
    if connection is None or connection.protocol is None:
        return  # the whole response is there already

    def lost(closed: asyncio.Future[None] | None) -> None:
        if closed is not None and not closed.cancelled():
            closed.exception()  # retrieved: content has it as well
        if not content.is_eof() and content.exception() is None:
            content.set_exception(aiohttp.ClientPayloadError("the connection was lost"))

    if not hasattr(connection.protocol, "closed"):
        return  # an older aiohttp, which leaves no way to know
    closed = connection.protocol.closed
    if closed is None:
        lost(None)
        return
    closed.add_done_callback(lost)
    # The connection lives longer than the response, and must not collect a callback for each response.
    content.on_eof(partial(_discard, closed, lost))


def _discard(future: asyncio.Future[None], callback: Callable[[asyncio.Future[None]], None]) -> None:
    future.remove_done_callback(callback)
    # One callback stays: a connection that is reset while no response uses it is no error, and asyncio would log one.
    future.remove_done_callback(_retrieve)
    future.add_done_callback(_retrieve)


def _retrieve(future: asyncio.Future[None]) -> None:
    if not future.cancelled():
        future.exception()


async def _slices(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), _READ_AHEAD_BYTES):
        yield body[start : start + _READ_AHEAD_BYTES]


def _validated(upstream: str) -> str:
    """`upstream` without its trailing slash, ready to be put in front of a path."""
    parts = urlsplit(upstream)
    example = "write it like http://127.0.0.1:8000"
    if not re.fullmatch(r"[!-~]+", upstream):
        raise ValueError(f"upstream {upstream!r} contains a space or a character beyond ASCII; {example}")
    if parts.scheme not in {"http", "https"}:
        raise ValueError(f"upstream {upstream!r} does not begin with http:// or https://; {example}")
    try:
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"upstream {upstream!r}: {error}; {example}") from None
    if not host:
        raise ValueError(f"upstream {upstream!r} names no host; {example}")
    if parts.username is not None:
        raise ValueError(f"upstream {parts.hostname!r} must not contain a user or a password; {example}")
    if parts.query or parts.fragment:
        raise ValueError(f"upstream {upstream!r} must end with its path, without ? or #; {example}")
    return upstream.rstrip("/")
