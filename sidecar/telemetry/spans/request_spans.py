"""The spans of one request, drawn from its record. `tracer` has the tree that they make."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from opentelemetry.trace import Span, SpanKind

from sidecar.events import (
    Admitted,
    Classified,
    Event,
    Expectation,
    Observed,
    Outcome,
    Preempted,
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
    ABANDONED,
    CANCELED,
    REPLAYED_BECAUSE,
    PreemptedAttempt,
    RequestRecord,
    engine_name,
    failed_with,
    failure_description,
)
from sidecar.telemetry.spans.app_trace import AppSpan
from sidecar.telemetry.spans.links import Attributes, FindLinks, LongWaits, Moment, OpenSpan, SoFar, WaitLinks

CLIENTS_ERRORS = 400
SERVERS_ERRORS = 500
"""From which status on an answer is an error of a CLIENT span, and of a SERVER span: the HTTP conventions' rule."""

UNREACHABLE = "engine_unreachable"
_NO_LINKS = WaitLinks((), (), {})


@dataclass(frozen=True, slots=True)
class SpanSettings:
    """The settings that the spans of all requests share.

    `report` logs the exception being handled. `starvation_limits_s` has the tiers that promise one; `provider_name` is
    the engine's name in the GenAI conventions, None where it is not known; `served_by` says whether the app of this
    process answers or an engine after the proxy; `find_links` is None where spans have no links, `long_waits` where
    waits are not reported before they end. `writes_usage` says whether `engine` has what the request used; None: unless
    the app has traced it itself.
    """

    report: Callable[[], None]
    starvation_limits_s: Mapping[str, float]
    provider_name: str | None
    find_links: FindLinks | None
    writes_usage: bool | None = None
    served_by: str | None = None
    long_waits: LongWaits | None = None


class _Reported(NamedTuple):
    """The `admission.queued` of a wait that was reported before its end, and when that was for the last time."""

    span: OpenSpan
    started_us: int
    at_us: int


