"""A reverse proxy as an ASGI app: what the client sends reaches the engine, what the engine answers reaches the client.

Its law: bytes pass as they are. Path, query, bodies and headers are neither decoded nor re-encoded; only what belongs
to one hop is removed (RFC 9110, section 7.6.1), and only `host` and `x-forwarded-*` are written. Nothing is held
back: every read from the engine is sent on at once, and the engine is read no faster than the client takes it.

Who ends what: a client that leaves cancels its request at the engine, before the headers as well as in the middle of
a stream. An engine that cannot answer is a 502 or a 504; one that breaks off in the middle of its response is a
`ResponseCut`, which makes the server close the client's connection, so that half a response never looks whole.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from yarl import URL

from sidecar.asgi.hop import declared_length, forwarded_headers, returned_headers, target
from sidecar.asgi.responses import send_error, speaks_anthropic
from sidecar.asgi.types import Message, Receive, Scope, Send
from sidecar.errors import AdmissionError, EngineTimeout, EngineUnreachable, InvalidHeader

logger = logging.getLogger(__name__)

# Below the 5 s after which uvicorn, and so trtllm-serve, vLLM and SGLang, closes an idle connection.
KEEPALIVE_S = 4.0
# On a network a connection is there in milliseconds; 5 s outlive one lost SYN and its repetition after 1 s and 2 s.
CONNECT_TIMEOUT_S = 5.0
# Read ahead per response: aiohttp stops reading from the engine at twice this, which is uvicorn's own mark for bodies.
_READ_AHEAD_BYTES = 64 * 1024
# For a line or a field of the engine's response; aiohttp's own 8190 is less than the engine's server lets through.
_MAX_HEADER_BYTES = 64 * 1024
# A connection that was already closed when it was written to says so within a round trip. See `_Forwarding._request`.
_STALE_WITHIN_S = 0.2

_AUTO_HEADERS = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")

# Whether this task's last request opened a connection of its own.
_on_fresh_connection: ContextVar[bool] = ContextVar("on_fresh_connection")


class ResponseCut(Exception):
    """The engine broke off in the middle of its response. Raised to the server, which must not end it cleanly."""


class ReverseProxy:
    """Forwards every HTTP request to `upstream`, an `http://` or `https://` address, with a base path or without.

    `connect_timeout_s` bounds looking up and connecting (502 when over). `response_timeout_s` bounds the engine's
    silence, before the headers and between two chunks (504, or a cut response); None lets an engine think for as long
    as its client waits. The pool of connections is opened by the first request and closed by the lifespan's shutdown,
    or by `close`. Raises ValueError for an address that cannot be one.
    """

    def __init__(
        self,
        upstream: str,
        *,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        response_timeout_s: float | None = None,
        keepalive_s: float = KEEPALIVE_S,
    ) -> None:
        self.upstream = _validated(upstream)
        self._timeout = aiohttp.ClientTimeout(total=None, connect=connect_timeout_s, sock_read=response_timeout_s)
        self._keepalive_s = keepalive_s
        self._session: aiohttp.ClientSession | None = None

    def __repr__(self) -> str:
        return f"ReverseProxy({self.upstream!r})"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one ASGI scope. WebSockets are refused: nothing that is admitted here speaks them."""
        if scope["type"] == "http":
            await _Forwarding(self, scope, receive, send).run()
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1011, "reason": "this proxy does not forward WebSockets"})
        elif scope["type"] == "lifespan":
            await self._lifespan(receive, send)

    async def close(self) -> None:
        """Closes the connections to the engine. A request that comes later opens new ones."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def session(self) -> aiohttp.ClientSession:
        """The pool of connections, opened on first use: it belongs to the event loop that it was opened in."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # No limit here: how many requests run at once is decided at the door.
                connector=_Connector(limit=0, keepalive_timeout=self._keepalive_s),
                timeout=self._timeout,
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=_AUTO_HEADERS,
                auto_decompress=False,
                read_bufsize=_READ_AHEAD_BYTES,
                max_line_size=_MAX_HEADER_BYTES,
                max_field_size=_MAX_HEADER_BYTES,
            )
        return self._session

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.close()
        await send({"type": "lifespan.shutdown.complete"})


