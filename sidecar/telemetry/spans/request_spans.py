"""The spans of one request, from its events. What they are is told in `spans`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from opentelemetry.trace import Link, SpanKind

from sidecar.events import (
    Admitted,
    Classified,
    Event,
    FirstByte,
    Headers,
    Observed,
    Preempted,
    Queued,
    Received,
    Refused,
    Settled,
)
from sidecar.telemetry import semconv
from sidecar.telemetry.preemption import end_of_wait
from sidecar.telemetry.spans import attributes
from sidecar.telemetry.spans.attributes import Attributes
from sidecar.telemetry.spans.links import MOST_LINKS, WhoWasAhead, links_to
from sidecar.telemetry.spans.propagation import injected
from sidecar.telemetry.spans.recording import Moment, OpenSpan

CLIENTS_ERRORS = 400
SERVERS_ERRORS = 500
"""From which status on an answer is an error of a CLIENT span, and of a SERVER span: the HTTP conventions' rule."""


@dataclass(frozen=True, slots=True)
class SpanSettings:
    """What the spans of all requests share.

    `report` logs the exception being handled. `starvation_limits_s` has the tiers that promise one; `provider_name` is
    what the GenAI conventions call the engine by, None where that is not known; `who_was_ahead` is None where spans
    have no links.
    """

    report: Callable[[], None]
    starvation_limits_s: Mapping[str, float]
    provider_name: str | None
    who_was_ahead: WhoWasAhead | None


class LostAttempt(NamedTuple):
    """An admission that was taken back: the wait before it, None where there was none, and its `engine` span."""

    queued: Queued | None
    admitted: Admitted
    engine: OpenSpan
    preempted: Preempted


