"""The spans of one request, drawn from its record. `tracer` has the tree that they make."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from opentelemetry.trace import Link, Span, SpanContext, SpanKind

from sidecar.events import (
    Admitted,
    Classified,
    Expectation,
    Observed,
    Outcome,
    Queued,
    Received,
    Refused,
    Replayed,
    ReplayReason,
    ServiceGain,
    Settled,
)
from sidecar.telemetry import semconv
from sidecar.telemetry.request_record import (
    REPLAYED_BECAUSE,
    PreemptedAttempt,
    RequestRecord,
    engine_name,
    failure_description,
)
from sidecar.telemetry.spans.app_trace import AppTrace
from sidecar.telemetry.spans.links import FindLinks, WaitLinks
from sidecar.telemetry.spans.open_span import Attributes, Moment, OpenSpan

CLIENTS_ERRORS = 400
SERVERS_ERRORS = 500
"""From which status on an answer is an error of a CLIENT span, and of a SERVER span: the HTTP conventions' rule."""

CANCELED, PASSED, UNREACHABLE = "canceled", "passed", "engine_unreachable"
ABANDONED = frozenset({Outcome.CLIENT_LEFT.value, CANCELED, PASSED})
"""The codes of `Refused` without an answer: the client disconnected, the server stopped, or every request passes."""
_NO_LINKS = WaitLinks((), (), {})


@dataclass(frozen=True, slots=True)
class SpanSettings:
    """The settings that the spans of all requests share.

    `report` logs the exception being handled. `starvation_limits_s` has the tiers that promise one; `provider_name` is
    the engine's name in the GenAI conventions, None where it is not known; `find_links` is None where spans have no
    links. `writes_usage` says whether `engine` has what the request used; None: unless the app has traced it itself.
    """

    report: Callable[[], None]
    starvation_limits_s: Mapping[str, float]
    provider_name: str | None
    find_links: FindLinks | None
    writes_usage: bool | None


