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
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from multidict import CIMultiDict

from sidecar.asgi.engine_call import CALL_KEY
from sidecar.asgi.hop import can_be_written, declared_length, forwarded_headers, returned_headers, target
from sidecar.asgi.pages import OWN
from sidecar.asgi.responses import send_error, speaks_anthropic
from sidecar.asgi.types import Message, Receive, Scope, Send
from sidecar.asgi.upstream import CONNECT_TIMEOUT_S, KEEPALIVE_S, Upstream, may_be_stale, said
from sidecar.errors import AdmissionError, EngineTimeout, EngineUnreachable, InvalidHeader

logger = logging.getLogger(__name__)


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
        self.upstream = Upstream(
            upstream,
            connect_timeout_s=connect_timeout_s,
            response_timeout_s=response_timeout_s,
            keepalive_s=keepalive_s,
        )

    def __repr__(self) -> str:
        return f"ReverseProxy({self.upstream.url!r})"

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
        await self.upstream.close()

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.close()
        await send({"type": "lifespan.shutdown.complete"})


class _Forwarding:
    """One request. Runs in the server's own task; a second, small one waits for the client to leave."""

    __slots__ = ("_client_left", "_proxy", "_receive", "_scope", "_send", "_task", "_was_sent", "_watcher")

    def __init__(self, proxy: ReverseProxy, scope: Scope, receive: Receive, send: Send) -> None:
        self._proxy = proxy
        self._scope = scope
        self._receive = receive
        self._send = send
        self._task: asyncio.Task[Any] | None = asyncio.current_task()
        self._watcher: asyncio.Task[None] | None = None
        self._client_left = False
        self._was_sent = True

    async def run(self) -> None:
        """Forwards the request and relays the response. Raises ResponseCut when the engine broke off in between."""
        try:
            await self._forward()
        except AdmissionError as error:
            self._stop_watching()
            if (call := self._scope.get(CALL_KEY)) is not None:
                call.answered_by_proxy(was_sent=self._was_sent)
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
            # One that is complete has closed itself and gone back to the pool. Else this hangs up on the engine.
            if not response.closed:
                response.close()

    async def _ask_engine(self, first: Message) -> aiohttp.ClientResponse:
        """Maps everything that aiohttp raises to our own errors, here and nowhere else."""
        try:
            response = await self._request(first)
        except aiohttp.ConnectionTimeoutError as error:
            self._was_sent = False
            raise self._unreachable("it took too long to connect", error) from None
        except (aiohttp.ServerTimeoutError, asyncio.TimeoutError):
            raise EngineTimeout("the engine did not answer in time") from None
        except aiohttp.ClientConnectorError as error:
            self._was_sent = False
            raise self._unreachable("no connection to it", error) from None
        except aiohttp.ClientConnectionError as error:
            raise self._unreachable("it closed the connection before it answered", error) from None
        except aiohttp.ClientError as error:
            raise self._unreachable("its answer is not HTTP", error) from None
        except ValueError as error:
            # A header that the server let through and that aiohttp will not write.
            self._was_sent = False
            raise InvalidHeader(f"the request cannot be forwarded: {error}") from None
        if not 200 <= response.status <= 599:
            response.close()
            raise self._unreachable(f"it answered with status {response.status}", None)
        return response

    async def _request(self, first: Message) -> aiohttp.ClientResponse:
        """Sends the request, a second time if the connection turned out to be one that the engine had closed.

        A proxy must not repeat a POST (RFC 9110, section 9.2.2) unless it can tell that the first was not applied.
        That is so close to certain after what `may_be_stale` asks for that failing would be the worse answer. If the
        engine had started after all, the break cancels that run: what is lost is computing, not state. A body that is
        streamed is gone and never sent twice.
        """
        if first.get("more_body", False):
            headers = forwarded_headers(self._scope)
            if (length := declared_length(self._scope["headers"])) is not None:
                headers["content-length"] = length
            return await self._attempt(headers, self._body(first))
        self._watcher = asyncio.create_task(self._watch())
        body = first.get("body", b"") or None
        sent_at_s = time.monotonic()
        try:
            return await self._attempt(forwarded_headers(self._scope), body)
        except aiohttp.ClientConnectionError as error:
            if not may_be_stale(error, time.monotonic() - sent_at_s):
                raise
        return await self._attempt(forwarded_headers(self._scope), body)

    async def _attempt(
        self, headers: CIMultiDict[str], body: bytes | AsyncIterator[bytes] | None
    ) -> aiohttp.ClientResponse:
        return await self._proxy.upstream.request(self._scope["method"], target(self._scope), headers, body)

    async def _relay(self, response: aiohttp.ClientResponse) -> None:
        content = response.content
        headers = returned_headers(response.status, response.raw_headers)
        if not can_be_written(headers):
            raise self._unreachable("its answer's headers are not HTTP", None)
        await self._send({"type": "http.response.start", "status": response.status, "headers": headers})
        complete = False
        while not complete:
            try:
                chunk = await content.readany()
            except (aiohttp.ClientError, asyncio.TimeoutError) as error:
                raise ResponseCut(f"the engine broke off in the middle of its response: {said(error)}") from None
            complete = content.at_eof()
            if complete:
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
        """Before a response ends: servers say `http.disconnect` behind it, too, and that must not cancel anything."""
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
        if OWN not in self._scope.get("extensions", {}):
            # The address is for the log: it is no business of the client's.
            fields = {"event": "engine_unreachable"}
            logger.warning("engine %s: %s (%s)", self._proxy.upstream.url, reason, said(error), extra=fields)
        return EngineUnreachable(f"the engine could not be reached: {reason}")
