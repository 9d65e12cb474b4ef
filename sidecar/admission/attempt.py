"""One attempt at the engine: how it is preempted before its first byte, and how long it may take.

The watchdog measures the time (`EngineTime`): a request pays nothing for it, and neither does a chunk. So a time may be
noticed three of the watchdog's intervals late, and never early. What counts are the bytes of the engine's body: neither
the head, which streaming servers send before the engine has begun, nor the sidecar's own comments.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Send

from sidecar.admission.answer import EngineCall
from sidecar.admission.client import ClientChannel, SseKeepAlive
from sidecar.admission.intake import SizedRequest
from sidecar.admission.responses import send_error
from sidecar.admission.usage import UsageReader
from sidecar.apis import Api
from sidecar.durations import short_duration
from sidecar.engines.watch import EngineHealth, EngineState
from sidecar.errors import AdmissionError, EngineTimeout, NoEngine, ResponseCut
from sidecar.events import ReplayReason
from sidecar.policy.model import Policy
from sidecar.policy.tier import Timeouts
from sidecar.pools import Lease


async def disconnects_before(
    disconnect: asyncio.Task[Message], when_ended: Callable[[Callable[[], object]], None]
) -> bool:
    """Returns when `when_ended` calls back, or a client disconnects: whether it has by then."""
    if not disconnect.done():
        ended = asyncio.get_running_loop().create_future()
        when_ended(partial(ended.set_result, None))
        await asyncio.wait((disconnect, ended), return_when=asyncio.FIRST_COMPLETED)
    return disconnect.done()


class PreemptibleAttempt:
    """One attempt at the engine that may be preempted before its first byte: the app's `receive` and `send` for it.

    The app is aborted by an `http.disconnect`, because every serving app aborts its engine then, and few do so when
    their task is canceled. The response of an aborted attempt is dropped; when the app has returned, the request waits
    again. An app that does not listen cannot be aborted, and its first byte keeps the room for good. The response's
    head waits for the first byte of the body: streaming apps send the head before the engine has begun.

    `receive` and `send` are those of an attempt that is not preempted, `disconnect` gives the task that ends when the
    client disconnects. `is_lost` says that the app was aborted: no one gets this attempt's response.
    """

    __slots__ = (
        "_disconnect",
        "_has_body",
        "_is_kept",
        "_lease",
        "_preempted",
        "_receive",
        "_send",
        "_start",
        "is_lost",
    )

    def __init__(
        self, lease: Lease, receive: Receive, send: Send, disconnect: Callable[[], asyncio.Task[Message]]
    ) -> None:
        self.is_lost = False
        self._lease = lease
        self._receive = receive
        self._send = send
        self._disconnect = disconnect
        self._preempted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._start: Message | None = None
        self._has_body = False
        self._is_kept = False

    def preempt(self) -> None:
        """A more important request needs the room. May be called at any time, by the pool."""
        if not self._preempted.done():
            self._preempted.set_result(None)

    async def receive(self) -> Message:
        """See ASGI's `receive`."""
        if not self._has_body:
            self._has_body = True
            return await self._receive()
        if self.is_lost:  # an engine may ask again after its request's end
            return {"type": "http.disconnect"}
        disconnect = self._disconnect()
        while not disconnect.done():
            if self._preempted.done() and not self._is_kept:
                self.is_lost = True
                return {"type": "http.disconnect"}
            waited = (disconnect,) if self._is_kept else (disconnect, self._preempted)
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        return disconnect.result()

    def send(self, message: Message) -> Awaitable[None]:
        """See ASGI's `send`. What follows the first byte needs no coroutine here."""
        return self._send(message) if self._is_kept and not self.is_lost else self._send_first(message)

    async def _send_first(self, message: Message) -> None:
        if self.is_lost:
            return
        if not self._is_kept:
            if message["type"] == "http.response.start":
                self._start = message
                return
            if message["type"] == "http.response.body" and not message.get("body") and message.get("more_body", False):
                return
            self._is_kept = True
            self._lease.keep()
            if self._start is not None:
                await self._send(self._start)
        await self._send(message)


READ_WITHIN_S = 5.0
"""So long a client that does not read is waited for, to get the error at the end of its answer."""