class RequestSpans:
    """Records one request. `admission` is open from the beginning, and one `engine` span from each admission on.

    Everything else is made at the end, from the request's record. All of a request's spans then leave the process
    together, and a Collector that decides some seconds after a trace's first span sees how this request ended.
    Attributes are gathered in one dict and written once: a call per attribute costs more than the span.

    `classified` is set as soon as it is known, before the record has it. `app_trace` is that of the last call of the
    app, where it has one.
    """

    __slots__ = (
        "_admission",
        "_engines",
        "_links",
        "_received_us",
        "_received_wall_ns",
        "_settings",
        "app_trace",
        "classified",
    )

    def __init__(self, settings: SpanSettings, received: Received, admission: OpenSpan) -> None:
        self._settings = settings
        self._received_us, self._received_wall_ns = received.at_us, received.wall_ns
        self._admission = admission
        self._engines: list[OpenSpan] = []
        self._links = _NO_LINKS
        self.classified: Classified | None = None
        self.app_trace: AppTrace | None = None

    @property
    def context(self) -> SpanContext:
        """The context of `admission`."""
        return self._admission.context

    def for_app(self) -> Span:
        """The span that is current in the app: the last `engine`, in the dry run `admission`."""
        return (self._engines[-1] if self._engines else self._admission).for_app()

    def admit(self, record: RequestRecord, event: Admitted) -> SpanContext:
        """Begins an `engine` span and returns its context, or that of `admission` where this failed.

        The record does not have the event yet; where the request waited, it has everything before the event.
        """
        try:
            if event.queue_wait_us:
                self._find_links(record, event)
            request = None
            if self.classified is not None:
                request = _of_engine_request(self.classified, self._settings.provider_name)
            if event.engine is not None:
                request = {**(request or {}), semconv.ADMISSION_ENGINE: engine_name(event.engine)}
            start_ns = self._wall_ns(event.at_us)
            engine = self._admission.child(semconv.ENGINE, SpanKind.CLIENT, start_ns, request)
            self._engines.append(engine)
            return engine.context
        except Exception:
            self._settings.report()
            return self._admission.context

    def end(self, record: RequestRecord) -> None:
        """Makes all other spans, and ends those that are open."""
        try:
            written = self._attributes(record)
            if record.refused is not None:
                self._find_links(record, record.refused)
            self._draw_waiting(record)
            if record.settled is not None:
                self._settle(record, record.settled, written)
            elif record.refused is not None:
                self._refuse(record.refused, written)
        except Exception:
            self._settings.report()

    def _refuse(self, event: Refused, written: Attributes) -> None:
        written.update(_of_refusal(event, self.classified))
        error = event.message if _is_servers_failure(event) else None
        self._admission.end(self._wall_ns(event.at_us), written, error=error)

    def _settle(self, record: RequestRecord, event: Settled, written: Attributes) -> None:
        ended_ns = self._wall_ns(event.at_us)
        if record.admitted is not None and self._engines:
            self._end_engine(record, record.admitted, event)
        written.update(_of_settlement(event))
        if self.classified is not None and event.held_tokens not in (None, self.classified.tokens):
            written[semconv.ADMISSION_TOKENS_HELD] = event.held_tokens
        error = _failure(event, written, from_status=SERVERS_ERRORS)
        if record.refused is not None:  # preempted, and not admitted again: no engine had it any more
            written[semconv.ADMISSION_REASON] = record.refused.code
            if error is not None:
                error = f"{record.refused.code}: {record.refused.message}"
        self._admission.end(ended_ns, written, error=error)

    def _end_engine(self, record: RequestRecord, admitted: Admitted, event: Settled) -> None:
        written = self._usage(event)
        moments: list[Moment] = []
        if record.first_byte is not None:
            moments.append((semconv.FIRST_BYTE, self._wall_ns(record.first_byte.at_us)))
            if self.classified is not None and self.classified.stream:
                since_admission_s = (record.first_byte.at_us - admitted.at_us) / 1e6
                written[semconv.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK] = since_admission_s
        error = _failure(event, written, from_status=CLIENTS_ERRORS)
        self._engines[-1].end(self._wall_ns(event.at_us), written, moments, error)

    def _usage(self, event: Settled) -> Attributes:
        """What the request used, where this span says it."""
        written: Attributes = {}
        writes = self._settings.writes_usage
        if writes is None:
            writes = self.app_trace is None or not self.app_trace.has_usage
        if not writes:
            return written
        if event.input_tokens is not None:
            written[semconv.GEN_AI_USAGE_INPUT_TOKENS] = event.input_tokens
        if event.cached_tokens is not None:
            written[semconv.GEN_AI_USAGE_CACHED_TOKENS] = event.cached_tokens
        if event.output_tokens is not None:
            written[semconv.GEN_AI_USAGE_OUTPUT_TOKENS] = event.output_tokens
        return written

    def _attributes(self, record: RequestRecord) -> Attributes:
        """The attributes of `admission` that do not depend on its end."""
        written = {} if self.classified is None else _of_classification(self.classified)
        for attempt in record.lost:
            self._write_wait(written, attempt.queued, attempt.admitted)
            written.update(_of_admission(attempt.admitted))
        if preemptions := record.preemptions:
            written[semconv.ADMISSION_PREEMPTIONS] = preemptions
        if replays := record.replays:
            written[semconv.ADMISSION_REPLAYS] = replays
        if record.waited is not None:
            self._write_wait(written, record.queued, record.waited)
        if record.admitted is not None:
            written.update(_of_admission(record.admitted))
        if record.observed is not None:
            written.update(_of_observed(record.observed))
        return written

    # -- waiting

    def _write_wait(self, written: Attributes, queued: Queued | None, end: Admitted | Refused) -> None:
        written.update(_of_waiting(end))
        if queued is not None and self.classified is not None:
            written[semconv.GEN_AI_LATENCY_TIME_IN_QUEUE] = end.queue_wait_us / 1e6
            if end.starvation_us > self._settings.starvation_limits_s.get(self.classified.tier, math.inf) * 1e6:
                written[semconv.ADMISSION_STARVED_TOO_LONG] = True

    def _find_links(self, record: RequestRecord, event: Admitted | Refused) -> None:
        """Finds the requests that went ahead, as long as they are known."""
        if record.queued is None or self.classified is None or self._settings.find_links is None:
            return
        try:
            self._links = self._settings.find_links(self.classified.tier, event, self._admission.context.span_id)
        except Exception:
            self._settings.report()  # the spans are useful without links

    def _draw_waiting(self, record: RequestRecord) -> None:
        """One bar for every wait, and one for the starvation that they add up to."""
        waited, classified = record.waited, self.classified
        if waited is None or classified is None:
            return
        # The tier is repeated on the bars, so that a search for starved batch requests needs no join with the parent.
        tier: Attributes = {semconv.ADMISSION_TIER: classified.tier}
        start_us = None
        if record.lost:
            start_us = self._draw_lost(record.lost, tier)
        in_turn, overtook, overtaken_by = self._links
        self._draw_wait(tier, record.queued, start_us, waited, in_turn)
        if waited.starvation_us > 0 and waited.overtaken_at_us is not None:
            written = {**tier, **_of_served_ahead(waited), **overtaken_by}
            self._draw(semconv.STARVED, waited.overtaken_at_us, waited.at_us, written, overtook)

    def _draw_lost(self, lost: Sequence[PreemptedAttempt], tier: Attributes) -> int | None:
        """The admissions that were taken back, and the waits before them. Returns when the last was."""
        start_us: int | None = None
        for attempt, engine in zip(lost, self._engines, strict=False):
            self._draw_wait(tier, attempt.queued, start_us, attempt.admitted, ())
            start_us = attempt.preempted.at_us
            ended_ns = self._wall_ns(start_us)
            if attempt.replayed is not None:
                self._end_replayed(engine, attempt.replayed, ended_ns)
                continue
            if attempt.preempted.is_unreached:
                engine.end(ended_ns, {semconv.ERROR_TYPE: UNREACHABLE}, error="no connection to the engine")
                continue
            # The `engine` span says so, and is no error of the engine's.
            engine.end(ended_ns, {semconv.ADMISSION_PREEMPTED: True}, [(semconv.PREEMPTED, ended_ns)])
        return start_us

    def _end_replayed(self, engine: OpenSpan, event: Replayed, ended_ns: int) -> None:
        """An attempt that its engine did not serve. One that says it is full is no failure, and no error."""
        reason = event.reason.value
        written: Attributes = {semconv.ADMISSION_REPLAY_REASON: reason}
        is_failure = event.reason is not ReplayReason.FULL
        if is_failure:
            written[semconv.ERROR_TYPE] = UNREACHABLE if event.reason is ReplayReason.UNREACHED else reason
        moments = [(semconv.REPLAYED, self._wall_ns(event.at_us))]
        engine.end(ended_ns, written, moments, error=REPLAYED_BECAUSE[event.reason] if is_failure else None)

    def _draw_wait(
        self,
        tier: Attributes,
        queued: Queued | None,
        start_us: int | None,
        waited: Admitted | Refused,
        links: Sequence[Link],
    ) -> None:
        """The bar of one wait. `start_us` is when it began again, None for the first one, which began in the queue."""
        if queued is None:
            return
        why: Attributes = {
            semconv.ADMISSION_OBSTACLE: queued.obstacle.value,
            semconv.ADMISSION_EXPLANATION: queued.explanation,
        }
        first_us = waited.at_us - waited.queue_wait_us
        self._draw(semconv.QUEUED, first_us if start_us is None else start_us, waited.at_us, {**tier, **why}, links)

    def _draw(self, name: str, start_us: int, end_us: int, written: Attributes, links: Sequence[Link]) -> None:
        span = self._admission.child(name, SpanKind.INTERNAL, self._wall_ns(start_us), written, links)
        span.end(self._wall_ns(end_us), {})

    def _wall_ns(self, at_us: int) -> int:
        """Calendar time, in nanoseconds, of a monotonic time: a clock that is set back cannot bend a span."""
        return self._received_wall_ns + (at_us - self._received_us) * 1000


