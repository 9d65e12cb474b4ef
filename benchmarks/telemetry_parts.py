"""Where telemetry's microseconds go: each of those who are told of a request, alone and warm, on one story."""

from __future__ import annotations

import timeit
from collections.abc import Callable, Mapping, Sequence

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased, Sampler
from sidecar.policy.compiler import shipped_policies

from benchmarks.overhead import HEADERS
from benchmarks.overhead_apps import Nowhere, bare
from sidecar import AdmissionMiddleware
from sidecar.events import Admitted, Classified, Event, FirstByte, Outcome, Received, Settled
from sidecar.telemetry import SpanObserver, Telemetry
from sidecar.telemetry.telemetry import Listener, Trace

REPEATS, CALLS = 9, 1500
A_TRACE = Trace(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, True)


def received() -> Received:
    """The benchmark's own request, as the door tells of it."""
    headers = [(name.lower().encode(), value.encode()) for name, value in HEADERS]
    return Received(5_000_000, 1_790_000_000_000_000_000, "POST", "/v1/chat/completions", headers, "request-1")


def events() -> Sequence[Event]:
    """Straight in, and answered."""
    return [
        Classified(5_000_040, "normal", "standard", "key", None, "chat", "llama", 256, False, 756, 1),
        Admitted(5_000_060, 0, 0, None, {}, 2, 0.5),
        FirstByte(5_000_900, 200),
        Settled(5_001_000, Outcome.COMPLETED, 200, 520, 480, 40, None),
    ]


def parts() -> Mapping[str, float]:
    """Microseconds of each, the least of several repeats. Called in an event loop, as a door's listeners are."""
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
    observer, request, story = SpanObserver(provider), received(), events()

    def part() -> None:
        observation = observer.received(request)
        assert observation is not None
        for number, event in enumerate(story):
            if observation.is_recording:
                observation.on_event(event)
            if number == 1:
                observation.headers()

    return part


def _told(listener: Listener) -> Callable[[], object]:
    request, story = received(), events()

    def part() -> None:
        tell = listener.begin(request, A_TRACE)
        if tell is not None:
            for event in story:
                tell(event)

    return part


def _least_us(part: Callable[[], object]) -> float:
    return min(timeit.repeat(part, number=CALLS, repeat=REPEATS)) / CALLS * 1e6
