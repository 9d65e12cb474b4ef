import logging
from typing import get_args

import pytest
from opentelemetry import propagate
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, Tracer
from opentelemetry.trace import TracerProvider as TracerProviderApi
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from sidecar.events import Event
from sidecar.telemetry.dispatch import EventDispatcher
from sidecar.telemetry.spans.tracer import RequestTracer
from tests.telemetry.span_stories import Tracing, admitted, classified, received, settled

WHOLE_STORY = (classified(), admitted(), settled(1000))


def observing(provider):
    return EventDispatcher(RequestTracer(provider), ())


def go_through(observer):
    observation = observer.received(received())
    if observation is not None:
        for event in WHOLE_STORY:
            observation.on_event(event)
            observation.headers()


class BrokenAtStart(SpanProcessor):
    def on_start(self, span, parent_context=None):
        raise RuntimeError("broken at start")


class BrokenAtEnd(SpanProcessor):
    def on_end(self, span):
        raise RuntimeError("broken at end")


@pytest.mark.parametrize("processor", [BrokenAtStart(), BrokenAtEnd()])
def test_a_broken_processor_never_raises_and_is_logged_once(processor, caplog):
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(processor)
    observer = observing(provider)

    for _ in range(3):
        go_through(observer)

    (record,) = caplog.records
    assert record.name == "sidecar.telemetry.spans.tracer"
    assert "tracing failed" in record.message
    assert record.exc_info is not None


class BrokenExporter(SpanExporter):
    def export(self, spans):
        raise OSError("no Collector")


def test_a_broken_exporter_never_raises():
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(BrokenExporter()))

    go_through(observing(provider))


class BrokenProvider(TracerProviderApi):
    def get_tracer(self, *arguments, **named):
        raise RuntimeError("no tracer today")


def test_a_broken_provider_leaves_the_request_unobserved(caplog):
    assert observing(BrokenProvider()).received(received()) is None
    assert len(caplog.records) == 1


@pytest.mark.parametrize("sampled", [True, False])
def test_a_broken_propagator_leaves_the_clients_headers_as_they_are(caplog, sampled):
    tracing = Tracing()
    observation = tracing.observer.received(received())
    if not sampled:
        provider = UnrecordedProvider()
        observation = observing(provider).received(received())

    class BrokenPropagator(TraceContextTextMapPropagator):
        def inject(self, *arguments, **named):
            raise ValueError("cannot inject")

    configured = propagate.get_global_textmap()
    propagate.set_global_textmap(BrokenPropagator())
    try:
        assert observation.headers() == ()
        assert observation.headers() == ()
    finally:
        propagate.set_global_textmap(configured)
    assert len(caplog.records) == 1


class UnrecordedTracer(Tracer):
    def __init__(self, span_context):
        self.span_context = span_context

    def start_span(self, *arguments, **named):
        return NonRecordingSpan(self.span_context)

    def start_as_current_span(self, *arguments, **named):
        raise NotImplementedError


class UnrecordedProvider(TracerProviderApi):
    def __init__(self, span_context=None):
        self.span_context = span_context or SpanContext(1, 2, is_remote=False, trace_flags=TraceFlags(0))

    def get_tracer(self, *arguments, **named):
        return UnrecordedTracer(self.span_context)


def test_a_tracer_that_neither_records_nor_has_a_context_is_as_none():
    nothing = SpanContext(0, 0, is_remote=False)

    assert observing(UnrecordedProvider(nothing)).received(received()) is None


def test_an_event_that_does_not_belong_there_ends_no_request(caplog):
    observation = Tracing().observer.received(received())

    observation.on_event("not an event")
    observation.on_event(settled(1000))
    observation.on_event(settled(1000))

    assert all(record.levelname == "WARNING" for record in caplog.records)


class BrokenHandler(logging.Handler):
    """Of a program whose log does not catch what it raises."""

    def emit(self, record):
        raise RuntimeError("no log today")


@pytest.mark.parametrize("named", ["sidecar.telemetry.spans.tracer", "sidecar.telemetry.dispatch"])
def test_a_log_that_raises_does_not_fail_the_request_that_would_have_told_it(named, monkeypatch):
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BrokenAtStart())

    class Broken:
        handlers = dict.fromkeys(get_args(Event), lambda *_: 1 // 0)

    broken = BrokenHandler()
    monkeypatch.setattr(logging.getLogger(named), "handlers", [broken])
    go_through(EventDispatcher(RequestTracer(provider), [Broken()]))
