"""Wait of one request: entering the pool, then its grant, a disconnect, or the end of its time, with comments."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from typing import Any, NamedTuple

import msgspec
from starlette.types import Message, Receive, Send

from sidecar.apis import Api
from sidecar.classify import Classification
from sidecar.durations import short_duration
from sidecar.errors import AdmissionError, QueueFull
from sidecar.events import Headers
from sidecar.middleware.asked_usage import UsageHider
from sidecar.middleware.intake import SizedRequest
from sidecar.middleware.lease_size import LeaseSizes
from sidecar.middleware.policy_snapshot import PolicySnapshot
from sidecar.middleware.response_headers import early_headers
from sidecar.middleware.sse_keepalive import STREAMING, SseKeepAlive
from sidecar.middleware.tenant_usage import TenantUsage
from sidecar.policy.model import Tenant
from sidecar.pools import Ask, Grant, Lease, Pool
from sidecar.pools.base import QueueStanding, WaitGivenUp
from sidecar.tasks import is_canceled_again

Appraise = Callable[[SizedRequest], None]
"""Gives a request that was sized the figures of its gain."""

_INSTRUMENTATION = "opentelemetry.instrumentation.asgi"


class ClientDisconnected(Exception):
    """The client disconnected before it was admitted. `wait` says how its wait went, None where it did not wait."""

    def __init__(self, wait: Grant | None = None) -> None:
        self.wait = wait


class WaitedTooLong(Exception):
    """The wait ends without a grant: it was too long, or else `refusal` says why. `wait` says how it went."""

    def __init__(self, wait: Grant | None, refusal: AdmissionError | None = None) -> None:
        self.wait = wait
        self.refusal = refusal


WITHOUT_GRANT = (ClientDisconnected, WaitedTooLong, AdmissionError)
"""How a wait ends without a grant."""


class Comments(NamedTuple):
    """Comments for a streaming client while it waits in a pool, one every `every_s` seconds.

    `headers` begin the response.
    """

    every_s: float
    api: Api
    headers: Headers
    pool: Pool


def comments_of(
    request: SizedRequest, lease: Lease, pool: Pool, snapshot: PolicySnapshot, request_id: str
) -> Comments | None:
    """The comments while a request waits; None where the policy has none, or its client does not stream."""
    every_s, api = snapshot.policy.keep_alive_s, request.api
    if every_s is None or not request.payload.stream or api not in STREAMING:
        return None
    return Comments(every_s, api, early_headers(request, lease, snapshot.tier_names, request_id), pool)


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

    async def comment(self, text: str, comments: Comments) -> None:
        """Sends a line that clients skip. The first one begins the response."""
        if self.keepalive is None:
            self.send = self.keepalive = SseKeepAlive(self.send, comments.api, comments.headers)
        await self.keepalive.comment(text)

    def hide_usage(self) -> None:
        """From now on the client does not see the usage of a stream. Harmless when repeated."""
        if self.hider is None:
            self.hider = UsageHider(self.send)
            self.send = self.hider.send

    def passes(self, body: bytes) -> bool:
        """Whether `send` would pass the next bytes of a stream on as they are."""
        return self.keepalive is None and (self.hider is None or self.hider.passes(body))

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


def sized_ask(pool: Pool, request: SizedRequest, sizes: LeaseSizes, appraise: Appraise | None = None) -> Ask:
    """Sizes a request for a pool. `appraise` gives it the figures of its gain once it is sized."""
    if request.requests > 1:
        request.hold_list(pool)
    if request.payload.unsized is not None:
        request.hold_at_least(pool.most_tokens(request.classification.level))
    elif sizes.learns:
        request.expect(sizes, pool)
    if appraise is not None:
        appraise(request)
    return request.ask()


async def enter_pool(pool: Pool, ask: Ask, classification: Classification, usage: TenantUsage | None) -> Lease:
    """Enters the pool, and notes the tier at which it took or refused the request. Raises what `Pool.enter` raises.

    `usage` knows what is left of the tenant's budgets, None where there are none.
    """
    if usage is not None and classification.tenant.limits.have_budgets:
        ask = usage.within(ask, classification.tenant, pool)
    try:
        lease = await pool.enter(ask)
    except QueueFull as full:
        classification.note_charged(full.level)
        raise
    if lease.ask.tier != classification.level:
        classification.note_charged(lease.ask.tier)
    return lease


async def wait(
    lease: Lease, granted: asyncio.Future[Grant], client: ClientChannel, most_s: float | None, comments: Comments | None
) -> Grant:
    """Waits for the grant, a disconnect, or `most_s` seconds, whichever comes first.

    Raises ClientDisconnected or WaitedTooLong (also where the wait was given up), after the ticket has left the queue,
    and whatever `granted` raises.
    """
    disconnect = client.disconnect()
    if comments is None:
        await asyncio.wait((granted, disconnect), timeout=most_s, return_when=asyncio.FIRST_COMPLETED)
    else:
        await _wait_and_comment(lease, granted, client, math.inf if most_s is None else most_s, comments)
    if disconnect.done():  # even at the moment of the grant: no one would read the response
        raise ClientDisconnected(lease.grant if lease.settle(0) else await lease.leave())
    if not granted.done():
        raise WaitedTooLong(await lease.leave())
    if isinstance(granted.exception(), WaitGivenUp):
        raise WaitedTooLong(lease.grant if lease.settle(0) else await lease.leave())
    grant = granted.result()
    if comments is not None and client.keepalive is not None:
        await client.comment(f"admitted after {grant.queue_wait_us / 1e6:.1f} s", comments)
    return grant


async def within_budget(lease: Lease, grant: Grant, tenant: Tenant, usage: TenantUsage) -> Grant:
    """The grant. Raises WaitedTooLong, after the lease has ended, where the tenant's budget was used up meanwhile."""
    over = usage.used_up(tenant)
    if over is None:
        return grant
    raise WaitedTooLong(grant if lease.settle(0) else await lease.leave(), over)


def withdraw(lease: Lease, report: Callable[[Grant | None], None]) -> None:
    """Leaves the queue. Calls `report` when the pool has said how the wait went."""
    if lease.settle(0):
        report(lease.grant)
        return
    left = lease.leave()
    if left.done():
        report(left.result())
    else:
        left.add_done_callback(lambda wait: report(wait.result()))


async def _wait_and_comment(
    lease: Lease, granted: asyncio.Future[Grant], client: ClientChannel, most_s: float, comments: Comments
) -> None:
    both, mark = (granted, client.disconnect()), comments.pool.mark(lease.tier)
    loop = asyncio.get_running_loop()
    ends_s = loop.time() + most_s
    while (left_s := ends_s - loop.time()) > 0:
        done, _ = await asyncio.wait(both, timeout=min(comments.every_s, left_s), return_when=asyncio.FIRST_COMPLETED)
        if done:
            return
        if loop.time() < ends_s:
            await client.comment(_said(comments.pool.standing(lease.tier, mark)), comments)


def _said(standing: QueueStanding) -> str:
    """Where a request stands, for its client: `queued, 14 ahead, about 20 s`."""
    if standing.wait_s is None:
        return f"queued, {standing.ahead} ahead"
    whole_s = max(1, round(standing.wait_s))
    return f"queued, {standing.ahead} ahead, about {f'{whole_s} s' if whole_s < 60 else short_duration(whole_s)}"
