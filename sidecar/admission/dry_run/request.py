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

7. Where its tier has `hold`, and its answer streams, the pool is told whether it would have met the SLO: by its own
   first byte, and by the time that it generates. So the pool decides as it would when enforcing.

Limits of the dry run. The report says where it finds one of the first four (`sidecar.cluster.dry_run`):

- It cannot know that a client sends its next request later because this one had to wait: the clients' requests are
  taken as they come. Nor does a refused client try again.
- What a quiet engine takes must have been seen. Until then the request's own times stand.
- Where a shadow is over before its request, the output length is drawn from earlier ones.
- A client that was served at once might have disconnected on a longer wait: the report counts long waits, not clients.
- A disconnect that the app does not listen for is not seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from msgspec.structs import replace
from starlette.types import Message, Receive, Scope, Send

from sidecar.admission.answer import Answer, CostReader, EngineCall
from sidecar.admission.client import ClientChannel
from sidecar.admission.controller import AdmissionController
from sidecar.admission.dry_run.shadow import CLIENT_LEFT, ShadowRequest
from sidecar.admission.event_reporter import new_reporter
from sidecar.admission.forwarding import call_app, forwarded_scope
from sidecar.admission.handover import WRITE_KEY
from sidecar.admission.intake import RequestIntake, SizedRequest
from sidecar.admission.responses import differences, id_headers, request_id
from sidecar.admission.slo import SloReport
from sidecar.admission.usage import UsageReader
from sidecar.context import current
from sidecar.errors import AdmissionError, IssuerUnavailable, TenantsUnavailable
from sidecar.events import Observed, Outcome, Verdict
from sidecar.policy.endpoint import Endpoint
from sidecar.pools import Grant

UNREAD, TOO_MANY = "body_unread", "too_many_shadows"
_MODE = (b"x-admission-mode", b"observe")