class RequestSpans:
    """Records one request. `admission` is open from the beginning, and one `engine` span from each admission on.

    Everything else is made at the end, from the request's record: but for `admission.waiting`, all of a request's spans
    leave the process together. Attributes are gathered in one dict and written once: a call per attribute costs more
    than the span. Each phase, a wait or an attempt at the engine, begins where the one before it ends, or later.

    `current` is the span that the engine is sent, and that is current in the app: the last `engine` while the request
    runs, else `admission`. `_links` and `_queued` belong to waits, by their numbers: the first is 0, and each attempt
    that was taken back is followed by another. `app_trace` is that of the last call of the app, where it has one.
    """

    __slots__ = ("_admission", "_engines", "_links", "_queued", "_record", "_settings", "app_trace", "current")

    def __init__(self, settings: SpanSettings, record: RequestRecord, admission: OpenSpan) -> None:
        self._settings = settings
        self._record = record
        self._admission = admission
        self._engines: list[OpenSpan] = []
        self._links: dict[int, WaitLinks] = {}
        self._queued: dict[int, _Reported] = {}
        self.current: Span = admission.span
        self.app_trace: AppSpan | None = None

    def note(self, event: Event | Received) -> None:
        """Follows the request; its record has the event already."""
        if (follow := _FOLLOWED.get(type(event))) is None:
            return
        try:
            follow(self, event)
        except Exception:
            self._settings.report()

    def _queue(self, _: Queued) -> None:
        if self._settings.long_waits is not None:
            self._settings.long_waits.add(self)

    def _preempt(self, _: Preempted) -> None:
        self.current = self._admission.span

    def _admit(self, event: Admitted) -> None:
        """Begins an `engine` span."""
        start_us = event.at_us
        if event.queue_wait_us:
            self._wait_is_over()
            self._find_links()
            start_us = max(start_us, self._before_us())
        request: Attributes = {}
        if self._record.classified is not None:
            request = _engine_request_attributes(self._record.classified, self._settings)
        if event.engine is not None:
            request[semconv.ADMISSION_ENGINE] = engine_name(event.engine)
        engine = self._admission.child(semconv.ENGINE, SpanKind.CLIENT, self._wall_ns(start_us), request)
        self._engines.append(engine)
        self.current = engine.span

    def report_wait(self, so_far: SoFar) -> None:
        """Exports how the wait goes, as a moment in it: `admission.queued` has its time, and ends later, if ever."""
        record = self._record
        queued, classified = record.queued, record.classified
        if queued is None or classified is None:
            return
        try:
            at_us, details = so_far(record)
            number, before_us = len(record.lost), self._before_us()
            reported = self._queued.get(number)
            if reported is None:
                started_us = max(before_us, record.arrived_us)
                reported = _Reported(self._begin_queued(queued, started_us), started_us, started_us)
            at_us = max(reported.at_us, at_us)
            self._queued[number] = reported._replace(at_us=at_us)
            whose: Attributes = {
                semconv.ADMISSION_IS_WAITING: True,
                semconv.ADMISSION_REQUEST_ID: record.request_id,
                semconv.ADMISSION_TIER: classified.tier,
                semconv.ADMISSION_TENANT: classified.tenant,
                semconv.ADMISSION_OBSTACLE: queued.obstacle.value,
            }
            at_ns = self._wall_ns(at_us)
            reported.span.child(semconv.WAITING, SpanKind.INTERNAL, at_ns, {**whose, **details}).end(at_ns, {})
        except Exception:
            self._settings.report()

    def _end(self, _: Settled | Refused) -> None:
        """Makes all other spans, and ends those that are open."""
        record = self._record
        if record.queued is not None:
            self._wait_is_over()
        if record.refused is not None:
            self._find_links()
        written = self._attributes()
        since_us = self._draw_phases()
        if record.settled is not None:
            self._settle(record.settled, written, since_us)
        elif record.refused is not None:
            self._refuse(record.refused, written, since_us)

    def _refuse(self, event: Refused, written: Attributes, since_us: int) -> None:
        written.update(_refusal_attributes(event, self._record.classified))
        error = event.message if _is_servers_failure(event) else None
        self._admission.end(self._wall_ns(max(event.at_us, since_us)), written, error=error)

    def _settle(self, event: Settled, written: Attributes, since_us: int) -> None:
        record = self._record
        ended_ns = self._wall_ns(max(since_us, event.at_us))
        if record.admitted is not None and self._engines:
            self._end_engine(record.admitted, event, ended_ns)
        written.update(_settlement_attributes(event))
        if record.classified is not None and event.held_tokens not in (None, record.classified.tokens):
            written[semconv.ADMISSION_TOKENS_HELD] = event.held_tokens
        error = _failure(event, written, from_status=SERVERS_ERRORS)
        if record.refused is not None:  # preempted, and not admitted again: no engine had it any more
            written[semconv.ADMISSION_REASON] = record.refused.code
            if error is not None:
                error = f"{record.refused.code}: {record.refused.message}"
        self._admission.end(ended_ns, written, error=error)

    def _end_engine(self, admitted: Admitted, event: Settled, ended_ns: int) -> None:
        classified, first_byte = self._record.classified, self._record.first_byte
        written: Attributes = {}
        moments: list[Moment] = []
        writes_usage, app_trace = self._settings.writes_usage, self.app_trace
        if writes_usage or (writes_usage is None and (app_trace is None or not app_trace.has_usage)):
            written[semconv.GEN_AI_USAGE_INPUT_TOKENS] = event.input_tokens
            written[semconv.GEN_AI_USAGE_CACHED_TOKENS] = event.cached_tokens
            written[semconv.GEN_AI_USAGE_OUTPUT_TOKENS] = event.output_tokens
        if first_byte is not None:
            moments.append((semconv.FIRST_BYTE, self._wall_ns(first_byte.at_us)))
            if classified is not None and classified.stream:
                since_admission_s = (first_byte.at_us - admitted.at_us) / 1e6
                written[semconv.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK] = since_admission_s
        error = _failure(event, written, from_status=CLIENTS_ERRORS)
        self._engines[-1].end(ended_ns, written, moments, error)

    def _attributes(self) -> Attributes:
        """The attributes of `admission` that do not depend on its end."""
        record = self._record
        written = {} if record.classified is None else _classification_attributes(record.classified)
        for attempt in record.lost:
            self._write_wait(written, attempt.queued, attempt.admitted)
            written.update(_admission_attributes(attempt.admitted))
        if preemptions := record.preemptions:
            written[semconv.ADMISSION_PREEMPTIONS] = preemptions
        if replays := record.replays:
            written[semconv.ADMISSION_REPLAYS] = replays
        if record.waited is not None:
            self._write_wait(written, record.queued, record.waited)
        if record.admitted is not None:
            written.update(_admission_attributes(record.admitted))
        if record.observed is not None:
            written.update(_observed_attributes(record.observed))
        if written.get(semconv.ADMISSION_STARVATION_S):
            for found in self._links.values():  # the last says what went ahead in all of its waits
                if semconv.ADMISSION_EXPLANATION in found.overtaken_by:
                    written[semconv.ADMISSION_EXPLANATION] = found.overtaken_by[semconv.ADMISSION_EXPLANATION]
        return written

    # -- waiting

    def _write_wait(self, written: Attributes, queued: Queued | None, end: Admitted | Refused) -> None:
        written.update(_waiting_attributes(end))
        classified = self._record.classified
        if queued is not None and classified is not None:
            written[semconv.GEN_AI_LATENCY_TIME_IN_QUEUE] = end.queue_wait_us / 1e6
            limit_s = math.inf if classified.is_deferred else self._settings.starvation_limits_s.get(classified.tier)
            if limit_s is not None and end.starvation_us > limit_s * 1e6:
                written[semconv.ADMISSION_STARVED_TOO_LONG] = True

    def _find_links(self) -> None:
        """Finds the requests that went ahead, as long as they are known."""
        record = self._record
        if record.queued is None or record.classified is None or self._settings.find_links is None:
            return
        try:
            self._links[len(record.lost)] = self._settings.find_links(record)
        except Exception:
            self._settings.report()  # the spans are useful without links

    def _wait_is_over(self) -> None:
        if self._settings.long_waits is not None:
            self._settings.long_waits.discard(self)

    def _draw_phases(self) -> int:
        """The waits, and the attempts that were taken back, one after the other. Returns when the last wait ended."""
        record = self._record
        since_us = record.at_us
        for number, attempt in enumerate(record.lost):
            since_us = self._draw_wait(number, attempt.queued, since_us, attempt.admitted)
            since_us = max(since_us, attempt.preempted.at_us)
            if number < len(self._engines):
                self._end_lost(self._engines[number], attempt, self._wall_ns(since_us))
        if record.waited is None or record.classified is None:
            return since_us
        return self._draw_wait(len(record.lost), record.queued, since_us, record.waited)

    def _end_lost(self, engine: OpenSpan, attempt: PreemptedAttempt, ended_ns: int) -> None:
        """An attempt that was taken back."""
        if attempt.replayed is not None:
            self._end_replayed(engine, attempt.replayed, ended_ns)
        elif attempt.preempted.is_unreached:
            engine.end(ended_ns, {semconv.ERROR_TYPE: UNREACHABLE}, error="no connection to the engine")
        else:  # the `engine` span says so, and is no error of the engine's
            engine.end(ended_ns, {semconv.ADMISSION_PREEMPTED: True}, [(semconv.PREEMPTED, ended_ns)])

    def _end_replayed(self, engine: OpenSpan, event: Replayed, ended_ns: int) -> None:
        """An attempt that its engine did not serve. One that says it is full is no failure, and no error."""
        reason = event.reason.value
        written: Attributes = {semconv.ADMISSION_REPLAY_REASON: reason}
        is_failure = event.reason is not ReplayReason.FULL
        if is_failure:
            written[semconv.ERROR_TYPE] = UNREACHABLE if event.reason is ReplayReason.UNREACHED else reason
        moments = [(semconv.REPLAYED, self._wall_ns(event.at_us))]
        engine.end(ended_ns, written, moments, error=REPLAYED_BECAUSE[event.reason] if is_failure else None)

    def _draw_wait(self, number: int, queued: Queued | None, since_us: int, end: Admitted | Refused) -> int:
        """The bar of one wait, and below it that of its starvation. Returns when it ended; `since_us` if before that.

        In a shared pool the moments of a wait come from the store, whose clock is not this process's.
        """
        ended_us = max(since_us, end.at_us)
        if queued is None:
            return ended_us
        started_us = min(max(since_us, end.at_us - end.queue_wait_us), ended_us)
        reported = self._queued.get(number)
        if reported is None:
            span = self._begin_queued(queued, started_us)
        else:
            span, ended_us = reported.span, max(ended_us, reported.at_us)
            started_us = reported.started_us
        in_turn, overtook, overtaken_by = self._links.get(number, _NO_LINKS)
        span.link(in_turn)
        overtaken_us = end.overtaken_at_us
        if end.starvation_us > 0 and overtaken_us is not None and overtaken_us < ended_us:
            written = {**self._tier(), **_served_ahead_attributes(end), **overtaken_by}
            start_ns = self._wall_ns(max(started_us, overtaken_us))
            starved = span.child(semconv.STARVED, SpanKind.INTERNAL, start_ns, written, overtook)
            starved.end(self._wall_ns(ended_us), {})
        span.end(self._wall_ns(ended_us), {})
        return ended_us

    def _begin_queued(self, queued: Queued, start_us: int) -> OpenSpan:
        why: Attributes = {
            **self._tier(),
            semconv.ADMISSION_OBSTACLE: queued.obstacle.value,
            semconv.ADMISSION_EXPLANATION: queued.explanation,
        }
        return self._admission.child(semconv.QUEUED, SpanKind.INTERNAL, self._wall_ns(start_us), why)

    def _before_us(self) -> int:
        """The moment before which neither the wait that goes on ended, nor the attempt after it began."""
        lost = self._record.lost
        reported = self._queued.get(len(lost))
        since_us = lost[-1].preempted.at_us if lost else self._record.at_us
        return since_us if reported is None else max(since_us, reported.at_us)

    def _tier(self) -> Attributes:
        """The tier is repeated on the bars, so that a search for starved batch requests needs no join."""
        classified = self._record.classified
        return {} if classified is None else {semconv.ADMISSION_TIER: classified.tier}

    def _wall_ns(self, at_us: int) -> int:
        """Calendar time, in nanoseconds, of a monotonic time: a clock that is set back cannot bend a span."""
        return self._record.wall_ns + (at_us - self._record.at_us) * 1000


