import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from span_stories import Tracing

from sidecar.telemetry import TelemetryError, configure_from_environment

ONE_REQUEST = """
from span_stories import admitted, classified, first_byte, received, settled
from sidecar.telemetry import SpanObserver, configure_from_environment

observer = SpanObserver()
assert observer.received(received()) is None
shutdown = configure_from_environment()
observation = observer.received(received())
for event in (classified(), admitted(), first_byte(500), settled(1000)):
    observation.on_event(event)
shutdown()
"""


@pytest.fixture(autouse=True)
def no_otel_variables(monkeypatch):
    for name in os.environ:
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)


@pytest.fixture
def collector():
    """A real OTLP/HTTP receiver: (its URL, what it was sent)."""
    exports = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            exports.append((self.path, ExportTraceServiceRequest.FromString(body)))
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


def run_one_request(**variables):
    """The script above in a process of its own, as the global provider can be set only once in each."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent.parent)])
    done = subprocess.run(
        [sys.executable, "-c", ONE_REQUEST],
        env={**os.environ, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def exported(exports):
    ((path, request),) = exports
    assert path == "/v1/traces"
    (resource_spans,) = request.resource_spans
    (scope_spans,) = resource_spans.scope_spans
    assert scope_spans.scope.name == "sidecar"
    resource = {item.key: item.value.string_value for item in resource_spans.resource.attributes}
    return resource, {span.name: span for span in scope_spans.spans}


def test_a_collector_receives_the_spans(collector):
    url, exports = collector

    run_one_request(OTEL_EXPORTER_OTLP_ENDPOINT=url)

    resource, spans = exported(exports)
    assert resource["service.name"] == "admission-sidecar"
    assert set(spans) == {"admission", "engine"}
    assert spans["engine"].parent_span_id == spans["admission"].span_id
    assert spans["admission"].end_time_unix_nano - spans["admission"].start_time_unix_nano == 1_000_000


def test_the_environments_service_name_and_resource_win(collector):
    url, exports = collector

    run_one_request(
        OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=f"{url}/v1/traces",
        OTEL_RESOURCE_ATTRIBUTES="service.name=front-door,deployment.environment.name=lab",
    )

    resource, _ = exported(exports)
    assert resource["service.name"] == "front-door"
    assert resource["deployment.environment.name"] == "lab"


def test_console_prints_the_spans():
    assert '"name": "admission"' in run_one_request(OTEL_TRACES_EXPORTER="console").stdout


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"},
        {"OTEL_SDK_DISABLED": "TRUE", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"},
    ],
)
def test_nothing_is_installed_where_nothing_was_asked_for(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    shutdown = configure_from_environment()

    assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
    shutdown()


def test_a_provider_that_is_there_already_is_left_alone(monkeypatch):
    mine = Tracing().provider
    monkeypatch.setattr("opentelemetry.trace._TRACER_PROVIDER", mine)
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")

    configure_from_environment()()

    assert trace.get_tracer_provider() is mine


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"OTEL_TRACES_EXPORTER": "zipkin"},
            'OTEL_TRACES_EXPORTER: "zipkin" is not supported; write otlp, console or none',
        ),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            'OTEL_EXPORTER_OTLP_PROTOCOL: "grpc" is not supported; write http/protobuf',
        ),
        (
            {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json"},
            'OTEL_EXPORTER_OTLP_TRACES_PROTOCOL: "http/json" is not supported',
        ),
    ],
)
def test_what_cannot_be_had_is_said_with_its_variable(monkeypatch, variables, message):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(TelemetryError) as raised:
        configure_from_environment()

    assert str(raised.value).startswith(message)


def test_a_missing_extra_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)

    with pytest.raises(TelemetryError, match=r"pip install 'admission-sidecar\[otlp\]'"):
        configure_from_environment()
