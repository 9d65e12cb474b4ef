"""HTTP/1.1 exchanges on one kept connection to the engine: a request out, its response in, read as it comes.

aiohttp makes the connection: names, addresses tried in turn, TLS. What is written and read on it is done here: through
aiohttp's session a request of `sidecar serve` costs 38% more instructions in all, and a streamed chunk more than twice
as many (benchmarks/instructions), because a task has to be woken for each.

Only what cannot be mistaken is accepted. Framing that llhttp refuses, a head or framing of more than `MOST_HEAD_BYTES`,
bytes that no request asked for, and a request body of another length than declared end the connection. It is used
again only after a whole response to a whole request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import aiohttp
import httptools
from yarl import URL

from sidecar.admission.handover import Write
from sidecar.server.unix_address import connector_to, url_for

MOST_HEAD_BYTES = 128 * 1024
"""Of a response's head, of its trailers, and of what frames a chunk. uvicorn and axum write a few hundred bytes."""
READ_AHEAD_BYTES = 128 * 1024
"""Bytes of a response that are read ahead of its client. Twice uvicorn's limit for bodies."""
STALE_WITHIN_S = 0.2
"""A connection that was closed before it was written to fails within a round trip."""
_SWITCHES = 101
_WITHOUT_BODY = frozenset((_SWITCHES, 204, 304))
_UNKNOWN = -1
_TOO_LARGE = f"its head, or what frames its chunks, is larger than {MOST_HEAD_BYTES} bytes"


class ConnectionBroke(Exception):
    """The connection ended before the response did.

    `was_stale` says that the engine had most likely closed it before the request came: the connection had been used
    before, not one byte came back, and it ended within `STALE_WITHIN_S`. An engine that took the request and then
    failed takes longer.
    """

    def __init__(self, message: str, *, was_stale: bool = False) -> None:
        super().__init__(message)
        self.was_stale = was_stale


class NotHttp(Exception):
    """The bytes of the engine are no HTTP response."""


FAILURES = (ConnectionBroke, NotHttp)


class Response:
    """One response of the engine. `status` and `headers` are there after `head`.

    `is_complete` says that nothing follows what was read. `reads` counts how often some of it was read so far. Its
    `parts`, of `unread_bytes`, are those that no one has taken yet.
    """

    def __init__(self, connection: EngineConnection, *, is_head: bool) -> None:
        self.status = _UNKNOWN
        self.headers: list[tuple[bytes, bytes]] = []
        self.is_complete = False
        self.is_head = is_head
        self.reads = self.unread_bytes = 0
        self._connection = connection
        self.parts: list[bytes] = []
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._write: Write | None = None

    async def head(self) -> None:
        """Returns when the status and the headers are there. Raises one of FAILURES."""
        while self.status == _UNKNOWN:
            await self._more()

    async def read(self, write: Write | None = None) -> bytes:
        """The bytes of the body that have come, together; else those that come next. Nothing where the body has ended.

        What comes while this waits goes to `write`, where it is read: this returns only what that has not taken, and
        the end. Raises one of FAILURES.
        """
        self._write = write
        try:
            while not self.parts and not self.is_complete:
                await self._more()
        finally:
            self._write = None
        return self._take()

    def close(self) -> None:
        """Ends the exchange. Where the response is not complete, the connection ends, too."""
        self._connection.give_up(self)

    def fail(self, failure: Exception) -> None:
        """The connection has no more of it."""
        if not self.is_complete and self._failure is None:
            self._failure = failure
            self._wake()

    def progressed(self) -> None:
        """The connection has read something: it is written, or the task that waits is woken."""
        self.reads += 1
        if self._write is not None and self.parts and not self.is_complete:
            part = self._take()
            if self._write(part):
                return
            self.parts, self.unread_bytes, self._write = [part], len(part), None
        self._wake()

    def _take(self) -> bytes:
        parts, self.unread_bytes = self.parts, 0
        together = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        return together

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _more(self) -> asyncio.Future[None]:
        if self._failure is not None:
            raise self._failure
        self._connection.resume_reading()
        self._waiter = self._connection.loop.create_future()
        return self._waiter


