"""Which listener is told of which request, and when."""

from __future__ import annotations

import asyncio
from typing import get_args

import pytest
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Sampler
from opentelemetry.trace import NoOpTracerProvider

from sidecar.events import Event, Received
from sidecar.telemetry.dispatch import MOST_PENDING, EventDispatcher
from sidecar.telemetry.request_record import RequestRecord
from sidecar.telemetry.spans.tracer import RequestTracer
from tests.telemetry.span_stories import TRACEPARENT, Tracing, admitted, classified, first_byte, received, settled

STORY = [classified(), admitted(), first_byte(900), settled(1000)]


class Ear:
    def __init__(self) -> None:
        self.heard: list[Event | Received] = []
        self.handlers = dict.fromkeys([Received, *get_args(Event)], self.hear)

    def hear(self, record: RequestRecord, event: Event | Received) -> None:
        self.heard.append(event)
        assert event in {getattr(record, name) for name in record.__struct_fields__} or type(event) is Received


def play(observer: EventDispatcher) -> None:
    observation = observer.received(received([TRACEPARENT]))
    assert observation is not None
    for event in STORY:
        observation.on_event(event)


@pytest.mark.parametrize(("sampler", "hears"), [(ALWAYS_ON, True), (ALWAYS_OFF, False)])
def test_a_listener_to_recorded_requests_hears_of_no_other(sampler: Sampler, hears: bool) -> None:
    every, recorded = Ear(), Ear()
    spans = Tracing(sampler).tracer
    play(EventDispatcher(spans, [every], of_recorded=[recorded]))
    whole = [received([TRACEPARENT]), *STORY]
    assert (every.heard, recorded.heard) == (whole, whole if hears else [])


@pytest.mark.parametrize(("sampler", "hears"), [(ALWAYS_ON, True), (ALWAYS_OFF, False)])
def test_where_listeners_do_not_need_everything_a_recorded_trace_has_it(sampler: Sampler, hears: bool) -> None:
    spans = Tracing(sampler).tracer
    observation = EventDispatcher(spans, [Ear()], hears_everything=False).received(received())
    assert observation is not None
    assert observation.hears_everything is hears


def test_without_tracing_no_request_is_recorded() -> None:
    every, recorded = Ear(), Ear()
    play(EventDispatcher(RequestTracer(NoOpTracerProvider()), [every], of_recorded=[recorded]))
    assert (len(every.heard), recorded.heard) == (5, [])


def test_events_are_dispatched_in_a_row_and_flushed_in_their_order() -> None:
    loops: list[asyncio.AbstractEventLoop] = []

    async def live() -> None:
        ear = Ear()
        observer = EventDispatcher(RequestTracer(NoOpTracerProvider()), [ear], delay_s=60.0, note_loop=loops.append)
        first, second = (observer.received(received()) for _ in range(2))
        assert first is not None
        assert second is not None
        for event in STORY:
            first.on_event(event)
            second.on_event(event)
        assert ear.heard == []
        observer.flush()
        assert ear.heard[2:] == [event for event in STORY for _ in range(2)]
        most_requests = MOST_PENDING // 5 + 1
        for _ in range(most_requests):
            play(observer)
        assert len(ear.heard) == 10
        play(observer)
        assert len(ear.heard) == 10 + 5 * most_requests
        observer.flush()
        assert len(ear.heard) == 10 + 5 * (most_requests + 1)
        assert set(loops) == {asyncio.get_running_loop()}

    asyncio.run(live())


def test_outside_of_an_event_loop_nothing_waits() -> None:
    ear = Ear()
    play(EventDispatcher(RequestTracer(NoOpTracerProvider()), [ear], delay_s=60.0))
    assert len(ear.heard) == 5
