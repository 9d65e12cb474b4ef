"""One admitted request, from its first byte to its released lease.

Its stages are those of `turn.Stage`. Whatever raises or is canceled, the lease is released exactly once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec.structs import replace
from starlette.types import Message, Receive, Scope, Send

from sidecar.admission.answer import Answer, CostReader, EngineCall
from sidecar.admission.attempt import EngineRoute, EngineTime, PreemptibleAttempt, break_off, disconnects_before
from sidecar.admission.background import BackgroundEnd, BackgroundRequest
from sidecar.admission.client import (
    ClientChannel,
    ClientComments,
    UploadChannel,
    comments_for,
)
from sidecar.admission.controller import AdmissionController
from sidecar.admission.event_reporter import new_reporter
from sidecar.admission.forwarding import (
    new_granted,
    pass_read,
    request_for_app,
    show_outside,
)
from sidecar.admission.handover import CALL_KEY, ENGINE_ID_KEY
from sidecar.admission.intake import RequestIntake, SizedRequest, counted, is_upload, sized_for
from sidecar.admission.pending_aborts import Held
from sidecar.admission.responses import REQUEST_ID, answer_headers, refusal_headers, refuse, request_id
from sidecar.admission.turn import EndCause, Stage, Turn, TurnEnded, TurnUser, refusal_for
from sidecar.admission.usage import UsageReader
from sidecar.apis import Api
from sidecar.context import SCOPE_KEY, Granted, current
from sidecar.engines.base import Forward
from sidecar.errors import AdmissionError, BodyTimeout, BodyTooLarge, Draining, EngineUnreachable
from sidecar.events import Outcome
from sidecar.identity.issuer_keys import KeysNeeded
from sidecar.policy.endpoint import Endpoint
from sidecar.policy.model import Policy
from sidecar.pools import Grant, Lease
from sidecar.tasks import is_canceled_again

CUT = "CancelledError"  # `Settled.error` of a request that the server cut off


class RequestHandler(TurnUser):
    """Handles one request to a guarded endpoint, which has just come. `run` is called once.

    `stage` is where it is. `_answer` is that of its present attempt. `_overdue` is why the present attempt was broken
    off: its app is told that its client has left, and what it still sends is dropped. `_body` is for the app's first
    `receive`; that of an upload passes as it comes.
    """

    __slots__ = (
        "_answer", "_attempt", "_body", "_call", "_client", "_controller", "_cut", "_endpoint",
        "_engine_time", "_for_app", "_intake", "_is_read", "_lease", "_now_us", "_overdue",
        "_pairs", "_preempted_us", "_receive", "_received_us", "_reporter", "_request", "_request_id", "_route",
        "_scope", "_snapshot", "_task", "_timed_out", "_turn", "_upload", "stage",
    )  # fmt: skip

    _request: SizedRequest
    _turn: Turn
    _lease: Lease

    def __init__(
        self, controller: AdmissionController, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self.stage = Stage.READING
        self._controller = controller
        self._snapshot = snapshot = controller.snapshot
        self._endpoint = endpoint
        self._scope = scope
        self._receive = receive
        self._now_us = now_us = controller.pool.now_us
        self._received_us = received_us = now_us()
        self._pairs = pairs = [*scope["headers"]]  # a copy: uvicorn appends trailers to its own list
        headers = dict(pairs)
        self._request_id = own_id = request_id(headers)
        self._intake = RequestIntake(snapshot, endpoint, headers, received_us)
        self._reporter = new_reporter(controller.observer, scope, own_id, received_us, now_us, self._intake)
        self._upload: UploadChannel | None = None
        if endpoint.size is not None and is_upload(headers):
            self._upload = UploadChannel(receive, send, now_us)
        self._client = self._upload or ClientChannel(receive, send, now_us)
        self._call = EngineCall(controller.engine_watch)
        self._is_read = False
        self._answer: Answer | None = None
        self._body: bytes | None = None
        self._attempt: PreemptibleAttempt | None = None
        self._for_app: Scope | None = None
        self._cut: Draining | None = None
        self._route: EngineRoute | None = None
        self._engine_time: EngineTime | None = None
        self._overdue: AdmissionError | None = None
        self._preempted_us: int | None = None
        self._timed_out = False

    async def run(self) -> None:
        """Handles the request to its end. Raises only what the app raises."""
        self._controller.watchdog.add(self)
        try:
            self._turn = self._next_turn(await self._read())
            async with self._turn as first:
                grant = first
                try:
                    while True:
                        scope, receive, send = self._forward(grant)
                        call = self._call
                        token = current.set(call)
                        try:
                            await self._controller.app(scope, receive, send)
                        except Exception as error:
                            if await self._has_failed(error):
                                raise
                        finally:
                            call.returned(token)
                        if (self.stage is Stage.OVER and self._overdue is None) or not await self._waits_again():
                            return
                        grant = await self._wait_again()
                except asyncio.CancelledError as canceled:
                    if not await self._has_answered(canceled):
                        self._settle(Outcome.FAILED, CUT)
                        raise
                finally:
                    self._settle(Outcome.FAILED, "incomplete_response")
        except (TurnEnded, AdmissionError) as end:
            if self.stage > Stage.WAITING:  # the app's own
                raise
            await self._end_without_grant(end)
        except asyncio.CancelledError as canceled:
            if self.stage > Stage.WAITING or not await self._has_answered(canceled):
                raise
        finally:
            self._end()

    def check(self) -> None:
        """Ends a body that takes too long, an engine that does, and a request whose client left unheard by the app."""
        now_us, policy = self._now_us(), self._snapshot.policy
        if self.stage is Stage.READING:
            if now_us - self._received_us > policy.body_timeout_s * 1e6 and self._body is None and not self._timed_out:
                self._timed_out = True
                self._task.cancel()
        elif self._background is not None:
            if self._controller.background.is_due(self._background):
                self._settle(Outcome.FAILED, "background_timeout")
        elif self.stage is Stage.RUNNING:
            self._check_running(now_us, policy)
        self._reporter.check(has_left=self._client.disconnected_us is not None)

    def _check_running(self, now_us: int, policy: Policy) -> None:
        disconnected_us, cut_us = self._client.disconnected_us, self._client.cut_us
        grace_us = policy.disconnect_grace_s * 1e6
        if disconnected_us is not None and now_us - disconnected_us > grace_us:
            self._settle(Outcome.CLIENT_LEFT)
        elif self._overdue is not None:  # the app was told that its client has left
            if cut_us is not None and now_us - cut_us > grace_us:
                self._timed_out = True
                self._settle(Outcome.FAILED, self._overdue.code)
                self._task.cancel()
        elif disconnected_us is None and not self._call.is_handed_back:
            self._client.watch()
            self._check_upload(now_us, policy.body_timeout_s)
            self._check_engine(now_us)

    def _check_upload(self, now_us: int, most_s: float) -> None:
        """Ends an upload that takes longer than a body may: it holds its lease meanwhile."""
        upload, grant = self._upload, self._lease.grant
        if upload is None or upload.is_complete or grant is None or now_us - grant.at_us <= most_s * 1e6:
            return
        self._overdue = BodyTimeout(f"the upload did not arrive within {most_s:g} s of its admission")
        if self._answer is not None:
            self._answer.is_dropped = True
        self._settle(Outcome.FAILED, self._overdue.code)
        upload.cut()

    def _check_engine(self, now_us: int) -> None:
        """Breaks off an attempt that the engine takes too long for. It is never repeated: the engine may work on it."""
        attempt, grant, answer, call = self._attempt, self._lease.grant, self._answer, self._call
        is_preempted = attempt is not None and attempt.is_lost
        if answer is None or self._overdue or is_preempted or not call.may_run:
            return
        if self._engine_time is None:
            timeouts = self._snapshot.policy.tiers[self._request.classification.level].timeouts
            since_us, streams = now_us if grant is None else grant.at_us, self._request.payload.stream
            self._engine_time = EngineTime(timeouts, answer.usage, self._client, since_us, streams=streams)
        self._overdue = late = self._engine_time.exceeded(now_us)
        if late is None:
            return
        if answer.status is None:
            call.error = late
        answer.streams, answer.is_dropped = False, True
        self._client.cut()

    def give_up(self) -> None:
        """Ends the wait, where the request waits: the process is about to end, or every request passes."""
        if self.stage is Stage.WAITING:
            self._turn.give_up()

    # -- up to admission

    def _next_turn(self, request: SizedRequest) -> Turn:
        """The request's turn in the pool."""
        controller, snapshot = self._controller, self._snapshot
        if controller.routing is not None:
            route = self._route = controller.routing.route(request)
            request, self._call = replace(request, hits=route.hits), route.call()
        pool, sizes = controller.pool, controller.lease_sizes
        meter = controller.gain if snapshot.policy.rules.is_by_gain else None
        request = sized_for(pool, request, sizes, meter, snapshot.tier_names)
        ask, budgets = request.ask(), controller.usage
        return Turn(pool, snapshot.policy, request, ask, self, reports=self._reporter, budgets=budgets, sizes=sizes)

    def entered(self, lease: Lease | None) -> None:
        """See `TurnUser`."""
        request, snapshot = self._turn.request, self._snapshot
        self.rose(request)
        at_us = self._now_us() if lease is None else lease.entered_us
        if snapshot.objectives:
            self._reporter.gain = self._controller.gain.follow(request, snapshot, at_us)
        self._reporter.classified(request, snapshot, at_us)
        if lease is None:
            return
        self._lease, self.stage = lease, Stage.WAITING
        if snapshot.are_preemptible[request.classification.level] and request.may_be_repeated:
            lease.on_preempt = self._preempt

    def rose(self, request: SizedRequest) -> None:
        """See `TurnUser`."""
        self._request, self._intake.classification = request, request.classification

    def disconnect(self) -> asyncio.Future[Any]:
        """See `TurnUser`."""
        return self._client.disconnect()

    def comments(self, lease: Lease) -> ClientComments | None:
        """See `TurnUser`."""
        return comments_for(self._client, self._request, self._snapshot, self._request_id, lease)

    @property
    def passes(self) -> bool:
        """See `TurnUser`."""
        return self._controller.is_passing

    async def _end_without_grant(self, end: Exception) -> None:
        """The request ended before it was admitted, or while it waited again."""
        controller, policy = self._controller, self._snapshot.policy
        self.stage = Stage.OVER
        wait = end.wait if isinstance(end, TurnEnded) else None
        if isinstance(end, TurnEnded) and end.cause is EndCause.DISCONNECTED:
            self._reporter.disconnected(wait)
        elif controller.is_passing and self._is_read and not isinstance(end, EngineUnreachable):
            # It was read, and goes to the app as it came; not an upload that has passed in part.
            self._reporter.let_pass(wait)
            self._body = None if self._upload else self._request.body
            receive = self._client.receive if self._upload else self._receive_for_app
            await pass_read(controller, self._scope, self._request, receive, self._client)
        else:
            level = self._request.classification.level if self._is_read else None
            error = refusal_for(controller.engine_watch, controller.pool, policy, end, level=level)
            self._reporter.refused(error, wait)
            await self._refuse(error, wait)

    async def _read(self) -> SizedRequest:
        """Reads the request, and sizes it. Raises TurnEnded where its client disconnects, or the intake's refusal."""
        if self._controller.is_draining:
            raise Draining("this server is shutting down and takes no new request; try another", retry_after_s=1)
        intake = self._intake
        try:
            intake.check_head(self._pairs, self._scope)
        except KeysNeeded as needed:
            await needed.arrive()
            intake.check_head(self._pairs, self._scope)
        try:
            request = intake.unread() if self._upload else None
            while request is None:
                message = await self._receive()
                if message["type"] == "http.disconnect":
                    raise TurnEnded(EndCause.DISCONNECTED, None)
                request = intake.feed(message, self._now_us())
        except asyncio.CancelledError:
            if self._timed_out and not is_canceled_again(self._task):
                intake.check_time(self._now_us())  # raises BodyTimeout
            raise
        self._request, self._body, self._is_read = request, request.payload.body, True
        if self._controller.controllers:  # each model has its own
            self._controller = self._controller.controller_for(request)
        if self._snapshot.estimator.counter is not None:
            request = await counted(request, self._snapshot)
        return request

    async def _refuse(self, error: AdmissionError, waited: Grant | None) -> None:
        """Answers with an error. What is left of a body is read: a client that still sends would lose the answer."""
        named, upload = refusal_headers(error, waited, is_cut=error is self._cut), self._upload
        is_unread = isinstance(error, BodyTooLarge) or (upload is not None and not upload.is_complete)
        await refuse(
            self._client.send,
            error,
            self._receive if upload is None or isinstance(error, BodyTooLarge) else upload.receive_rest,
            self._snapshot.policy.body_timeout_s,
            is_body_left=is_unread and not self._intake.is_whole,
            anthropic=self._endpoint.api is Api.MESSAGES,
            request_id=self._request_id,
            headers=named,
        )

    # -- after admission

    def _forward(self, grant: Grant) -> tuple[Scope, Receive, Send]:
        """The request as the engine should see it, for the app. It is settled when its response is sent."""
        controller, request, snapshot, lease = self._controller, self._turn.request, self._snapshot, self._lease
        self._request = request
        priority = snapshot.priorities[grant.level]
        forward = controller.dialect.forward(self._endpoint.api, priority)
        self._reporter.admitted(grant, priority if forward.is_sent else None)
        granted = new_granted(grant, request, snapshot.policy, priority, self._request_id)
        observation = self._reporter.observation
        self._call.granted, self._call.trace = granted, None if observation is None else observation.app_trace()
        answer = self._answer = self._new_answer(grant)
        self.stage = Stage.RUNNING  # not before: a request that runs is settled by its answer
        receive: Receive = self._receive_for_app
        send: Send = answer.send
        if lease.on_preempt is not None:
            attempt = self._attempt = PreemptibleAttempt(lease, receive, send, self._client.disconnect)
            receive, send = attempt.receive, attempt.send
            if self._preempted_us is not None:
                attempt.preempt()
        elif snapshot.are_preemptible_by_rule[lease.ask.tier]:  # what cannot be given back must be no one's victim
            lease.keep()
        if self._route is not None:
            send = self._route.begin(lease, send)
        return self._scope_for_app(forward, granted, answer), receive, send

    def _new_answer(self, grant: Grant) -> Answer:
        request, gain, cost = self._request, self._reporter.gain, self._endpoint.cost
        usage = UsageReader() if self._route is None else self._route.usage
        reader = usage if gain is None else gain.sent(grant.engine, usage)
        first_byte = self._reporter.first_byte if self._route is None else self._first_byte
        answer = Answer(usage, reader, self._client, self._call, self._response_start, first_byte, self._settle)
        if cost is not None:
            answer.cost = CostReader(cost)
        if request.expected is not None:
            sizes, streams = self._controller.lease_sizes, request.payload.stream
            answer.size = sizes.begin(request.expected, self._lease, usage, streams)
        return answer

    async def _has_failed(self, error: Exception) -> bool:
        """Ends a request whose app raised an error. False where no one gets this attempt's response."""
        is_dropped = self._overdue is not None or (self._attempt is not None and self._attempt.is_lost)
        if is_dropped or (self._route is not None and self._route.failed(error)):
            return False
        if self.stage is Stage.RUNNING:  # else the answer was complete, or no one gets it
            self._settle(Outcome.FAILED, type(error).__name__)
            if self._client.keepalive is not None:
                await self._client.keepalive.break_off()
        return True

    async def _waits_again(self) -> bool:
        """True if the request waits again: it was preempted before its first byte, or could not be sent."""
        attempt, route = self._attempt, self._route
        if self._overdue is not None:
            await self._answer_overdue(self._overdue)
            return False
        if self._call.is_handed_back and self.stage is Stage.RUNNING:
            return route is None or await self._leaves(route)
        return attempt is not None and attempt.is_lost and not await self._disconnects_before_abort()

    async def _answer_overdue(self, error: AdmissionError) -> None:
        """The answer to an attempt that was broken off. One that has begun ends with the error, as far as it can."""
        status = self._status
        if isinstance(error, BodyTimeout):
            if status is None:
                await self._refuse(error, None)
        elif status is None:
            self._call.error, self._overdue = error, None
            assert self._answer is not None
            await self._answer.send_error(error, self._endpoint.api)
        else:
            self._settle(Outcome.FAILED, error.code)
            streams = self._request.payload.stream and status < 400
            assert self._answer is not None
            await break_off(self._client, error, self._endpoint.api, self._answer.usage, streams=streams)

    async def _leaves(self, route: EngineRoute) -> bool:
        """True if a request that got nothing of an answer waits for another engine. Else it gets the error."""
        if await route.waits_again():
            if self._call.may_run:  # the connection broke, but the engine lives: it computes on for a moment
                await self._disconnects_before_abort()
            return self.stage is Stage.RUNNING
        self._call.is_handed_back, error = False, self._call.error
        assert error is not None
        assert self._answer is not None
        await self._answer.send_error(error, self._endpoint.api)
        return False

    def _scope_for_app(self, forward: Forward, granted: Granted, answer: Answer) -> Scope:
        request, observation, is_proxied = self._request, self._reporter.observation, self._controller.is_proxied
        traced = () if observation is None else observation.headers()
        named = () if is_proxied else ((REQUEST_ID, self._request_id.encode()),)
        added = (*forward.headers, *traced, *request.added, *named)
        scope, body = request_for_app(
            request, self._snapshot, self._endpoint, self._scope, self._pairs, forward=forward, added=added,
            client=self._client, answer=answer, is_proxied=is_proxied,
        )  # fmt: skip
        self._body = None if self._upload else body
        if request.payload.background:
            app = self._controller.app if self._route is None else self._route.pinned(self._controller.app)
            answer.background = BackgroundRequest(app, scope, request.payload)
        if self._route is not None:
            scope[ENGINE_ID_KEY] = None if self._lease.grant is None else self._lease.grant.engine
        scope[SCOPE_KEY], scope[CALL_KEY] = granted, self._call
        self._for_app = None if is_proxied else scope
        return scope

    async def _receive_for_app(self) -> Message:
        """The body in one piece; then the client's messages: the app sees a disconnect as without the middleware."""
        body = self._body
        if body is not None:
            self._body = None
            return {"type": "http.request", "body": body, "more_body": False}
        return await (self._background or self._client).receive()

    @property
    def _background(self) -> BackgroundRequest | None:
        """The request whose answer runs on in the engine, None where there is none."""
        return None if self._answer is None else self._answer.background

    def _response_start(self, message: Message) -> Message:
        """The response's start, with the headers of the admission."""
        if self._for_app is not None:
            show_outside(self._for_app, self._scope)
        request, tier_names, headers = self._request, self._snapshot.tier_names, message.get("headers", ())
        added = answer_headers(request, self._lease, tier_names, self._turn.preemptions, self._request_id, headers)
        return {**message, "headers": [*headers, *added]}

    def _first_byte(self, status: int | None) -> None:
        self._reporter.first_byte(status)
        assert self._route is not None
        self._route.first_byte()

    # -- preemption

    def _preempt(self) -> None:
        """Called by the pool: a more important request needs the room."""
        self._preempted_us = self._now_us()
        if self._attempt is not None:
            self._attempt.preempt()

    async def _disconnects_before_abort(self) -> bool:
        """Returns when the engine has aborted an attempt: whether the client disconnected before that."""
        if has_left := await disconnects_before(self._client.disconnect(), self._when_aborted):
            self._settle(Outcome.CLIENT_LEFT)
        return has_left

    async def _wait_again(self) -> Grant:
        """Releases the room, and queues the request at its original place."""
        is_handed_back, grant = self._call.is_handed_back, self._lease.grant
        assert grant is not None
        if self._answer is not None and self._answer.size is not None:
            self._answer.size.ended()
        if self._reporter.gain is not None:
            self._reporter.gain.taken_back()
        if self._upload is not None and not self._upload.rewind():
            self.stage = Stage.WAITING
            self._turn.settle(0, is_counted=False)
            raise EngineUnreachable(
                "the engine could not be reached, and too much of the upload has passed to send it to another; send "
                "it once more",
                retry_after_s=1,
            )
        self._preempted_us = self._attempt = self._answer = self._engine_time = None
        route = self._route
        self._call = EngineCall(self._controller.engine_watch) if route is None else route.call()
        self.stage = Stage.WAITING
        if not is_handed_back:
            return await self._turn.requeue()
        if route is None:
            return await self._turn.hand_back(others_answer=False)
        if grant.engine is not None and route.replay is not None:
            self._reporter.replayed(grant.engine, route.replay)
        others_answer = self._controller.engine_watch.is_usable
        return await self._turn.hand_back(route.barred, others_answer=others_answer)

    # -- the end

    @property
    def _status(self) -> int | None:
        """The status of the answer; None before its head."""
        return None if self._answer is None else self._answer.status

    async def _has_answered(self, canceled: asyncio.CancelledError) -> bool:
        """Answers a request that was canceled, unless its answer has begun. False where the cancellation goes on."""
        if self._overdue is not None and self._timed_out and not is_canceled_again(self._task):
            await self._answer_overdue(self._overdue)
            return True
        if self._controller.is_stopping(canceled) and self.stage < Stage.FOLLOWED and self._status is None:
            self._cut = Draining("this server stopped before the request was served; send it again", retry_after_s=1)
            await self._refuse(self._cut, None)
            if self._answer is not None:
                self._answer.status = self._cut.status
        return False

    def _settle(self, outcome: Outcome, error: str | None = None) -> None:
        """Ends a running request. Only the first call counts; a background response is followed to its own end."""
        if self.stage is not Stage.RUNNING:
            return
        answer = self._answer
        assert answer is not None
        answer.is_over, answer.streams = True, False  # no more of it is read
        background, answer.background = answer.background, None
        response_id = None if background is None else background.running_id()
        if background is None or response_id is None:
            self._release(outcome, error)
        else:
            self.stage = Stage.FOLLOWED
            self._turn.outlast()
            self._request.payload.drop_text()
            self._controller.background.follow(background, response_id, self._settle_background)

    def _settle_background(self, ended: BackgroundEnd) -> None:
        assert self._answer is not None
        self._answer.usage.read()
        self._answer.usage.counted(ended.input_tokens, ended.output_tokens)
        self._client.disconnected_us = None  # a background response does not end with its client
        self._call.answered()
        self._release(ended.outcome, ended.error)
        self._answer = None

    def _release(self, outcome: Outcome, error: str | None) -> None:
        """Releases the lease, as soon as the engine has aborted the request, and reports what it cost."""
        self.stage = Stage.OVER
        controller, request, lease = self._controller, self._request, self._lease
        call, answer = self._call, self._answer
        assert answer is not None
        usage, status = answer.usage, answer.status
        failure = None if call.error is None else call.engine_error()
        call.granted = None
        policy, is_complete = self._snapshot.policy, outcome is Outcome.COMPLETED
        tokens, charged = answer.used(request, controller, policy, is_complete=is_complete)
        if call.may_run:
            if lease.on_preempt is not None:
                lease.on_preempt = lambda: None  # nothing can free its room sooner
            self._turn.outlast()
            self._when_aborted(partial(lease.settle, charged, failure is None))
        else:
            lease.settle(charged, failure is None)
        if self._client.disconnected_us is not None and outcome is Outcome.FAILED:
            outcome, error = Outcome.CLIENT_LEFT, None  # the disconnect is why the app failed
        if self._route is not None:
            self._route.ended()
        used = tokens, usage.input_tokens, usage.output_tokens, usage.cached_tokens
        message = None if failure is None else failure.message
        self._reporter.settled(outcome, status, used, error, message, answer.size)

    def _when_aborted(self, release: Callable[[], object]) -> None:
        """Calls `release` when the engine has aborted what it computed for this request."""
        is_lost = self._attempt is not None and self._attempt.is_lost
        disconnected_us = self._preempted_us if is_lost else self._client.disconnected_us or self._client.cut_us
        due_us = self._snapshot.abort_latency.due_us(self._now_us(), disconnected_us)
        size = None if self._answer is None else self._answer.size
        tokens = self._request.tokens if size is None else size.held
        held = Held(self._request.requests, tokens)
        self._call.when_aborted(release, self._controller.pending_aborts, due_us, held)

    def _end(self) -> None:
        """Reports the end of a request that was canceled before it ran, and leaves no task."""
        if self.stage <= Stage.WAITING:
            if self.stage is Stage.READING:
                self._report_canceled(None)
            else:
                self._turn.when_left(self._report_canceled)
            self.stage = Stage.OVER
        if self._for_app is not None:
            show_outside(self._for_app, self._scope, is_shown=self._status is not None)
        self._client.close()
        self._controller.watchdog.discard(self)
        if self.stage is Stage.OVER:
            self._answer = None  # it refers to this: what the request had would stay until garbage is collected

    def _report_canceled(self, wait: Grant | None) -> None:
        if self._cut is None:
            self._reporter.canceled(wait)
        else:
            self._reporter.refused(self._cut, wait)
