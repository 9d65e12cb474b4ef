"""Durations that we add up ourselves: exported as the SDK exports what it counted, to the last bucket and exemplar."""

import random
import sys
import threading
from itertools import pairwise
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.proto.metrics.v1.metrics_pb2 import Histogram
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics

from sidecar.events import Observed, Verdict
from sidecar.telemetry.dry_run import DryRunMetrics
from sidecar.telemetry.metrics import RequestMetrics
from sidecar.telemetry.metrics.histograms import (
    DURATIONS,
    HAS_CONTEXT,
    QUEUE_WAIT,
    WAITS,
    DurationHistogram,
    LabeledHistogram,
)
from sidecar.telemetry.metrics.prometheus import PrometheusReader
from sidecar.telemetry.metrics.store import StoreMetrics
from sidecar.telemetry.metrics.views import HAS_EXEMPLARS, views
from sidecar.telemetry.request_record import RequestRecord, TraceIds
from sidecar.telemetry.sdk_bypass.histograms import sums_of
from sidecar.telemetry.semconv import ADMISSION_REQUEST_ID
from sidecar.telemetry.setup import meter_provider_for
from tests.support.examples import examples
from tests.support.otlp import otlp_over_http
from tests.telemetry.span_stories import admitted, begin, classified, first_byte, received, refused
from tests.telemetry.test_setup import run_cold

pytestmark = pytest.mark.skipif(not (HAS_CONTEXT and HAS_EXEMPLARS), reason="this OpenTelemetry has no exemplars yet")

OPENMETRICS = "application/openmetrics-text;version=1.0.0"
LABELS = {"admission.pool": "default", "admission.tier": "batch"}


class Request(NamedTuple):
    """What happens to one request. `read` is whether the metrics are read after it."""

    tier: str
    code: str
    wait_us: int
    starvation_us: int
    round_trip_us: int
    id: str
    is_kept: bool
    read: bool


def waits():
    """Between, above and exactly at the ends of buckets."""
    return st.one_of(st.integers(0, 4_000_000_000), st.sampled_from([int(wait * 1e6) for wait in WAITS]))


REQUESTS = st.lists(
    st.builds(
        Request,
        st.sampled_from(["high", "batch"]),
        st.sampled_from(["", "queue_timeout", "client_left"]),
        waits(),
        waits(),
        st.integers(0, 5_000_000),
        st.sampled_from(["request-1", "x" * 70]),
        st.booleans(),
        st.booleans(),
    ),
    max_size=12,
)


def would_be_admitted(request):
    return Observed(1, "r", "g", Verdict.ADMITTED, None, request.tier, "acme", request.wait_us, request.starvation_us)


def would_be_refused(request):
    return msgspec.structs.replace(would_be_admitted(request), verdict=Verdict.REFUSED, code=request.code)


class Counting:
    """Listens to requests with a provider, the SDK's own way or ours."""

    def __init__(self, provider):
        self.provider = provider
        self.requests = RequestMetrics("default", meter_provider=provider)
        self.another_sidecar = RequestMetrics("default", meter_provider=provider)
        self.observed = DryRunMetrics(self.requests)
        self.store = StoreMetrics("default", provider)

    def play(self, number, request):
        about = msgspec.structs.replace(received(), request_id=request.id)
        sidecar = self.another_sidecar if number % 3 == 0 else self.requests
        tell = begin(sidecar, about, TraceIds(number + 1, number + 2, request.is_kept))
        tell(msgspec.structs.replace(classified(), tier=request.tier))
        waited = {"queue_wait_us": request.wait_us, "starvation_us": request.starvation_us}
        if request.code:
            tell(refused(request.code, 503, **waited))
        else:
            tell(admitted(request.wait_us, request.wait_us, request.starvation_us))
            tell(first_byte(request.wait_us + 7))
        self.observed.note(would_be_refused(request) if request.code else would_be_admitted(request))
        self.store.round_trip(request.round_trip_us / 1e6)


def scraped(reader):
    """Every sample with its exemplar, but for when that was."""
    text, _ = reader.text(OPENMETRICS)
    return {
        (sample.name, *sorted(sample.labels.items())): (
            pytest.approx(sample.value, rel=1e-12),
            None if sample.exemplar is None else (sample.exemplar.labels, sample.exemplar.value),
        )
        for family in openmetrics(text.decode())
        for sample in family.samples
    }


