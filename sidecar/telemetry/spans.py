"""Spans from events: what one request's stay at the door looks like in a trace.

    admission               SERVER    arrival to settlement or refusal; child of the client's `traceparent`
      admission.queued      INTERNAL  arrival to admission or departure; only if it waited
      admission.starved     INTERNAL  first overtaken to admission or departure; only if it starved
      engine                CLIENT    admission to settlement; its context is what the engine is sent

Only `admission` is open while a request waits: its children are made afterwards, with the times of the events, so a
waiting request costs nothing. Nothing is made current: the context goes from span to span by argument. Everything here
is called on the request's path, so nothing raises; the first failure is logged, and the request goes on.
"""

from __future__ import annotations

import logging

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import NoOpTracer, NoOpTracerProvider, ProxyTracerProvider, Span, SpanKind, StatusCode

from sidecar.events import (
    Admitted,
    Classified,
    Event,
    FirstByte,
    Headers,
    Outcome,
    Queued,
    Received,
    Refused,
    Settled,
)
from sidecar.telemetry import semconv
from sidecar.telemetry.propagation import injected, parent_of
from sidecar.version import __version__

logger = logging.getLogger(__name__)

Attributes = dict[str, str | int | float | bool]


class SpanObserver:
    """Makes the spans of every request. One per process; holds nothing of any request.

    `tracer_provider` None means the global one, looked up at each request: an SDK that is installed later is found.
    """

    def __init__(self, tracer_provider: trace.TracerProvider | None = None) -> None:
        self._given_provider = tracer_provider
        self._provider: trace.TracerProvider | None = None
        self._tracer: trace.Tracer | None = None
        self._reported = False

    def listens(self) -> bool:
        """Whether there is an SDK that may record."""
        try:
            return self._current_tracer() is not None
        except Exception:
            self.report()
            return False

    def received(self, event: Received) -> RequestSpans | SampledOut | None:
        """Start `admission`. None without an SDK, or where tracing failed: the client's headers then pass untouched."""
        try:
            tracer = self._current_tracer()
            return None if tracer is None else self._observe(tracer, event)
        except Exception:
            self.report()
            return None

    def report(self) -> None:
        """Log the exception being handled, the first time only: one broken exporter must not write a line a request."""
        if not self._reported:
            self._reported = True
            logger.exception("tracing failed; requests go on without, and further failures are not logged")

    def injected(self, span: Span, received: Received) -> Headers:
        """The headers that carry a span's context on; none where that failed."""
        try:
            return injected(span, received.headers)
        except Exception:
            self.report()
            return ()

    def _current_tracer(self) -> trace.Tracer | None:
        provider = self._given_provider or trace.get_tracer_provider()
        if provider is not self._provider:
            self._tracer = _tracer_of(provider)
            self._provider = provider
        return self._tracer

    def _observe(self, tracer: trace.Tracer, event: Received) -> RequestSpans | SampledOut | None:
        parent, kind = parent_of(event.headers)
        span = tracer.start_span(
            semconv.ADMISSION,
            parent,
            kind,
            {semconv.HTTP_REQUEST_METHOD: event.method, semconv.URL_PATH: event.path},
            start_time=event.wall_ns,
        )
        if span.is_recording():
            return RequestSpans(self, tracer, event, span, parent)
        if span.get_span_context().is_valid:
            return SampledOut(self, event, span)
        return None


class SampledOut:
    """A request whose trace is not recorded: only the context goes on, so that the engine does not record it either."""

    __slots__ = ("_observer", "_received", "_span")

    def __init__(self, observer: SpanObserver, received: Received, span: Span) -> None:
        self._observer = observer
        self._received = received
        self._span = span

    @property
    def trace(self) -> tuple[int, int, bool]:
        """The trace's id, the span's, and that nothing is recorded."""
        context = self._span.get_span_context()
        return context.trace_id, context.span_id, False

    def headers(self) -> Headers:
        """The unrecorded span's context."""
        return self._observer.injected(self._span, self._received)

    def on_event(self, event: Event) -> None:
        """Nothing is recorded."""