# Looked up once: an enumeration's attribute costs as much as a call.
_, _CLIENT_LEFT, _FAILED = Outcome


def _failure(event: Settled, written: Attributes, *, from_status: int) -> str | None:
    """Writes `error.type` where the engine failed, or answered `from_status` and above; returns the status description.

    A client's disconnect is no failure.
    """
    if event.outcome is _FAILED:
        written[semconv.ERROR_TYPE] = event.error or Outcome.FAILED.value
        return failure_description(event.outcome, event.status, event.error)
    if event.outcome is not _CLIENT_LEFT and event.status is not None and event.status >= from_status:
        written[semconv.ERROR_TYPE] = event.error or str(event.status)
        return f"the engine answered {event.status}"
    return None


def _of_classification(event: Classified) -> Attributes:
    """The tenant and the tier."""
    attributes: Attributes = {
        semconv.ADMISSION_TIER: event.tier,
        semconv.ADMISSION_TENANT: event.tenant,
        semconv.ADMISSION_SOURCE: event.source,
        semconv.ADMISSION_TOKENS_RESERVED: event.tokens,
    }
    if event.clamped_from is not None:
        attributes[semconv.ADMISSION_CLAMPED_FROM] = event.clamped_from
    if event.downgraded_from is not None:
        attributes[semconv.ADMISSION_DOWNGRADED_FROM] = event.downgraded_from
    if isinstance(event.expected, Expectation):
        _write_expectation(attributes, event.expected)
    return attributes


