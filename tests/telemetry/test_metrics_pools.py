"""The gauges: every figure of a pool's sample under its name, and nothing for what has no bounds."""

import gc
import time
from dataclasses import replace

import pytest

from sidecar.telemetry.metrics import PoolMetrics, PoolSample, TierSample
from sidecar.telemetry.metrics.instruments import FRESH_S
from sidecar.telemetry.metrics.lease_sizes import LeaseSizeSample
from tests.telemetry.measuring import Measuring

HIGH = TierSample(
    tier="high",
    queued_requests=3,
    queued_tokens=300,
    oldest_wait_s=12.5,
    longest_starvation_s=2.25,
    held_tokens=4000,
    held_requests=5,
    reserve_tokens=6000,
    reserve_requests=7,
    limit_tokens=8000,
    limit_requests=9,
    borrowed_tokens=10,
    lent_tokens=11,
    slo_ttft_s=0.5,
    slo_queue_wait_s=2.0,
    slo_starvation_s=1800.0,
)
BOUNDED = PoolSample(
    [HIGH],
    "abc123",
    capacity_tokens=100_000,
    capacity_requests=64,
    replicas=3,
    policies_rejected=2,
    passing=1,
    loop_blocked_s=3.5,
    aborting_requests=12,
    aborting_tokens=1300,
)
UNBOUNDED = PoolSample([TierSample("high")], "abc123")

OF_TIERS = {
    "queue.requests": 3,
    "queue.tokens": 300,
    "queue.oldest_wait": 12.5,
    "queue.longest_starvation": 2.25,
    "held.tokens": 4000,
    "held.requests": 5,
    "reserve.tokens": 6000,
    "reserve.requests": 7,
    "limit.tokens": 8000,
    "limit.requests": 9,
    "borrowed.tokens": 10,
    "lent.tokens": 11,
    "slo.ttft": 0.5,
    "slo.queue_wait": 2.0,
    "slo.starvation": 1800.0,
}
OF_POOL = {
    "capacity.tokens": 100_000,
    "capacity.requests": 64,
    "aborting.requests": 12,
    "aborting.tokens": 1300,
    "replicas": 3,
    "policy.rejected": 2,
    "event_loop.blocked": 3.5,
    "passing": 1,
}


OF_SIZES = {
    "lease.held.tokens": (100, 1),
    "lease.expected.tokens": (200, 2),
    "lease.used.tokens": (50, 3),
    "lease.overlap": (0.5, 1.0),
    "lease.quantile": (0.9, 0.95),
    "lease.quantile_raised": (0, 1),
}


@pytest.fixture
def measuring():
    return Measuring()


def watch(measuring, sample, pool="default"):
    return PoolMetrics(pool, sample if callable(sample) else lambda: sample, measuring.provider)


def test_every_figure_is_reported_under_its_name(measuring):
    kept = watch(measuring, BOUNDED)

    reported = {name.removeprefix("admission."): measuring.values(name) for name in measuring.metrics()}
    assert reported == {
        **{name: {("default", "high"): value} for name, value in OF_TIERS.items()},
        **{name: {("default",): value} for name, value in OF_POOL.items()},
        "policy.info": {("abc123", "default"): 1},
    }
    assert {measuring.metrics()[f"admission.{name}"].unit for name in OF_TIERS if "wait" in name or "slo" in name} == {
        "s"
    }
    assert kept is not None


def test_the_sizes_of_leases_are_those_of_each_engine(measuring):
    first = LeaseSizeSample("a", 100, 200, 50, 0.5, 0.9, 0, preemptions=3)
    kept = watch(measuring, replace(UNBOUNDED, lease_sizes=[first, LeaseSizeSample(None, 1, 2, 3, 1.0, 0.95, 1)]))
    found = {name: measuring.values(f"admission.{name}") for name in OF_SIZES}
    assert kept is not None
    assert found == {name: {("a", "default"): of_a, ("default",): of_one} for name, (of_a, of_one) in OF_SIZES.items()}
    assert measuring.values("admission.engine.preemptions") == {("a", "default"): 3}


def test_what_has_no_bounds_and_no_promise_is_left_out(measuring):
    kept = watch(measuring, UNBOUNDED)

    missing = {"reserve.tokens", "reserve.requests", "limit.tokens", "limit.requests", "slo.ttft", "slo.queue_wait"}
    missing |= {"slo.starvation", "capacity.tokens", "capacity.requests", "replicas"}
    reported = {name.removeprefix("admission.") for name in measuring.metrics()}
    assert reported == (set(OF_TIERS) | set(OF_POOL) | {"policy.info"}) - missing
    assert measuring.values("admission.queue.oldest_wait") == {("default", "high"): 0.0}
    assert kept is not None


def test_one_reading_takes_one_sample_of_each_pool(measuring):
    taken = []
    kept = [watch(measuring, lambda pool=pool: taken.append(pool) or BOUNDED, pool) for pool in ("chat", "batch")]

    measuring.metrics()
    assert taken == ["chat", "batch"]

    time.sleep(FRESH_S * 1.5)
    assert measuring.values("admission.replicas") == {("chat",): 3, ("batch",): 3}
    assert taken == ["chat", "batch"] * 2
    assert len(kept) == 2


def test_a_pool_that_is_gone_is_not_reported_and_of_two_of_one_name_the_later_is(measuring):
    first, second, gone = (watch(measuring, sample, pool) for sample, pool in (
        (BOUNDED, "default"), (UNBOUNDED, "default"), (BOUNDED, "gone")
    ))  # fmt: skip
    del gone
    gc.collect()

    assert measuring.values("admission.held.tokens") == {("default", "high"): 0}
    assert first is not second


def test_a_pool_that_cannot_be_sampled_is_left_out_and_logged_once(measuring, caplog):
    def broken():
        raise OSError("no sample today")

    kept = watch(measuring, broken, "broken"), watch(measuring, lambda: None, "unknown"), watch(measuring, BOUNDED)
    for _ in range(3):
        assert measuring.values("admission.replicas") == {("default",): 3}
        time.sleep(FRESH_S * 1.5)

    (record,) = caplog.records
    assert record.message.startswith("pool broken cannot be sampled")
    assert len(kept) == 3


def test_an_sdk_that_cannot_be_used_is_logged(caplog):
    class Broken:
        def get_meter(self, *arguments, **named):
            raise RuntimeError("no meter today")

    PoolMetrics("default", lambda: BOUNDED, Broken())

    assert "the metrics of pool default failed" in caplog.text
