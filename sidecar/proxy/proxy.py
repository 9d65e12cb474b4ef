"""Reverse proxy as an ASGI app: the client's bytes reach the engine, and the engine's bytes reach the client.

Path, query, bodies and headers are neither decoded nor re-encoded. Only the headers of one hop are removed (RFC 9110,
section 7.6.1), and only `host`, `via` and `x-forwarded-*` are written. The engine's own address in a `Location` becomes
a path, so that no client follows it past the sidecar. Nothing is held back: every read from the engine is sent on at
once, and the engine is read no faster than the client reads.

A client that disconnects cancels its request at the engine, before the response's headers as well as during a stream.
An engine that cannot be reached is a 502. An engine that breaks off during its response raises `ResponseCut`: the
server then closes the client's connection, so that half a response never looks complete.
"""

from __future__ import annotations

import asyncio
import logging
import random
import sys
from collections.abc import AsyncIterator, Callable, Container, Iterable
from typing import Any
from urllib.parse import quote

import aiohttp
from starlette.types import Message, Receive, Scope, Send

from sidecar.admission.handover import CALL_KEY, WRITE_KEY, AppCall, Write, is_internal
from sidecar.admission.responses import send_error, speaks_anthropic
from sidecar.admission.via import OWN_VIA, refuse_loop
from sidecar.errors import AdmissionError, EngineUnreachable, InvalidHeader, ResponseCut
from sidecar.events import Headers
from sidecar.proxy import EngineProxy
from sidecar.proxy.connection import FAILURES, ConnectionBroke, NotHttp, Response
from sidecar.proxy.upstream import (
    CONNECT_TIMEOUT_S,
    KEEPALIVE_S,
    Upstream,
    can_be_written,
    connect_trouble,
    error_text,
)

logger = logging.getLogger(__name__)

WATCH_AFTER_S = 0.1
"""Before it no task waits for the client's disconnect: a client that leaves so early costs its engine no more."""
SOON_S = 1.0
"""When a client may come again whose request the engine failed, at the earliest: it waits then for the engine."""

_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade".split()
)
# Written anew for the engine. The sidecar's server answers `expect` itself, when the body is first read.
_REPLACED = frozenset([b"host", b"content-length", b"expect"])
_LONGEST_LENGTH = 18
"""Digits of a Content-Length: an exabyte."""
_ADDRESSES = (b"location", b"content-location")
_OWN_VIA = OWN_VIA.encode("ascii")
_NOT_FORWARDED = _HOP_BY_HOP | _REPLACED


class Traffic:
    """Responses of the engine to admitted requests, as a sign of life. It costs a request two entries in a mapping."""

    def __init__(self) -> None:
        self._begun = 0
        self._begun_before = 0
        self._read: dict[Response, int] = {}

    def began(self, response: Response) -> None:
        """A response begins."""
        self._begun += 1
        self._read[response] = 0

    def ended(self, response: Response) -> None:
        """A response ends, in any way."""
        self._read.pop(response, None)

    def has_flowed(self) -> bool:
        """True if a response has begun, or more of one was read, since the last call."""
        has_flowed, self._begun_before = self._begun != self._begun_before, self._begun
        for response, before in self._read.items():
            has_flowed |= response.reads > before
            self._read[response] = response.reads
        return has_flowed


