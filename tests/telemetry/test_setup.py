import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider

from sidecar.telemetry.setup import MetricsEndpoint, MetricsUnavailable, TelemetryError, configure_from_environment
from tests.support.otlp import otlp_over_grpc
from tests.telemetry.span_stories import Tracing

INSTALL = """
from tests.telemetry.span_stories import begin, admitted, classified, first_byte, received, settled
from sidecar.events import StoreChanged, StoreState
from sidecar.telemetry.dispatch import EventDispatcher
from sidecar.telemetry.metrics.instruments import StoreMetrics
from sidecar.telemetry.setup import configure_from_environment
from sidecar.telemetry.spans.tracer import RequestTracer

observer = EventDispatcher(RequestTracer(), ())
assert observer.received(received()) is None
shutdown = configure_from_environment()
"""
ONE_REQUEST = """
observation = observer.received(received())
for event in (classified(), admitted(), first_byte(500), settled(1000)):
    observation.on_event(event)
"""
ONE_CHANGE = """
store = StoreMetrics("default")
store(StoreChanged(1, StoreState.SHARED, "reached"))
"""
NO_SDK = """
import sys
from sidecar.telemetry.dispatch import EventDispatcher
from sidecar.telemetry.metrics.instruments import StoreMetrics
from sidecar.telemetry.setup import configure_from_environment
from sidecar.telemetry.spans.tracer import RequestTracer

observer, store = EventDispatcher(RequestTracer(), ()), StoreMetrics("default")
configure_from_environment()()
assert "opentelemetry.trace" in sys.modules
assert not [name for name in sys.modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))]
"""


