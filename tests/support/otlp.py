"""A small OTLP receiver, over HTTP and over gRPC: what a Collector would have been sent, decoded."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1 import trace_pb2

WITHIN_S = 10.0


@dataclass(frozen=True)
class Link:
    """Where a span points to; ids in hex."""

    trace_id: str
    span_id: str
    attributes: Mapping[str, Any]


@dataclass(frozen=True)
class Span:
    """A span as it was sent. Ids are hex, `parent_id` is empty for a root; times are Unix nanoseconds.

    `kind` and `status` are the protocol's names without their prefix: SERVER, ERROR. `events` are (name, time).
    """

    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Any]
    events: tuple[tuple[str, int], ...]
    links: tuple[Link, ...]
    status: str
    description: str
    flags: int
    scope: str
    resource: Mapping[str, Any]

    @property
    def length_s(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


@dataclass
class Received:
    """Everything that was sent so far. `url` is what goes into OTEL_EXPORTER_OTLP_ENDPOINT."""

    url: str = ""
    spans: list[Span] = field(default_factory=list)
    metrics: list[ExportMetricsServiceRequest] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)

    def of(self, trace_id: str) -> dict[str, Span]:
        """The spans of a trace by name; fails where two have one name."""
        found = [span for span in self.spans if span.trace_id == trace_id]
        by_name = {span.name: span for span in found}
        assert len(by_name) == len(found), [span.name for span in found]
        return by_name

    def until(self, is_enough: Callable[[Received], bool]) -> None:
        """Waits for more; fails after `WITHIN_S`."""
        end_s = time.monotonic() + WITHIN_S
        while not is_enough(self):
            assert time.monotonic() < end_s, [(span.trace_id, span.name) for span in self.spans]
            time.sleep(0.01)

    def _traces(self, request: ExportTraceServiceRequest) -> None:
        for of_resource in request.resource_spans:
            resource = _attributes(of_resource.resource.attributes)
            for of_scope in of_resource.scope_spans:
                self.spans += [_span(span, of_scope.scope.name, resource) for span in of_scope.spans]

    def _metrics(self, request: ExportMetricsServiceRequest) -> None:
        self.metrics.append(request)


@contextmanager
def otlp_over_http() -> Iterator[Received]:
    """Listens as a Collector does on port 4318: `http/protobuf`."""
    received = Received()

    class Receiver(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers["content-encoding"] == "gzip":
                body = gzip.decompress(body)
            assert self.headers["content-type"] == "application/x-protobuf"
            received.headers.append({name.lower(): value for name, value in self.headers.items()})
            if self.path == "/v1/traces":
                received._traces(ExportTraceServiceRequest.FromString(body))
            elif self.path == "/v1/metrics":
                received._metrics(ExportMetricsServiceRequest.FromString(body))
            self.send_response(200 if self.path in {"/v1/traces", "/v1/metrics"} else 404)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        received.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield received
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def otlp_over_grpc() -> Iterator[Received]:
    """Listens as a Collector does on port 4317: `grpc`."""
    import grpc
    from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc

    received = Received()

    class Traces(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: ExportTraceServiceRequest, context: Any) -> ExportTraceServiceResponse:  # noqa: N802
            received.headers.append(dict(context.invocation_metadata()))
            received._traces(request)
            return ExportTraceServiceResponse()

    class Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
        def Export(self, request: ExportMetricsServiceRequest, context: Any) -> ExportMetricsServiceResponse:  # noqa: N802
            received._metrics(request)
            return ExportMetricsServiceResponse()

    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Traces(), server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(Metrics(), server)
    received.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield received
    finally:
        server.stop(None).wait()


def _span(span: trace_pb2.Span, scope: str, resource: Mapping[str, Any]) -> Span:
    return Span(
        name=span.name,
        kind=trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        events=tuple((event.name, event.time_unix_nano) for event in span.events),
        links=tuple(Link(link.trace_id.hex(), link.span_id.hex(), _attributes(link.attributes)) for link in span.links),
        status=trace_pb2.Status.StatusCode.Name(span.status.code).removeprefix("STATUS_CODE_"),
        description=span.status.message,
        flags=span.flags,
        scope=scope,
        resource=resource,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in pairs:
        assert pair.key not in found, pair.key
        found[pair.key] = _value(pair.value)
    return found


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    return [_value(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)
