"""Where telemetry's microseconds go: each of those who are told of a request, alone and warm, on one story."""

from __future__ import annotations

import timeit
from collections.abc import Callable, Mapping, Sequence

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased, Sampler

from benchmarks.overhead import HEADERS
from benchmarks.overhead_apps import Nowhere, bare
from sidecar import AdmissionMiddleware
from sidecar.events import Admitted, Classified, Event, FirstByte, Outcome, Received, Settled
from sidecar.policy.compiler import shipped_policies
from sidecar.telemetry.dispatch import EventDispatcher, Listener
from sidecar.telemetry.dispatch import EventDispatcher as Telemetry
from sidecar.telemetry.request_record import RequestRecord, TraceIds
from sidecar.telemetry.spans.tracer import RequestTracer

REPEATS, CALLS = 9, 1500
A_TRACE = TraceIds(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, True)


def received() -> Received:
    """The benchmark's own request, as the proxy tells of it."""
    headers = [(name.lower().encode(), value.encode()) for name, value in HEADERS]
    return Received(5_000_000, 1_790_000_000_000_000_000, "POST", "/v1/chat/completions", headers, "request-1")


def events() -> Sequence[Event]:
    """Straight in, and answered."""
    return [
        Classified(5_000_040, "normal", "standard", "key", None, "chat", "llama", 256, False, 756, 1),
        Admitted(5_000_060, 0, 0, None, {}, 2, engine_priority=0.5),
        FirstByte(5_000_900, 200),
        Settled(5_001_000, Outcome.COMPLETED, 200, 520, 480, 40, None),
    ]


def parts() -> Mapping[str, float]:
    """Microseconds of each, the least of several repeats. Called in an event loop, as a proxy's listeners are."""
    found = {
        "spans, every one recorded": _least_us(_spans(ParentBased(ALWAYS_ON))),
        "spans, none sampled": _least_us(_spans(ALWAYS_OFF)),
    }
    observer = AdmissionMiddleware(bare, str(shipped_policies()), is_shown=True).controller.observer
    assert isinstance(observer, Telemetry)
    for listener in observer.listeners:
        found[type(listener).__name__] = _least_us(_told(listener))
    return found


def _spans(sampler: Sampler) -> Callable[[], object]:
    provider = TracerProvider(sampler=sampler)
    provider.add_span_processor(BatchSpanProcessor(Nowhere()))
    observer, request, story = EventDispatcher(RequestTracer(provider), ()), received(), events()

    def part() -> None:
        observation = observer.received(request)
        assert observation is not None
        for number, event in enumerate(story):
            observation.on_event(event)
            if number == 1:
                observation.headers()

    return part


def _told(listener: Listener) -> Callable[[], object]:
    """The listener's own part, with the record's."""
    request, story, handlers = received(), events(), listener.handlers

    def part() -> None:
        record = RequestRecord.of(request, A_TRACE)
        if Received in handlers:
            handlers[Received](record, request)
        for event in story:
            record.add(event)
            if type(event) in handlers:
                handlers[type(event)](record, event)

    return part


def _least_us(part: Callable[[], object]) -> float:
    return min(timeit.repeat(part, number=CALLS, repeat=REPEATS)) / CALLS * 1e6