WARM = """
import json, os, sys
import opentelemetry.sdk.metrics.export, opentelemetry.sdk.trace.export
import opentelemetry.exporter.otlp.proto.http.metric_exporter, opentelemetry.exporter.otlp.proto.http.trace_exporter
import prometheus_client, tests.telemetry.span_stories, sidecar.telemetry.setup

for line in sys.stdin:
    code, variables, output, errors = json.loads(line)
    if not (child := os.fork()):
        os.environ.clear()
        os.environ.update(variables)
        for path, number in ((output, 1), (errors, 2)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
        exec(compile(code, "<script>", "exec"), {"__name__": "__main__"})
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def warm():
    """A process that has imported everything, and is forked for each script: an import takes most of its time."""
    command = [sys.executable, "-c", WARM]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment_of({}), stdin=pipe, stdout=pipe, text=True) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def run(warm, tmp_path):
    """Runs the scripts above in a process of their own, as a global provider can be set only once in each."""

    def ran(*parts, **variables):
        files = [tmp_path / name for name in ("output", "errors")]
        warm.stdin.write(json.dumps(["".join(parts), environment_of(variables), *map(str, files)]) + "\n")
        warm.stdin.flush()
        code = int(warm.stdout.readline())
        done = subprocess.CompletedProcess(parts, code, *(file.read_text() for file in files))
        assert done.returncode == 0, done.stderr
        return done

    return ran


def environment_of(variables):
    here = Path(__file__).parent
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), str(here.parent.parent)]), **variables}


def run_cold(*parts, **variables):
    """The same, with nothing imported before."""
    command = [sys.executable, "-c", "".join(parts)]
    done = subprocess.run(
        command, env=environment_of(variables), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


def run_one_request(run, **variables):
    return run(INSTALL, ONE_REQUEST, "shutdown()", **variables)


def run_one_change(run, **variables):
    return run(INSTALL, ONE_CHANGE, "shutdown()", **variables)


def exported(exports):
    ((path, request),) = exports
    assert path == "/v1/traces"
    (resource_spans,) = request.resource_spans
    (scope_spans,) = resource_spans.scope_spans
    assert scope_spans.scope.name == "sidecar"
    resource = {item.key: item.value.string_value for item in resource_spans.resource.attributes}
    return resource, {span.name: span for span in scope_spans.spans}


def test_a_collector_receives_the_spans(run, collector):
    url, exports = collector

    run_one_request(run, OTEL_EXPORTER_OTLP_ENDPOINT=url)

    resource, spans = exported(exports)
    assert resource["service.name"] == "admission-sidecar"
    assert set(spans) == {"admission", "engine"}
    assert spans["engine"].parent_span_id == spans["admission"].span_id
    assert spans["admission"].end_time_unix_nano - spans["admission"].start_time_unix_nano == 1_000_000


def test_the_environments_service_name_and_resource_win(run, collector):
    url, exports = collector

    run_one_request(
        run,
        OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=f"{url}/v1/traces",
        OTEL_RESOURCE_ATTRIBUTES="service.name=front-door,deployment.environment.name=lab",
    )

    resource, _ = exported(exports)
    assert resource["service.name"] == "front-door"
    assert resource["deployment.environment.name"] == "lab"


def measured(exports):
    """What the last export of metrics says: the resource, and the points of each metric by its name."""
    path, request = exports[-1]
    assert path == "/v1/metrics"
    (resource_metrics,) = request.resource_metrics
    (scope_metrics,) = resource_metrics.scope_metrics
    assert scope_metrics.scope.name == "sidecar"
    resource = {item.key: item.value.string_value for item in resource_metrics.resource.attributes}
    return resource, {metric.name: points(metric) for metric in scope_metrics.metrics}


def points(metric):
    data = getattr(metric, metric.WhichOneof("data"))
    return [
        ({item.key: item.value.string_value for item in point.attributes}, point.as_int) for point in data.data_points
    ]


@pytest.mark.parametrize(
    ("variable", "path"), [("OTEL_EXPORTER_OTLP_ENDPOINT", ""), ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "/v1/metrics")]
)
def test_a_collector_receives_the_metrics(run, collector, variable, path):
    url, exports = collector

    run_one_change(run, **{variable: url + path})

    resource, by_name = measured(exports)
    assert resource["service.name"] == "admission-sidecar"
    labels = {"admission.pool": "default", "admission.store.state": "shared"}
    assert by_name == {"admission.store.changes": [(labels, 1)]}


def test_metrics_are_sent_as_often_as_the_environment_says(run, collector, tmp_path):
    url, exports = collector

    enough = tmp_path / "enough"

    def say_when_enough():
        while len(exports) <= 2:
            time.sleep(0.01)
        enough.touch()

    threading.Thread(target=say_when_enough, daemon=True).start()
    wait = f"import os, time\nwhile not os.path.exists({str(enough)!r}):\n    time.sleep(0.01)\nshutdown()"
    run(INSTALL, ONE_CHANGE, wait, OTEL_EXPORTER_OTLP_ENDPOINT=url, OTEL_METRIC_EXPORT_INTERVAL="50")


@pytest.mark.parametrize(
    ("off", "paths"),
    [("METRICS", ["/v1/traces"]), ("TRACES", ["/v1/metrics"]), ("LOGS", ["/v1/metrics", "/v1/traces"])],
)
def test_an_endpoint_for_all_is_for_both_and_either_can_be_switched_off(run, collector, off, paths):
    url, exports = collector
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": url, f"OTEL_{off}_EXPORTER": "none"}

    run(INSTALL, "" if off == "TRACES" else ONE_REQUEST, ONE_CHANGE, "shutdown()", **variables)

    assert sorted(path for path, _ in exports) == paths


def test_a_collector_that_is_silent_delays_the_end_once_and_not_for_each_signal(run):
    timed = "import time; began = time.monotonic(); shutdown(); print(time.monotonic() - began)"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_EXPORTER_OTLP_TIMEOUT": "2"}

        done = run(INSTALL, ONE_REQUEST, ONE_CHANGE, timed, **variables)

    assert 1.9 < float(done.stdout) < 3.9


def test_an_end_that_fails_is_logged_and_keeps_no_other_from_ending(run):
    broken = """
from opentelemetry import trace
def refuse():
    raise OSError("no end today")
