"""One admitted request, from its first byte to its released lease.

Its stages are those of `stages`. Whatever raises or is canceled, the lease is released exactly once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import msgspec
from starlette.types import Message, Receive, Scope, Send

from sidecar.admission.turn import Cause, Turn, TurnEnded
from sidecar.apis import Api
from sidecar.chunks import Write, with_write, write_of
from sidecar.context import SCOPE_KEY, Granted, current
from sidecar.engines.base import Forward
from sidecar.errors import AdmissionError, Draining, EngineTimeout
from sidecar.events import Headers, Outcome
from sidecar.identity.issuer_keys import KeysNeeded
from sidecar.middleware.app_call import BODIES, AppCall, body_of, without_files
from sidecar.middleware.asked_usage import ask_for_usage
from sidecar.middleware.background import BackgroundEnd, BackgroundRequest
from sidecar.middleware.client_channel import ClientChannel, ClientComments, ClientDisconnected, comments_for
from sidecar.middleware.controller import AdmissionController
from sidecar.middleware.engine_route import EngineRoute
from sidecar.middleware.engine_time import EngineTime
from sidecar.middleware.error_responses import refuse, send_error
from sidecar.middleware.event_reporter import EventReporter
from sidecar.middleware.forwarding import forwarded_body, forwarded_scope, granted_of, headers_for_app
from sidecar.middleware.intake import RequestIntake, SizedRequest, count_tokens, sized_ask
from sidecar.middleware.lease_size import LeaseSize
from sidecar.middleware.outer_scope import show_outside
from sidecar.middleware.passing import pass_read
from sidecar.middleware.pending_aborts import CALL_KEY, ENGINE_ID_KEY, EngineCall, Held
from sidecar.middleware.policy_snapshot import PolicySnapshot
from sidecar.middleware.preemptible_attempt import PreemptibleAttempt, disconnects_before
from sidecar.middleware.refusals import refusal_headers, refusal_of
from sidecar.middleware.request_gain import AnswerReader, RequestGain
from sidecar.middleware.response_headers import admission_headers, id_for_app, id_headers
from sidecar.middleware.stages import Stage
from sidecar.middleware.usage import UsageReader
from sidecar.policy.model import Endpoint
from sidecar.pools import Grant, Lease
from sidecar.tasks import is_canceled_again

CUT = "CancelledError"  # `Settled.error` of a request that the server cut off

# Looked up once: an enumeration's attribute costs as much as a call.
_READING, _WAITING, _RUNNING, _FOLLOWED, _OVER = Stage
_COMPLETED, _CLIENT_LEFT, _FAILED = Outcome
_NOT_YET: Any = msgspec.UNSET


class RequestHandler(msgspec.Struct, eq=False):
    """Handles one request to a guarded endpoint: see `middleware.handler_of`. `run` is called once.

    `_pairs` are the client's headers as they came, `_headers` the last value of each. `_passing` reads a stream as it
    passes. A body that `_is_unread` passes as it comes: `generic_request`.
    """

    _controller: AdmissionController
    _snapshot: PolicySnapshot
    _endpoint: Endpoint
    _scope: Scope
    _receive: Receive
    _now_us: Callable[[], int]
    _received_us: int
    _pairs: Headers
    _headers: Mapping[bytes, bytes]
    _request_id: str
    _client: ClientChannel
    _reporter: EventReporter
    _intake: RequestIntake
    _usage: UsageReader
    _call: EngineCall
    _task: asyncio.Task[object] | None
    stage: Stage = _READING
    _request: SizedRequest = _NOT_YET
    _turn: Turn = _NOT_YET
    _lease: Lease = _NOT_YET
    _reader: AnswerReader = _NOT_YET
    _passing: AnswerReader | None = None
    _body: bytes | None = None
    _status: int | None = None
    _attempt: PreemptibleAttempt | None = None
    _for_app: Scope | None = None
    _app_call: AppCall = _NOT_YET
    _cut: Draining | None = None
    _route: EngineRoute | None = None
    _background: BackgroundRequest | None = None
    _size: LeaseSize | None = None
    _gain: RequestGain | None = None
    _engine_time: EngineTime | None = None
    _overdue: EngineTimeout | None = None
    _preempted_us: int | None = None
    _timed_out: bool = False
    _is_unread: bool = False

    async def run(self) -> None:
        """Handles the request to its end. Raises only what the app raises."""
        self._controller.watchdog.add(self)
        next_grant = self._admission
        try:
            while True:
                try:
                    grant = await next_grant()
                except (ClientDisconnected, TurnEnded, AdmissionError) as end:
                    await self._end_without_grant(end)
                    return
                scope, receive, send = self._forward(grant)
                app_call = self._app_call = AppCall(scope[SCOPE_KEY], self._reporter.app_trace())
                token = current.set(app_call)
                try:
                    await self._controller.app(scope, receive, send)
                except Exception as error:
                    if await self._has_failed(error):
                        raise
                finally:
                    app_call.returned(token)
                if self._is_over() or not await self._waits_again():
                    return
                next_grant = self._wait_again
        except asyncio.CancelledError as canceled:
            if not await self._has_answered(canceled):
                self._settle(_FAILED, CUT)
                raise
        finally:
            self._end()

    def check(self) -> None:
        """Ends a body that takes too long, and a request whose client disconnects while the app does not listen."""
        now_us, policy = self._now_us(), self._snapshot.policy
        if self.stage is _READING and now_us - self._received_us > policy.body_timeout_s * 1e6:
            if self._task is not None and self._body is None and not self._timed_out:
                self._timed_out = True
                self._task.cancel()
        elif self._background is not None and self._controller.background.is_due(self._background):
            self._settle(_FAILED, "background_timeout")
        elif self.stage is _RUNNING and self._background is None:
            disconnected_us = self._client.disconnected_us
            if disconnected_us is None:
                self._client.watch()
            elif now_us - disconnected_us > policy.disconnect_grace_s * 1e6:
                self._settle(_CLIENT_LEFT)

    def give_up(self) -> None:
        """Ends the wait, where the request waits: the process is about to end, or every request passes."""
        if self.stage is _WAITING:
            self._turn.give_up()

    # -- up to admission

    async def _admission(self) -> Grant:
        """Reads the request, enters the pool and waits."""
        request, controller, snapshot = await self._read(), self._controller, self._snapshot
        if controller.routing is not None:
            route = self._route = controller.routing.route(request)
            request.hits, self._call, self._usage = route.hits, route.call(), route.usage
        pool, classification, entered_us = controller.pool, request.classification, None
        turn = self._turn = Turn(
            pool,
            snapshot.policy,
            classification.tenant,
            self._reporter,
            budgets=controller.usage,
            max_wait_s=request.max_wait_s,
            disconnect=self._client.disconnect,
            comments=self._comments,
            is_over=lambda: controller.is_passing,
        )
        try:
            appraise = controller.appraiser(snapshot) if snapshot.policy.rules.is_by_gain else None
            lease = self._lease = await turn.enter(sized_ask(pool, request, controller.lease_sizes, appraise))
            entered_us = lease.entered_us
            self.stage = _WAITING
        finally:  # only now the charged tier is known
            classification.note_charged(turn.level)
            self._classified(entered_us)
        if snapshot.are_preemptible[classification.level] and request.may_be_repeated:
            lease.on_preempt = self._preempt
        if lease.grant is None and request.expected is not None:
            lease.size_now = partial(request.expect, controller.lease_sizes, pool)
        return await turn.granted()

    async def _end_without_grant(self, end: Exception) -> None:
        """The request ended before it was admitted, or while it waited again."""
        controller, policy, request = self._controller, self._snapshot.policy, self._request
        self.stage = _OVER
        wait = end.wait if isinstance(end, TurnEnded) else None
        if isinstance(end, ClientDisconnected) or (isinstance(end, TurnEnded) and end.cause is Cause.DISCONNECTED):
            self._reporter.disconnected(wait)
        elif controller.is_passing and request is not _NOT_YET:  # it was read, and goes to the app as it came
            self._reporter.let_pass(wait)
            self._body = request.body
            receive = self._client.receive if self._is_unread else self._receive_for_app
            await pass_read(controller, self._scope, request, receive, self._client)
        else:
            level = None if request is _NOT_YET else request.classification.level
            error = refusal_of(controller, policy, end, level=level)
            self._reporter.refused(error, wait)
            await self._refuse(error, wait)

    async def _read(self) -> SizedRequest:
        """Reads the request, and sizes it. Raises ClientDisconnected, or the intake's refusal."""
        if self._controller.is_draining:
            raise Draining("this server is shutting down and takes no new request; try another", retry_after_s=1)
        intake = self._intake
        try:
            intake.check_head(self._pairs, self._scope)
        except KeysNeeded as needed:
            await needed.arrive()
            intake.check_head(self._pairs, self._scope)
        request = intake.unread() if self._is_unread else None
        try:
            while request is None:
                message = await self._receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnected
                request = intake.feed(message, self._now_us())
        except asyncio.CancelledError:
            if self._timed_out and not is_canceled_again(self._task):
                intake.check_time(self._now_us())  # raises BodyTimeout
            raise
        self._request, self._body = request, request.body
        if self._snapshot.estimator.counter is not None:
            await count_tokens(request, self._snapshot)
        self._controller = self._controller.controller_of(request)
        return request

    def _classified(self, entered_us: int | None) -> None:
        """Notes the tier that is charged from `entered_us` on; None where the request did not enter the pool."""
        at_us = self._now_us() if entered_us is None else entered_us
        request, snapshot = self._request, self._snapshot
        if objectives := snapshot.objectives:
            gain = self._controller.gain.follow(request, objectives, snapshot.tier_names, at_us)
            self._gain = self._reporter.gain = gain
        self._reporter.classified(request, self._endpoint, snapshot.policy, at_us)

    def _comments(self) -> ClientComments | None:
        """The comments for the client while it waits."""
        return comments_for(self._client, self._request, self._lease, self._snapshot, self._request_id)

    async def _refuse(self, error: AdmissionError, waited: Grant | None) -> None:
        send, own_id, most_s = self._client.send, self._request_id, self._snapshot.policy.body_timeout_s
        named = refusal_headers(error, waited, is_cut=error is self._cut)
        is_anthropic = self._endpoint.api is Api.MESSAGES
        await refuse(send, error, self._receive, most_s, anthropic=is_anthropic, request_id=own_id, headers=named)

    # -- after admission

    def _forward(self, grant: Grant) -> tuple[Scope, Receive, Send]:
        """The request as the engine should see it, for the app. It is settled when its response is sent."""
        self.stage = _RUNNING
        controller, request, snapshot, lease = self._controller, self._request, self._snapshot, self._lease
        priority = snapshot.priorities[grant.level]
        forward = controller.dialect.forward(self._endpoint.api, priority)
        self._reporter.admitted(grant, priority if forward.is_sent else None)
        receive: Receive = self._receive_for_app
        send: Send = self._send_for_app
        if lease.on_preempt is not None:
            attempt = self._attempt = PreemptibleAttempt(lease, receive, send, self._client.disconnect)
            receive, send = attempt.receive, attempt.send
            if self._preempted_us is not None:
                attempt.preempt()
        elif snapshot.policy.rules.is_preemptible(lease.tier):  # what cannot be given back must be no one's victim
            lease.keep()
        if self._route is not None:
            send = self._route.begin(lease, send)
        if request.expected is not None:
            self._size = controller.lease_sizes.begin(request.expected, lease, self._usage, request.payload.stream)
        self._reader = self._usage if self._gain is None else self._gain.sent(grant.engine, self._usage)
        scope = self._scope_for_app(forward, granted_of(grant, request, snapshot.policy, priority, self._request_id))
        return scope, receive, send

    async def _has_failed(self, error: Exception) -> bool:
        """Ends a request whose app raised an error. False where no one gets this attempt's response."""
        attempt, route = self._attempt, self._route
        if (attempt is not None and attempt.is_lost) or (route is not None and route.failed(error)):
            return False
        self._settle(_FAILED, type(error).__name__)
        if self._client.keepalive is not None:
            await self._client.keepalive.break_off()
        return True

    def _is_over(self) -> bool:
        """Whether the app's response was the end of the request."""
        return self.stage is _OVER and self._overdue is None

    async def _waits_again(self) -> bool:
        """Whether the request waits again: it was preempted before its first byte, or could not be sent."""
        attempt, route = self._attempt, self._route
        if self._call.is_handed_back and self.stage is _RUNNING:
            return route is None or await self._leaves(route)
        return attempt is not None and attempt.is_lost and not await self._disconnects_before_abort()

    async def _leaves(self, route: EngineRoute) -> bool:
        """Whether a request that got nothing of an answer waits for another engine. Else it gets the error."""
        if await route.waits_again():
            if self._call.may_run:  # the connection broke, but the engine lives: it computes on for a moment
                await self._disconnects_before_abort()
            return self.stage is _RUNNING
        self._call.is_handed_back, error = False, self._call.error
        assert error is not None
        await send_error(self._send_for_app, error, anthropic=self._endpoint.api is Api.MESSAGES)
        return False

    def _scope_for_app(self, forward: Forward, granted: Granted) -> Scope:
        request = self._request
        named = () if self._controller.is_proxied else id_for_app(self._request_id, self._pairs, self._headers)
        added = [*forward.headers, *self._reporter.headers(), *request.added, *named]
        asked = self._snapshot.asks_usage_of
        options = ask_for_usage(request, asked, self._usage) if asked is None or request.payload.stream else None
        if options is not None:
            self._client.hide_usage()
        self._body = body = forwarded_body(request.capped_body(), request.payload, forward, options)
        headers = headers_for_app(self._pairs, request, body, added)
        scope = forwarded_scope(self._scope, self._endpoint, headers)
        if self._client.keepalive is not None:
            scope["extensions"] = without_files(scope)
        if request.payload.background:
            app = self._controller.app if self._route is None else self._route.pinned(self._controller.app)
            self._background = BackgroundRequest(app, scope, request.payload)
        if self._route is not None:
            scope[ENGINE_ID_KEY] = None if self._lease.grant is None else self._lease.grant.engine
        if (write := write_of(scope)) is not None:
            is_framed = self._client.keepalive is not None or not self._controller.is_proxied
            with_write(scope, None if is_framed else partial(self._write, write))
        scope[SCOPE_KEY], scope[CALL_KEY] = granted, self._call
        self._for_app = None if self._controller.is_proxied else scope
        return scope

    async def _receive_for_app(self) -> Message:
        """The body in one piece; then the client's messages: the app sees a disconnect as without the middleware."""
        body = self._body
        if body is not None:
            self._body = None
            return {"type": "http.request", "body": body, "more_body": False}
        return await (self._client if self._background is None else self._background).receive()

    def _send_for_app(self, message: Message) -> Awaitable[None]:
        """Passes the response on as it comes, chunk by chunk, and settles after its last byte.

        Streams have many chunks: each costs no more than this, and no coroutine of its own.
        """
        reader = self._passing
        if reader is None or not message.get("more_body"):
            if self._overdue is not None:
                return _nothing()
            if self._background is None:
                if message["type"] == "http.response.start":
                    return self._client.send(self._response_start(message))
                if message["type"] in BODIES and not message.get("more_body"):
                    return self._send_last(message)
            return self._send_other(message)
        if reader.feed(message.get("body", b"")) and self._size is not None:
            self._size.answer_read()
        return self._client.send(message)

    def _write(self, write: Write, body: bytes) -> bool:
        """See `chunks.Write`, around the server's: from the first byte on, a chunk is read as one that is sent."""
        reader, hider = self._passing, self._client.hider
        if reader is None or (hider is not None and not hider.passes(body)) or not write(body):
            return False
        if reader.feed(body) and self._size is not None:
            self._size.answer_read()
        return True

    async def _send_last(self, message: Message) -> None:
        """The last bytes of a response, and most often its only ones."""
        if (body := message.get("body")) or message["type"] != "http.response.body":  # what `body_of` does, in line
            self._read_response(body or b"")
        # Servers also say `http.disconnect` after a complete response: only an earlier one is the client's.
        has_left = self._client.disconnected_us is not None
        self._call.answered()
        await self._app_call.send_last(self._client.send, message)
        self._settle_answered(_CLIENT_LEFT if has_left else _COMPLETED)

    async def _send_other(self, message: Message) -> None:
        """The first bytes of a stream; every message of a background response; what HTTP servers may add."""
        kind, background, is_end = message["type"], self._background, False
        if kind == "http.response.start":
            message = self._response_start(message)
        elif kind in BODIES:
            if is_end := background is not None and not message.get("more_body"):
                self._call.answered()
            if (body := body_of(message)) is not None:
                self._read_response(body)
                if background is None and self.stage is _RUNNING:
                    self._passing = self._reader
        await (self._client.send if background is None else background.sender(self._client.send))(message)
        if is_end:
            self._settle_answered(_COMPLETED)

    def _settle_answered(self, outcome: Outcome) -> None:
        """Ends a request whose response is complete. It may be the proxy's, because the engine failed."""
        error = None if self._call.error is None else self._call.engine_error()
        self._settle(outcome if error is None else _FAILED, None if error is None else error.code)

    def _response_start(self, message: Message) -> Message:
        """The response's start, with the headers of the admission."""
        self._status = message["status"]
        show_outside(self._for_app, self._scope)
        headers = message.get("headers", ())
        own = admission_headers(self._request, self._lease, self._snapshot.tier_names, self._turn.preemptions)
        named = id_headers(self._request_id, headers, self._endpoint.api)
        return {**message, "headers": [*headers, *own, *named]}

    def _read_response(self, body: bytes) -> None:
        if self.stage is not _RUNNING:  # not what comes after a disconnect's grace: no one gets it
            return
        if not self._usage.has_begun:
            self._usage.has_begun = True
            self._reporter.first_byte(self._status)
            if self._route is not None:
                self._route.first_byte()
            if self._gain is not None:
                self._gain.first_byte(self._status)
        if self._reader.feed(body) and self._size is not None:
            self._size.answer_read()
        if self._background is not None:
            self._background.feed(body)

    # -- preemption

    def _preempt(self) -> None:
        """Called by the pool: a more important request needs the room."""
        self._preempted_us = self._now_us()
        if self._attempt is not None:
            self._attempt.preempt()

    async def _disconnects_before_abort(self) -> bool:
        """Returns when the engine has aborted a preempted attempt: whether the client disconnected before that."""
        if has_left := await disconnects_before(self._client.disconnect(), self._when_aborted):
            self._settle(_CLIENT_LEFT)
        return has_left

    async def _wait_again(self) -> Grant:
        """Releases the room, and queues the request at its original place."""
        is_handed_back, grant = self._call.is_handed_back, self._lease.grant
        assert grant is not None
        if self._size is not None:
            self._size.ended()
        if self._gain is not None:
            self._gain.taken_back()
        self._preempted_us = self._attempt = self._background = self._engine_time = None
        route = self._route
        self._call = EngineCall(self._controller.engine_watch) if route is None else route.call()
        self._usage, self._status = UsageReader() if route is None else route.usage, None
        self.stage = _WAITING
        if not is_handed_back:
            return await self._turn.requeue()
        if route is None:
            return await self._turn.hand_back(others_answer=False)
        if grant.engine is not None and route.replay is not None:
            self._reporter.replayed(grant.engine, route.replay)
        others_answer = self._controller.engine_watch.is_usable
        return await self._turn.hand_back(route.barred, others_answer=others_answer)

    # -- the end

    async def _has_answered(self, canceled: asyncio.CancelledError) -> bool:
        """Answers a request that was canceled, unless its response has begun. False where the cancellation goes on."""
        if self._controller.is_stopping(canceled) and self.stage < _FOLLOWED and self._status is None:
            self._cut = Draining("this server stopped before the request was served; send it again", retry_after_s=1)
            await self._refuse(self._cut, None)
            self._status = self._cut.status
        return False

    def _settle(self, outcome: Outcome, error: str | None = None) -> None:
        """Ends a running request. Only the first call counts; a background response is followed to its own end."""
        if self.stage is not _RUNNING:
            return
        background, response_id = self._background, None
        if background is not None:
            self._background, response_id = None, background.running_id()
        if background is None or response_id is None:
            self._release(outcome, error)
        else:
            self.stage = _FOLLOWED
            self._request.drop_body()
            self._controller.background.follow(background, response_id, self._settle_background)

    def _settle_background(self, ended: BackgroundEnd) -> None:
        self._usage.read()
        self._usage.counted(ended.input_tokens, ended.output_tokens)
        self._client.disconnected_us = None  # a background response does not end with its client
        self._call.answered()
        self._release(ended.outcome, ended.error)

    def _release(self, outcome: Outcome, error: str | None) -> None:
        """Releases the lease, as soon as the engine has aborted the request, and reports what it cost."""
        self.stage = _OVER
        request, usage, lease, call, size = self._request, self._usage, self._lease, self._call, self._size
        controller, status = self._controller, self._status
        failure = None if call.error is None else call.engine_error()
        if self._app_call is not _NOT_YET:
            self._app_call.granted = None
        self._passing = None
        usage.conclude(controller.output_ratios, request.classification.tenant.name, request.payload.model)
        tokens = usage.used_tokens(request.prompt_tokens) if failure is None else 0
        is_known = usage.output_tokens is not None or failure is not None or usage.is_known(status)
        charged = tokens if is_known else None
        if size is not None:
            size.ended(tokens)
        if call.may_run:
            if lease.on_preempt is not None:
                lease.on_preempt = lambda: None  # nothing can free its room sooner
            self._when_aborted(partial(lease.settle, charged, failure is None))
        else:
            lease.settle(charged, failure is None)
        if outcome is _FAILED and self._client.disconnected_us is not None:
            outcome, error = _CLIENT_LEFT, None  # the disconnect is why the app failed
        if self._route is not None:
            self._route.ended()
        controller.learn(request, self._snapshot.policy, usage, status, outcome is _COMPLETED, failure is not None)
        used = tokens, usage.input_tokens, usage.output_tokens, usage.cached_tokens
        said = None if failure is None else failure.message
        self._reporter.settled(outcome, status, used, error, said, size)

    def _when_aborted(self, release: Callable[[], object]) -> None:
        """Calls `release` when the engine has aborted what it computed for this request."""
        is_lost = self._attempt is not None and self._attempt.is_lost
        disconnected_us = self._preempted_us if is_lost else self._client.disconnected_us or self._client.cut_us
        due_us = self._snapshot.abort_latency.due_us(self._now_us(), disconnected_us)
        tokens = self._request.tokens if self._size is None else self._size.held
        held = Held(self._request.requests, tokens)
        self._call.when_aborted(release, self._controller.pending_aborts, due_us, held)

    def _end(self) -> None:
        """Leaves no lease, no ticket and no task, in whichever stage the request broke off."""
        stage = self.stage
        if stage is _READING:
            self._report_canceled(None)
            self.stage = _OVER
        elif stage is _WAITING:  # the task was canceled
            self._turn.withdraw(self._report_canceled)
            self.stage = _OVER
        elif stage is _RUNNING:
            self._settle(_FAILED, "incomplete_response")
        show_outside(self._for_app, self._scope, is_shown=self._status is not None)
        self._client.close()
        self._controller.watchdog.discard(self)

    def _report_canceled(self, wait: Grant | None) -> None:
        if self._cut is None:
            self._reporter.canceled(wait)
        else:
            self._reporter.refused(self._cut, wait)


async def _nothing() -> None:
    """The `send` of what no one gets any more."""
