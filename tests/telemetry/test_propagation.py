import os
import sys
from importlib import import_module

import opentelemetry.propagate
import pytest
from opentelemetry import baggage, context, trace
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.trace import NoOpTracerProvider, SpanContext, SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from sidecar.events import Received
from sidecar.telemetry.dispatch import EventDispatcher
from sidecar.telemetry.providers import none_is_set
from sidecar.telemetry.spans.propagation import client_trace
from sidecar.telemetry.spans.tracer import RequestTracer
from tests.telemetry.span_stories import (
    CLIENT_SPAN_ID,
    TRACE_ID,
    TRACEPARENT,
    Tracing,
    admitted,
    classified,
    parent_id,
    received,
    settled,
    span_id,
    value_of,
)


def sent(tracing, *headers):
    """What the engine is sent, and the spans, for an admitted request with these headers."""
    observation = tracing.observer.received(received(headers))
    observation.on_event(classified())
    observation.on_event(admitted())
    to_engine = observation.headers()
    observation.on_event(settled(1000))
    return to_engine, {span.name: span for span in tracing.exporter.get_finished_spans()}


def test_the_engine_hangs_below_our_engine_span_and_that_below_the_client():
    to_engine, spans = sent(Tracing(), (b"host", b"x"), TRACEPARENT, (b"tracestate", b"rojo=00f067aa0ba902b7"))

    assert spans["admission"].get_span_context().trace_id == TRACE_ID
    assert parent_id(spans["admission"]) == CLIENT_SPAN_ID
    assert parent_id(spans["engine"]) == span_id(spans["admission"])
    version, trace_id, parent, flags = value_of(to_engine, b"traceparent").decode().split("-")
    assert (version, trace_id) == ("00", f"{TRACE_ID:032x}")
    assert parent == f"{span_id(spans['engine']):016x}"
    assert int(flags, 16) & 1
    assert value_of(to_engine, b"tracestate") == b"rojo=00f067aa0ba902b7"


def test_a_trace_of_our_own_begins_where_the_client_sent_none():
    to_engine, spans = sent(Tracing())

    assert parent_id(spans["admission"]) is None
    assert f"{span_id(spans['engine']):016x}".encode() in value_of(to_engine, b"traceparent")
    assert value_of(to_engine, b"tracestate") is None


@pytest.mark.parametrize("broken", [b"", b"nonsense", b"00-" + b"0" * 32 + b"-b7ad6b7169203331-01", b"\xff\xfe"])
def test_a_broken_traceparent_begins_a_trace_and_its_tracestate_does_not_travel_with_it(broken):
    to_engine, spans = sent(Tracing(), (b"traceparent", broken), (b"tracestate", b"rojo=1"))

    assert parent_id(spans["admission"]) is None
    assert value_of(to_engine, b"tracestate") == b""


def test_the_clients_baggage_is_left_to_pass_as_it_came():
    to_engine, _ = sent(Tracing(), TRACEPARENT, (b"baggage", b"user=alice;secret, x = 1"))

    assert [name for name, _ in to_engine] == [b"traceparent"]


def test_before_admission_the_admission_span_is_what_would_be_passed_on():
    tracing = Tracing()
    observation = tracing.observer.received(received([TRACEPARENT]))

    before = observation.headers()
    observation.on_event(admitted())
    observation.on_event(settled(1000))

    admission = {span.name: span for span in tracing.exporter.get_finished_spans()}["admission"]
    assert f"{span_id(admission):016x}".encode() in value_of(before, b"traceparent")


@pytest.mark.parametrize("headers", [(), (TRACEPARENT,), ((b"traceparent", TRACEPARENT[1][:-1] + b"0"),)])
def test_a_request_that_is_sampled_out_passes_on_its_context_unsampled(headers):
    tracing = Tracing(ALWAYS_OFF)

    to_engine, spans = sent(tracing, *headers)

    _, trace_id, parent, flags = value_of(to_engine, b"traceparent").decode().split("-")
    assert int(flags, 16) & 1 == 0
    assert parent != f"{CLIENT_SPAN_ID:016x}"
    assert (trace_id == f"{TRACE_ID:032x}") == bool(headers)
    assert spans == {}


def test_the_clients_decision_to_sample_is_followed():
    _, spans = sent(Tracing(ParentBased(ALWAYS_OFF)), TRACEPARENT)

    assert set(spans) == {"admission", "engine"}


def test_in_a_server_that_is_traced_already_we_are_a_part_of_its_request():
    tracing = Tracing()
    server = tracing.provider.get_tracer("server").start_span("POST", kind=SpanKind.SERVER)
    token = context.attach(trace.set_span_in_context(server, baggage.set_baggage("user", "alice")))
    try:
        to_engine, spans = sent(tracing, TRACEPARENT)
    finally:
        context.detach(token)

    assert parent_id(spans["admission"]) == server.get_span_context().span_id
    assert spans["admission"].kind is SpanKind.INTERNAL
    assert value_of(to_engine, b"baggage") is None