class _Connector(aiohttp.TCPConnector):
    """Says when a request had to open a connection; that one was not stale."""

    async def _create_connection(self, *args: Any, **kwargs: Any) -> Any:  # aiohttp types it with private names
        _on_fresh_connection.set(True)
        return await super()._create_connection(*args, **kwargs)


class _Forwarding:
    """One request. Runs in the server's own task; a second, small one waits for the client to leave."""

    __slots__ = ("_client_left", "_proxy", "_receive", "_scope", "_send", "_task", "_watcher")

    def __init__(self, proxy: ReverseProxy, scope: Scope, receive: Receive, send: Send) -> None:
        self._proxy = proxy
        self._scope = scope
        self._receive = receive
        self._send = send
        self._task: asyncio.Task[Any] | None = asyncio.current_task()
        self._watcher: asyncio.Task[None] | None = None
        self._client_left = False

    async def run(self) -> None:
        """Forwards the request and relays the response. Raises ResponseCut when the engine broke off in between."""
        try:
            await self._forward()
        except AdmissionError as error:
            await send_error(self._send, error, anthropic=speaks_anthropic(self._scope["path"]))
        except asyncio.CancelledError:
            if not self._is_our_own_cancellation():
                raise
        finally:
            self._stop_watching()

    async def _forward(self) -> None:
        first = await self._receive()
        if first["type"] == "http.disconnect":
            return
        response = await self._ask_engine(first)
        try:
            await self._relay(response)
        finally:
            # Complete, it has gone back to the pool already and this does nothing. Else it hangs up on the engine.
            response.close()

    async def _ask_engine(self, first: Message) -> aiohttp.ClientResponse:
        """Maps everything that aiohttp raises to our own errors, here and nowhere else."""
        try:
            response = await self._request(first)
        except aiohttp.ConnectionTimeoutError as error:
            raise self._unreachable("it took too long to connect", error) from None
        except (aiohttp.ServerTimeoutError, asyncio.TimeoutError):
            raise EngineTimeout("the engine did not answer in time") from None
        except aiohttp.ClientConnectorError as error:
            raise self._unreachable("no connection to it", error) from None
        except aiohttp.ClientConnectionError as error:
            raise self._unreachable("it closed the connection before it answered", error) from None
        except aiohttp.ClientError as error:
            raise self._unreachable("its answer is not HTTP", error) from None
        except ValueError as error:
            # A header that the server let through and that aiohttp will not write.
            raise InvalidHeader(f"the request cannot be forwarded: {error}") from None
        if not 200 <= response.status <= 599:
            response.close()
            raise self._unreachable(f"it answered with status {response.status}", None)
        return response

    async def _request(self, first: Message) -> aiohttp.ClientResponse:
        """Sends the request, a second time if the connection turned out to be one that the engine had closed.

        A proxy must not repeat a POST (RFC 9110, section 9.2.2) unless it can tell that the first was not applied.
        That is so close to certain here that a failure would be the worse answer: the connection had been idle before,
        not one byte came back, and it broke within a round trip of being written to, which is what a connection closed
        by the engine in that very moment looks like. An engine that took the request and then failed takes longer, and
        its failure is reported. If it had started after all, the break cancels that run: what is lost is computing,
        not state. A body that was streamed is gone and never sent twice.
        """
        if first.get("more_body", False):
            return await self._attempt(self._body(first))
        self._watcher = asyncio.create_task(self._watch())
        body = first.get("body", b"") or None
        sent_at_s = self._watcher.get_loop().time()
        try:
            return await self._attempt(body)
        except aiohttp.ClientConnectionError as error:
            elapsed_s = self._watcher.get_loop().time() - sent_at_s
            if elapsed_s > _STALE_WITHIN_S or not _may_be_stale(error):
                raise
        return await self._attempt(body)

    async def _attempt(self, body: bytes | AsyncIterator[bytes] | None) -> aiohttp.ClientResponse:
        scope = self._scope
        headers = forwarded_headers(scope)
        if body is not None and not isinstance(body, bytes):
            length = declared_length(scope["headers"])
            if length is not None:
                headers["content-length"] = length
        url = self._proxy.upstream + target(scope)
        _on_fresh_connection.set(False)
        return await self._proxy.session().request(
            scope["method"], URL(url, encoded=True), headers=headers, data=body, allow_redirects=False
        )

    async def _relay(self, response: aiohttp.ClientResponse) -> None:
        content = response.content
        _break_with_its_connection(response)
        headers = returned_headers(response.status, response.raw_headers)
        await self._send({"type": "http.response.start", "status": response.status, "headers": headers})
        complete = False
        while not complete:
            try:
                chunk = await content.readany()
            except (aiohttp.ClientError, asyncio.TimeoutError) as error:
                raise ResponseCut(f"the engine broke off in the middle of its response: {_said(error)}") from None
            complete = content.at_eof()
            if complete:
                # Servers say `http.disconnect` after a complete response, too; that must not cancel anything.
                self._stop_watching()
            await self._send({"type": "http.response.body", "body": chunk, "more_body": not complete})

    async def _body(self, message: Message) -> AsyncIterator[bytes]:
        """The request's body as it comes in. Its end is where waiting for the client to leave begins."""
        while message["type"] == "http.request":
            if body := message.get("body", b""):
                yield body
            if not message.get("more_body", False):
                self._watcher = asyncio.create_task(self._watch())
                return
            message = await self._receive()
        self._cancel()
        raise ConnectionResetError("the client left")

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._cancel()

    def _stop_watching(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()

    def _cancel(self) -> None:
        self._client_left = True
        if self._task is not None:
            self._task.cancel()

    def _is_our_own_cancellation(self) -> bool:
        """Whether the client's leaving is all that canceled this task; the server may have done so, too."""
        if sys.version_info >= (3, 11) and self._client_left and self._task is not None:
            return self._task.uncancel() == 0
        return self._client_left

    def _unreachable(self, reason: str, error: Exception | None) -> EngineUnreachable:
        # The address is for the log: it is no business of the client's.
        logger.warning("engine %s: %s (%s)", self._proxy.upstream, reason, _said(error))
        return EngineUnreachable(f"the engine could not be reached: {reason}")


def _said(error: Exception | None) -> str:
    """What happened, for a log. Not aiohttp's repr of a bad response, which shows the request's headers and its key."""
    message = error.message if isinstance(error, aiohttp.ClientResponseError) else str(error or "")
    return f"{type(error).__name__}: {message}" if error else "no error"


def _break_with_its_connection(response: aiohttp.ClientResponse) -> None:
    """Wakes the reader of a response whose connection is gone.

    aiohttp does so itself but for one case: its compiled parser, on finding that the chunks' framing is broken, closes
    the connection and tells nobody (3.14.5). The client would wait for ever, and hold what it holds.
    """
    content, connection = response.content, response.connection
    if connection is None or connection.protocol is None:
        return  # the whole response is there already

    def lost(closed: asyncio.Future[None] | None) -> None:
        if closed is not None and not closed.cancelled():
            closed.exception()  # retrieved: content has it as well
        if not content.is_eof() and content.exception() is None:
            content.set_exception(aiohttp.ClientPayloadError("the connection was lost"))

    closed = connection.protocol.closed
    if closed is None:
        lost(None)
        return
    closed.add_done_callback(lost)
    # The connection outlives the response, and must not collect a callback for each.
    content.on_eof(partial(_discard, closed, lost))


def _discard(future: asyncio.Future[None], callback: Callable[[asyncio.Future[None]], None]) -> None:
    future.remove_done_callback(callback)


def _may_be_stale(error: aiohttp.ClientConnectionError) -> bool:
    if _on_fresh_connection.get() or isinstance(error, aiohttp.ServerTimeoutError):
        return False
    # aiohttp puts what it could parse of a response in place of the message.
    return not isinstance(error, aiohttp.ServerDisconnectedError) or isinstance(error.message, str)


def _validated(upstream: str) -> str:
    """`upstream` without its trailing slash, ready to be put in front of a path."""
    parts = urlsplit(upstream)
    example = "write it like http://127.0.0.1:8000"
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
