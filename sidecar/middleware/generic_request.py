"""Requests of the generic API: a size that the policy says, uploads that pass as they come, and a cost of their own.

A body in a form, or of sound or pictures, is not read here. Its declared length says what it holds, and it passes from
the client to the app chunk by chunk, once it is admitted. While it waits, at most `READ_AHEAD` bytes of it are kept: so
a client that leaves is noticed as long as it has not sent more.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Awaitable

import msgspec
from starlette.types import Message, Scope

from sidecar.chunks import Write
from sidecar.context import Granted
from sidecar.engines.base import Forward
from sidecar.errors import AdmissionError, BodyTimeout, BodyTooLarge, EngineUnreachable
from sidecar.events import Outcome
from sidecar.middleware.app_call import without_files
from sidecar.middleware.client_channel import ClientChannel, unobserved
from sidecar.middleware.error_responses import discard_body
from sidecar.middleware.intake import is_upload
from sidecar.middleware.stages import Stage
from sidecar.middleware.timed_request import TimedRequest
from sidecar.policy.model import CostPlace
from sidecar.pools import Grant

READ_AHEAD = 256 * 1024
"""Bytes of an upload that are kept while it waits."""
_MOST_DIGITS = 12
"""Of a cost in tokens."""


class CostReader:
    """Reads what an answer says that it cost, as it passes. `tokens` is the last figure, None where there is none."""

    def __init__(self, place: CostPlace) -> None:
        self.tokens: int | None = None
        self._header = place.header
        self._number: re.Pattern[bytes] | None = None
        self._carried = b""
        self._longest = 0
        if place.member is not None:
            self._number = re.compile(
                rb'"%b"\s{0,8}:\s{0,8}(\d{1,%d})(?![\d.eE])' % (re.escape(place.member), _MOST_DIGITS)
            )
            self._longest = len(place.member) + _MOST_DIGITS + 20

    def feed(self, message: Message) -> None:
        """Takes a message of the answer."""
        if message["type"] == "http.response.start":
            self._read_headers(message)
        elif self._number is not None and message["type"] == "http.response.body":
            is_last = not message.get("more_body", False)
            window = self._carried + bytes(message.get("body", b""))
            for found in self._number.finditer(window):
                # A number at the very end may go on with the next chunk.
                if is_last or found.end() < len(window):
                    self.tokens = int(found[1])
            self._carried = window[-self._longest :]

    def _read_headers(self, message: Message) -> None:
        for name, value in message.get("headers", ()):
            if name.lower() == self._header and value.isdigit() and len(value) <= _MOST_DIGITS:
                self.tokens = int(value)


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


class GenericRequest(TimedRequest):
    """Handles one request of the generic API."""

    _cost: CostReader | None = None
    _upload: UploadChannel | None = None
    _is_late: bool = False

    def __post_init__(self) -> None:
        """Adds what reads the cost, and the channel of an upload."""
        self._cost = None if self._endpoint.cost is None else CostReader(self._endpoint.cost)
        if is_upload(self._headers):
            self._client = self._upload = UploadChannel(self._receive, self._client.send, self._now_us)
            self._is_unread = True

    def check(self) -> None:
        """See `Watched`. Also ends an upload that takes longer than a body may: it holds its lease meanwhile."""
        super().check()
        upload = self._upload
        if upload is None or upload.is_complete or self.stage is not Stage.RUNNING or self._lease.grant is None:
            return
        if self._now_us() - self._lease.grant.at_us > self._snapshot.policy.body_timeout_s * 1e6:
            self._is_late = True
            self._settle(Outcome.FAILED, BodyTimeout.code)
            upload.cut()

    async def _has_failed(self, error: Exception) -> bool:
        """See `RequestHandler`. What the app makes of an upload that was ended is not passed on."""
        has_failed = await super()._has_failed(error)
        return has_failed and not (self._is_late and self._status is None)

    def _is_over(self) -> bool:
        """See `RequestHandler`. A late upload is answered yet."""
        return super()._is_over() and not self._is_late

    async def _waits_again(self) -> bool:
        """See `RequestHandler`. Not a late upload."""
        if not self._is_late:
            return await super()._waits_again()
        if self._status is None:
            most_s = self._snapshot.policy.body_timeout_s
            await super()._refuse(BodyTimeout(f"the upload did not arrive within {most_s:g} s of its admission"), None)
        return False

    async def _refuse(self, error: AdmissionError, waited: Grant | None) -> None:
        """See `RequestHandler`. The rest of an upload is read: a client that still sends would lose the response."""
        upload, client = self._upload, self._client
        if upload is None or upload.is_complete or isinstance(error, BodyTooLarge):
            await super()._refuse(error, waited)
            return
        send = client.send

        async def send_and_go_on(message: Message) -> None:
            await send({**message, "more_body": True} if message["type"] == "http.response.body" else message)

        client.send = send_and_go_on
        await super()._refuse(error, waited)
        await discard_body(upload.receive, self._snapshot.policy.body_timeout_s)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _scope_for_app(self, forward: Forward, granted: Granted) -> Scope:
        scope = super()._scope_for_app(forward, granted)
        if self._upload is not None:
            self._body = None  # it comes from the client
        if self._endpoint.cost is not None and self._endpoint.cost.member is not None:
            scope["extensions"] = without_files(scope)
        return scope

    async def _wait_again(self) -> Grant:
        """See `RequestHandler`. Of an upload, what has passed must be there still."""
        if self._upload is not None and not self._upload.rewind():
            self._lease.settle(0, is_counted=False)
            raise EngineUnreachable(
                "the engine could not be reached, and too much of the upload has passed to send it to another; send "
                "it once more",
                retry_after_s=1,
            )
        return await super()._wait_again()

    def _send_for_app(self, message: Message) -> Awaitable[None]:
        if self._cost is not None:
            self._cost.feed(message)
        return super()._send_for_app(message)

    def _write(self, write: Write, body: bytes) -> bool:
        """See `RequestHandler`. A cost is read from messages."""
        return self._cost is None and super()._write(write, body)

    def _release(self, outcome: Outcome, error: str | None) -> None:
        cost = None if self._cost is None else self._cost.tokens
        if cost is not None:
            usage = self._usage
            usage.read()
            usage.input_tokens = usage.output_tokens = None
            usage.counted(cost, 0)
        super()._release(outcome, error)