class ReverseProxy(EngineProxy):
    """Forwards every HTTP request to `upstream`, an `http://` or `https://` address, with a base path or without.

    `CONNECT_TIMEOUT_S` bounds name lookup and connecting (502 when over). It waits for the engine's answer as long as
    the client does: who admits requests ends their time. The first request opens the connection pool; the lifespan's
    shutdown, or `close`, closes it. `on_failure` is called when the engine fails a request: with the reason where no
    connection could be made, else with None. `siblings` are the other engines of its fleet: a redirect to one of them
    leads the client here again. Raises ValueError for an invalid address.
    """

    def __init__(self, upstream: str, *, keepalive_s: float = KEEPALIVE_S) -> None:
        self.upstream = Upstream(upstream, connect_timeout_s=CONNECT_TIMEOUT_S, keepalive_s=keepalive_s)
        self.traffic = Traffic()
        self.on_failure = lambda _: None
        self.siblings: Callable[[], Iterable[Upstream]] = tuple

    def __repr__(self) -> str:
        return f"ReverseProxy({self.upstream.url!r})"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one ASGI scope. WebSockets are refused: no API that is admitted uses them."""
        if scope["type"] == "http":
            await _Forwarding(self, scope, receive, send).run()
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1011, "reason": "this proxy does not forward WebSockets"})
        elif scope["type"] == "lifespan":
            await self._lifespan(receive, send)

    def for_client(self, location: bytes) -> bytes:
        """An address of this engine, or of one beside it, as the path by which a client gets there. Others stay."""
        upstreams = (self.upstream, *self.siblings())
        return next((path for one in upstreams if (path := one.path_for(location)) is not None), location)

    async def close(self) -> None:
        """Closes the connections to the engine. A request that comes later opens new ones."""
        await self.upstream.close()

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            await send({"type": "lifespan.startup.complete"})
            await receive()
        finally:
            await self.close()
        await send({"type": "lifespan.shutdown.complete"})


async def answer_failure(error: AdmissionError, scope: Scope, send: Send, *, was_sent: bool) -> None:
    """Ends a request that failed. `was_sent`: the engine may have received it.

    A request of the sidecar itself raises the error, with words that no client sees.
    """
    if is_internal(scope):
        raise error
    call: AppCall | None = scope.get(CALL_KEY)
    if call is None or call.failed(error, was_sent=was_sent):
        await send_error(send, error, anthropic=speaks_anthropic(scope["path"]))


class _Forwarding:
    """One request. It runs in the server's own task. A second, small one waits for a disconnect."""

    __slots__ = ("_disconnected", "_proxy", "_receive", "_scope", "_send", "_task", "_was_sent", "_watcher")

    def __init__(self, proxy: ReverseProxy, scope: Scope, receive: Receive, send: Send) -> None:
        self._proxy = proxy
        self._scope = scope
        self._receive = receive
        self._send = send
        self._task: asyncio.Task[Any] | None = asyncio.current_task()
        self._watcher: asyncio.Task[None] | asyncio.TimerHandle | None = None
        self._disconnected = False
        self._was_sent = True

    async def run(self) -> None:
        """Forwards the request and relays the response. Raises ResponseCut."""
        try:
            first = await self._receive()
            if first["type"] == "http.disconnect":
                return
            response = await self._ask_engine(first)
            try:
                await self._relay(response)
            finally:
                self._proxy.traffic.ended(response)
                if not response.is_complete:
                    response.close()
        except AdmissionError as error:
            self._stop_watching()
            await answer_failure(error, self._scope, self._send, was_sent=self._was_sent)
        except asyncio.CancelledError:
            if not self._is_our_own_cancellation():
                raise
        finally:
            self._stop_watching()

    async def _ask_engine(self, first: Message) -> Response:
        """Maps the exceptions of the connections to the sidecar's errors, here and nowhere else."""
        try:
            response = await self._request(first)
        except aiohttp.ConnectionTimeoutError as error:
            raise self._not_connected("it took too long to connect", error) from None
        except aiohttp.ClientConnectorError as error:
            raise self._not_connected("no connection to it", error) from None
        except (ConnectionBroke, aiohttp.ClientConnectionError) as error:
            raise self._unreachable("it closed the connection before it answered", error) from None
        except NotHttp as error:
            raise self._unreachable("its answer is not HTTP", error) from None
        except InvalidHeader:
            self._was_sent = False
            raise
        if not 200 <= response.status <= 599:
            response.close()
            raise self._unreachable(f"it answered with status {response.status}", None)
        return response

    async def _request(self, first: Message) -> Response:
        """Sends the request, and once more, on a new connection, if the engine had just closed the kept one.

        A proxy must not repeat a POST (RFC 9110, section 9.2.2) unless it knows that the first one was not applied.
        Where the connection `was_stale` that is nearly certain, and an error would be the worse answer. If the engine
        had started after all, the broken connection cancels that run: it loses computing, no state. A body that is
        streamed is never sent twice.
        """
        scope, upstream = self._scope, self._proxy.upstream
        head = scope["method"], target(scope), forwarded_headers(scope)
        if first.get("more_body", False):
            return await upstream.request(*head, self._body(first), declared_length(scope["headers"]))
        self._watch_client()
        body = first.get("body", b"")
        try:
            return await upstream.request(*head, body, len(body))
        except ConnectionBroke as broke:
            if not broke.was_stale:
                raise
        return await upstream.request(*head, body, len(body), is_again=True)

    async def _relay(self, response: Response) -> None:
        """Passes the response on. Bytes that were read together go out together, and others at once."""
        headers = returned_headers(response.status, response.headers, self._proxy.for_client)
        if not can_be_written(headers):
            raise self._unreachable("its answer's headers are not HTTP", None)
        is_admitted = CALL_KEY in self._scope
        if not is_admitted:  # an admitted request's response has headers of the admission controller
            headers.append((b"via", _OWN_VIA))
        await self._send({"type": "http.response.start", "status": response.status, "headers": headers})
        if response.status < 500 and is_admitted:
            self._proxy.traffic.began(response)
        write: Write | None = self._scope.get(WRITE_KEY)
        is_last = False
        while not is_last:
            try:
                part = await response.read(write)
            except FAILURES as error:
                self._proxy.on_failure(None)
                raise ResponseCut(f"the engine broke off in the middle of its answer: {error_text(error)}") from None
            is_last = response.is_complete
            if is_last:
                self._stop_watching()
            await self._send({"type": "http.response.body", "body": part, "more_body": not is_last})

    async def _body(self, message: Message) -> AsyncIterator[bytes]:
        """The request's body as it comes in. After its end the client is watched for a disconnect."""
        while message["type"] == "http.request":
            if body := message.get("body", b""):
                yield body
            if not message.get("more_body", False):
                self._watch_client()
                return
            message = await self._receive()
        self._cancel()
        raise ConnectionResetError("the client disconnected")

    def _watch_client(self) -> None:
        """From now on, or soon after, a disconnect cancels the request."""
        self._watcher = asyncio.get_running_loop().call_later(WATCH_AFTER_S, self._begin_to_watch)

    def _begin_to_watch(self) -> None:
        self._watcher = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._cancel()

    def _stop_watching(self) -> None:
        """Called before a response ends: servers also say `http.disconnect` after it, which must cancel nothing."""
        if self._watcher is not None:
            self._watcher.cancel()

    def _cancel(self) -> None:
        self._disconnected = True
        if self._task is not None:
            self._task.cancel()

    def _is_our_own_cancellation(self) -> bool:
        """True if only the client's disconnect canceled this task; the server may have done so, too."""
        if sys.version_info >= (3, 11) and self._disconnected and self._task is not None:
            return self._task.uncancel() == 0
        return self._disconnected

    def _not_connected(self, reason: str, error: aiohttp.ClientError) -> EngineUnreachable:
        """An error before anything was sent."""
        self._was_sent = False
        upstream = self._proxy.upstream
        return self._unreachable(reason, error, connect_trouble(upstream.url, error, upstream.connect_timeout_s))

    def _unreachable(self, reason: str, error: Exception | None, trouble: str | None = None) -> EngineUnreachable:
        """`trouble` says why there is no connection; None where there was one."""
        url = self._proxy.upstream.url
        if not is_internal(self._scope):
            # The address is only for the log: the client must not see it.
            logger.warning("engine %s: %s (%s)", url, reason, error_text(error), extra={"event": "engine_unreachable"})
            self._proxy.on_failure(trouble)
        shown = trouble or f"{url}: {reason}"
        message = f"the engine could not be reached: {reason}"
        retry_after_s = SOON_S * random.uniform(1, 2)
        return EngineUnreachable(message, trouble=shown, is_connected=trouble is None, retry_after_s=retry_after_s)