class RequestSpans:
    """The spans of one request, from its events.

    Attributes are gathered in one dict and written once, at the end: a call per attribute costs more than the span.
    """

    __slots__ = (
        "_admission",
        "_attributes",
        "_classified",
        "_context",
        "_engine",
        "_engine_attributes",
        "_engine_start_us",
        "_observer",
        "_queued",
        "_received",
        "_tracer",
    )

    def __init__(
        self, observer: SpanObserver, tracer: trace.Tracer, received: Received, admission: Span, parent: Context
    ) -> None:
        self._observer = observer
        self._tracer = tracer
        self._received = received
        self._admission = admission
        self._context = trace.set_span_in_context(admission, parent)
        self._attributes: Attributes = {}
        self._classified: Classified | None = None
        self._queued = False
        self._engine: Span | None = None
        self._engine_start_us = 0
        self._engine_attributes: Attributes = {}

    @property
    def trace(self) -> tuple[int, int, bool]:
        """The trace's id, the id of `admission`, and that they are recorded."""
        context = self._admission.get_span_context()
        return context.trace_id, context.span_id, True

    def headers(self) -> Headers:
        """The `engine` span's context once admitted, so that the engine's own spans hang below it."""
        span = self._admission if self._engine is None else self._engine
        return self._observer.injected(span, self._received)

    def on_event(self, event: Event) -> None:
        """Record it; `Refused` and `Settled` end the spans."""
        try:
            self._record(event)
        except Exception:
            self._observer.report()

    def _record(self, event: Event) -> None:
        match event:
            case Classified():
                self._classify(event)
            case Queued():
                self._queued = True
            case Admitted():
                self._admit(event)
            case FirstByte():
                self._first_byte(event)
            case Refused():
                self._refuse(event)
            case Settled():
                self._settle(event)

    def _classify(self, event: Classified) -> None:
        self._classified = event
        attributes = self._attributes
        attributes[semconv.ADMISSION_TIER] = event.tier
        attributes[semconv.ADMISSION_TENANT] = event.tenant
        attributes[semconv.ADMISSION_SOURCE] = event.source
        attributes[semconv.ADMISSION_TOKENS_RESERVED] = event.tokens
        if event.clamped_from is not None:
            attributes[semconv.ADMISSION_CLAMPED_FROM] = event.clamped_from

    def _admit(self, event: Admitted) -> None:
        self._end_waiting(event)
        attributes = self._attributes
        attributes[semconv.ADMISSION_DECISION] = "admitted"
        attributes[semconv.ADMISSION_LEVEL] = event.level
        if event.engine_priority is not None:
            attributes[semconv.ADMISSION_ENGINE_PRIORITY] = event.engine_priority
        self._engine_start_us = event.at_us
        self._engine = self._tracer.start_span(
            semconv.ENGINE,
            self._context,
            SpanKind.CLIENT,
            _engine_request(self._classified),
            start_time=self._wall_ns(event.at_us),
        )

    def _first_byte(self, event: FirstByte) -> None:
        if self._engine is None:
            return
        self._engine.add_event(semconv.FIRST_BYTE, timestamp=self._wall_ns(event.at_us))
        if self._classified is not None and self._classified.stream:
            since_admission_s = (event.at_us - self._engine_start_us) / 1e6
            self._engine_attributes[semconv.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK] = since_admission_s

    def _refuse(self, event: Refused) -> None:
        self._end_waiting(event)
        attributes = self._attributes
        if event.status is not None:
            attributes[semconv.HTTP_RESPONSE_STATUS_CODE] = event.status
        if self._classified is not None and self._classified.model is not None:
            attributes[semconv.GEN_AI_REQUEST_MODEL] = self._classified.model  # else `engine` has it
        left = event.code == Outcome.CLIENT_LEFT.value
        attributes[semconv.ADMISSION_DECISION] = event.code if left else "refused"
        if not left:
            attributes[semconv.ERROR_TYPE] = event.code
        # What the client did wrong (4xx) is an answer, not an error of this server: the HTTP conventions' rule.
        if event.status is not None and event.status >= 500:
            self._admission.set_status(StatusCode.ERROR, event.message)
        self._end(self._admission, attributes, event.at_us)

    def _settle(self, event: Settled) -> None:
        attributes, engine_attributes = self._attributes, self._engine_attributes
        attributes[semconv.ADMISSION_OUTCOME] = event.outcome.value
        attributes[semconv.ADMISSION_TOKENS_USED] = event.tokens_used
        if event.status is not None:
            attributes[semconv.HTTP_RESPONSE_STATUS_CODE] = event.status
        if event.input_tokens is not None:
            engine_attributes[semconv.GEN_AI_USAGE_INPUT_TOKENS] = event.input_tokens
        if event.output_tokens is not None:
            engine_attributes[semconv.GEN_AI_USAGE_OUTPUT_TOKENS] = event.output_tokens
        failure = _failure_of(event)
        if self._engine is not None:
            self._conclude(self._engine, engine_attributes, event.at_us, failure)
        self._conclude(self._admission, attributes, event.at_us, failure)

    def _conclude(self, span: Span, attributes: Attributes, at_us: int, failure: tuple[str, str] | None) -> None:
        if failure is not None:
            error_type, description = failure
            attributes[semconv.ERROR_TYPE] = error_type
            span.set_status(StatusCode.ERROR, description)
        self._end(span, attributes, at_us)

    def _end(self, span: Span, attributes: Attributes, at_us: int) -> None:
        if attributes:
            span.set_attributes(attributes)
        span.end(self._wall_ns(at_us))

    def _end_waiting(self, event: Admitted | Refused) -> None:
        """Note how long it waited, and draw the waiting as spans of their own."""
        served_ahead = {semconv.ADMISSION_SERVED_AHEAD_PREFIX + tier: n for tier, n in event.served_ahead.items()}
        attributes = self._attributes
        attributes[semconv.ADMISSION_QUEUE_WAIT_S] = event.queue_wait_us / 1e6
        attributes[semconv.ADMISSION_STARVATION_S] = event.starvation_us / 1e6
        attributes.update(served_ahead)
        if self._queued:
            attributes[semconv.GEN_AI_LATENCY_TIME_IN_QUEUE] = event.queue_wait_us / 1e6
            self._add_child(semconv.QUEUED, event.at_us - event.queue_wait_us, event.at_us, {})
        if event.starvation_us > 0 and event.overtaken_at_us is not None:
            self._add_child(semconv.STARVED, event.overtaken_at_us, event.at_us, served_ahead)

    def _add_child(self, name: str, start_us: int, end_us: int, served_ahead: dict[str, int]) -> None:
        # The tier is repeated on the bar, so that a search for starved batch requests needs no join with the parent.
        tier = {} if self._classified is None else {semconv.ADMISSION_TIER: self._classified.tier}
        span = self._tracer.start_span(
            name,
            self._context,
            SpanKind.INTERNAL,
            {**tier, **served_ahead},
            start_time=self._wall_ns(start_us),
        )
        span.end(self._wall_ns(end_us))

    def _wall_ns(self, at_us: int) -> int:
        """Calendar time, in nanoseconds, of a monotonic time: a clock that is set back cannot bend a span."""
        return self._received.wall_ns + (at_us - self._received.at_us) * 1000