class EngineConnection(asyncio.Protocol):
    """One connection. `on_free` gets it when it can be used again, `on_lost` when it has ended."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.Transport,
        *,
        on_free: Callable[[EngineConnection], None],
        on_lost: Callable[[EngineConnection], None],
    ) -> None:
        self.loop = loop
        self.free_since_s = 0.0
        self._was_used = False
        self._sent_s = 0.0
        self._transport = transport
        self._on_free, self._on_lost = on_free, on_lost
        self._parser: httptools.HttpResponseParser | None = None
        self._response: Response | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._is_in_head = self._is_kept = self._is_paused = False
        self._framing_bytes = 0
        self._upload: asyncio.Task[None] | None = None
        self._is_uploaded = True
        self._can_write: asyncio.Future[None] | None = None

    # -- a request

    def send(self, head: bytes, body: bytes | AsyncIterator[bytes], length: int | None, *, is_head: bool) -> Response:
        """Sends a request. Of a body that is streamed `length` is the declared length, None where it goes in chunks."""
        response = self._response = Response(self, is_head=is_head)
        if self._parser is None:
            self._parser = httptools.HttpResponseParser(self)
        self._is_in_head, self._is_kept, self._framing_bytes = True, False, 0
        self._sent_s = self.loop.time()
        if isinstance(body, bytes):
            self._is_uploaded = True
            self._transport.writelines((head, body) if body else (head,))
        else:
            self._is_uploaded = False
            self._transport.write(head)
            self._upload = self.loop.create_task(self._send_body(response, body, length))
        return response

    def give_up(self, response: Response) -> None:
        """No one reads this response any further."""
        if self._response is response:
            self._fail(ConnectionBroke("given up"))

    def can_be_used(self) -> bool:
        """True if another request may be sent."""
        return not self._transport.is_closing()

    def abort(self) -> None:
        """Ends the connection at once."""
        self._transport.abort()

    def resume_reading(self) -> None:
        """Reads on, where too much had been read ahead."""
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()

    # -- the transport's calls

    def data_received(self, data: bytes) -> None:
        response, parser = self._response, self._parser
        if response is None or parser is None:
            self.abort()  # no one has asked for it
            return
        self._framing_bytes += len(data)
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._is_kept = False
        except httptools.HttpParserError as error:
            if not response.is_complete:
                self._fail(NotHttp(str(error.__context__ or error)))
                return
            self._is_kept = False
        if response.is_complete:
            self._end(response)
        elif self._framing_bytes > MOST_HEAD_BYTES:
            self._fail(NotHttp(_TOO_LARGE))
        else:
            response.progressed()
            if response.unread_bytes > READ_AHEAD_BYTES:
                self._is_paused = True
                self._transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        response = self._response
        if response is not None and exc is None and self._ends_here(response):
            response.is_complete = True
            self._end(response)
        else:
            self._fail(ConnectionBroke(str(exc or "the connection ended"), was_stale=self._was_stale()))
        self._on_lost(self)

    def pause_writing(self) -> None:
        self._can_write = self.loop.create_future()

    def resume_writing(self) -> None:
        if self._can_write is not None and not self._can_write.done():
            self._can_write.set_result(None)
        self._can_write = None

    # -- the parser's calls

    def on_message_begin(self) -> None:
        if self._response is None or self._response.is_complete:
            raise NotHttp("it sent a response that no one had asked for")
        self._headers, self._is_in_head = [], True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:  # later ones are trailers
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        response, status = self._response, self._parser.get_status_code()
        if response is None or response.is_complete or (100 <= status < 200 and status != _SWITCHES):
            return  # an early response is passed over
        if self._framing_bytes > MOST_HEAD_BYTES and _size(self._headers) > MOST_HEAD_BYTES:
            raise NotHttp(_TOO_LARGE)
        self._is_in_head, self._framing_bytes = False, 0
        self._is_kept = self._parser.should_keep_alive()
        response.status, response.headers = status, self._headers
        response.is_complete = response.is_head or status in _WITHOUT_BODY

    def on_body(self, body: bytes) -> None:
        response = self._response
        if response is None or response.is_complete:  # it has none, as that to HEAD
            self._is_kept = False
            return
        self._framing_bytes = 0
        response.parts.append(body)
        response.unread_bytes += len(body)

    def on_message_complete(self) -> None:
        if not self._is_in_head and self._response is not None:
            self._response.is_complete = True

    # -- the end

    def _end(self, response: Response) -> None:
        """The response is complete."""
        self._response = None
        if response.is_head or response.status in _WITHOUT_BODY:
            self._parser = None  # it may wait for a body
        if self._is_kept and self._is_uploaded and not self._transport.is_closing():
            self.resume_reading()
            self._was_used = True
            self._on_free(self)
        else:
            self._stop_upload()
            self.abort()
        response.progressed()

    def _fail(self, failure: Exception) -> None:
        response, self._response = self._response, None
        self._stop_upload()
        self.abort()
        if response is not None:
            response.fail(failure)

    def _ends_here(self, response: Response) -> bool:
        """True if the end of the connection is the end of the response (RFC 9112, section 6.3)."""
        if response.status == _UNKNOWN or response.status in _WITHOUT_BODY:
            return False
        codings = [value for name, value in response.headers if name.lower() == b"transfer-encoding"]
        if codings:
            return codings[-1].rpartition(b",")[2].strip().lower() != b"chunked"
        return not any(name.lower() == b"content-length" for name, _ in response.headers)

    def _was_stale(self) -> bool:
        is_silent = self._is_in_head and not self._framing_bytes
        return self._was_used and is_silent and self.loop.time() - self._sent_s <= STALE_WITHIN_S

    # -- a body that is streamed

    async def _send_body(self, response: Response, body: AsyncIterator[bytes], length: int | None) -> None:
        left = length
        try:
            async for part in body:
                if left is not None:
                    left -= len(part)
                    if left < 0:
                        raise ConnectionBroke("the request's body is longer than declared")
                await self._write(part if length is not None else b"%x\r\n%b\r\n" % (len(part), part))
            if left:
                raise ConnectionBroke("the request's body is shorter than declared")
        except Exception as error:
            if self._response is response:
                self._upload = None
                self._fail(error if isinstance(error, ConnectionBroke) else ConnectionBroke(str(error)))
            return
        if length is None:
            self._transport.write(b"0\r\n\r\n")
        self._is_uploaded = True

    async def _write(self, part: bytes) -> None:
        self._transport.write(part)
        if self._can_write is not None:
            await self._can_write

    def _stop_upload(self) -> None:
        if self._upload is not None:
            self._upload.cancel()
            self._upload = None
        self.resume_writing()


class EngineConnections:
    """The connections to one address. aiohttp's connector makes them, and knows how many there are."""

    def __init__(self, url: str, timeout: aiohttp.ClientTimeout, *, keepalive_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        # No limit here: the admission controller decides how many requests run at once.
        self._connector = connector_to(url)
        self._address = aiohttp.ClientRequest("GET", URL(url_for(url), encoded=True), loop=self._loop)
        self._timeout = timeout
        self._keepalive_s = keepalive_s
        self._free: list[EngineConnection] = []
        self._made: dict[EngineConnection, aiohttp.connector.Connection] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    async def request(
        self, head: bytes, body: bytes | AsyncIterator[bytes], length: int | None, *, is_head: bool, is_again: bool
    ) -> Response:
        """Sends a request, and returns at the response's headers. See `Upstream.request`."""
        kept = self._take() if isinstance(body, bytes) and not is_again else None
        connection = kept or await self._new()
        response = connection.send(head, body, length, is_head=is_head)
        try:
            await response.head()
        except BaseException:
            response.close()
            raise
        return response

    async def close(self) -> None:
        """Ends all of them."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        for connection, made in self._made.items():
            made.close()  # or the connector would wait for it
            connection.abort()
        await self._connector.close()

    def _take(self) -> EngineConnection | None:
        """The connection that was used last, where one can be used again."""
        oldest_s = self._loop.time() - self._keepalive_s
        while self._free:
            connection = self._free.pop()
            if connection.free_since_s >= oldest_s and connection.can_be_used():
                return connection
            connection.abort()
        return None

    async def _new(self) -> EngineConnection:
        """Another connection. Raises aiohttp's exceptions."""
        try:
            made = await self._connector.connect(self._address, [], self._timeout)
        except asyncio.TimeoutError:
            raise aiohttp.ConnectionTimeoutError("it took too long to connect") from None
        transport, protocol = made.transport, made.protocol
        if transport is None or transport.is_closing() or protocol is None or protocol.should_close:
            made.close()
            raise aiohttp.ServerDisconnectedError("the engine closed the connection, or spoke first")
        connection = EngineConnection(self._loop, transport, on_free=self._put_back, on_lost=self._forget)
        transport.set_protocol(connection)
        self._made[connection] = made
        return connection

    def _put_back(self, connection: EngineConnection) -> None:
        if self._is_closed:
            connection.abort()
            return
        connection.free_since_s = self._loop.time()
        self._free.append(connection)
        if self._timer is None:
            self._timer = self._loop.call_later(self._keepalive_s, self._close_idle)

    def _close_idle(self) -> None:
        """Closes what was not used for so long, before the engine does."""
        self._timer = None
        oldest_s = self._loop.time() - self._keepalive_s
        kept = [connection for connection in self._free if connection.free_since_s > oldest_s]
        for connection in self._free:
            if connection.free_since_s <= oldest_s:
                connection.abort()
        self._free = kept
        if kept:
            self._timer = self._loop.call_at(kept[0].free_since_s + self._keepalive_s, self._close_idle)

    def _forget(self, connection: EngineConnection) -> None:
        if connection in self._free:
            self._free.remove(connection)
        made = self._made.pop(connection, None)
        if made is not None:
            made.close()


def _size(headers: list[tuple[bytes, bytes]]) -> int:
    return sum(len(name) + len(value) for name, value in headers)