class RequestSpans:
    """Records one request. `admission` is open from the beginning; `engine` from admission on.

    The spans of its waiting are made when it is over. All of a request's spans then leave the process together, and a
    Collector that decides what to keep some seconds after a trace's first span sees how this request ended.

    Attributes are gathered in one dict and written once, at the end: a call per attribute costs more than the span.
    """

    __slots__ = (
        "_admission",
        "_attributes",
        "_classified",
        "_engine",
        "_engine_attributes",
        "_engine_events",
        "_engine_start_us",
        "_links",
        "_lost",
        "_queued",
        "_received",
        "_settings",
        "_waited",
    )

    is_recording = True

    def __init__(self, settings: SpanSettings, received: Received, admission: OpenSpan) -> None:
        self._settings = settings
        self._received = received
        self._admission = admission
        self._attributes: Attributes = {}
        self._classified: Classified | None = None
        self._queued: Queued | None = None
        self._waited: Admitted | Refused | None = None
        self._lost: Sequence[LostAttempt] = ()
        self._links: tuple[Sequence[Link], Sequence[Link]] = ((), ())
        self._engine: OpenSpan | None = None
        self._engine_start_us = 0
        self._engine_events: list[Moment] = []
        self._engine_attributes: Attributes = {}

    @property
    def trace(self) -> tuple[int, int, bool]:
        """The trace's id, the id of `admission`, and whether they are exported."""
        context = self._admission.context
        return context.trace_id, context.span_id, context.trace_flags.sampled

    def headers(self) -> Headers:
        """The `engine` span's context once admitted, so that the engine's own spans hang below it."""
        span = self._admission if self._engine is None else self._engine
        try:
            return injected(span.context, self._received.headers)
        except Exception:
            self._settings.report()
            return ()

    def on_event(self, event: Event) -> None:
        """Record it; `Refused` and `Settled` end the spans."""
        try:
            self._record(event)
        except Exception:
            self._settings.report()

    def _record(self, event: Event) -> None:
        match event:
            case Classified():
                self._classified = event
                self._attributes.update(attributes.of_classification(event))
            case Queued():
                self._queued = event
            case Admitted():
                self._admit(event)
            case Observed():
                self._attributes.update(attributes.of_observed(event))
            case Preempted():
                self._preempt(event)
            case FirstByte():
                self._first_byte(event)
            case Refused():
                self._refuse(event)
            case Settled():
                self._settle(event)

    def _admit(self, event: Admitted) -> None:
        self._end_waiting(event)
        self._attributes.update(attributes.of_admission(event))
        self._engine_start_us = event.at_us
        request = None
        if self._classified is not None:
            request = attributes.of_engine_request(self._classified, self._settings.provider_name)
        self._engine = self._admission.child(semconv.ENGINE, SpanKind.CLIENT, self._wall_ns(event.at_us), request)

    def _preempt(self, event: Preempted) -> None:
        """What the engine did is lost, and the request waits again. Its span is ended with all others."""
        self._attributes.update(attributes.of_preemption(event))
        if self._engine is None or not isinstance(self._waited, Admitted):
            return
        self._lost = (*self._lost, LostAttempt(self._queued, self._waited, self._engine, event))
        self._engine = self._queued = None

    def _first_byte(self, event: FirstByte) -> None:
        if self._engine is None:
            return
        self._engine_events.append((semconv.FIRST_BYTE, self._wall_ns(event.at_us)))
        if self._classified is not None and self._classified.stream:
            since_admission_s = (event.at_us - self._engine_start_us) / 1e6
            self._engine_attributes[semconv.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK] = since_admission_s

    def _refuse(self, event: Refused) -> None:
        self._end_waiting(event)
        self._attributes.update(attributes.of_refusal(event, self._classified))
        self._draw_waiting()
        error = event.message if attributes.is_servers_failure(event) else None
        self._admission.end(self._wall_ns(event.at_us), self._attributes, error=error)

    def _settle(self, event: Settled) -> None:
        ended_ns = self._wall_ns(event.at_us)
        in_vain = end_of_wait(self._lost[-1].admitted, event) if self._lost and self._engine is None else None
        if in_vain is not None:
            self._end_waiting(in_vain)
            self._attributes[semconv.ADMISSION_REASON] = in_vain.code
        self._draw_waiting()
        if self._engine is not None:
            self._engine_attributes.update(attributes.of_engine_usage(event))
            error = _failure(event, self._engine_attributes, from_status=CLIENTS_ERRORS)
            self._engine.end(ended_ns, self._engine_attributes, self._engine_events, error)
        self._attributes.update(attributes.of_settlement(event))
        error = _failure(event, self._attributes, from_status=SERVERS_ERRORS)
        if error is not None and in_vain is not None:
            error = f"{in_vain.code}: {in_vain.message}"  # no engine had it any more
        self._admission.end(ended_ns, self._attributes, error=error)

    # -- waiting

    def _end_waiting(self, event: Admitted | Refused) -> None:
        """Note how long it waited, and who went ahead as long as that is known."""
        self._attributes.update(attributes.of_waiting(event))
        self._waited = event
        queued, classified = self._queued, self._classified
        if queued is None or classified is None:
            return
        self._attributes[semconv.GEN_AI_LATENCY_TIME_IN_QUEUE] = event.queue_wait_us / 1e6
        if event.starvation_us > self._settings.starvation_limits_s.get(classified.tier, math.inf) * 1e6:
            self._attributes[semconv.ADMISSION_STARVED_TOO_LONG] = True
        try:
            self._links = self._links_of(classified.tier, event)
        except Exception:
            self._settings.report()  # the spans are worth having without

    def _links_of(self, tier: str, event: Admitted | Refused) -> tuple[Sequence[Link], Sequence[Link]]:
        if self._settings.who_was_ahead is None:
            return (), ()
        in_turn, overtook = self._settings.who_was_ahead(tier, event, MOST_LINKS)
        # Of one that was preempted, an earlier admission is among those in turn; it does not wait for itself.
        own = self._admission.context.span_id
        return links_to(each for each in in_turn if each.span_id != own), links_to(overtook)

    def _draw_waiting(self) -> None:
        """One bar for every wait, and one for the starvation that they add up to."""
        waited, classified = self._waited, self._classified
        if waited is None or classified is None:
            return
        # The tier is repeated on the bars, so that a search for starved batch requests needs no join with the parent.
        tier: Attributes = {semconv.ADMISSION_TIER: classified.tier}
        start_us: int | None = None
        for lost in self._lost:
            self._draw_wait(tier, lost.queued, start_us, lost.admitted, ())
            self._end_lost(lost)
            start_us = lost.preempted.at_us
        in_turn, overtook = self._links
        self._draw_wait(tier, self._queued, start_us, waited, in_turn)
        if waited.starvation_us > 0 and waited.overtaken_at_us is not None:
            served_ahead = attributes.of_served_ahead(waited)
            self._draw(semconv.STARVED, waited.overtaken_at_us, waited.at_us, {**tier, **served_ahead}, overtook)

    def _draw_wait(
        self,
        tier: Attributes,
        queued: Queued | None,
        start_us: int | None,
        waited: Admitted | Refused,
        links: Sequence[Link],
    ) -> None:
        """The bar of one wait. `start_us` is when it began anew, None for the first one, which began in the queue."""
        if queued is None:
            return
        why: Attributes = {
            semconv.ADMISSION_OBSTACLE: queued.obstacle.value,
            semconv.ADMISSION_EXPLANATION: queued.explanation,
        }
        first_us = waited.at_us - waited.queue_wait_us
        self._draw(semconv.QUEUED, first_us if start_us is None else start_us, waited.at_us, {**tier, **why}, links)

    def _end_lost(self, lost: LostAttempt) -> None:
        """Ends an `engine` span that was given up: it says so, and is no error of the engine's."""
        ended_ns = self._wall_ns(lost.preempted.at_us)
        lost.engine.end(ended_ns, {semconv.ADMISSION_PREEMPTED: True}, [(semconv.PREEMPTED, ended_ns)])

    def _draw(self, name: str, start_us: int, end_us: int, written: Attributes, links: Sequence[Link]) -> None:
        span = self._admission.child(name, SpanKind.INTERNAL, self._wall_ns(start_us), written, links)
        span.end(self._wall_ns(end_us), {})

    def _wall_ns(self, at_us: int) -> int:
        """Calendar time, in nanoseconds, of a monotonic time: a clock that is set back cannot bend a span."""
        return self._received.wall_ns + (at_us - self._received.at_us) * 1000


def _failure(event: Settled, written: Attributes, *, from_status: int) -> str | None:
    """Writes the type of a failure, and returns the description of the span's status."""
    failure = attributes.engine_failure(event, from_status=from_status)
    if failure is None:
        return None
    written[semconv.ERROR_TYPE], description = failure
    return description
