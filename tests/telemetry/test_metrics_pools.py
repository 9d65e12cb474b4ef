"""The gauges: every figure of a pool's sample under its name, and nothing for what has no bounds."""

import gc
from types import SimpleNamespace

import pytest

from sidecar.cluster.document import OldestWaiter, PoolFigures, Promised, TierGuard, TierShare, TierWaits
from sidecar.cluster.sampler import KINDS
from sidecar.engines.view import Amount
from sidecar.lengths.estimator import EngineSizesDocument
from sidecar.telemetry.metrics import PoolMetrics, instruments
from tests.telemetry.measuring import Measuring

HIGH = {"admission.tier": "high"}
NONE = Amount(0, 0)
BOUNDED = [
    (
        HIGH,
        TierShare("high", Amount(4000, 5), Amount(6000, 7), Amount(8000, 9), 10, 11, Promised(0.5, 2.0, 1800.0)),
    ),
    (HIGH, TierWaits("high", Amount(300, 3), OldestWaiter(12.5, 2.25, {}, "one"))),
    (
        {},
        PoolFigures(
            "abc123",
            Amount(100_000, 64),
            aborting=Amount(1300, 12),
            replicas=3,
            is_passing=True,
            policies_rejected=2,
            loop_blocked_s=3.5,
        ),
    ),
]
UNBOUNDED = [
    (HIGH, TierShare("high", NONE, Amount(), Amount(), 0, 0, Promised())),
    (HIGH, TierWaits("high", NONE)),
    ({}, PoolFigures("abc123", Amount())),
]

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
    return PoolMetrics(pool, sample if callable(sample) else lambda: sample, KINDS, measuring.provider)


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
    first = EngineSizesDocument("a", 0.9, 0.5, "", False, 1, 100, 200, 50, preemptions=3)
    other = EngineSizesDocument(None, 0.95, 1.0, "", True, 1, 1, 2, 3)
    kept = watch(measuring, [({"admission.engine": "a"}, first), ({}, other)])
    found = {name: measuring.values(f"admission.{name}") for name in OF_SIZES}
    assert kept is not None
    assert found == {name: {("a", "default"): of_a, ("default",): of_one} for name, (of_a, of_one) in OF_SIZES.items()}
    assert measuring.values("admission.engine.preemptions") == {("a", "default"): 3}


def test_the_guard_of_a_tier_is_reported_with_what_it_counts(measuring):
    guard = TierGuard(0.35, 0.2, 0.3, {"met": 12, "missed": 1}, is_in_vain=True)
    kept = watch(measuring, [(HIGH, TierShare("high", NONE, Amount(), Amount(), 0, 0, Promised(hold=0.97), guard))])
    gauges = ("guard.share", "guard.held", "guard.total", "guard.in_vain", "slo.hold")
    found = {name: measuring.values(f"admission.{name}")["default", "high"] for name in gauges}
    assert kept is not None
    assert found == dict(zip(gauges, (0.35, 0.2, 0.3, 1, 0.97), strict=True))
    counted = measuring.values("admission.guard.requests")
    assert counted == {("default", "met", "high"): 12, ("default", "missed", "high"): 1}


def test_what_has_no_bounds_and_no_promise_is_left_out(measuring):
    kept = watch(measuring, UNBOUNDED)

    missing = {"reserve.tokens", "reserve.requests", "limit.tokens", "limit.requests", "slo.ttft", "slo.queue_wait"}
    missing |= {"slo.starvation", "capacity.tokens", "capacity.requests", "replicas"}
    reported = {name.removeprefix("admission.") for name in measuring.metrics()}
    assert reported == (set(OF_TIERS) | set(OF_POOL) | {"policy.info"}) - missing
    assert measuring.values("admission.queue.oldest_wait") == {("default", "high"): 0.0}
    assert kept is not None


@pytest.fixture
def clock(monkeypatch):
    """The time by which samples grow old: a reading may take as long as a busy machine needs."""
    clock = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr(instruments, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    return clock


def test_one_reading_takes_one_sample_of_each_pool(measuring, clock):
    taken = []
    kept = [watch(measuring, lambda pool=pool: taken.append(pool) or BOUNDED, pool) for pool in ("chat", "batch")]

    measuring.metrics()
    assert taken == ["chat", "batch"]

    clock.now_s += instruments.FRESH_S * 1.5
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


def test_a_pool_that_cannot_be_sampled_is_left_out_and_logged_once(measuring, clock, caplog):
    def broken():
        raise OSError("no sample today")

    kept = watch(measuring, broken, "broken"), watch(measuring, lambda: None, "unknown"), watch(measuring, BOUNDED)
    for _ in range(3):
        assert measuring.values("admission.replicas") == {("default",): 3}
        clock.now_s += instruments.FRESH_S * 1.5

    (record,) = caplog.records
    assert record.message.startswith("pool broken cannot be sampled")
    assert len(kept) == 3


def test_an_sdk_that_cannot_be_used_is_logged(caplog):
    class Broken:
        def get_meter(self, *arguments, **named):
            raise RuntimeError("no meter today")

    PoolMetrics("default", lambda: BOUNDED, KINDS, Broken())

    assert "the metrics of pool default failed" in caplog.text