def _tracer_of(provider: trace.TracerProvider) -> trace.Tracer | None:
    """The provider's tracer, or None where it records nothing (no SDK, or an SDK switched off by OTEL_SDK_DISABLED)."""
    if isinstance(provider, ProxyTracerProvider | NoOpTracerProvider):
        return None
    tracer = provider.get_tracer("sidecar", __version__)
    return None if isinstance(tracer, NoOpTracer) else tracer


def _engine_request(classified: Classified | None) -> Attributes:
    """What the GenAI conventions want to be known when a call to a model starts."""
    if classified is None:
        return {}
    attributes: Attributes = {
        semconv.GEN_AI_OPERATION_NAME: semconv.OPERATIONS.get(classified.api, classified.api),
        semconv.GEN_AI_REQUEST_STREAM: classified.stream,
    }
    if classified.model is not None:
        attributes[semconv.GEN_AI_REQUEST_MODEL] = classified.model
    if classified.max_output_tokens is not None:
        attributes[semconv.GEN_AI_REQUEST_MAX_TOKENS] = classified.max_output_tokens
    return attributes


def _failure_of(event: Settled) -> tuple[str, str] | None:
    """`error.type` and the status description where the engine failed; a client that left is no failure."""
    if event.outcome is Outcome.CLIENT_LEFT:
        return None
    if event.outcome is Outcome.FAILED:
        error_type = event.error or Outcome.FAILED.value
        return error_type, f"the engine failed: {error_type}"
    if event.status is not None and event.status >= 500:
        return event.error or str(event.status), f"the engine answered {event.status}"
    return None