@pytest.mark.long
@given(REQUESTS)
@settings(max_examples=examples(2))
def test_a_scraper_cannot_tell_who_counted(requests):
    readers = ours, theirs = PrometheusReader(), PrometheusReader()
    countings = [
        Counting(meter_provider_for([ours], Resource.get_empty())),
        Counting(MeterProvider([theirs], Resource.get_empty(), shutdown_on_exit=False, views=views())),
    ]
    assert [sums_of(counting.provider) is None for counting in countings] == [False, True]

    for number, request in enumerate(requests):
        for counting in countings:
            counting.play(number, request)
        if request.read:
            first, second = map(scraped, readers)
            assert first == second
    first, second = map(scraped, readers)
    assert first == second
    assert ("admission_queue_wait_seconds_sum" in {name for name, *_ in first}) == any(
        not request.code or request.wait_us for request in requests
    )


def histograms(request):
    """Of one export: every point by its metric and its labels."""
    (resource,) = request.resource_metrics
    (scope,) = resource.scope_metrics
    assert scope.scope.name == "sidecar"
    assert len({metric.name for metric in scope.metrics}) == len(scope.metrics)
    found = {}
    for metric in scope.metrics:
        if metric.WhichOneof("data") == "histogram":
            assert metric.unit == "s"
            for point in metric.histogram.data_points:
                found[metric.name, metric.description, reported(point.attributes)] = (metric.histogram, point)
    return found


def reported(attributes):
    return tuple(sorted((each.key, each.value.string_value) for each in attributes))


def content(histogram: Histogram, point):
    """Of a point, all but its times."""
    return (
        histogram.aggregation_temporality,
        point.count,
        pytest.approx(point.sum, rel=1e-12),
        (point.min, point.max),
        list(point.bucket_counts),
        list(point.explicit_bounds),
        [
            (each.as_double, each.trace_id, each.span_id, reported(each.filtered_attributes), each.time_unix_nano > 0)
            for each in point.exemplars
        ],
    )


def exporting(provider_of, requests):
    """What a Collector is sent, export by export."""
    with otlp_over_http() as collector:
        counting = Counting(provider_of(OTLPMetricExporter(f"{collector.url}/v1/metrics")))
        for number, request in enumerate(requests):
            counting.play(number, request)
            if request.read:
                counting.provider.force_flush()
        counting.provider.shutdown()
    return [histograms(request) for request in collector.metrics]


def by_the_sdk(exporter):
    reader = PeriodicExportingMetricReader(exporter)
    return MeterProvider([reader], Resource.get_empty(), shutdown_on_exit=False, views=views())


def by_us(exporter):
    provider = meter_provider_for([exporter], Resource.get_empty())
    assert sums_of(provider) is not None
    return provider


@pytest.mark.parametrize("seed", range(3))
def test_a_collector_cannot_tell_who_counted(seed):
    chance = random.Random(seed)
    requests = [
        Request(
            chance.choice(["high", "batch"]),
            chance.choice(["", "", "queue_timeout", "canceled"]),
            chance.choice([int(10 ** chance.uniform(0, 9.7)), int(chance.choice(WAITS) * 1e6)]),
            chance.choice([0, int(10 ** chance.uniform(0, 9.7))]),
            int(10 ** chance.uniform(0, 6.6)),
            f"request-{number}",
            chance.random() < 0.3,
            number % 50 == 20,
        )
        for number in range(200)
    ]

    ours, theirs = exporting(by_us, requests), exporting(by_the_sdk, requests)

    assert len(ours) == len(theirs) == 5
    assert {name for name, *_ in ours[-1]} == {duration.name for duration in DURATIONS}
    for mine, others in zip(ours, theirs, strict=True):
        assert {key: content(*of) for key, of in mine.items()} == {key: content(*of) for key, of in others.items()}
    assert any(point.exemplars for export in ours for _, point in export.values())