trace.get_tracer_provider()._active_span_processor.shutdown = refuse
shutdown()
"""
    done = run(INSTALL, ONE_CHANGE, broken, OTEL_TRACES_EXPORTER="console", OTEL_METRICS_EXPORTER="console")

    assert "no end today" in done.stderr
    assert '"name": "admission.store.changes"' in done.stdout


@pytest.mark.parametrize("variables", [{}, {"OTEL_SDK_DISABLED": "true", "OTEL_METRICS_EXPORTER": "console"}])
def test_the_sdk_is_not_imported_where_nothing_was_asked_for(variables):
    run_cold(NO_SDK, **variables)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {
            "OTEL_TRACES_EXPORTER": "none",
            "OTEL_METRICS_EXPORTER": "none",
            "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1",
        },
        {"OTEL_SDK_DISABLED": "TRUE", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"},
    ],
)
def test_nothing_is_installed_where_nothing_was_asked_for(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    tracer_provider, meter_provider = trace.get_tracer_provider(), metrics.get_meter_provider()
    assert isinstance(tracer_provider, trace.ProxyTracerProvider)

    shutdown = configure_from_environment()

    assert trace.get_tracer_provider() is tracer_provider
    assert metrics.get_meter_provider() is meter_provider
    shutdown()


def test_a_provider_that_is_there_already_is_left_alone(monkeypatch):
    mine = Tracing().provider
    monkeypatch.setattr("opentelemetry.trace._TRACER_PROVIDER", mine)
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")

    configure_from_environment()()

    assert trace.get_tracer_provider() is mine


@pytest.mark.parametrize("mine", [MeterProvider(shutdown_on_exit=False), metrics.NoOpMeterProvider()])
def test_a_meter_provider_that_is_there_already_is_left_alone(monkeypatch, caplog, mine):
    monkeypatch.setattr("opentelemetry.metrics._internal._METER_PROVIDER", mine)
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "console")

    configure_from_environment()()

    assert metrics.get_meter_provider() is mine
    assert caplog.records == []


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"OTEL_TRACES_EXPORTER": "zipkin"},
            'OTEL_TRACES_EXPORTER: "zipkin" is not supported; write otlp, console or none',
        ),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "thrift"},
            'OTEL_EXPORTER_OTLP_PROTOCOL: "thrift" is not supported; write http/protobuf (a Collector listens for it '
            "on port 4318) or grpc (on port 4317)",
        ),
        (
            {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json"},
            'OTEL_EXPORTER_OTLP_TRACES_PROTOCOL: "http/json" is not supported',
        ),
        (
            {"OTEL_TRACES_EXPORTER": "prometheus"},
            'OTEL_TRACES_EXPORTER: "prometheus" is not supported; write otlp, console or none',
        ),
        (
            {"OTEL_METRICS_EXPORTER": "prometheus"},
            'OTEL_METRICS_EXPORTER: "prometheus" is what the admin port serves at /metrics, and there is none; set '
            "SIDECAR_ADMIN_PORT, or write otlp, console or none",
        ),
        (
            {"OTEL_METRICS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "http/json"},
            'OTEL_EXPORTER_OTLP_METRICS_PROTOCOL: "http/json" is not supported; write http/protobuf',
        ),
        (
            {"OTEL_TRACES_EXPORTER": "console", "OTEL_METRICS_EXPORTER": "statsd"},
            'OTEL_METRICS_EXPORTER: "statsd" is not supported; write prometheus, otlp, console or none',
        ),
    ],
)
def test_what_cannot_be_had_is_said_with_its_variable(monkeypatch, variables, message):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(TelemetryError) as raised:
        configure_from_environment()

    assert str(raised.value).startswith(message)
    assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


EXPORTERS = "opentelemetry.exporter.otlp.proto"


@pytest.mark.parametrize(("protocol", "extra"), [("http/protobuf", "otlp"), ("grpc", "otlp-grpc")])
@pytest.mark.parametrize(("signal", "module"), [("traces", "trace_exporter"), ("metrics", "metric_exporter")])
def test_a_missing_extra_is_named_with_the_command_that_installs_it(monkeypatch, signal, module, protocol, extra):
    monkeypatch.setenv(f"OTEL_{signal.upper()}_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setitem(sys.modules, f"{EXPORTERS}.{protocol.partition('/')[0]}.{module}", None)

    with pytest.raises(TelemetryError, match=rf"exporting {signal} .* pip install '\./admission-sidecar\[{extra}\]'"):
        configure_from_environment()


SCRAPED = """
from sidecar.telemetry.metrics import RequestMetrics
from sidecar.telemetry.setup import MetricsEndpoint, MetricsUnavailable

