"""One request in `mode: observe`: it passes at once, unchanged, while its shadow request goes through the pool.

Rules for the request. The app is called at once, with the client's own messages, one by one, as it asks for them; every
message of its response goes out as it comes. Nothing is refused, held or changed, including the client's own priority
fields and its API key. Only headers are added to the response: `x-admission-mode: observe`, `x-admission-tier` where
the tier is known by then, and the request's id. One change is necessary: a path that the policy maps with `forward_to`
is mapped, because the engine need not know it. `granted()` returns None. A defect in the dry run is logged once, and
the request goes on unwatched.

Rules for its shadow (`shadow`):

1. It enters the pool when the request's last byte has come, as the request would when enforcing, with the same ask.
   A request that enforcing would refuse before that has no shadow (an unknown key, a body that is no JSON, one that is
   too large or too late): it takes no room. Nor has one whose token cannot be checked, because the issuer's keys are
   not there: its result is unknown.
2. It waits for as long as its tier, and its client's `x-admission-max-wait`, allow; then it would have been refused.
   Where neither has a limit it is given up after an hour, and its result is unknown.
3. It holds its lease for as long as its request would take in an engine that runs no more than the pool admits
   (`engine_times`), counted from its own grant. Where the load did not lengthen the request's own times, these are
   they, to the microsecond, even where the request is over. So the pool is as full as it would be.
4. It may be preempted, as when enforcing, until the moment at which its first byte would have gone out. It then waits
   again at once, and its request's time begins again with the next grant.
5. A client that disconnects before the first byte of its response has lost its patience. That patience counts from the
   request's arrival, so the shadow ends at that moment, unless its own first byte would have gone out by then. After
   that, and after a later disconnect, rule 3 applies. It applies as well to a request that the engine refused (a full
   queue, a lost connection): when enforcing, the engine would have had room.
6. Where the sidecar itself ends a shadow (the server stops, there are too many shadows) its result is unknown. When the
   policy changes to `mode: enforce`, only those shadows stay that hold for a request that still runs, until it ends: no
   real request waits for the others.

Limits of the dry run. The report says where it finds one of the first four (`sidecar.cluster.doubts`):

- It cannot know that a client sends its next request later because this one had to wait: the clients' requests are
  taken as they come. Nor does a refused client try again.
- What a quiet engine takes must have been seen. Until then the request's own times stand.
- Where a shadow is over before its request, the output length is drawn from earlier ones.
- A client that was served at once might have disconnected on a longer wait: the report counts long waits, not clients.
- A disconnect that the app does not listen for is not seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from starlette.types import Message, Receive, Scope, Send

from sidecar.admission.answer import BODIES, AppCall, CostReader, body_of
from sidecar.admission.controller import AdmissionController
from sidecar.admission.dry_run.engine_times import SentRequest
from sidecar.admission.dry_run.shadow import CLIENT_LEFT, ShadowRequest, ShadowResult
from sidecar.admission.event_reporter import reporter_of
from sidecar.admission.forwarding import call_app, forwarded_scope
from sidecar.admission.intake import RequestIntake, SizedRequest
from sidecar.admission.request_gain import AnswerReader
from sidecar.admission.responses import differences, id_headers, request_id
from sidecar.admission.usage import UsageReader
from sidecar.context import current
from sidecar.errors import AdmissionError, IssuerUnavailable, TenantsUnavailable
from sidecar.events import AppTrace, Headers, Observed, Outcome, Verdict
from sidecar.handover import with_write
from sidecar.policy.model import Endpoint
from sidecar.pools import Grant

Shown = TypeVar("Shown")
UNREAD, TOO_MANY = "body_unread", "too_many_shadows"
_REFUSED_BY_ENGINE = frozenset((429, 502, 503, 504, 529))
"""Statuses by which an engine, or the proxy before it, says that it cannot take a request now."""
_MODE = (b"x-admission-mode", b"observe")
_NO_WAIT = Grant(0, 0, 0, None, {}, 0)


class DryRunRequest:
    """Passes one request to a guarded endpoint, and shows it to a `RequestWatcher`. `run` is called once.

    `front` decides which controller's pool it would enter. The app of `controller` gets it at once, which is the same
    but for several models' pools. `received_us` is when the request came.
    """

    __slots__ = (
        "_app_call", "_controller", "_endpoint", "_front", "_receive", "_received_us", "_scope", "_send", "_watcher",
    )  # fmt: skip

    def __init__(  # noqa: PLR0917  # the three of ASGI, and what they belong to
        self,
        front: AdmissionController,
        controller: AdmissionController,
        endpoint: Endpoint,
        scope: Scope,
        receive: Receive,
        send: Send,
        received_us: int,
    ) -> None:
        self._front = front
        self._received_us = received_us
        self._controller = controller
        self._endpoint = endpoint
        self._scope = scope
        self._receive = receive
        self._send = send
        self._watcher: RequestWatcher | None = None
        self._app_call: AppCall | None = None

    async def run(self) -> None:
        """Calls the app. Raises only what the app raises."""
        self._controller.watchdog.add(self)
        raised: BaseException | None = None
        try:
            scope, controller = self._scope, self._controller
            try:
                self._watcher = RequestWatcher(self._front, controller, self._endpoint, scope, self._received_us)
            except Exception as defect:
                controller.shadows.report(defect)
            with_write(scope, None)  # every message is watched
            if self._endpoint.forward_to is not None:
                scope = forwarded_scope(scope, self._endpoint, scope["headers"])
            app_call = self._app_call = AppCall(None, None if self._watcher is None else self._watcher.app_trace())
            token = current.set(app_call)
            try:
                await call_app(controller, self._scope, scope, self._receive_for_app, self._send_for_app)
            finally:
                app_call.returned(token)
        except BaseException as error:
            raised = error
            raise
        finally:
            self._watch(lambda watcher: watcher.on_end(raised, is_complete=False))
            self._controller.watchdog.discard(self)

    def check(self) -> None:
        """See `Watched`. The dry run ends no request, so there is nothing to check."""

    def give_up(self) -> None:
        """Nothing: the request does not wait."""

    async def _receive_for_app(self) -> Message:
        message = await self._receive()
        self._watch(lambda watcher: watcher.on_request(message))
        return message

    async def _send_for_app(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", ())]  # the app's own value may be an iterator
            added = self._watch(lambda watcher: watcher.headers(headers))
            message = {**message, "headers": [*headers, *(added or ())]}
        self._watch(lambda watcher: watcher.on_response(message))
        if message["type"] not in BODIES or message.get("more_body", False):
            await self._send(message)
            return
        assert self._app_call is not None
        await self._app_call.send_last(self._send, message)
        self._watch(lambda watcher: watcher.on_end(None, is_complete=True))

    def _watch(self, show: Callable[[RequestWatcher], Shown]) -> Shown | None:
        """Shows the watcher something. None after a defect in the dry run: the request goes on, unwatched."""
        watcher = self._watcher
        if watcher is None:
            return None
        try:
            return show(watcher)
        except Exception as defect:
            self._watcher = None
            self._controller.shadows.report(defect)
            watcher.release()
            return None


class RequestWatcher:
    """Watches one request pass: what it asks for, what its response costs, and what enforcing would have done to it.

    It sees every message, and the end. Its methods may raise: `DryRunRequest` lets the request go on without it.
    `_found` is the request or, as soon as that is certain, the reason why enforcing would refuse it.
    """

    __slots__ = (
        "_client", "_controller", "_cost", "_disconnected", "_endpoint", "_found", "_front", "_intake", "_is_answered",
        "_is_over", "_reader", "_received_us", "_reporter", "_request_id", "_sent", "_shadow", "_snapshot", "_status",
        "_usage",
    )  # fmt: skip

    def __init__(
        self,
        front: AdmissionController,
        controller: AdmissionController,
        endpoint: Endpoint,
        scope: Scope,
        received_us: int,
    ) -> None:
        headers = dict(scope["headers"])
        client = scope.get("client")
        self._client: str | None = client[0] if client else None
        self._front, self._controller = front, controller
        self._snapshot = front.snapshot
        self._endpoint = endpoint
        self._request_id = request_id(headers)
        self._received_us = received_us
        now_us = controller.pool.now_us
        self._intake = intake = RequestIntake(self._snapshot, endpoint, headers, received_us)
        self._reporter = reporter_of(controller.observer, scope, self._request_id, received_us, now_us, intake)
        self._usage = UsageReader()
        self._cost = None if endpoint.cost is None else CostReader(endpoint.cost)
        self._reader: AnswerReader = self._usage
        self._shadow: ShadowRequest | None = None
        self._sent: SentRequest | None = None
        self._status: int | None = None
        self._disconnected = self._is_answered = self._is_over = False
        self._found: SizedRequest | AdmissionError | None = None
        try:
            self._intake.check_head(scope["headers"], scope)
        except (IssuerUnavailable, TenantsUnavailable) as missing:  # enforcing would have waited, or said so
            self._found = missing
            self._report(ShadowResult(Verdict.UNKNOWN, missing.code, None))
        except AdmissionError as refusal:
            self._refuse(refusal)

    def app_trace(self) -> AppTrace | None:
        """See `Observation.app_trace`: the request is admitted while the app runs, so it is that of `admission`."""
        observation = self._reporter.observation
        return None if observation is None else observation.app_trace()

    def on_request(self, message: Message) -> None:
        """The app is about to get this message."""
        if message["type"] == "http.disconnect":
            self._disconnected = True
        elif self._found is None and message["type"] == "http.request":
            try:
                request = self._intake.feed(message, self._now_us())
                if request is not None:
                    self._controller = self._front.controller_of(request)
            except AdmissionError as refusal:
                self._refuse(refusal)
            else:
                if request is not None:
                    self._begin_shadow(request)

    def on_response(self, message: Message) -> None:
        """The client is about to get this message."""
        if self._cost is not None:
            self._cost.feed(message)
        if message["type"] == "http.response.start":
            self._status = message["status"]
        elif message["type"] in BODIES:
            if (body := body_of(message)) is not None:
                if not self._usage.has_begun:
                    self._usage.has_begun = True
                    self._reporter.first_byte(self._status)
                    self._first_byte()
                self._reader.feed(body)
            # Servers also say `http.disconnect` after a complete response: only an earlier one is the client's.
            self._is_answered = not message.get("more_body", False) and not self._disconnected

    def headers(self, of_app: Headers) -> Headers:
        """The headers that are added to the app's own."""
        named = id_headers(self._request_id, of_app, self._endpoint.api)
        if not isinstance(self._found, SizedRequest):
            return (_MODE, *named)
        tiers = self._snapshot.tier_names
        tier = (b"x-admission-tier", tiers[self._found.classification.level])
        return (_MODE, tier, *differences(self._found, tiers), *named)

    def on_end(self, error: BaseException | None, *, is_complete: bool) -> None:
        """The app has returned, or the last byte is out. `error` is what the app raised."""
        if self._is_over:
            return
        self._is_over = True
        if self._found is None:
            self._report_unread_body()
        outcome, code = self._outcome(error, is_complete=is_complete)
        usage, prompt_tokens, charged = self._usage, 0, None
        usage.read()
        if self._cost is not None:
            self._cost.tell(usage)
        if isinstance(self._found, SizedRequest):
            tenant, payload = self._found.classification.tenant.name, self._found.payload
            usage.conclude(self._controller.output_ratios, tenant, payload.model)
            prompt_tokens = self._found.prompt_tokens
            charged = usage.charged_tokens(prompt_tokens, self._status)
        if self._sent is not None:
            self._end_sent(self._sent, outcome, charged)
        if isinstance(self._found, SizedRequest):
            is_complete = outcome is Outcome.COMPLETED
            self._controller.learn(self._found, self._snapshot.policy, usage, self._status, is_complete, False)
        used = usage.used_tokens(prompt_tokens), usage.input_tokens, usage.output_tokens, usage.cached_tokens
        self._reporter.settled(outcome, status=self._status, used=used, error=code)

    def release(self) -> None:
        """After a defect: the shadow ends, and holds nothing more than its request would."""
        if self._reporter.gain is not None:
            self._reporter.gain.taken_back()
        if self._sent is not None:
            self._controller.engine_times.ended(self._sent, self._now_us(), None, is_complete=False)
        if self._shadow is not None:
            self._shadow.ended()

    # -- the request at the engine

    def _first_byte(self) -> None:
        status, sent = self._status or 0, self._sent
        if sent is None or status in _REFUSED_BY_ENGINE:
            return
        self._controller.engine_times.first_byte(sent, self._now_us(), is_served=status < 400)
        if self._shadow is not None:
            self._shadow.begun()

    def _end_sent(self, sent: SentRequest, outcome: Outcome, charged: int | None) -> None:
        """The request has left the engine: its times are known, or say nothing."""
        times, usage, status, now_us = self._controller.engine_times, self._usage, self._status or 0, self._now_us()
        is_complete = outcome is Outcome.COMPLETED
        if is_complete and sent.first_us is None and status not in _REFUSED_BY_ENGINE:
            times.first_byte(sent, now_us, is_served=False)  # a response without a body
        sent.is_lost = sent.first_us is None
        output_tokens = usage.output_tokens
        if output_tokens is None and usage.chunks:
            output_tokens = usage.chunks - 1  # the last one is `[DONE]`
        times.ended(sent, now_us, output_tokens, is_complete=is_complete and 0 < status < 400)
        if self._shadow is None:
            return
        if outcome is Outcome.CLIENT_LEFT and sent.first_us is None:
            self._shadow.disconnected()
        else:
            self._shadow.ended(charged)

    # -- what enforcing would do

    def _refuse(self, refusal: AdmissionError) -> None:
        self._found = refusal
        self._report(ShadowResult(Verdict.REFUSED, refusal.code, None))

    def _begin_shadow(self, request: SizedRequest) -> None:
        """The body is complete. Called once."""
        self._found, controller = request, self._controller
        if controller.routing is not None:
            request.hits = ()  # its prompt counts at an engine; nothing is predicted, as the request passes to any
        shadow = ShadowRequest(controller, self._snapshot, request, self._report)
        self._sent = shadow.sent
        if not self._usage.has_begun:  # an app may answer before it has read the body
            self._reporter.classified(request, self._endpoint, self._snapshot.policy, self._now_us())
            self._reporter.passed(self._now_us(), request.classification.level)
            self._measure_gain(request)
        if controller.shadows.follow(shadow):
            self._shadow = shadow
        else:
            self._report(ShadowResult(Verdict.UNKNOWN, TOO_MANY, None))

    def _measure_gain(self, request: SizedRequest) -> None:
        """The gain as it really is, without the admission of the policy."""
        objectives, names = self._snapshot.objectives, self._snapshot.tier_names
        gain = self._controller.gain.follow(request, objectives, names, self._now_us()) if objectives else None
        if gain is not None:
            self._reporter.gain, self._reader = gain, gain.sent(None, self._usage)

    def _report_unread_body(self) -> None:
        """The request is over before its body was complete."""
        try:
            self._intake.check_time(self._now_us())
        except AdmissionError as refusal:
            self._report(ShadowResult(Verdict.REFUSED, refusal.code, None))
            return
        verdict, code = (Verdict.ABANDONED, CLIENT_LEFT) if self._disconnected else (Verdict.UNKNOWN, UNREAD)
        self._report(ShadowResult(verdict, code, None))

    def _outcome(self, error: BaseException | None, *, is_complete: bool) -> tuple[Outcome, str | None]:
        if is_complete and self._is_answered:
            return Outcome.COMPLETED, None
        if isinstance(error, asyncio.CancelledError) and self._controller.is_stopping(error):
            return Outcome.FAILED, type(error).__name__
        if self._disconnected or isinstance(error, asyncio.CancelledError):
            return Outcome.CLIENT_LEFT, None  # even where the app made something else of it
        return Outcome.FAILED, "incomplete_response" if error is None else type(error).__name__

    def _report(self, result: ShadowResult) -> None:
        found, intake, policy = self._found, self._intake, self._snapshot.policy
        clamped_from = found.classification.clamped_from if isinstance(found, SizedRequest) else None
        wait = result.wait or _NO_WAIT
        observed = Observed(
            at_us=self._now_us() if result.wait is None else wait.at_us,
            request_id=self._request_id,
            generation=policy.generation,
            verdict=result.verdict,
            received_us=self._received_us,
            code=result.code,
            tier=policy.tiers[found.classification.level].name if isinstance(found, SizedRequest) else intake.tier,
            tenant=None if intake.tenant is None else intake.tenant.name,
            queue_wait_us=wait.queue_wait_us,
            starvation_us=wait.starvation_us,
            served_ahead=wait.served_ahead,
            path=self._endpoint.path,
            client=self._client,
            clamped_from=None if clamped_from is None else policy.tiers[clamped_from].name,
        )
        if not self._is_over:
            self._reporter.observed(observed)
        if (report := self._controller.monitor.observed) is not None:
            report(observed)

    def _now_us(self) -> int:
        return self._controller.pool.now_us()