def test_a_series_begins_once_and_is_read_later_every_time():
    exports = exporting(by_us, [Request("batch", "", wait_us, 0, 5, "a", False, True) for wait_us in (1, 2, 3)])

    for before, after in pairwise(exports):
        for key, (_, point) in before.items():
            _, next_point = after[key]
            assert 0 < point.start_time_unix_nano <= point.time_unix_nano < next_point.time_unix_nano
            assert point.start_time_unix_nano == next_point.start_time_unix_nano


def test_each_reader_gets_each_exemplar_once():
    reader = PrometheusReader()
    with otlp_over_http() as collector:
        provider = meter_provider_for([reader, OTLPMetricExporter(f"{collector.url}/v1/metrics")], Resource.get_empty())
        counting = Counting(provider)
        counting.play(1, Request("batch", "queue_timeout", 1_900_000, 0, 5, "a", True, False))
        provider.force_flush()
        provider.force_flush()
        counting.play(2, Request("batch", "queue_timeout", 1_900_000, 0, 5, "b", True, False))
        provider.shutdown()

    exemplars = [
        [
            reported(exemplar.filtered_attributes)
            for _, point in histograms(export).values()
            for exemplar in point.exemplars
        ]
        for export in collector.metrics
    ]
    assert exemplars == [[((ADMISSION_REQUEST_ID, "a"),)], [], [((ADMISSION_REQUEST_ID, "b"),)]]
    kept = [exemplar for _, exemplar in scraped(reader).values() if exemplar is not None]
    assert [labels["request_id"] for labels, _ in kept] == ["b"]


def test_a_reader_that_reads_while_two_threads_write_never_sees_half_a_measurement():
    reader = PrometheusReader()
    provider = meter_provider_for([reader], Resource.get_empty())
    provider.get_meter("sidecar").create_up_down_counter("something.that.the.sdk.tells").add(1)
    (sums, writes, seconds) = sums_of(provider), 30_000, 0.25
    switches_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def write(labeled: LabeledHistogram) -> None:
        for _ in range(writes):
            labeled.record(seconds)

    writers = [
        threading.Thread(target=write, args=[DurationHistogram(QUEUE_WAIT, provider).labeled(dict(LABELS))])
        for _ in range(2)
    ]
    try:
        for writer in writers:
            writer.start()
        while any(writer.is_alive() for writer in writers):
            for series in sums.of(QUEUE_WAIT.name) * 500:
                total = series.total()
                assert sum(total.counts) * seconds == total.sum_s
            found = {name: value for (name, *_), (value, _) in scraped(reader).items() if "queue_wait" in name}
            if found:
                count = found["admission_queue_wait_seconds_count"].expected
                assert found["admission_queue_wait_seconds_sum"].expected == count * seconds
    finally:
        sys.setswitchinterval(switches_s)
        for writer in writers:
            writer.join()
    ((series,), kept) = sums.of(QUEUE_WAIT.name), (None,) * (len(WAITS) + 1)
    total = series.total()
    assert (sum(total.counts), total.sum_s, total.exemplars) == (2 * writes, 2 * writes * seconds, kept)


def test_what_reaches_the_sdk_while_a_provider_of_ours_is_installed_is_not_reported_beside_our_sum():
    reader = PrometheusReader()
    counting = Counting(meter_provider_for([reader], Resource.get_empty()))
    counting.play(1, Request("batch", "", 1_900_000, 0, 5, "a", False, False))

    counting.requests.instruments.queue_wait.record(1.9, LABELS, None)

    (count,) = [
        value for (name, *_), (value, _) in scraped(reader).items() if name == "admission_queue_wait_seconds_count"
    ]
    assert count == 1


@pytest.mark.parametrize("is_kept", [True, False])
def test_only_a_trace_that_is_kept_makes_an_exemplar(is_kept):
    provider = meter_provider_for([PrometheusReader()], Resource.get_empty())
    request = RequestRecord.of(received(), TraceIds(7, 8, is_kept))

    DurationHistogram(QUEUE_WAIT, provider).labeled(LABELS).record(0, request)

    (series,) = sums_of(provider).of(QUEUE_WAIT.name)
    assert [kept.trace.trace_id for kept in series.total().exemplars if kept is not None] == [7] * is_kept


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_what_is_no_duration_is_left_to_the_sdk_which_says_so(caplog, seconds):
    provider = meter_provider_for([PrometheusReader()], Resource.get_empty())

    DurationHistogram(QUEUE_WAIT, provider).labeled(LABELS).record(seconds)

    assert [series.total().sum_s for series in sums_of(provider).of(QUEUE_WAIT.name)] == [0]
    assert "Record amount" in caplog.text


