"""The Prometheus text: from the SDK's own figures, readable by Prometheus' own parser, with exemplars."""

import logging
import re
import subprocess

import msgspec
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.trace import SpanContext
from prometheus_client import REGISTRY
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plain

from sidecar.cluster.document import OldestWaiter, PoolFigures, Promised, TierShare, TierWaits
from sidecar.cluster.sampler import KINDS
from sidecar.engines.view import Amount
from sidecar.telemetry.metrics import PoolMetrics, RequestMetrics
from sidecar.telemetry.metrics.prometheus import MOST_EXEMPLAR_CHARACTERS, PrometheusReader
from sidecar.telemetry.metrics.views import views
from tests.support.prometheus import program
from tests.telemetry.span_stories import (
    SAMPLED,
    admitted,
    begin,
    classified,
    first_byte,
    queued,
    received,
    refused,
    settled,
)

OPENMETRICS = "application/openmetrics-text;version=1.0.0;q=0.8,text/plain;version=0.0.4;q=0.5"


class Scraped:
    def __init__(self) -> None:
        self.reader = PrometheusReader()
        self.provider = MeterProvider([self.reader], shutdown_on_exit=False, views=views())
        self.requests = RequestMetrics("default", meter_provider=self.provider)

    def play(self, *events, trace=None, request=None):
        tell = begin(self.requests, request or received(), trace)
        for event in events:
            tell(event)

    def plain(self):
        text, content_type = self.reader.text(None)
        assert content_type.startswith("text/plain; version=0.0.4")
        return {family.name: family for family in plain(text.decode())}

    def exemplars(self):
        """By name, labels and bucket."""
        text, content_type = self.reader.text(OPENMETRICS)
        assert content_type.startswith("application/openmetrics-text")
        assert text.endswith(b"# EOF\n")
        return {
            (sample.name, sample.labels["le"]): sample.exemplar
            for family in openmetrics(text.decode())
            for sample in family.samples
            if sample.exemplar is not None
        }


@pytest.fixture
def scraped():
    return Scraped()


def samples(family):
    return {(sample.name, *sorted(sample.labels.items())): sample.value for sample in family.samples}


def test_names_have_their_units_and_counters_their_suffix(scraped):
    scraped.play(classified(), admitted(2_000_000, 1_900_000), first_byte(3_000_000), settled(4_000_000))
    families = scraped.plain()

    pool, tier = ("admission_pool", "default"), ("admission_tier", "batch")
    assert families["admission_admitted"].type == "counter"
    assert samples(families["admission_admitted"]) == {("admission_admitted_total", pool, tier): 1}
    assert samples(families["admission_tokens_used"]) == {("admission_tokens_used_total", pool, tier): 712}
    waits = families["admission_queue_wait_seconds"]
    assert waits.type == "histogram"
    labels = (("admission_decision", "admitted"), pool, tier)
    found = samples(waits)
    assert found[("admission_queue_wait_seconds_count", *labels)] == 1
    assert found[("admission_queue_wait_seconds_sum", *labels)] == 1.9
    buckets = {sample.labels["le"]: sample.value for sample in waits.samples if sample.name.endswith("_bucket")}
    assert (buckets["1.0"], buckets["2.5"], buckets["3600.0"], buckets["+Inf"]) == (0, 1, 1, 1)
    assert list(buckets) == sorted(buckets, key=float)


def test_neither_the_target_nor_the_scope_is_reported(scraped):
    scraped.play(classified(), admitted())

    text, _ = scraped.reader.text(OPENMETRICS)
    assert b"target_info" not in text
    assert b"otel_scope" not in text
    assert b"_created" not in text


def test_an_exemplar_leads_to_the_span_and_names_the_request(scraped):
    scraped.play(classified(), admitted(2_000_000, 1_900_000, 1_400_000), first_byte(3_000_000), trace=SAMPLED)

    found = scraped.exemplars()
    assert {where: exemplar.value for where, exemplar in found.items()} == {
        ("admission_queue_wait_seconds_bucket", "2.5"): 1.9,
        ("admission_starvation_seconds_bucket", "2.5"): 1.4,
        ("admission_time_to_first_token_seconds_bucket", "5.0"): 3.0,
    }
    for exemplar in found.values():
        assert exemplar.labels == {
            "trace_id": "0af7651916cd43dd8448eb211c80319c",
            "span_id": "b7ad6b7169203331",
            "request_id": "request-1",
        }


def test_the_next_scraper_sees_the_exemplar_until_there_is_a_newer_one(scraped):
    scraped.play(classified(), admitted(), trace=SAMPLED)
    first = scraped.exemplars()
    assert scraped.exemplars() == first
    assert len(first) == 1

    scraped.play(
        classified(),
        admitted(),
        trace=SpanContext(7, SAMPLED.span_id, is_remote=False, trace_flags=SAMPLED.trace_flags),
    )
    (newer,) = scraped.exemplars().values()
    assert newer.labels["trace_id"] == f"{7:032x}"


