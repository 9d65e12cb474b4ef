"""One attempt at the engine that may be taken back: its room may go to a more important request before its first byte.

The app is told what it knows best, that its client has left: every serving app stops its engine then, and few do when
their task is canceled. Whatever it answers from then on goes to nobody, and when it has returned the request waits
again. An app that does not listen cannot be stopped; its first byte keeps the room for good.

The head of the answer waits for the first byte of the body: streaming apps send it before the engine has begun.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sidecar.asgi.types import Message, Receive, Send
from sidecar.pools import Lease


class Attempt:
    """The app's `receive` and `send` for one attempt. `preempt` may be called at any time, by the pool.

    `receive` and `send` are those of an attempt that nobody takes back; `departure` gives the task that ends when the
    client has left.
    """

    __slots__ = (
        "_departure",
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
        self, lease: Lease, receive: Receive, send: Send, departure: Callable[[], asyncio.Task[Message]]
    ) -> None:
        self._lease = lease
        self._receive = receive
        self._send = send
        self._departure = departure
        self._preempted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._start: Message | None = None
        self._has_body = False
        self._is_kept = False
        self.is_lost = False
        """Whether the app was told to stop: this attempt answers nobody."""

    def preempt(self) -> None:
        """The room is wanted by a more important request."""
        if not self._preempted.done():
            self._preempted.set_result(None)

    async def receive(self) -> Message:
        """See ASGI's `receive`."""
        if not self._has_body:
            self._has_body = True
            return await self._receive()
        if self.is_lost:  # an engine may ask again after its request's end
            return {"type": "http.disconnect"}
        departure = self._departure()
        while not departure.done():
            if self._preempted.done() and not self._is_kept:
                self.is_lost = True
                return {"type": "http.disconnect"}
            waited = (departure,) if self._is_kept else (departure, self._preempted)
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        return departure.result()

    async def send(self, message: Message) -> None:
        """See ASGI's `send`."""
        if self.is_lost:
            return
        if not self._is_kept:
            if message["type"] == "http.response.start":
                self._start = message
                return
            if message["type"] == "http.response.body" and not message.get("body") and message.get("more_body", False):
                return
            await self._keep()
        await self._send(message)

    async def _keep(self) -> None:
        self._is_kept = True
        self._lease.keep()
        if self._start is not None:
            await self._send(self._start)
