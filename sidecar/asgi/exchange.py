"""One request at the door: read, classified, admitted, forwarded, settled.

    READING -> WAITING -> RUNNING -> OVER        (WAITING is skipped where there is room)
       |        | ^          |
       |        | +----------+                   (preempted: its room went to a more important request)
       +--------+-> OVER                         (refused, or the client left)

Whatever raises, hangs up or is cancelled, `run` ends in OVER with the lease given back exactly once.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from enum import Enum
from functools import partial

from sidecar.apis import Api
from sidecar.asgi.allowances import entered, refusal_headers, used_tokens
from sidecar.asgi.attempt import Attempt
from sidecar.asgi.background import BackgroundRequest, Ended
from sidecar.asgi.body import ClientLeft, discard_body, read_body, too_late
from sidecar.asgi.client import Client
from sidecar.asgi.credentials import refuse_two_keys
from sidecar.asgi.door import Door
from sidecar.asgi.engine_call import CALL_KEY, EngineCall, given_back_anyway
from sidecar.asgi.forwarding import forwarded_request, granted_of
from sidecar.asgi.heading import admission_headers, early_headers
from sidecar.asgi.naming import id_header, request_id, wait_headers
from sidecar.asgi.pending_aborts import Held
from sidecar.asgi.report import Report
from sidecar.asgi.responses import send_error
from sidecar.asgi.types import Message, Receive, Scope, Send
from sidecar.asgi.understanding import Understood, declared_length, longest_wait_s
from sidecar.asgi.usage import UsageReader
from sidecar.asgi.waiting import WaitedTooLong, comments, wait
from sidecar.engines.base import Forward
from sidecar.errors import AdmissionError, BodyTimeout, BodyTooLarge, Draining, InvalidHeader, QueueTimeout
from sidecar.events import Obstacle, Outcome
from sidecar.granted import SCOPE_KEY, Granted, current
from sidecar.policy.model import Endpoint
from sidecar.pools import Grant, Lease


class Stage(Enum):
    """Where a request is."""

    READING = "reading"
    WAITING = "waiting"
    RUNNING = "running"
    OVER = "over"


class Exchange:
    """One request. Made by the middleware for every request to a guarded endpoint; `run` is called once."""

    __slots__ = (
        "_admitted_us", "_attempt", "_background", "_body", "_call", "_client", "_door", "_endpoint", "_headers",
        "_lease", "_preempted_us", "_preemptions", "_receive", "_received_us", "_report", "_request_id", "_ruling",
        "_scope", "_stage", "_status", "_task", "_timed_out", "_understood", "_usage",
    )  # fmt: skip

    _understood: Understood
    _lease: Lease

    def __init__(self, door: Door, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        self._door = door
        self._ruling = door.ruling
        self._endpoint = endpoint
        self._scope = scope
        self._receive = receive
        self._client = Client(receive, send, door.pool.now_us)
        self._stage = Stage.READING
        self._task = asyncio.current_task()
        self._received_us = door.pool.now_us()
        self._headers = dict(scope["headers"])
        self._request_id = request_id(self._headers)
        self._report = Report(door.observer, scope, self._request_id, self._received_us, door.pool.now_us)
        self._usage = UsageReader()
        self._body: bytes | None = None
        self._status: int | None = None
        self._timed_out = False
        self._attempt: Attempt | None = None
        self._call = EngineCall()
        self._background: BackgroundRequest | None = None
        self._preempted_us: int | None = None
        self._preemptions = self._admitted_us = 0

    async def run(self) -> None:
        """Takes the request all the way. Raises only what the app raises."""
        self._door.rounds.add(self)
        try:
            grant = await self._granted_or_over(self._admission())
            while grant is not None and not await self._forward(grant):
                grant = await self._granted_or_over(self._wait_again())
        finally:
            self._end()

    def on_round(self) -> None:
        """Looks after a body that does not come, and a client that leaves while the app does not listen."""
        now_us, policy = self._now_us(), self._ruling.policy
        if self._stage is Stage.READING and now_us - self._received_us > policy.body_timeout_s * 1e6:
            if self._task is not None and self._body is None and not self._timed_out:
                self._timed_out = True
                self._task.cancel()
        elif self._background is not None and self._door.followed.is_due(self._background):
            self._settle(Outcome.FAILED, "background_timeout")
        elif self._stage is Stage.RUNNING and self._background is None:
            left_us = self._client.left_us
            if left_us is None:
                self._client.watch()
            elif now_us - left_us > policy.disconnect_grace_s * 1e6:
                self._settle(Outcome.CLIENT_LEFT)

    # -- up to admission

    async def _granted_or_over(self, wait_for_grant: Coroutine[None, None, Grant]) -> Grant | None:
        """The grant; None where the request ended at the door instead."""
        waited: Grant | None = None
        try:
            return await wait_for_grant
        except ClientLeft as left:
            self._stage = Stage.OVER
            self._report.left(left.wait)
            return None
        except WaitedTooLong as over:
            waited = over.wait
            error: AdmissionError = self._queue_timeout()
        except AdmissionError as refusal:
            error = refusal
        self._stage = Stage.OVER
        self._report.refused(error, waited)
        await self._refuse(error, waited)
        return None

    async def _admission(self) -> Grant:
        """Reads, classifies and waits."""
        await self._understand()
        self._longest_wait_s()  # raises for what is no duration
        lease = await self._enter()
        if self._ruling.is_preemptible(self._understood):
            lease.on_preempt = self._preempt
        return self._granted_at_once(lease) or await self._wait(lease, lease.wait(), self._longest_wait_s())

    async def _understand(self) -> None:
        ruling = self._ruling
        if self._door.is_draining:
            raise Draining("this server is shutting down and takes no new request; try another", retry_after_s=1)
        headers = self._headers
        refuse_two_keys(self._scope, headers)
        tenant = ruling.intake.tenant(headers)
        length = declared_length(self._scope, headers)
        try:
            body = self._body = await read_body(self._receive, ruling.policy.max_body_bytes, length)
        except asyncio.CancelledError:
            if not self._timed_out or self._is_cancelled_by_others():
                raise
            raise too_late(ruling.policy.body_timeout_s) from None
        self._understood = ruling.intake.understand(self._endpoint, headers, tenant, body)
        if ruling.intake.has_tokenizer:
            await ruling.intake.count(self._understood)

    async def _enter(self) -> Lease:
        """Asks the pool, and says who asked: only now is it known at which tier."""
        understood, at_us = self._understood, self._now_us()
        try:
            self._lease = await entered(self._door.pool, understood)
            self._stage = Stage.WAITING
        finally:
            self._report.classified(understood, self._endpoint, self._ruling.policy, at_us)
        return self._lease

    def _is_cancelled_by_others(self) -> bool:
        # 3.10 does not count cancellations: one by the server in the same instant is taken for ours
        return sys.version_info >= (3, 11) and self._task is not None and self._task.uncancel() > 0

    def _granted_at_once(self, lease: Lease) -> Grant | None:
        """The grant that came with the pool's first answer. That answer itself may have been waited for."""
        grant = lease.grant
        if grant is not None and grant.queue_wait_us:
            self._report.waited_for_the_answer(grant.at_us - grant.queue_wait_us)
        return grant

    async def _wait(self, lease: Lease, granted: asyncio.Future[Grant], most_s: float | None) -> Grant:
        """See `waiting.wait`."""
        self._report.queued(self._obstacle)
        heard, every_s = None, self._ruling.policy.keep_alive_s
        if every_s is not None and self._understood.payload.stream:
            headers = early_headers(self._understood, lease, self._ruling.tier_names, self._request_id)
            heard = comments(every_s, self._endpoint.api, headers)
        return await wait(lease, granted, self._client, most_s, heard)

    def _obstacle(self) -> tuple[Obstacle, str]:
        """Why it has to wait."""
        if self._preemptions:
            return Obstacle.PREEMPTED, "its room went to a more important request"
        return self._door.pool.obstacle(self._understood.ask())

    def _longest_wait_s(self) -> float | None:
        return self._ruling.longest_wait_s(self._understood)

    def _queue_timeout(self) -> QueueTimeout:
        level = self._understood.classification.level
        tier = self._ruling.policy.tiers[level].name
        return QueueTimeout(
            f"no room came free for tier {tier} within {self._longest_wait_s():g} s; try again later",
            retry_after_s=self._door.pool.retry_after_s(level),
        )

    async def _refuse(self, error: AdmissionError, waited: Grant | None) -> None:
        # What is left of an unread body is of no use: the connection ends with the answer.
        closes = isinstance(error, BodyTimeout | BodyTooLarge | InvalidHeader)
        headers = [(b"connection", b"close")] if closes else []
        headers += refusal_headers(error)
        if waited is not None:
            headers += wait_headers(waited)
        send = self._send_first if isinstance(error, BodyTooLarge) else self._client.send
        is_anthropic = self._endpoint.api is Api.MESSAGES
        await send_error(send, error, anthropic=is_anthropic, request_id=self._request_id, headers=headers)
        if isinstance(error, BodyTooLarge):
            await discard_body(self._receive, self._ruling.policy.body_timeout_s)
            await self._client.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_first(self, message: Message) -> None:
        # The end comes later: the server closes then, which takes the answer from a client that is still sending.
        await self._client.send({**message, "more_body": True} if message["type"] == "http.response.body" else message)

    # -- from admission on

    async def _forward(self, grant: Grant) -> bool:
        """Runs the app with the request as the engine should see it, and settles when the answer has gone out.

        False where its room was taken back before the first byte: the request waits again.
        """
        self._stage = Stage.RUNNING
        door = self._door
        priority = self._ruling.priorities[grant.level]
        forward = door.dialect.forward(self._endpoint.api, priority)
        self._admitted_us = grant.at_us
        self._report.admitted(grant, priority if forward.is_sent else None)
        granted = granted_of(grant, self._understood, self._ruling.policy, priority)
        attempt = self._attempt = self._preemptible_attempt()
        receive, send = (
            (self._receive_for_app, self._send_for_app) if attempt is None else (attempt.receive, attempt.send)
        )
        token = current.set(granted)
        try:
            await door.app(self._scope_for_app(forward, granted), receive, send)
        except BaseException as error:
            if attempt is None or not attempt.is_lost or not isinstance(error, Exception):
                self._settle(Outcome.FAILED, type(error).__name__)
                if self._client.kept_alive is not None and isinstance(error, Exception):
                    await self._client.kept_alive.break_off()
                raise
        finally:
            current.reset(token)
        return attempt is None or not attempt.is_lost or await self._has_left_meanwhile()

    # -- while its room may be taken back

    def _preemptible_attempt(self) -> Attempt | None:
        if not self._ruling.is_preemptible(self._understood):
            return None
        attempt = Attempt(self._lease, self._receive_for_app, self._send_for_app, self._client.departure)
        if self._preempted_us is not None:
            attempt.preempt()
        return attempt

    def _preempt(self) -> None:
        """Called by the pool: the room is wanted by a more important request."""
        self._preempted_us = self._now_us()
        if self._attempt is not None:
            self._attempt.preempt()

    async def _has_left_meanwhile(self) -> bool:
        """Returns when the engine has aborted a lost attempt: whether the client has left by then, which ends it."""
        departure = self._client.departure()
        if not departure.done():
            aborted = asyncio.get_running_loop().create_future()
            self._when_aborted(partial(aborted.set_result, None))
            await asyncio.wait((departure, aborted), return_when=asyncio.FIRST_COMPLETED)
        if departure.done():
            self._settle(Outcome.CLIENT_LEFT)
        return departure.done()

    async def _wait_again(self) -> Grant:
        """Gives the room back, and queues where the request had stood."""
        lease = self._lease
        self._preempted_us = self._attempt = None
        self._call = EngineCall()
        self._usage, self._status = UsageReader(), None
        self._preemptions += 1
        granted = lease.requeue()
        self._stage = Stage.WAITING
        self._report.preempted(self._admitted_us, self._preemptions)
        # It was admitted in time once: only the client itself may limit how long it waits again.
        return await self._wait(lease, granted, longest_wait_s(self._understood.headers, None))

    def _scope_for_app(self, forward: Forward, granted: Granted) -> Scope:
        has_begun, traced = self._client.kept_alive is not None, self._report.headers()
        request = forwarded_request(self._scope, self._endpoint, self._understood, forward, traced, has_begun=has_begun)
        if self._understood.payload.background:
            self._background = BackgroundRequest(
                self._door.app, request.scope, self._endpoint, self._understood.payload
            )
        request.scope[SCOPE_KEY] = granted
        request.scope[CALL_KEY] = self._call
        self._body = request.body
        return request.scope

    async def _receive_for_app(self) -> Message:
        """The body in one piece, then whatever the client does: a disconnect reaches the app as it would without us."""
        body = self._body
        if body is not None:
            self._body = None
            return {"type": "http.request", "body": body, "more_body": False}
        return await (self._client if self._background is None else self._background).receive()

    async def _send_for_app(self, message: Message) -> None:
        """Passes the response on as it comes, chunk by chunk, and settles behind its last byte."""
        kind, background = message["type"], self._background
        send = self._client.send if background is None else background.sender(self._client.send)
        if kind == "http.response.body":
            self._read_response(message.get("body", b""))
            # Servers say `http.disconnect` behind a complete response, too: only one from before is a departure.
            has_left = self._client.left_us is not None and background is None
            outcome = Outcome.CLIENT_LEFT if has_left else Outcome.COMPLETED
            if message.get("more_body", False):
                await send(message)
                return
            self._call.answered()
            await send(message)
            self._settle(outcome)
            return
        if kind == "http.response.start":
            self._status = message["status"]
            headers = list(message.get("headers", ()))
            own = admission_headers(self._understood, self._lease, self._ruling.tier_names, self._preemptions)
            message = {**message, "headers": [*headers, *own, id_header(self._request_id, headers)]}
        await send(message)

    def _read_response(self, body: bytes) -> None:
        if body and self._stage is Stage.RUNNING:  # what comes behind the grace of a client that left is told nobody
            if not self._usage.has_begun:
                self._report.first_byte(self._status)
            self._usage.feed(body)
            if self._background is not None:
                self._background.feed(body)

    # -- the end

    def _settle(self, outcome: Outcome, error: str | None = None) -> None:
        """Gives the lease back, as soon as the engine has released it, and says what it cost. The first call counts."""
        if self._stage is not Stage.RUNNING:
            return
        if self._background is not None and self._is_followed(self._background):
            return
        self._stage = Stage.OVER
        understood, usage = self._understood, self._usage
        used, is_known = used_tokens(usage, understood.prompt_tokens, self._status)
        give_back = partial(self._lease.settle, used if is_known else None)
        if self._call.may_run:
            self._lease.on_preempt = given_back_anyway(self._lease.on_preempt)
            self._when_aborted(give_back)
        else:
            give_back()
        if outcome is Outcome.FAILED and self._client.left_us is not None:
            outcome, error = Outcome.CLIENT_LEFT, None  # whatever the app makes of it, that was why
        if usage.input_tokens is not None:
            self._door.estimator.learn(understood.payload, understood.classification.tenant.name, usage.input_tokens)
        self._report.settled(
            outcome,
            status=self._status,
            used=(used, usage.input_tokens, usage.output_tokens),
            error=error,
        )

    def _when_aborted(self, release: Callable[[], object]) -> None:
        """Calls `release` when the engine has aborted what it computed for this request."""
        is_lost = self._attempt is not None and self._attempt.is_lost
        disconnected_us = self._preempted_us if is_lost else self._client.left_us
        due_us = self._ruling.abort_latency.due_us(self._now_us(), disconnected_us)
        understood = self._understood
        self._call.when_aborted(
            release, self._door.pending_aborts, due_us, Held(understood.requests, understood.tokens)
        )

    def _is_followed(self, background: BackgroundRequest) -> bool:
        """Whether the response runs on in the background: then it is followed, and settled when it has ended."""
        self._background, response_id = None, background.running_id()
        if response_id is None:
            return False
        self._stage = Stage.OVER
        self._understood.drop_body()
        self._door.followed.follow(background, response_id, self._settle_followed)
        return True

    def _settle_followed(self, ended: Ended) -> None:
        self._usage.input_tokens, self._usage.output_tokens = ended.input_tokens, ended.output_tokens
        self._client.left_us = None  # it does not matter any more: nothing was waiting for it
        self._stage = Stage.RUNNING
        self._call.answered()
        self._settle(ended.outcome, ended.error)

    def _end(self) -> None:
        """Leaves nothing behind, whatever stage it broke off in: no lease, no ticket, no task."""
        if self._stage is Stage.READING:
            self._report.canceled(None)
        elif self._stage is Stage.WAITING:
            self._withdraw()
        elif self._stage is Stage.RUNNING:
            self._settle(Outcome.FAILED, "incomplete_response")
        self._stage = Stage.OVER
        self._client.close()
        self._door.rounds.discard(self)

    def _withdraw(self) -> None:
        """Gives up a wait whose task was canceled: how it had gone is reported when the pool has told."""
        if self._lease.settle(0):
            self._report.canceled(self._lease.grant)
            return
        left = self._lease.leave()
        if left.done():
            self._report.canceled(left.result())
        else:
            left.add_done_callback(lambda told: self._report.canceled(told.result()))

    def _now_us(self) -> int:
        return self._door.pool.now_us()