_FOLLOWED: Mapping[type, Callable[[RequestSpans, Any], None]] = {
    Queued: RequestSpans._queue,
    Admitted: RequestSpans._admit,
    Preempted: RequestSpans._preempt,
    Settled: RequestSpans._end,
    Refused: RequestSpans._end,
}


def _failure(event: Settled, written: Attributes, *, from_status: int) -> str | None:
    """Writes `error.type` where the engine failed (see `failed_with`); returns the description of the status."""
    failure = failed_with(event, from_status=from_status)
    if failure is None:
        return None
    written[semconv.ERROR_TYPE] = failure
    if event.outcome is Outcome.FAILED:
        return failure_description(event.outcome, event.status, event.error)
    return f"the engine answered {event.status}"


def _classification_attributes(event: Classified) -> Attributes:
    """The tenant and the tier."""
    return {
        semconv.ADMISSION_TIER: event.tier,
        semconv.ADMISSION_TENANT: event.tenant,
        semconv.ADMISSION_KEY: event.key,
        semconv.ADMISSION_SOURCE: event.source,
        semconv.ADMISSION_TOKENS_RESERVED: event.tokens,
        semconv.ADMISSION_CLAMPED_FROM: event.clamped_from,
        semconv.ADMISSION_DOWNGRADED_FROM: event.downgraded_from,
        semconv.ADMISSION_RISEN_FROM: event.risen_from,
        **({} if event.expected is None else _expectation_attributes(event.expected)),
    }


