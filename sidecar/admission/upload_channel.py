"""Uploads of the generic API: a body in a form, or of sound or pictures, passes as it comes.

It is not read here. Its declared length says what it holds, and it passes from the client to the app chunk by chunk,
once it is admitted. While it waits, at most `READ_AHEAD` bytes of it are kept: so a client that leaves is noticed as
long as it has not sent more.
"""

from __future__ import annotations

import asyncio
from collections import deque

import msgspec
from starlette.types import Message

from sidecar.admission.client_channel import ClientChannel, unobserved

READ_AHEAD = 256 * 1024
"""Bytes of an upload that are kept while it waits."""


class UploadChannel(ClientChannel):
    """The client's messages where the body is not read before the request is admitted."""

    _ahead: deque[Message] = msgspec.field(default_factory=deque)
    _ahead_bytes: int = 0
    _passed: list[Message] = msgspec.field(default_factory=list)
    _passed_bytes: int = 0
    _changed: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    is_complete: bool = False

    @property
    def is_watched(self) -> bool:
        """Whether its messages are read already: `receive` alone has them."""
        return self._disconnect is not None

    def cut(self) -> None:
        """See `ClientChannel.cut`. What comes of the upload is still read."""
        self.cut_us = self._now_us()
        self._changed.set()

    def rewind(self) -> bool:
        """The app gets the body once more, from its beginning. False where too much has passed to be kept."""
        if self._passed_bytes > READ_AHEAD:
            return False
        self._ahead.extendleft(reversed(self._passed))
        self._ahead_bytes += self._passed_bytes
        self._passed, self._passed_bytes = [], 0
        return True

    async def receive(self) -> Message:
        """See `ClientChannel.receive`: the body's chunks, in their order, and then a disconnect."""
        reading = self.disconnect()
        while not self._ahead or self.cut_us is not None:
            if self.cut_us is not None:
                return {"type": "http.disconnect"}
            if reading.done():
                return reading.result()
            self._changed.clear()
            await self._changed.wait()
        message = self._ahead.popleft()
        size = len(message.get("body", b""))
        self._ahead_bytes -= size
        self._passed_bytes += size
        if self._passed_bytes <= READ_AHEAD:
            self._passed.append(message)
        else:
            self._passed.clear()
        self._changed.set()
        return message

    async def _watched(self) -> Message:
        """Reads ahead until the client disconnects."""
        try:
            while True:
                while self._ahead_bytes >= READ_AHEAD:
                    self._changed.clear()
                    await self._changed.wait()
                receive = unobserved(self._receive) if self.is_complete else self._receive
                message = await self._next_message(receive)
                if message["type"] != "http.request":
                    return message
                self.is_complete = not message.get("more_body", False)
                self._ahead.append(message)
                self._ahead_bytes += len(message.get("body", b""))
                self._changed.set()
        finally:
            self._changed.set()
