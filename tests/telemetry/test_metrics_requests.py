"""Every metric and every label of requests, from the events that the sidecar tells."""

import gc
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from opentelemetry.context import get_current
from opentelemetry.sdk.metrics.export import MetricsData
from opentelemetry.trace import SpanContext

from sidecar.events import FirstByte, Outcome, Settled
from sidecar.telemetry.metrics.histograms import ROUND_TRIPS, WAITS
from sidecar.telemetry.metrics.instruments import StoreMetrics
from sidecar.telemetry.metrics.tenants import TenantHolding
from tests.telemetry.measuring import BrokenProvider, Measuring
from tests.telemetry.span_stories import (
    ARRIVAL_US,
    EXPECTED,
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

INSTALLED_LATER = """
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from tests.telemetry.span_stories import begin, admitted, classified, received
from sidecar.events import StoreChanged, StoreState
from sidecar.telemetry.metrics import RequestMetrics
from sidecar.telemetry.metrics.instruments import StoreMetrics

before, stored = RequestMetrics("before"), StoreMetrics("before")
for event in (classified(), admitted()):
    tell = begin(before, received(), None)
    tell(classified())
    tell(admitted())
stored(StoreChanged(1, StoreState.SHARED, "because"))
reader = InMemoryMetricReader()
metrics.set_meter_provider(MeterProvider([reader], shutdown_on_exit=False))
tell = begin(RequestMetrics("after"), received(), None)
tell(classified())
tell(admitted())
stored(StoreChanged(2, StoreState.SHARED, "because"))
(resource,) = reader.get_metrics_data().resource_metrics
(scope,) = resource.scope_metrics
(found,) = [metric for metric in scope.metrics if metric.name == "admission.admitted"]
print(*[f"{point.attributes['admission.pool']}={point.value}" for point in found.data.data_points])
(found,) = [metric for metric in scope.metrics if metric.name == "admission.store.changes"]
print(*[f"store-{point.attributes['admission.pool']}" for point in found.data.data_points])
"""


@pytest.fixture
def measuring():
    return Measuring()


def play(listener, *events, trace=None):
    tell = begin(listener, received(), trace)
    for event in events:
        tell(event)


def test_a_request_that_did_not_wait(measuring):
    play(measuring.requests(), classified(), admitted(), first_byte(30_000), settled(90_000))

    assert measuring.values("admission.admitted") == {("default", "batch"): 1}
    assert measuring.sums("admission.queue_wait") == {("admitted", "default", "batch"): (1, 0.0)}
    assert measuring.sums("admission.starvation") == {}
    assert measuring.sums("admission.time_to_first_token") == {("default", "batch"): (1, 0.03)}
    assert measuring.values("admission.settled") == {("completed", "default", "batch"): 1}
    assert measuring.values("admission.tokens.estimated") == {("default", "batch"): 800}
    assert measuring.values("admission.tokens.used") == {("default", "batch"): 712}
    assert measuring.values("admission.tokens.estimate_error") == {("over", "default", "batch"): 88}
    assert measuring.values("admission.tenant.admitted") == {("default", "acme"): 1}
    assert measuring.values("admission.tenant.tokens_used") == {("default", "acme"): 712}
    assert measuring.values("admission.tenant.refused") == {("default", "acme"): 0}
    for none in ("refused", "abandoned", "clamped", "overtaken", "overtaken.tokens"):
        assert measuring.values(f"admission.{none}") == {}


def test_a_request_that_waited_and_starved(measuring):
    waited = admitted(2_000_000, 1_900_000, 1_400_000, {"high": 900})
    play(measuring.requests(), classified(), queued(), waited, settled(3_000_000))

    assert measuring.sums("admission.queue_wait") == {("admitted", "default", "batch"): (1, 1.9)}
    assert measuring.sums("admission.starvation") == {("admitted", "default", "batch"): (1, 1.4)}


@pytest.mark.parametrize(
    ("code", "status", "decision"),
    [("queue_timeout", 503, "refused"), ("client_left", None, "client_left"), ("canceled", None, "canceled")],
)
def test_a_request_that_waited_in_vain(measuring, code, status, decision):
    over = refused(code, status, 5_000_000, queue_wait_us=4_900_000, starvation_us=100_000)
    play(measuring.requests(), classified(), queued(), over)

    assert measuring.sums("admission.queue_wait") == {(decision, "default", "batch"): (1, 4.9)}
    assert measuring.sums("admission.starvation") == {(decision, "default", "batch"): (1, 0.1)}
    gave_up = status is None
    assert measuring.values("admission.abandoned") == ({("default", code, "batch"): 1} if gave_up else {})
    assert measuring.values("admission.refused") == ({} if gave_up else {("default", code, "batch"): 1})
    assert measuring.values("admission.tenant.refused") == {("default", "acme"): int(not gave_up)}
    assert measuring.values("admission.admitted") == {}


def test_a_request_refused_before_its_tier_was_known_has_none(measuring):
    listener = measuring.requests()
    play(listener, refused("invalid_api_key", 401))
    play(listener, classified(), refused("queue_full", 503))
    play(listener, refused("client_left", None))

    assert measuring.values("admission.refused") == {
        ("default", "invalid_api_key", ""): 1,
        ("default", "queue_full", "batch"): 1,
    }
    assert measuring.values("admission.abandoned") == {("default", "client_left", ""): 1}
    assert measuring.sums("admission.queue_wait") == {}  # none of them has waited
    assert measuring.values("admission.tenant.refused") == {("default", "acme"): 1}


def test_a_clamp_says_from_where_and_to_where(measuring):
    play(measuring.requests(), classified("critical"), admitted())

    assert measuring.values("admission.clamped") == {("critical", "default", "batch"): 1}


def test_overtaking_counts_requests_and_tokens_of_who_went_ahead(measuring):
    listener = measuring.requests()
    for passed in ({"low": "level", "normal": "reserve"}, {"low": "level"}):
        play(listener, classified(), admitted(passed=passed))

    low, normal = ("batch", "default", "level", "low"), ("batch", "default", "reserve", "normal")
    assert measuring.values("admission.overtaken") == {low: 2, normal: 1}
    assert measuring.values("admission.overtaken.tokens") == {low: 1600, normal: 800}


@pytest.mark.parametrize(
    ("outcome", "used", "output", "errors"),
    [
        (Outcome.COMPLETED, 1000, 200, {("under", "default", "batch"): 200}),
        (Outcome.COMPLETED, 1000, None, {}),
        (Outcome.CLIENT_LEFT, 100, 20, {}),
        (Outcome.FAILED, 100, 20, {}),
    ],
)
def test_an_estimate_is_compared_where_the_engine_counted_a_whole_answer(measuring, outcome, used, output, errors):
    end = Settled(ARRIVAL_US + 9, outcome, 200, used, 80, output, None)
    play(measuring.requests(), classified(), admitted(), end)

    assert measuring.values("admission.tokens.estimate_error") == errors
    assert measuring.values("admission.tokens.used") == {("default", "batch"): used}
    assert measuring.values("admission.settled") == {(outcome.value, "default", "batch"): 1}


@pytest.mark.parametrize(("stream", "status"), [(False, 200), (True, 400), (True, 503)])
def test_an_error_and_an_answer_in_one_piece_have_no_first_token(measuring, stream, status):
    play(measuring.requests(), classified(stream=stream), admitted(), FirstByte(ARRIVAL_US + 100, status))

    assert measuring.sums("admission.time_to_first_token") == {}


@pytest.mark.parametrize(
    ("output", "ratio"),
    [(0, "0.25"), (50, "0.25"), (51, "0.5"), (200, "1"), (201, "1.25"), (400, "2"), (801, "more"), (10**9, "more")],
)
def test_an_answer_is_counted_by_its_length_to_the_expected_one(measuring, output, ratio):
    expected = msgspec.structs.replace(classified(), expected=EXPECTED)  # two sequences of 100 tokens
    ended = msgspec.structs.replace(settled(90_000), output_tokens=output, growths=3)
    play(measuring.requests(), expected, admitted(), first_byte(30_000), ended)
    assert measuring.values("admission.output.answers") == {(ratio, "default", "acme", "batch"): 1}
    assert measuring.values("admission.lease.growths") == {("default", "batch"): 3}


@pytest.mark.parametrize(
    ("of_request", "of_end"),
    [
        ({"expected": None}, {}),
        ({"expected": msgspec.structs.replace(EXPECTED, source="maximum")}, {}),
        ({}, {"output_tokens": None}),
        ({}, {"outcome": Outcome.CLIENT_LEFT}),
        ({}, {"outcome": Outcome.FAILED}),
        ({}, {"status": 500}),
    ],
)
def test_where_nothing_was_expected_or_the_answer_is_not_whole_there_is_no_error(measuring, of_request, of_end):
    expected = msgspec.structs.replace(classified(), **{"expected": EXPECTED, **of_request})
    play(measuring.requests(), expected, admitted(), msgspec.structs.replace(settled(90_000), **of_end))
    assert measuring.values("admission.output.answers") == {}


def test_the_errors_of_tenants_beyond_the_first_few_are_counted_together(measuring):
    listener = measuring.requests(tenants_shown=1)
    for tenant in ("acme", "globex", "initech"):
        asked = msgspec.structs.replace(classified(), tenant=tenant, expected=EXPECTED)
        play(listener, asked, admitted(), settled(90_000))
    assert measuring.values("admission.output.answers") == {
        ("1", "default", "acme", "batch"): 1,
        ("1", "default", "other", "batch"): 2,
    }


def test_tenants_beyond_the_first_few_are_others(measuring):
    listener = measuring.requests(tenants_shown=1)
    for tenant in ("acme", "globex", "initech"):
        play(listener, msgspec.structs.replace(classified(), tenant=tenant), admitted())

    assert measuring.values("admission.tenant.admitted") == {("default", "acme"): 1, ("default", "other"): 2}
    assert measuring.values("admission.tenant.tokens_held") == {("default", "acme"): 800, ("default", "other"): 1600}


def test_what_a_tenant_holds_and_waits_for_follows_its_requests(measuring):
    listener = measuring.requests()
    tell, later = begin(listener, received(), None), begin(listener, received(), None)
    for event in (classified(), admitted()):
        tell(event)
    for event in (classified(), queued()):
        later(event)
    assert listener.held() == {"acme": TenantHolding(800, 1, 1)}
    assert measuring.values("admission.tenant.tokens_held") == {("default", "acme"): 800}

    later(admitted(100, 50))
    tell(settled(1000))
    assert listener.held() == {"acme": TenantHolding(800, 1, 0)}

    later(settled(2000))
    assert listener.held() == {}
    assert measuring.values("admission.tenant.tokens_held") == {("default", "acme"): 0}


def test_who_stops_waiting_without_a_lease_waits_no_more(measuring):
    listener = measuring.requests()
    play(listener, classified(), queued(), refused("client_left", None))

    assert listener.held() == {}


def test_what_every_tier_has_is_reported_before_its_first_request(measuring):
    listener = measuring.requests(tiers=["high", "batch"])
    for name in ("admitted", "tokens.estimated", "tokens.used"):
        assert measuring.values(f"admission.{name}") == {("default", "high"): 0, ("default", "batch"): 0}
    assert len(measuring.values("admission.settled")) == 6
    assert len(measuring.values("admission.tokens.estimate_error")) == 4

    play(listener, classified(), admitted())
    assert measuring.values("admission.admitted") == {("default", "high"): 0, ("default", "batch"): 1}


def test_two_pools_are_distinguished_and_two_sidecars_to_one_pool_are_one(measuring, caplog):
    chat, chat_again, batch = (measuring.requests(pool) for pool in ("chat", "chat", "batch"))
    for listener in (chat, chat_again, batch):
        play(listener, classified(), admitted())

    assert measuring.values("admission.admitted") == {("chat", "batch"): 2, ("batch", "batch"): 1}
    held = {("chat", "acme"): 1600, ("batch", "acme"): 800}
    assert measuring.values("admission.tenant.tokens_held") == held
    assert [listener.held()["acme"].leases for listener in (chat, chat_again, batch)] == [1, 1, 1]
    assert caplog.records == []


def test_counts_outlive_the_sidecar_and_holdings_do_not(measuring):
    listener = measuring.requests()
    play(listener, classified(), admitted())
    del listener
    gc.collect()

    assert measuring.values("admission.admitted") == {("default", "batch"): 1}
    assert measuring.values("admission.tenant.tokens_held") == {("default", "acme"): 0}


def test_buckets_fit_milliseconds_to_more_than_half_an_hour(measuring):
    play(measuring.requests(), classified(), admitted(2_000_000, 1_900_000, 1_400_000), first_byte(3_000_000))
    StoreMetrics("default", measuring.provider).round_trip(0.0007)

    for name in ("queue_wait", "starvation", "time_to_first_token"):
        (point,) = measuring.points(f"admission.{name}").values()
        assert point.explicit_bounds == WAITS
    (point,) = measuring.points("admission.store.round_trip").values()
    assert (point.explicit_bounds, point.sum) == (ROUND_TRIPS, 0.0007)


def exemplars(measuring):
    """Of every histogram, by its name; the SDK tells each of them once."""
    return {
        name: [exemplar for point in metric.data.data_points for exemplar in point.exemplars]
        for name, metric in measuring.metrics().items()
        if metric.unit == "s"
    }


def test_every_duration_of_a_sampled_request_leads_to_its_span(measuring):
    play(
        measuring.requests(),
        classified(),
        admitted(2_000_000, 1_900_000, 1_400_000),
        first_byte(3_000_000),
        trace=SAMPLED,
    )

    found = exemplars(measuring)
    for name, value in (("queue_wait", 1.9), ("starvation", 1.4), ("time_to_first_token", 3.0)):
        (exemplar,) = found[f"admission.{name}"]
        assert (exemplar.trace_id, exemplar.span_id, exemplar.value) == (SAMPLED.trace_id, SAMPLED.span_id, value)
        assert exemplar.filtered_attributes == {"admission.request_id": "request-1"}
    assert get_current() == {}


@pytest.mark.parametrize("trace", [None, SpanContext(SAMPLED.trace_id, SAMPLED.span_id, is_remote=False)])
def test_a_request_whose_trace_is_not_kept_leaves_no_exemplar(measuring, trace):
    play(measuring.requests(), classified(), admitted(), trace=trace)

    assert exemplars(measuring) == {"admission.queue_wait": []}
    assert measuring.sums("admission.queue_wait") == {("admitted", "default", "batch"): (1, 0.0)}


def test_an_sdk_that_is_installed_later_is_found():
    here = Path(__file__).parent
    command = [sys.executable, "-c", INSTALLED_LATER]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=here)

    assert sorted(done.stdout.split()) == ["after=1", "before=2", "store-before"]
    assert done.stderr == ""


def test_a_broken_sdk_is_logged_and_requests_go_on(measuring, caplog):
    listener = measuring.requests()
    broken = type(listener)("default", meter_provider=BrokenProvider())
    play(broken, classified(), queued(), admitted())

    (record,) = caplog.records
    assert "no meter today" in caplog.text
    assert "metrics of requests failed" in record.message
    assert broken.held() == {"acme": TenantHolding(800, 1, 0)}


def test_every_metric_says_what_it_is(measuring):
    play(measuring.requests(), classified("high"), queued(), admitted(9, 8, 7, {"high": 1}, passed={"low": "level"}))

    found: dict[str, MetricsData] = measuring.metrics()
    for metric in found.values():
        assert metric.description.endswith(".")
        assert metric.unit in {"s", "{request}", "{token}", "{policy}", "{preemption}", "{growth}"}