def _expectation_attributes(expected: Expectation) -> Attributes:
    """Expected use, as far as that is not what it holds without learning."""
    attributes: Attributes = {semconv.ADMISSION_OUTPUT_SOURCE: expected.source}
    if expected.quantile:
        attributes[semconv.ADMISSION_OUTPUT_EXPECTED] = expected.output_tokens
        attributes[semconv.ADMISSION_OUTPUT_QUANTILE] = expected.quantile
        attributes[semconv.ADMISSION_TOKENS_MOST] = expected.most_tokens
    if expected.overlap < 1:
        attributes[semconv.ADMISSION_OVERLAP] = expected.overlap
    return attributes


def _admission_attributes(event: Admitted) -> Attributes:
    """That it was admitted, at which level, and which tiers it overtook by which rule."""
    engine, placed = event.engine, event.placed
    attributes: Attributes = {
        semconv.ADMISSION_DECISION: "admitted",
        semconv.ADMISSION_LEVEL: event.level,
        semconv.ADMISSION_ENGINE_PRIORITY: event.engine_priority,
        **{semconv.ADMISSION_PASSED_PREFIX + tier: rule for tier, rule in event.passed.items()},
    }
    if engine is not None:
        attributes[semconv.ADMISSION_ENGINE] = engine_name(engine)
    if placed is not None:
        attributes[semconv.ADMISSION_ENGINE_HIT] = dict(placed.hits).get(engine or "", 0)
        if placed.claimed_us:
            attributes[semconv.ADMISSION_ENGINE_CLAIMED_S] = placed.claimed_us / 1e6
    return attributes