class CapitalsPropagator:
    """A vendor's propagator, which spells its header with capitals as AWS X-Ray's does."""

    fields = frozenset({"X-Vendor-Trace"})

    def extract(self, carrier, context, getter):
        assert "x-vendor-trace" in getter.keys(carrier)
        trace_id, parent = (int(part, 16) for part in getter.get(carrier, "X-Vendor-Trace")[0].split(":"))
        remote = trace.SpanContext(trace_id, parent, is_remote=True, trace_flags=trace.TraceFlags(1))
        return trace.set_span_in_context(trace.NonRecordingSpan(remote), context)

    def inject(self, carrier, context, setter):
        mine = trace.get_current_span(context).get_span_context()
        setter.set(carrier, "X-Vendor-Trace", f"{mine.trace_id:x}:{mine.span_id:x}")


def test_the_configured_propagator_is_the_one_that_reads_and_writes(monkeypatch):
    monkeypatch.setattr("opentelemetry.propagate._HTTP_TEXT_FORMAT", CapitalsPropagator())

    to_engine, spans = sent(Tracing(), TRACEPARENT, (b"tracestate", b"a=1"), (b"x-vendor-trace", b"abc:def"))

    assert parent_id(spans["admission"]) == 0xDEF
    assert to_engine == [(b"x-vendor-trace", f"abc:{span_id(spans['engine']):x}".encode())]


def test_without_an_sdk_no_one_looks_at_the_request():
    assert EventDispatcher(RequestTracer(), ()).received(received([TRACEPARENT])) is None
    assert EventDispatcher(RequestTracer(trace.NoOpTracerProvider()), ()).received(received([TRACEPARENT])) is None


def test_an_sdk_that_is_switched_off_is_none(monkeypatch):
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")

    assert Tracing().observer.received(received([TRACEPARENT])) is None


def test_an_sdk_that_is_installed_later_is_found(monkeypatch):
    observer = EventDispatcher(RequestTracer(), ())
    assert observer.received(received()) is None
    tracing = Tracing()
    monkeypatch.setattr("opentelemetry.trace._TRACER_PROVIDER", tracing.provider)

    observation = observer.received(received())
    assert observation is not None
    observation.on_event(settled(1000))

    assert [span.name for span in tracing.exporter.get_finished_spans()] == ["admission"]


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", (TRACE_ID, CLIENT_SPAN_ID)),
        (b"01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-what-comes-later", (TRACE_ID, CLIENT_SPAN_ID)),
        (b"00-00000000000000000000000000000000-b7ad6b7169203331-01", None),
        (b"00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01", None),
        (b"ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", None),
        (b"00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01", None),
        (b"nonsense", None),
    ],
)
def test_without_tracing_a_request_is_known_by_the_trace_that_the_client_names(
    value: bytes, found: tuple[int, int] | None
) -> None:
    ids = client_trace(received([(b"accept", b"*/*"), (b"traceparent", value)]))
    assert (ids and (ids.trace_id, ids.span_id)) == found


def test_a_process_without_tracing_tells_its_listeners_of_the_clients_trace() -> None:
    reported: list[SpanContext | None] = []

    class Ear:
        def __init__(self) -> None:
            self.handlers = {Received: lambda record, _: reported.append(record.trace)}

    spans = RequestTracer(NoOpTracerProvider())
    EventDispatcher(spans, [Ear()]).received(received([TRACEPARENT]))
    assert reported == [SpanContext(TRACE_ID, CLIENT_SPAN_ID, is_remote=True)]


def test_a_propagator_that_is_not_installed_is_left_out_with_a_warning(monkeypatch, caplog):
    monkeypatch.setenv("OTEL_PROPAGATORS", "jaeger, tracecontext,nonsense")
    monkeypatch.delattr(opentelemetry, "propagate")  # imported anew here, and put back
    for module in ("opentelemetry.propagate", "sidecar.telemetry.spans.propagation"):
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(ValueError, match="jaeger not found"):  # no workaround is needed where this warns
        import_module("opentelemetry.propagate")

    usable = import_module("sidecar.telemetry.spans.propagation").propagate

    assert [type(part) for part in usable.get_global_textmap()._propagators] == [TraceContextTextMapPropagator]
    (said,) = caplog.messages
    assert said == "OTEL_PROPAGATORS: jaeger, nonsense is not installed, and is left out; in force: tracecontext"
    assert os.environ["OTEL_PROPAGATORS"] == "jaeger, tracecontext,nonsense"


def test_where_the_api_no_longer_has_the_name_that_is_looked_at_there_may_be_an_sdk(monkeypatch):
    monkeypatch.delattr(trace, "_TRACER_PROVIDER")
    assert not none_is_set()
