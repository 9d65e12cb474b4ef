"""The stand-in for a Collector's file exporter: the JSON of OTLP, and a backend that gets everything as it came."""

from __future__ import annotations

import json

from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import Link, SpanKind

from benchmarks.otlp_file import otlp_file
from tests.support.otlp import otlp_over_http


def test_a_line_has_one_export_of_a_trace_with_ids_in_hex_and_the_backend_has_it_too() -> None:
    provider = TracerProvider(resource=Resource({"service.name": "app"}), shutdown_on_exit=False)
    tracer = provider.get_tracer("client")
    with otlp_over_http() as backend, otlp_file(backend.url) as kept:
        exporter = OTLPSpanExporter(f"{kept.url}/v1/traces", compression=Compression.Gzip)
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        with tracer.start_as_current_span("another") as another:
            linked = another.get_span_context()
        with tracer.start_as_current_span("asked", kind=SpanKind.CLIENT, links=[Link(linked)]) as span:
            span.set_attribute("tokens", 7)
        provider.shutdown()

        asked = span.get_span_context()
        [line] = kept.lines_of(f"{asked.trace_id:032x}")
        names = [sent.name for sent in backend.spans]

    [resource] = json.loads(line)["resourceSpans"]
    [scope] = resource["scopeSpans"]
    [written] = scope["spans"]
    assert resource["resource"]["attributes"] == [{"key": "service.name", "value": {"stringValue": "app"}}]
    assert (written["traceId"], written["spanId"]) == (f"{asked.trace_id:032x}", f"{asked.span_id:016x}")
    assert written["links"][0]["traceId"] == f"{linked.trace_id:032x}"
    assert (written["kind"], written["startTimeUnixNano"]) == (3, str(span.start_time))  # type: ignore[attr-defined]
    assert written["attributes"] == [{"key": "tokens", "value": {"intValue": "7"}}]
    assert kept.spans == 2
    assert names == ["another", "asked"]