def _write_expectation(attributes: Attributes, expected: Expectation) -> None:
    """What it was expected to use, as far as that is not what it holds without learning."""
    attributes[semconv.ADMISSION_OUTPUT_SOURCE] = expected.source
    if expected.quantile:
        attributes[semconv.ADMISSION_OUTPUT_EXPECTED] = expected.output_tokens
        attributes[semconv.ADMISSION_OUTPUT_QUANTILE] = expected.quantile
        attributes[semconv.ADMISSION_TOKENS_MOST] = expected.most_tokens
    if expected.overlap < 1:
        attributes[semconv.ADMISSION_OVERLAP] = expected.overlap


def _of_admission(event: Admitted) -> Attributes:
    """That it was admitted, at which level, and which tiers it overtook by which rule."""
    attributes: Attributes = {semconv.ADMISSION_DECISION: "admitted", semconv.ADMISSION_LEVEL: event.level}
    if event.engine_priority is not None:
        attributes[semconv.ADMISSION_ENGINE_PRIORITY] = event.engine_priority
    for tier, rule in event.passed.items():
        attributes[semconv.ADMISSION_PASSED_PREFIX + tier] = rule
    if event.engine is not None:
        attributes[semconv.ADMISSION_ENGINE] = engine_name(event.engine)
    if event.placed is not None:
        attributes[semconv.ADMISSION_ENGINE_HIT] = dict(event.placed.hits).get(event.engine or "", 0)
        if event.placed.claimed_us:
            attributes[semconv.ADMISSION_ENGINE_CLAIMED_S] = event.placed.claimed_us / 1e6
    return attributes


