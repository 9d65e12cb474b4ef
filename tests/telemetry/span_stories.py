"""Event sequences as the sidecar tells them, and the spans they leave, for the tests in this folder."""

from collections.abc import Callable, Mapping
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Sampler
from opentelemetry.trace import SpanContext, TraceFlags

from sidecar.events import (
    Admitted,
    Classified,
    Event,
    Expectation,
    FirstByte,
    Headers,
    Obstacle,
    Outcome,
    Preempted,
    Queued,
    Received,
    Refused,
    Settled,
)
from sidecar.telemetry.dispatch import EventDispatcher, Listener
from sidecar.telemetry.request_record import RequestRecord
from sidecar.telemetry.spans.tracer import RequestTracer

ARRIVAL_US = 5_000_000
ARRIVAL_NS = 1_790_000_000_123_456_789
TRACE_ID = 0x0AF7651916CD43DD8448EB211C80319C
CLIENT_SPAN_ID = 0xB7AD6B7169203331
SAMPLED = SpanContext(TRACE_ID, CLIENT_SPAN_ID, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
TRACEPARENT = (b"traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")


def ns(after_arrival_us: int) -> int:
    """The wall clock's nanoseconds, so long after the arrival."""
    return ARRIVAL_NS + after_arrival_us * 1000


def received(headers: Headers = ()) -> Received:
    return Received(ARRIVAL_US, ARRIVAL_NS, "POST", "/v1/chat/completions", headers, "request-1")


def classified(
    clamped_from: str | None = None, stream: bool = True, api: str = "chat", *, preemptible: bool = False
) -> Classified:
    return Classified(
        at_us=ARRIVAL_US + 40,
        tier="batch",
        tenant="acme",
        source="header",
        clamped_from=clamped_from,
        api=api,
        model="llama-3.1-8b",
        max_output_tokens=256,
        stream=stream,
        tokens=800,
        requests=1,
        preemptible=preemptible,
    )


def queued() -> Queued:
    return Queued(ARRIVAL_US + 50, Obstacle.NO_ROOM, "the pool has no room")


def preempted(after_us: int, admitted_us: int, times: int = 1) -> tuple[Preempted, Queued]:
    """Preempted so long after the arrival, when it had been admitted `admitted_us` behind it: and waits again."""
    at_us = ARRIVAL_US + after_us
    again = Queued(at_us, Obstacle.PREEMPTED, "its room went to a more important request")
    return Preempted(at_us, ARRIVAL_US + admitted_us, times), again


def admitted(
    after_us: int = 60,
    wait_us: int = 0,
    starvation_us: int = 0,
    served_ahead: dict[str, int] | None = None,
    *,
    engine_priority: float | None = 10,
    passed: Mapping[str, str] | None = None,
) -> Admitted:
    at_us = ARRIVAL_US + after_us
    overtaken_at_us = at_us - starvation_us if served_ahead else None
    waited = at_us, wait_us, starvation_us, overtaken_at_us, served_ahead or {}
    return Admitted(*waited, 3, passed or {}, engine_priority=engine_priority)


def refused(code: str, status: int | None, after_us: int = 70, **waiting: object) -> Refused:
    return Refused(ARRIVAL_US + after_us, code, f"because of {code}", status, **waiting)


def first_byte(after_us: int) -> FirstByte:
    return FirstByte(ARRIVAL_US + after_us, 200)


def settled(
    after_us: int, outcome: Outcome = Outcome.COMPLETED, status: int | None = 200, error: str | None = None
) -> Settled:
    return Settled(ARRIVAL_US + after_us, outcome, status, 712, 512, 200, error)


EXPECTED = Expectation(
    100, 2, "own", 1532, 0.95, overlap=0.83, most_tokens=1000, prompt_tokens=700, bytes_per_token=3.9, bucket="plain"
)
"""Two sequences of 100 tokens. `settled` has 200 output tokens: as long as expected."""


def in_vain(after_us: int, code: str, status: int | None) -> Settled:
    """How a request ends that was preempted and not admitted again."""
    outcome = Outcome.CLIENT_LEFT if code == "client_left" else Outcome.FAILED
    return Settled(ARRIVAL_US + after_us, outcome, status, 0, None, None, code)


TWICE_PREEMPTED = (
    classified(preemptible=True),
    queued(),
    admitted(1_000_000, wait_us=999_950),
    *preempted(3_000_000, 1_000_000),
    admitted(5_000_000, 4_999_950, starvation_us=2_000_000, served_ahead={"high": 900}),
    *preempted(5_500_000, 5_000_000, times=2),
    admitted(6_000_000, 5_999_950, starvation_us=3_000_000, served_ahead={"high": 950}),
    first_byte(6_200_000),
    settled(7_000_000),
)
"""It waits for 1 s, 2 s and 0.5 s, the engine works for 2 s and 0.5 s in vain, and it starves from 3 s on."""


def begin(listener: Listener, received: Received, trace: SpanContext | None = None) -> Callable[[Event], None]:
    """Begins a request for one listener alone; the returned function gives it the request's next event."""
    record = RequestRecord.of(received, trace)

    def give(event: Event | Received) -> None:
        if not isinstance(event, Received):
            record.add(event)
        if type(event) in listener.handlers:
            listener.handlers[type(event)](record, event)

    give(received)
    return give


class Tracing:
    """An observer with an SDK of its own, and what it exported."""

    def __init__(self, sampler: Sampler = ALWAYS_ON, **settings: Any) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = RequestTracer(self.provider, **settings)
        self.observer = EventDispatcher(self.tracer, ())

    def play(self, *events: Event, headers: Headers = ()) -> dict[str, ReadableSpan]:
        """The spans by name, after one request to which all of this happened."""
        observation = self.observer.received(received(headers))
        assert observation is not None
        for event in events:
            observation.on_event(event)
        spans = self.exporter.get_finished_spans()
        assert len({span.name for span in spans}) == len(spans)
        return {span.name: span for span in spans}


def interval(span: ReadableSpan) -> tuple[int | None, int | None]:
    return span.start_time, span.end_time


def span_id(span: ReadableSpan) -> int:
    return span.get_span_context().span_id


def parent_id(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def value_of(headers: Headers, name: bytes) -> bytes | None:
    values = [value for header, value in headers if header == name]
    assert len(values) <= 1
    return values[0] if values else None