class EngineTime:
    """The time of one attempt that was admitted at `since_us`. `usage` reads its answer, and `client` gets it.

    An answer that does not stream, as `streams` says, comes when it is complete: only the time in all says that it is
    late.
    """

    __slots__ = ("_client", "_probe", "_progress", "_progress_us", "_since_us", "_streams", "_timeouts", "_usage")

    def __init__(
        self, timeouts: Timeouts, usage: UsageReader, client: ClientChannel, since_us: int, *, streams: bool
    ) -> None:
        self._timeouts = timeouts
        self._usage = usage
        self._client = client
        self._probe: asyncio.Task[None] | None = None
        self._since_us = self._progress_us = since_us
        self._streams = streams
        self._progress = (0, 0)

    def exceeded(self, now_us: int) -> EngineTimeout | None:
        """The error, where the engine has taken too long."""
        most, usage, progress = self._timeouts, self._usage, self._usage.passed
        if progress != self._progress:
            self._progress, self._progress_us = progress, now_us
            if self._probe is not None and self._probe.done():
                self._probe = None
        if now_us - self._since_us > most.total_s * 1e6:
            return _error("did not complete its answer", most.total_s)
        if usage.has_begun:
            if now_us - self._progress_us > most.between_bytes_s * 1e6 and self._is_client_ready(now_us):
                return _error("sent nothing more", most.between_bytes_s)
        elif self._streams and now_us - self._since_us > most.first_byte_s * 1e6:
            return _error("did not begin its answer", most.first_byte_s)
        return None

    def _is_client_ready(self, now_us: int) -> bool:
        """True if the client takes what it is sent. While it does not, the engine is not silent.

        A `send` of nothing says it: that ends when the client has read enough. So the chunks themselves need not be
        watched.
        """
        if self._probe is None:
            self._probe = asyncio.ensure_future(self._send_nothing())
            return False
        if not self._probe.done():
            self._progress_us = now_us
        return self._probe.done()

    async def _send_nothing(self) -> None:
        with suppress(Exception):  # the app gets it, too
            await self._client.send({"type": "http.response.body", "body": b"", "more_body": True})


def _error(did: str, within_s: float) -> EngineTimeout:
    message = f"the engine {did} within {short_duration(within_s)}"
    # Spread, because all that such an engine ran are told at the same time.
    return EngineTimeout(message, retry_after_s=random.uniform(1, 2))


async def break_off(
    client: ClientChannel, error: AdmissionError, api: Api, usage: UsageReader, *, streams: bool
) -> None:
    """Ends an answer that has begun, and that `usage` has read: an event, where it `streams`, tells the client why.

    Raises ResponseCut.
    """
    send = client.send

    async def send_and_go_on(message: Message) -> None:
        # Blank lines first: the engine may have stopped in the middle of an event.
        await send({**message, "body": b"\n\n" + message["body"], "more_body": True})

    if client.keepalive is not None:
        await client.keepalive.break_off()
    if streams and (usage.chunks or not usage.has_begun):  # else the engine has not done as it was asked
        telling = send_error(SseKeepAlive(send_and_go_on, api, ()), error, anthropic=api is Api.MESSAGES)
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(telling, READ_WITHIN_S)
    raise ResponseCut(error.message)


# -- The engines of a pool of several, as the middleware sees them. The package `fleet` implements this.
#
# A request has one route. Each time it is admitted, its route begins an attempt at the engine that its grant names.
# An attempt that ends before the first byte of the response's body may be repeated: the request waits again.

SOONEST_S, LATEST_S = 1.0, 60.0
"""When a client may come again that found no engine: see `no_engine`."""


class EngineRoute(Protocol):
    """One request's way to the engines of its pool.

    `hits` are the prompt's tokens that engines are predicted to have, by their ids. `barred` are the names of the
    engines that broke the request in its last attempt. `replay` is why it was sent, or is to be sent, to an engine
    again: the last of the reasons, None before the first.
    """

    hits: tuple[tuple[str, int], ...]
    barred: tuple[str, ...]
    replay: ReplayReason | None
    usage: UsageReader
    """Reads the response of the present attempt."""

    def begin(self, lease: Lease, send: Send) -> Send:
        """Begins an attempt at the engine of the lease's grant. Returns the app's `send`.

        What it passes on to `send` begins with the first byte of the body.
        """

    def call(self) -> EngineCall:
        """The call of the app in the next attempt."""

    def pinned(self, app: ASGIApp) -> ASGIApp:
        """The app, for further questions to the engine of the present attempt."""

    def failed(self, error: Exception) -> bool:
        """The app raised an error. Whether the request may wait again: nothing of a response was passed on."""

    async def waits_again(self) -> bool:
        """True if the failed attempt is repeated. Call it once, before the lease is handed back.

        False: the call's `error` is the request's answer.
        """

    def first_byte(self) -> None:
        """The first byte of the response's body is there."""

    def ended(self) -> None:
        """The request is over."""


class EngineRouting(Protocol):
    """Routes for the requests of one pool."""

    def route(self, request: SizedRequest) -> EngineRoute:
        """The route of a request that enters the pool next."""

    def change_policy(self, policy: Policy) -> None:
        """Another policy counts from now on."""

    def wake(self) -> None:
        """A lease of a request without a route enters the pool next. Raises Draining as `route` does."""

    def url_for(self, engine_id: str) -> str | None:
        """The address of an engine, by its id; None where it runs in this process, or is gone."""


def no_engine(watch: EngineHealth) -> NoEngine:
    """The refusal while no request can be sent to the engine. Its address and the trouble are for the operator alone.

    A client comes again after as long as the engine has been away already, within `SOONEST_S` and `LATEST_S`.
    """
    lasted_s = watch.for_s
    if watch.state is EngineState.MISMATCH:
        why = "another engine answers than the one that this server is set up for"
    else:
        why = f"the engine has not answered for {short_duration(lasted_s)}"
    retry_after_s = min(LATEST_S, max(SOONEST_S, lasted_s)) * random.uniform(0.8, 1.2)
    return NoEngine(f"{why}, and no request is sent to it; try again later", retry_after_s=retry_after_s)
