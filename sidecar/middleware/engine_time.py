"""Time that the engine takes for one attempt at a request, and the end of a request that it takes too long for.

The watchdog measures it: a request pays nothing for it, and neither does a chunk. So a time may be noticed two of the
watchdog's intervals late, and never early. What counts are the bytes of the engine's body: neither the head, which
streaming servers send before the engine has begun, nor the sidecar's own comments.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable

from starlette.types import Message

from sidecar.apis import Api
from sidecar.durations import short_duration
from sidecar.errors import EngineTimeout
from sidecar.middleware.error_responses import send_error
from sidecar.middleware.sse_keepalive import SseKeepAlive
from sidecar.middleware.usage import UsageReader
from sidecar.middleware.wait import ClientChannel
from sidecar.policy.model import Timeouts
from sidecar.sending import ClientWatch, ResponseCut


class EngineTime:
    """The time of one attempt that was admitted at `since_us`, whose answer `usage` reads. `streams`: it is asked to.

    An answer that does not stream comes when it is complete: only the time in all says that it is late.
    """

    __slots__ = ("_heard", "_heard_us", "_since_us", "_streams", "_timeouts", "_usage")

    def __init__(self, timeouts: Timeouts, usage: UsageReader, since_us: int, *, streams: bool) -> None:
        self._timeouts = timeouts
        self._usage = usage
        self._since_us = self._heard_us = since_us
        self._streams = streams
        self._heard = (0, 0)

    def exceeded(self, now_us: int, sending: Awaitable[None], client: ClientWatch | None) -> EngineTimeout | None:
        """The error, where the engine has taken too long.

        While the client does not take what it is sent, the engine is not silent: `sending` was the last that it was
        sent, and `client` says it where the server has agreed to.
        """
        most, usage, heard = self._timeouts, self._usage, self._usage.passed
        is_held_up = getattr(sending, "cr_frame", None) is not None or (client is not None and client.is_slow)
        if is_held_up or heard != self._heard:
            self._heard, self._heard_us = heard, now_us
        if now_us - self._since_us > most.total_s * 1e6:
            return _error("did not complete its answer", most.total_s)
        if usage.has_begun:
            if now_us - self._heard_us > most.between_bytes_s * 1e6:
                return _error("sent nothing more", most.between_bytes_s)
        elif self._streams and now_us - self._since_us > most.first_byte_s * 1e6:
            return _error("did not begin its answer", most.first_byte_s)
        return None


def _error(did: str, within_s: float) -> EngineTimeout:
    message = f"the engine {did} within {short_duration(within_s)}"
    # Spread, because all that such an engine ran are told at the same time.
    return EngineTimeout(message, retry_after_s=random.uniform(1, 2))


async def break_off(
    client: ClientChannel, error: EngineTimeout, api: Api, usage: UsageReader, *, streams: bool
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
        await send_error(SseKeepAlive(send_and_go_on, api, ()), error, anthropic=api is Api.MESSAGES)
    raise ResponseCut(error.message)