def _refusal_attributes(event: Refused, classified: Classified | None) -> Attributes:
    """Why the middleware ended it. A client's mistake (4xx) has a reason, and is no error of this server's.

    That is the HTTP conventions' rule, for `error.type` as for the span's status.
    """
    return {
        semconv.ADMISSION_DECISION: event.code if event.code in ABANDONED else "refused",
        semconv.ADMISSION_REASON: event.code,
        semconv.HTTP_RESPONSE_STATUS_CODE: event.status,
        semconv.ADMISSION_TENANT: event.tenant if classified is None else classified.tenant,
        semconv.ADMISSION_KEY: event.key if classified is None else classified.key,
        semconv.ADMISSION_TIER: event.tier if classified is None else classified.tier,
        semconv.GEN_AI_REQUEST_MODEL: None if classified is None else classified.model,  # else `engine` has it
        semconv.ERROR_TYPE: event.code if _is_servers_failure(event) else None,
        **_gain_attributes(event.gain),
    }


def _is_servers_failure(event: Refused) -> bool:
    """True if the request ended as it did through the server: an answer of 500 and above, or none."""
    return event.code == CANCELED if event.status is None else event.status >= 500


def _observed_attributes(event: Observed) -> Attributes:
    """The end that enforcing would have given it."""
    return {
        semconv.OBSERVED_DECISION: event.verdict.value,
        semconv.OBSERVED_QUEUE_WAIT_S: event.queue_wait_us / 1e6,
        semconv.OBSERVED_STARVATION_S: event.starvation_us / 1e6,
        semconv.OBSERVED_REASON: event.code,
    }


def _waiting_attributes(event: Admitted | Refused) -> Attributes:
    """How long it waited and starved; zeros where it did not."""
    return {
        semconv.ADMISSION_QUEUE_WAIT_S: event.queue_wait_us / 1e6,
        semconv.ADMISSION_STARVATION_S: event.starvation_us / 1e6,
        **_served_ahead_attributes(event),
    }


def _served_ahead_attributes(event: Admitted | Refused) -> Attributes:
    """Tokens that went ahead of it, by tier."""
    return {semconv.ADMISSION_SERVED_AHEAD_PREFIX + tier: tokens for tier, tokens in event.served_ahead.items()}


def _settlement_attributes(event: Settled) -> Attributes:
    """How the admitted request ended."""
    return {
        semconv.ADMISSION_OUTCOME: event.outcome._value_,
        semconv.ADMISSION_TOKENS_USED: event.tokens_used,
        semconv.HTTP_RESPONSE_STATUS_CODE: event.status,
        semconv.ADMISSION_GROWTHS: event.growths or None,
        **_gain_attributes(event.gain),
    }


def _gain_attributes(gain: ServiceGain | None) -> Attributes:
    """Gain in weighted tokens, and whether its tier's objective was met; nothing where it was not measured."""
    if gain is None:
        return {}
    return {
        semconv.GAIN_EARNED: gain.earned,
        semconv.GAIN_ATTAINABLE: gain.attainable,
        semconv.ADMISSION_SLO: gain.slo,
    }


def _engine_request_attributes(classified: Classified, settings: SpanSettings) -> Attributes:
    """The attributes that the GenAI conventions want when a call to a model starts."""
    return {
        semconv.GEN_AI_OPERATION_NAME: semconv.OPERATIONS.get(classified.api, classified.api),
        semconv.GEN_AI_REQUEST_STREAM: classified.stream,
        semconv.GEN_AI_PROVIDER_NAME: settings.provider_name,
        semconv.ADMISSION_SERVED_BY: settings.served_by,
        semconv.GEN_AI_REQUEST_MODEL: classified.model,
        semconv.GEN_AI_REQUEST_MAX_TOKENS: classified.max_output_tokens,
    }
