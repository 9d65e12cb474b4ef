"""Which listener is told of which request, and when."""

from __future__ import annotations

from typing import get_args

from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON
from opentelemetry.trace import NoOpTracerProvider

from sidecar.events import Event, Received
from sidecar.telemetry.dispatch import EventDispatcher
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


def test_each_event_is_told_as_it_comes_whether_the_request_is_traced_or_not() -> None:
    for tracer in (Tracing(ALWAYS_ON).tracer, Tracing(ALWAYS_OFF).tracer, RequestTracer(NoOpTracerProvider())):
        ear = Ear()
        observation = EventDispatcher(tracer, [ear]).received(received([TRACEPARENT]))
        assert observation is not None
        for number, event in enumerate(STORY, 2):
            observation.on_event(event)
            assert len(ear.heard) == number
        assert ear.heard == [received([TRACEPARENT]), *STORY]
