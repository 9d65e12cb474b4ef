"""A process without telemetry variables, and a real OTLP/HTTP receiver."""

import os
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

REQUESTS = {"/v1/traces": ExportTraceServiceRequest, "/v1/metrics": ExportMetricsServiceRequest}


@pytest.fixture(autouse=True)
def no_otel_variables(monkeypatch, no_providers):
    for name in os.environ:
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)


@pytest.fixture
def collector():
    """(its URL, the path and the request of everything that it was sent)."""
    exports = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            exports.append((self.path, REQUESTS[self.path].FromString(body)))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *arguments):
            pass

    server = HTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", exports
    server.shutdown()
    thread.join()
    server.server_close()