def target(scope: Scope) -> bytes:
    """The request's target as the client wrote it. Raises InvalidHeader where it is no path."""
    raw_path: bytes = scope.get("raw_path") or quote(scope["path"]).encode("ascii")
    if not raw_path.startswith(b"/") or scope["method"] == "CONNECT":
        raise InvalidHeader("the request's target must be a path")
    query: bytes = scope.get("query_string", b"")
    return raw_path + b"?" + query if query else raw_path


def forwarded_headers(scope: Scope) -> list[tuple[bytes, bytes]]:
    """The client's headers for the engine: without this hop's, without a length, with `via` and `x-forwarded-*`.

    Raises LoopDetected for a request that this process has sent.
    """
    received: Headers = scope["headers"]
    first = dict(reversed(received))
    dropped = _NOT_FORWARDED | _named_by_connection(received) if b"connection" in first else _NOT_FORWARDED
    headers = [pair for pair in received if pair[0] not in dropped]
    if client := scope.get("client"):
        _append(headers, first, b"x-forwarded-for", client[0].encode())
    if b"via" in first:
        refuse_loop(b", ".join([value for name, value in headers if name == b"via"]))
    _append(headers, first, b"via", _OWN_VIA)
    if b"x-forwarded-proto" not in first:
        headers.append((b"x-forwarded-proto", scope.get("scheme", "http").encode()))
    if b"x-forwarded-host" not in first and b"host" in first:
        headers.append((b"x-forwarded-host", first[b"host"]))
    return headers


