"""One attempt at the engine that may be preempted before its first byte."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from starlette.types import Message, Receive, Send

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
