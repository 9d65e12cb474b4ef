"""Time that the engine takes for one attempt at a request, and the end of a request that it takes too long for.

The watchdog measures it: a request pays nothing for it, and neither does a chunk. So a time may be noticed three of the
watchdog's intervals late, and never early. What counts are the bytes of the engine's body: neither the head, which
streaming servers send before the engine has begun, nor the sidecar's own comments.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

from starlette.types import Message

from sidecar.admission.client_channel import ClientChannel
from sidecar.admission.error_responses import send_error
from sidecar.admission.sse_keepalive import SseKeepAlive
from sidecar.admission.usage import UsageReader
from sidecar.apis import Api
from sidecar.durations import short_duration
from sidecar.errors import AdmissionError, EngineTimeout, ResponseCut
from sidecar.policy.model import Timeouts

READ_WITHIN_S = 5.0
"""So long a client that does not read is waited for, to get the error at the end of its answer."""


class EngineTime:
    """The time of one attempt that was admitted at `since_us`. `usage` reads its answer, and `client` gets it.

    An answer that does not stream, as `streams` says, comes when it is complete: only the time in all says that it is
    late.
    """

    __slots__ = ("_client", "_heard", "_heard_us", "_probe", "_since_us", "_streams", "_timeouts", "_usage")

    def __init__(
        self, timeouts: Timeouts, usage: UsageReader, client: ClientChannel, since_us: int, *, streams: bool
    ) -> None:
        self._timeouts = timeouts
        self._usage = usage
        self._client = client
        self._probe: asyncio.Task[None] | None = None
        self._since_us = self._heard_us = since_us
        self._streams = streams
        self._heard = (0, 0)

    def exceeded(self, now_us: int) -> EngineTimeout | None:
        """The error, where the engine has taken too long."""
        most, usage, heard = self._timeouts, self._usage, self._usage.passed
        if heard != self._heard:
            self._heard, self._heard_us = heard, now_us
            if self._probe is not None and self._probe.done():
                self._probe = None
        if now_us - self._since_us > most.total_s * 1e6:
            return _error("did not complete its answer", most.total_s)
        if usage.has_begun:
            if now_us - self._heard_us > most.between_bytes_s * 1e6 and self._is_client_ready(now_us):
                return _error("sent nothing more", most.between_bytes_s)
        elif self._streams and now_us - self._since_us > most.first_byte_s * 1e6:
            return _error("did not begin its answer", most.first_byte_s)
        return None

    def _is_client_ready(self, now_us: int) -> bool:
        """Whether the client takes what it is sent. While it does not, the engine is not silent.

        A `send` of nothing says it: that ends when the client has read enough. So the chunks themselves need not be
        watched.
        """
        if self._probe is None:
            self._probe = asyncio.ensure_future(self._send_nothing())
            return False
        if not self._probe.done():
            self._heard_us = now_us
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