def test_an_id_that_would_make_an_exemplar_too_long_is_left_out(scraped):
    for length, is_there in ((55, True), (56, False)):
        request = msgspec.structs.replace(received(), request_id="x" * length)
        scraped.play(classified(), admitted(), trace=SAMPLED, request=request)
        (exemplar,) = scraped.exemplars().values()
        assert ("request_id" in exemplar.labels) == is_there
        assert sum(map(len, (*exemplar.labels, *exemplar.labels.values()))) <= MOST_EXEMPLAR_CHARACTERS
        assert exemplar.labels["span_id"] == "b7ad6b7169203331"


def test_the_plain_text_has_no_exemplars(scraped):
    scraped.play(classified(), admitted(), trace=SAMPLED)

    assert b"trace_id" not in scraped.reader.text("text/plain")[0]


def test_labels_may_hold_anything(scraped):
    name = 'a "quoted"\nback\\slash'
    requests = RequestMetrics(name, meter_provider=scraped.provider)
    tell = begin(requests, received(), None)
    tell(refused("queue_full", 503))

    (sample,) = scraped.plain()["admission_refused"].samples
    assert sample.labels == {"admission_pool": name, "admission_reason": "queue_full", "admission_tier": ""}


def test_whatever_else_the_process_measures_is_reported_too(scraped, caplog):
    meter = scraped.provider.get_meter("theirs")
    meter.create_up_down_counter("their.open-connections", "{connection}").add(-2)
    meter.create_counter("their.bytes", "By", "Sent.").add(5, {"to.whom": 7})
    meter.create_counter("admission.admitted").add(3, {"other": "one"})
    meter.create_up_down_counter("admission.clamped").add(9)
    scraped.play(classified("high"), admitted())

    families = scraped.plain()
    clamped = [line for line in scraped.reader.text(None)[0].splitlines() if line.startswith(b"admission_clamped")]
    assert len(clamped) == 1  # of two kinds under one name only one can be reported
    assert samples(families["their_open_connections"]) == {("their_open_connections",): -2}
    assert families["their_open_connections"].type == "gauge"
    assert families["their_open_connections"].documentation == "their.open-connections"
    assert samples(families["their_bytes"]) == {("their_bytes_total", ("to_whom", "7")): 5}
    assert len(families["admission_admitted"].samples) == 2
    assert [record for record in caplog.records if record.levelno > logging.WARNING] == []


def everything():
    """A process in which every metric has a value."""
    scraped = Scraped()
    waited = admitted(2_000_000, 1_900_000, 1_400_000, {"high": 1}, passed={"low": "level"})
    scraped.play(classified("high"), queued(), waited, first_byte(3_000_000), settled(4_000_000), trace=SAMPLED)
    scraped.play(classified(), queued(), refused("queue_timeout", 503, queue_wait_us=9))
    scraped.play(classified(), refused("client_left", None))
    one, high = Amount(1, 1), {"admission.tier": "high"}
    sample = [
        (high, TierShare("high", one, one, one, 1, 1, Promised(1, 1, 1))),
        (high, TierWaits("high", one, OldestWaiter(1, 1, {}, ""))),
        ({}, PoolFigures("abc", one, replicas=2, policies_rejected=1)),
    ]
    pool = PoolMetrics("default", lambda: sample, KINDS, scraped.provider)
    return scraped, pool


@pytest.mark.long
def test_promtool_finds_nothing_to_say():
    scraped, _kept = everything()
    text, _ = scraped.reader.text(None)

    command = [program("promtool"), "check", "metrics"]
    checked = subprocess.run(command, input=text, capture_output=True, timeout=60, check=False)

    assert (checked.stdout, checked.stderr, checked.returncode) == (b"", b"", 0)
    assert len(re.findall(rb"^# TYPE admission_", text, re.MULTILINE)) == 41  # but those of the store


def test_upstreams_exporter_still_has_no_exemplars():
    """When this fails, `metrics.prometheus` may be replaced by it."""
    upstream = pytest.importorskip("opentelemetry.exporter.prometheus")
    provider = MeterProvider([upstream.PrometheusMetricReader()], shutdown_on_exit=False)
    requests = RequestMetrics("default", meter_provider=provider)
    tell = begin(requests, received(), SAMPLED)
    tell(classified())
    tell(admitted())

    text = generate_latest(REGISTRY)
    provider.shutdown()
    assert b"admission_queue_wait_seconds_bucket" in text
    assert b"trace_id" not in text
