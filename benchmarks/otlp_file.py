"""A stand-in for a Collector with a file exporter: it takes spans over OTLP/HTTP, keeps them as JSON and sends them on.

The Collector itself is on no package registry. A line of its file is one export, in the JSON of the OTLP specification
(https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding): protobuf's own, but with ids in hex.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

TRACES = "/v1/traces"
IDS = ("traceId", "spanId", "parentSpanId")


class OtlpFile:
    """What was exported so far. `url` is what goes into OTEL_EXPORTER_OTLP_ENDPOINT."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._exports: list[TracesData] = []

    def add(self, body: bytes) -> None:
        """Keeps one export; its message has the fields of `TracesData`."""
        self._exports.append(TracesData.FromString(body))

    @property
    def spans(self) -> int:
        """How many spans were exported."""
        scopes = (of_scope for export in self._exports for one in export.resource_spans for of_scope in one.scope_spans)
        return sum(len(of_scope.spans) for of_scope in scopes)

    def lines_of(self, trace_id: str) -> Sequence[str]:
        """The lines with a trace's spans, without the spans of others."""
        found = [_only(export, bytes.fromhex(trace_id)) for export in self._exports]
        return [json.dumps(_as_json(export)) for export in found if export.resource_spans]


@contextlib.contextmanager
def otlp_file(backend: str) -> Iterator[OtlpFile]:
    """Listens on loopback, and passes every export on to the backend's address as it came."""

    class Receiver(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            kept.add(gzip.decompress(body) if self.headers["content-encoding"] == "gzip" else body)
            passed_on = {name: value for name, value in self.headers.items() if name.lower().startswith("content-")}
            with urllib.request.urlopen(
                urllib.request.Request(backend + TRACES, body, passed_on), timeout=30
            ) as answer:
                self.send_response(answer.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        kept = OtlpFile(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield kept
        finally:
            server.shutdown()
            thread.join()


def _only(export: TracesData, trace_id: bytes) -> TracesData:
    found = TracesData()
    for of_resource in export.resource_spans:
        for of_scope in of_resource.scope_spans:
            spans = [span for span in of_scope.spans if span.trace_id == trace_id]
            if spans:
                kept = found.resource_spans.add(resource=of_resource.resource)
                kept.scope_spans.add(scope=of_scope.scope, spans=spans)
    return found


def _as_json(export: TracesData) -> Any:
    return _with_hex_ids(MessageToDict(export, use_integers_for_enums=True))


def _with_hex_ids(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_hex_ids(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {name: base64.b64decode(one).hex() if name in IDS else _with_hex_ids(one) for name, one in value.items()}