scrape = MetricsEndpoint()
shutdown = configure_from_environment(scrape=scrape)
tell = begin(RequestMetrics("default"), received(), None)
tell(classified())
tell(admitted())
try:
    text, _ = scrape.text("application/openmetrics-text; version=1.0.0")
    print(text.decode())
except MetricsUnavailable as reason:
    print(f"not scraped: {reason}")
"""
IMPORTS = """
from tests.telemetry.span_stories import begin, admitted, classified, received
from sidecar.telemetry.setup import configure_from_environment
"""
ADMITTED = 'admission_admitted_total{admission_pool="default",admission_tier="batch"} 1.0'


@pytest.mark.parametrize(
    "variables", [{}, {"OTEL_METRICS_EXPORTER": "prometheus"}, {"OTEL_METRICS_EXPORTER": "none, prometheus"}]
)
def test_where_there_is_a_page_for_metrics_they_are_scraped_unless_others_are_listed(run, variables):
    assert ADMITTED in run(IMPORTS, SCRAPED, "shutdown()", **variables).stdout


def test_a_named_endpoint_is_sent_the_metrics_that_are_scraped(run, collector):
    url, exports = collector

    done = run(IMPORTS, SCRAPED, "shutdown()", OTEL_EXPORTER_OTLP_METRICS_ENDPOINT=f"{url}/v1/metrics")

    assert ADMITTED in done.stdout
    ((_, request),) = exports
    (scope_metrics,) = request.resource_metrics[0].scope_metrics
    (counter,) = [metric for metric in scope_metrics.metrics if metric.name == "admission.admitted"]
    assert points(counter) == [({"admission.pool": "default", "admission.tier": "batch"}, 1)]


@pytest.mark.parametrize(
    ("before", "variables", "reason"),
    [
        ("", {"OTEL_METRICS_EXPORTER": "none"}, "OTEL_METRICS_EXPORTER is none; with prometheus in it"),
        ("", {"OTEL_METRICS_EXPORTER": "console"}, "OTEL_METRICS_EXPORTER is console; with prometheus in it"),
        ("", {"OTEL_SDK_DISABLED": "true"}, "OTEL_SDK_DISABLED is true"),
        (
            "from opentelemetry import metrics; metrics.set_meter_provider(metrics.NoOpMeterProvider())",
            {"OTEL_METRICS_EXPORTER": "prometheus"},
            "this process had set up OpenTelemetry's metrics before",
        ),
    ],
)
def test_why_there_is_nothing_to_scrape_is_said(run, before, variables, reason):
    done = run(IMPORTS, before, SCRAPED, "shutdown()", **variables)

    assert f"not scraped: {reason}" in done.stdout
    assert done.stderr == ""


def test_before_the_metrics_are_set_up_a_scraper_is_asked_to_come_back():
    with pytest.raises(MetricsUnavailable, match="not set up yet"):
        MetricsEndpoint().text(None)


def test_what_was_not_asked_for_is_not_loaded():
    """Neither the SDK for metrics that can be scraped, nor the client of a store that there is not."""
    mounted = """
from sidecar import AdmissionMiddleware
from sidecar.policy.compiler import shipped_policies

async def app(scope, receive, send): ...

AdmissionMiddleware(app, shipped_policies())
"""
    check = """
import sys
loaded = [name for name in sys.modules if name.startswith(("opentelemetry.sdk", "prometheus_client", "redis"))]
assert not loaded, loaded
"""
    run_cold(mounted, check)


@pytest.mark.parametrize(
    "protocols", [{"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, {"OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "grpc"}]
)
def test_a_collector_receives_the_metrics_over_grpc(run, protocols):
    with otlp_over_grpc() as receiver:
        run(INSTALL, ONE_CHANGE, "shutdown()", OTEL_EXPORTER_OTLP_METRICS_ENDPOINT=receiver.url, **protocols)

    (request,) = receiver.metrics
    names = {metric.name for of_scope in request.resource_metrics[0].scope_metrics for metric in of_scope.metrics}
    assert names == {"admission.store.changes"}
