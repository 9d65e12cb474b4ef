"""The client's side of one request: its messages, its disconnect, and comments while it waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from typing import Any

import msgspec
from starlette.types import Message, Receive, Send

from sidecar.admission.asked_usage import UsageHider
from sidecar.admission.intake import RequestIntake, SizedRequest
from sidecar.admission.policy_snapshot import PolicySnapshot
from sidecar.admission.response_headers import early_headers
from sidecar.admission.sse_keepalive import STREAMING, SseKeepAlive
from sidecar.apis import Api
from sidecar.events import Headers
from sidecar.pools import Lease
from sidecar.tasks import is_canceled_again

_INSTRUMENTATION = "opentelemetry.instrumentation.asgi"


class ClientDisconnected(Exception):
    """The client disconnected before its request was read."""


async def read_body(intake: RequestIntake, receive: Receive, now_us: Callable[[], int]) -> SizedRequest:
    """The request, once its body is complete. Raises ClientDisconnected, or the intake's refusal."""
    request = None
    while request is None:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        request = intake.feed(message, now_us())
    return request


class ClientChannel(msgspec.Struct, eq=False):
    """The client's `receive` and `send`. Detects disconnects when the app is not receiving.

    `disconnected_us` is when a disconnect was seen, by `now_us`, the pool's clock in microseconds; None before.
    `send` takes the response. Once comments have begun it, `keepalive` is the rest of the response's `send`. From
    `cut_us` on the app gets no message but a disconnect, though the client has not left.
    `hider`: see `hide_usage`.
    """

    _receive: Receive
    send: Send
    _now_us: Callable[[], int]
    keepalive: SseKeepAlive | None = None
    disconnected_us: int | None = None
    hider: UsageHider | None = None
    cut_us: int | None = None
    _disconnect: asyncio.Task[Message] | None = None
    _receiving: tuple[asyncio.Task[object] | None, ...] = ()
    _context: Context = msgspec.field(default_factory=copy_context)

    async def comment(self, text: str, api: Api, headers: Headers) -> None:
        """Sends a line that clients skip. The first one begins the response, with `headers`."""
        if self.keepalive is None:
            self.send = self.keepalive = SseKeepAlive(self.send, api, headers)
        await self.keepalive.comment(text)

    def hide_usage(self) -> None:
        """From now on the client does not see the usage of a stream. Harmless when repeated."""
        if self.hider is None:
            self.hider = UsageHider(self.send)
            self.send = self.hider.send

    def disconnect(self) -> asyncio.Task[Message]:
        """The task that ends when the client disconnects. It starts when it is first asked for.

        Its context is the one that the request came with: not the app's, nor that of the watchdog's timer.
        """
        if self._disconnect is None:
            self._disconnect = self._context.run(asyncio.ensure_future, self._watched())
        return self._disconnect

    async def receive(self) -> Message:
        """The next message, for the app: it sees a disconnect as it would without the middleware."""
        if self.cut_us is not None:
            return {"type": "http.disconnect"}
        if self._disconnect is not None:
            return await asyncio.shield(self._disconnect)
        return await self._next_message(self._receive)

    def cut(self) -> None:
        """For the app, the client disconnects now, also where it waits for its next message."""
        self.cut_us = self._now_us()
        for task in self._receiving:
            if task is not None:
                task.cancel()

    def watch(self) -> None:
        """Starts to look for a disconnect, where the app does not."""
        if self.disconnected_us is None and not self._receiving:
            self.disconnect()

    def close(self) -> None:
        """Stops to look for a disconnect."""
        if self._disconnect is not None and not self._disconnect.done():
            self._disconnect.cancel()

    def _watched(self) -> Coroutine[Any, Any, Message]:
        """The message by which the client disconnects."""
        return self._next_message(unobserved(self._receive))

    async def _next_message(self, receive: Receive) -> Message:
        task = asyncio.current_task()
        self._receiving += (task,)
        try:
            message = await receive()
        except asyncio.CancelledError:
            if self.cut_us is None or is_canceled_again(task):
                raise
            return {"type": "http.disconnect"}
        finally:
            self._receiving = tuple(other for other in self._receiving if other is not task)
        if message["type"] == "http.disconnect" and self.disconnected_us is None:
            self.disconnected_us = self._now_us()
        return message


def unobserved(receive: Receive) -> Receive:
    """`receive` without the span that OpenTelemetry's instrumentation of ASGI makes of each call.

    The app does not ask for a disconnect that we look for: in its trace that span would be as long as the request.
    """
    while getattr(receive, "__globals__", {}).get("__name__") == _INSTRUMENTATION and hasattr(receive, "__wrapped__"):
        receive = receive.__wrapped__  # `functools.wraps` leaves it there (0.48b0 to 0.66b2)
    return receive


class ClientComments(msgspec.Struct, frozen=True):
    """Comments for a streaming client while it waits: see `turn.Comments`. `headers` begin the response."""

    every_s: float
    _client: ClientChannel
    _api: Api
    _headers: Headers

    async def comment(self, text: str) -> None:
        """Sends a line that the client skips."""
        await self._client.comment(text, self._api, self._headers)

    async def admitted(self, wait_s: float) -> None:
        """Says that the wait is over, where a comment was sent before."""
        if self._client.keepalive is not None:
            await self.comment(f"admitted after {wait_s:.1f} s")


def comments_for(
    client: ClientChannel, request: SizedRequest, snapshot: PolicySnapshot, request_id: str, lease: Lease
) -> ClientComments | None:
    """The comments while a request waits; None where the policy has none, or its client does not stream."""
    every_s, api = snapshot.policy.keep_alive_s, request.api
    if every_s is None or not request.payload.stream or api not in STREAMING:
        return None
    return ClientComments(every_s, client, api, early_headers(request, lease, snapshot.tier_names, request_id))