def returned_headers(
    status: int, raw_headers: Headers, for_client: Callable[[bytes], bytes]
) -> list[tuple[bytes, bytes]]:
    """The engine's headers for the client, in ASGI's lower case: without this hop's; duplicates and order stay.

    `for_client` writes an address of the engine's as the client must write it: else a redirect would lead past here.
    """
    received = [(name.lower(), value) for name, value in raw_headers]
    present, dropped = dict(received), _HOP_BY_HOP
    if b"location" in present or b"content-location" in present:
        received = [(name, for_client(value)) if name in _ADDRESSES else (name, value) for name, value in received]
    if b"connection" in present:
        dropped |= _named_by_connection(received)
    # Beside chunks a length has no meaning and is how responses are smuggled; 204 and 304 have no body.
    if status in {204, 304} or b"transfer-encoding" in present:
        dropped |= {b"content-length"}
    return [header for header in received if header[0] not in dropped]


def declared_length(headers: Headers) -> int | None:
    """The length of a body that is streamed; None where it comes in chunks. Raises InvalidHeader for two lengths."""
    lengths = {value for name, value in headers if name == b"content-length"}
    if any(name == b"transfer-encoding" for name, _ in headers) or not lengths:
        return None
    length = lengths.pop()
    if lengths or not length.isdigit() or len(length) > _LONGEST_LENGTH:
        raise InvalidHeader("content-length must be one whole number")
    return int(length)  # written without leading zeros, which some servers read as octal


def _named_by_connection(headers: Headers) -> frozenset[bytes]:
    values = [value for name, value in headers if name == b"connection"]
    return frozenset(token.strip().lower() for value in values for token in value.split(b","))


def _append(headers: list[tuple[bytes, bytes]], received: Container[bytes], name: bytes, value: bytes) -> None:
    """Adds a value to those that `headers` have of that name, in one line."""
    if name in received:
        value = b", ".join([*(before for found, before in headers if found == name), value])
        headers[:] = [pair for pair in headers if pair[0] != name]
    headers.append((name, value))