@pytest.mark.parametrize(
    "variables",
    [
        {"OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE": "delta"},
        {"OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE": "lowmemory"},
        {"OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION": "base2_exponential_bucket_histogram"},
        {"OTEL_METRICS_EXEMPLAR_FILTER": "always_off"},
    ],
)
def test_where_we_do_not_add_up_what_is_wanted_the_sdk_counts(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    reader = PrometheusReader()
    with otlp_over_http() as collector:
        exporter = OTLPMetricExporter(f"{collector.url}/v1/metrics")
        provider = meter_provider_for([reader, exporter], Resource.get_empty())
        assert sums_of(provider) is None
        counting = Counting(provider)
        counting.play(1, Request("batch", "", 1_900_000, 0, 5, "a", True, False))
        provider.force_flush()
        counting.play(2, Request("batch", "", 1_900_000, 0, 5, "a", True, False))
        provider.shutdown()

    counts = []
    for export in collector.metrics:
        (metric,) = [
            each for each in export.resource_metrics[0].scope_metrics[0].metrics if each.name == QUEUE_WAIT.name
        ]
        (point,) = getattr(metric, metric.WhichOneof("data")).data_points
        counts.append(point.count)
    is_delta = "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE" in variables
    assert counts == ([1, 1] if is_delta else [1, 2])
    (count,) = [
        value for (name, *_), (value, _) in scraped(reader).items() if name == "admission_queue_wait_seconds_count"
    ]
    assert count == 2


@pytest.mark.parametrize("exporter", [ConsoleMetricExporter, OTLPMetricExporter])
def test_the_exporters_that_can_be_asked_for_take_our_sums(exporter):
    assert sums_of(by_us(exporter())) is not None


MADE_BEFORE = """
from tests.telemetry.span_stories import begin, admitted, classified, received
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from sidecar.telemetry.setup import configure_from_environment
from sidecar.telemetry.metrics import RequestMetrics
from sidecar.telemetry.sdk_bypass.histograms import sums_of
from sidecar.telemetry.metrics.prometheus import PrometheusReader
from sidecar.telemetry.metrics.views import views
from sidecar.telemetry.setup import MetricsEndpoint

made_before, scrape, reader = RequestMetrics("default"), MetricsEndpoint(), PrometheusReader()

def one_request():
    tell = begin(made_before, received(), None)
    tell(classified())
    tell(admitted())

one_request()  # no one counts durations yet
"""
OURS = """
configure_from_environment(scrape=scrape)
"""
THE_HOSTS = """
metrics.set_meter_provider(MeterProvider([reader], shutdown_on_exit=False, views=views()))
configure_from_environment(scrape=scrape)
scrape.open(reader)
"""
THEN = """
one_request()
one_request()
(line,) = [line for line in scrape.text(None)[0].decode().splitlines() if "queue_wait_seconds_count" in line]
print("added up" if sums_of(None) is not None else "left to the SDK", line.split()[-1])
"""


@pytest.mark.parametrize(("install", "who"), [(OURS, "added up"), (THE_HOSTS, "left to the SDK")])
def test_an_instrument_that_was_made_before_the_provider_counts_each_duration_once(install, who):
    assert run_cold(MADE_BEFORE, install, THEN).stdout.splitlines() == [f"{who} 2.0"]


def test_a_variable_has_the_sdk_count(monkeypatch):
    monkeypatch.setenv("SIDECAR_SDK_BYPASS", "off")
    reader = PrometheusReader()
    provider = meter_provider_for([reader], Resource.get_empty())
    assert sums_of(provider) is None

    Counting(provider).play(1, Request("batch", "", 1_900_000, 0, 5, "a", True, False))

    (count,) = [
        value for (name, *_), (value, _) in scraped(reader).items() if name == "admission_queue_wait_seconds_count"
    ]
    assert count == 1
