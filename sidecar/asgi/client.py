"""The client's side of one request behind its body: from then on nothing but its hanging up can come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sidecar.asgi.types import Message, Receive


class Client:
    """Listens for whoever does not. `left_us` is when the client was found to have left, None while it is there.

    `now_us` is the clock of that, in microseconds.
    """

    __slots__ = ("_departure", "_listening", "_now_us", "_receive", "left_us")

    def __init__(self, receive: Receive, now_us: Callable[[], int]) -> None:
        self.left_us: int | None = None
        self._receive = receive
        self._now_us = now_us
        self._departure: asyncio.Task[Message] | None = None
        self._listening = 0

    def departure(self) -> asyncio.Task[Message]:
        """Ends when the client has left. Until somebody asks for it the app's own listening is enough."""
        if self._departure is None:
            self._departure = asyncio.ensure_future(self._next_message())
        return self._departure

    async def receive(self) -> Message:
        """What comes next, for the app: a disconnect reaches it as it would without us."""
        if self._departure is not None:
            return await asyncio.shield(self._departure)
        self._listening += 1
        try:
            return await self._next_message()
        finally:
            self._listening -= 1

    def watch(self) -> None:
        """Looks out for the client where the app does not."""
        if self.left_us is None and not self._listening:
            self.departure()

    def close(self) -> None:
        """Listens no more."""
        if self._departure is not None and not self._departure.done():
            self._departure.cancel()

    async def _next_message(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" and self.left_us is None:
            self.left_us = self._now_us()
        return message
