"""The client's side of one request: what it is sent, and, behind its body, its hanging up. Nothing else can come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sidecar.apis import Api
from sidecar.asgi.keep_alive import KeptAlive
from sidecar.asgi.types import Message, Receive, Send
from sidecar.events import Headers


class Client:
    """Listens for whoever does not. `left_us` is when the client was found to have left, None while it is there.

    `now_us` is the clock of that, in microseconds. `send` is for the answer, as ASGI has it; where it has begun with
    comments, `kept_alive` is what it goes on in.
    """

    __slots__ = ("_departure", "_listening", "_now_us", "_receive", "kept_alive", "left_us", "send")

    def __init__(self, receive: Receive, send: Send, now_us: Callable[[], int]) -> None:
        self.send: Send = send
        self.kept_alive: KeptAlive | None = None
        self.left_us: int | None = None
        self._receive = receive
        self._now_us = now_us
        self._departure: asyncio.Task[Message] | None = None
        self._listening = 0

    async def comment(self, text: str, api: Api, headers: Headers) -> None:
        """Sends a line that clients skip. The first one begins the answer, a stream of the API's with these headers."""
        if self.kept_alive is None:
            self.send = self.kept_alive = KeptAlive(self.send, api, headers)
        await self.kept_alive.comment(text)

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