class DryRunRequest:
    """Passes one request to a guarded endpoint, and shows it to a `RequestWatcher`. `run` is called once.

    `front` decides which controller's pool it would enter. The app of `controller` gets it at once, which is the same
    but for several models' pools. `received_us` is when the request came.
    """

    __slots__ = (
        "_client", "_client_error", "_controller", "_endpoint", "_front", "_is_out", "_received_us", "_scope", "_send",
        "_watcher",
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
        self._send = send
        self._client = ClientChannel(receive, self._pass, controller.pool.now_us)
        self._client_error: Exception | None = None
        self._is_out = False
        self._watcher: RequestWatcher | None = None

    async def run(self) -> None:
        """Calls the app. Raises only what the app raises."""
        scope, controller, call = self._scope, self._controller, EngineCall()
        controller.watchdog.add(self)
        raised: BaseException | None = None
        try:
            with self._watching():
                watcher = RequestWatcher(
                    self._front, controller, self._endpoint, scope, self._client, self._received_us
                )
                self._watcher, call = watcher, watcher.call
            scope.pop(WRITE_KEY, None)  # every message is watched
            if self._endpoint.forward_to is not None:
                scope = forwarded_scope(scope, self._endpoint, scope["headers"])
            token = current.set(call)
            try:
                await call_app(controller, self._scope, scope, self._receive_for_app, self._send_for_app)
            finally:
                call.returned(token)
        except BaseException as error:
            raised = error
            raise
        finally:
            if self._watcher is not None:
                with self._watching():
                    self._watcher.app_ended(raised)
            controller.watchdog.discard(self)

    def check(self) -> None:
        """See `Watched`. The dry run ends no request, so there is nothing to check."""

    def give_up(self) -> None:
        """Nothing: the request does not wait."""

    async def _receive_for_app(self) -> Message:
        message = await self._client.receive()
        if self._watcher is not None:
            with self._watching():
                self._watcher.asked(message)
        return message

    async def _send_for_app(self, message: Message) -> None:
        if message["type"] == "http.response.start":  # the app's own headers may be an iterator
            message = {**message, "headers": [*message.get("headers", ())]}
        self._is_out = False
        if self._watcher is not None:
            with self._watching():
                await self._watcher.answer.send(message)
        if not self._is_out:
            await self._send(message)

    async def _pass(self, message: Message) -> None:
        self._is_out = True
        try:
            await self._send(message)
        except Exception as error:
            self._client_error = error
            raise

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """After a defect of the dry run the request goes on, unwatched. What the server raises is none."""
        try:
            yield
        except Exception as defect:
            if defect is self._client_error:
                raise
            watcher, self._watcher = self._watcher, None
            self._controller.shadows.report(defect)
            if watcher is not None:
                watcher.release()


class RequestWatcher:
    """Watches one request pass: what it asks for, what its response costs, and what enforcing would have done to it.

    It sees every message, and the end. Its methods may raise: `DryRunRequest` lets the request go on without it.
    `_refusal` is why enforcing would refuse it, as soon as that is certain.
    """

    __slots__ = (
        "_client", "_controller", "_endpoint", "_front", "_intake", "_is_over", "_received_us",
        "_refusal", "_reporter", "_request_id", "_scope", "_shadow", "_snapshot", "_usage", "answer", "call",
    )  # fmt: skip

    def __init__(  # noqa: PLR0917
        self,
        front: AdmissionController,
        controller: AdmissionController,
        endpoint: Endpoint,
        scope: Scope,
        client: ClientChannel,
        received_us: int,
    ) -> None:
        headers, now_us = dict(scope["headers"]), controller.pool.now_us
        self._scope, self._client = scope, client
        self._front, self._controller = front, controller
        self._snapshot = front.snapshot
        self._endpoint = endpoint
        self._request_id = request_id(headers)
        self._received_us = received_us
        self._intake = intake = RequestIntake(self._snapshot, endpoint, headers, received_us)
        self._reporter = new_reporter(controller.observer, scope, self._request_id, received_us, now_us, intake)
        self._usage = usage = UsageReader()
        observation = self._reporter.observation
        self.call = EngineCall(trace=None if observation is None else observation.app_trace())
        hooks = self._response_start, self._first_byte, self._settle
        self.answer = Answer(usage, usage, client, self.call, *hooks)
        if endpoint.cost is not None:
            self.answer.cost = CostReader(endpoint.cost)
        self._shadow: ShadowRequest | None = None
        self._is_over = False
        self._refusal: AdmissionError | None = None
        try:
            intake.check_head(scope["headers"], scope)
        except (IssuerUnavailable, TenantsUnavailable) as missing:  # enforcing would have waited, or said so
            self._refusal = missing
            self._report(Verdict.UNKNOWN, missing.code)
        except AdmissionError as refusal:
            self._refuse(refusal)

    def asked(self, message: Message) -> None:
        """The app is about to get this message of the client."""
        if self._refusal is not None or self._shadow is not None or message["type"] != "http.request":
            return
        try:
            request = self._intake.feed(message, self._now_us())
            if request is not None:
                self._controller = self._front.controller_for(request)
        except AdmissionError as refusal:
            self._refuse(refusal)
        else:
            if request is not None:
                self._begin_shadow(request)

    def app_ended(self, error: BaseException | None) -> None:
        """The app has returned, or has raised an error. Its answer may not be complete."""
        if isinstance(error, asyncio.CancelledError) and self._controller.is_stopping(error):
            self._settle(Outcome.FAILED, type(error).__name__)
        elif self._client.disconnected_us is not None or isinstance(error, asyncio.CancelledError):
            self._settle(Outcome.CLIENT_LEFT)  # even where the app made something else of it
        else:
            self._settle(Outcome.FAILED, "incomplete_response" if error is None else type(error).__name__)

    def release(self) -> None:
        """After a defect: the shadow ends, and holds nothing more than its request would."""
        if self._reporter.gain is not None:
            self._reporter.gain.taken_back()
        if self._shadow is not None:
            self._shadow.unwatched()

    @property
    def _request(self) -> SizedRequest | None:
        """The request as it is now, once its body is complete and enforcing would let it enter the pool."""
        return None if self._shadow is None else self._shadow.request

    # -- the answer

    def _response_start(self, message: Message) -> Message:
        """The response's start, with the headers that are added to the app's own."""
        tiers, of_app = self._snapshot.tier_names, message["headers"]
        added = [_MODE]
        if (found := self._request) is not None:
            tier = (b"x-admission-tier", tiers[found.classification.level])
            added += [tier, *differences(found, tiers)]
        named = id_headers(self._request_id, of_app, self._endpoint.api)
        return {**message, "headers": [*of_app, *added, *named]}

    def _first_byte(self, status: int | None) -> None:
        self._reporter.first_byte(status)
        if self._shadow is not None:
            self._shadow.first_byte(status)

    def _settle(self, outcome: Outcome, error: str | None = None) -> None:
        """The request is over. Only the first call counts."""
        if self._is_over:
            return
        self._is_over = True
        answer, usage, request = self.answer, self._usage, self._request
        if request is not None:
            policy, is_complete = self._snapshot.policy, outcome is Outcome.COMPLETED
            tokens, charged = answer.used(request, self._controller, policy, is_complete=is_complete)
            if self._shadow is not None:
                self._shadow.ended(outcome, answer.status, usage, charged)
        else:
            usage.read()
            tokens = usage.used_tokens(0)
        if self._refusal is None and request is None:
            self._report_unread_body()
        used = tokens, usage.input_tokens, usage.output_tokens, usage.cached_tokens
        self._reporter.settled(outcome, answer.status, used, error)

    # -- what enforcing would do

    def _refuse(self, refusal: AdmissionError) -> None:
        self._refusal = refusal
        self._report(Verdict.REFUSED, refusal.code)

    def _begin_shadow(self, request: SizedRequest) -> None:
        """The body is complete. Called once."""
        controller = self._controller
        if controller.routing is not None:
            # Its prompt counts at an engine. Nothing is predicted, as the request passes to any.
            request = replace(request, hits=())
        shadow = self._shadow = ShadowRequest(controller, self._snapshot, request, self._report)
        request = shadow.request
        if not self._usage.has_begun:  # an app may answer before it has read the body
            now_us, level = self._now_us(), request.classification.level
            self._reporter.classified(request, self._snapshot, now_us)
            self._reporter.admitted(Grant(now_us, 0, 0, None, {}, level), None, is_dry_run=True)
            self._measure_gain(request, shadow)
        if not controller.shadows.follow(shadow):
            shadow.give_up(TOO_MANY)

    def _measure_gain(self, request: SizedRequest, shadow: ShadowRequest) -> None:
        """The gain as it really is, without the admission of the policy."""
        snapshot, meter = self._snapshot, self._controller.gain
        gain = meter.follow(request, snapshot, self._now_us()) if snapshot.objectives else None
        if gain is None:
            return
        if shadow.is_guarded and request.objective is not None:
            times, sent = self._controller.engine_times, shadow.sent
            gain.report = SloReport(
                lambda is_missed: times.note_slo(sent, is_missed=is_missed, is_shadow=False),
                sent.sent_us + request.objective.ttft_us,
            )
        self._reporter.gain, self.answer.reader = gain, gain.sent(None, self._usage)

    def _report_unread_body(self) -> None:
        """The request is over before its body was complete."""
        try:
            self._intake.check_time(self._now_us())
        except AdmissionError as refusal:
            self._report(Verdict.REFUSED, refusal.code)
            return
        has_left = self._client.disconnected_us is not None
        verdict, code = (Verdict.ABANDONED, CLIENT_LEFT) if has_left else (Verdict.UNKNOWN, UNREAD)
        self._report(verdict, code)

    def _report(self, verdict: Verdict, code: str | None, wait: Grant | None = None) -> None:
        """Reports what enforcing would have done. `wait` is there where it would have waited, or was admitted."""
        found, intake, policy = self._request, self._intake, self._snapshot.policy
        classification = None if found is None else found.classification
        clamped_from = None if classification is None else classification.clamped_from
        now_us, client = self._now_us(), self._scope.get("client")
        wait = wait or Grant(now_us, 0, 0, None, {}, 0)
        observed = Observed(
            at_us=wait.at_us,
            request_id=self._request_id,
            generation=policy.generation,
            verdict=verdict,
            received_us=self._received_us,
            code=code,
            tier=intake.tier if classification is None else policy.tiers[classification.level].name,
            tenant=None if intake.tenant is None else intake.tenant.name,
            queue_wait_us=wait.queue_wait_us,
            starvation_us=wait.starvation_us,
            served_ahead=wait.served_ahead,
            path=self._endpoint.path,
            client=client[0] if client else None,
            clamped_from=None if clamped_from is None else policy.tiers[clamped_from].name,
        )
        if not self._is_over:
            self._reporter.event(observed)
        if (report := self._controller.monitor.observed) is not None:
            report(observed)

    def _now_us(self) -> int:
        return self._controller.pool.now_us()