def _of_refusal(event: Refused, classified: Classified | None) -> Attributes:
    """Why the middleware ended it. A client's mistake (4xx) has a reason, and is no error of this server's.

    That is the HTTP conventions' rule, for `error.type` as for the span's status.
    """
    is_abandoned = event.code in ABANDONED
    attributes: Attributes = {
        semconv.ADMISSION_DECISION: event.code if is_abandoned else "refused",
        semconv.ADMISSION_REASON: event.code,
    }
    if event.status is not None:
        attributes[semconv.HTTP_RESPONSE_STATUS_CODE] = event.status
    if classified is None and event.tenant is not None:
        attributes[semconv.ADMISSION_TENANT] = event.tenant
    if classified is None and event.tier is not None:
        attributes[semconv.ADMISSION_TIER] = event.tier
    if classified is not None and classified.model is not None:
        attributes[semconv.GEN_AI_REQUEST_MODEL] = classified.model  # else `engine` has it
    if event.gain is not None:
        attributes.update(_of_gain(event.gain))
    if _is_servers_failure(event):
        attributes[semconv.ERROR_TYPE] = event.code
    return attributes


def _is_servers_failure(event: Refused) -> bool:
    """Whether the request ended as it did through the server: an answer of 500 and above, or none."""
    return event.code == CANCELED if event.status is None else event.status >= 500


def _of_observed(event: Observed) -> Attributes:
    """The end that enforcing would have given it."""
    attributes: Attributes = {
        semconv.OBSERVED_DECISION: event.verdict.value,
        semconv.OBSERVED_QUEUE_WAIT_S: event.queue_wait_us / 1e6,
        semconv.OBSERVED_STARVATION_S: event.starvation_us / 1e6,
    }
    if event.code is not None:
        attributes[semconv.OBSERVED_REASON] = event.code
    return attributes


def _of_waiting(event: Admitted | Refused) -> Attributes:
    """How long it waited and starved; zeros where it did not."""
    attributes: Attributes = {
        semconv.ADMISSION_QUEUE_WAIT_S: event.queue_wait_us / 1e6,
        semconv.ADMISSION_STARVATION_S: event.starvation_us / 1e6,
    }
    if event.served_ahead:
        attributes.update(_of_served_ahead(event))
    return attributes


def _of_served_ahead(event: Admitted | Refused) -> Attributes:
    """Tokens that went ahead of it, by tier."""
    return {semconv.ADMISSION_SERVED_AHEAD_PREFIX + tier: tokens for tier, tokens in event.served_ahead.items()}


def _of_settlement(event: Settled) -> Attributes:
    """How the admitted request ended."""
    attributes: Attributes = {
        semconv.ADMISSION_OUTCOME: event.outcome._value_,
        semconv.ADMISSION_TOKENS_USED: event.tokens_used,
    }
    if event.status is not None:
        attributes[semconv.HTTP_RESPONSE_STATUS_CODE] = event.status
    if event.growths:
        attributes[semconv.ADMISSION_GROWTHS] = event.growths
    if event.gain is not None:
        attributes.update(_of_gain(event.gain))
    return attributes


def _of_gain(gain: ServiceGain) -> Attributes:
    """What it earned, in weighted tokens, and whether its tier's objective was met."""
    return {
        semconv.GAIN_EARNED: gain.earned,
        semconv.GAIN_ATTAINABLE: gain.attainable,
        semconv.ADMISSION_SLO: gain.slo,
    }


def _of_engine_request(classified: Classified, provider_name: str | None) -> Attributes:
    """The attributes that the GenAI conventions want when a call to a model starts."""
    attributes: Attributes = {
        semconv.GEN_AI_OPERATION_NAME: semconv.OPERATIONS.get(classified.api, classified.api),
        semconv.GEN_AI_REQUEST_STREAM: classified.stream,
    }
    if provider_name is not None:
        attributes[semconv.GEN_AI_PROVIDER_NAME] = provider_name
    if classified.model is not None:
        attributes[semconv.GEN_AI_REQUEST_MODEL] = classified.model
    if classified.max_output_tokens is not None:
        attributes[semconv.GEN_AI_REQUEST_MAX_TOKENS] = classified.max_output_tokens
    return attributes
