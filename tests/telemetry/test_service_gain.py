"""Service gain in metrics, spans and the last five minutes: each offered request counts once."""

from __future__ import annotations

import msgspec
import pytest

from sidecar.cluster.sampler import KINDS
from sidecar.engines.speed import EngineSpeedDocument
from sidecar.events import Outcome, Refused, ServiceGain, Settled
from sidecar.telemetry.metrics import PoolMetrics
from sidecar.telemetry.recent import Recent
from tests.telemetry.measuring import Measuring
from tests.telemetry.span_stories import (
    ARRIVAL_NS,
    ARRIVAL_US,
    Tracing,
    admitted,
    begin,
    classified,
    preempted,
    received,
    refused,
    settled,
)

MET, REFUSED = ServiceGain(40, 40, "met"), ServiceGain(0, 60, "refused")
ABANDONED = ServiceGain(0, 60, "abandoned")


def in_full() -> Settled:
    return msgspec.structs.replace(settled(2_000_000), gain=MET)


def refused_with_gain() -> Refused:
    return msgspec.structs.replace(refused("queue_full", 503), gain=REFUSED)


def in_vain() -> Settled:
    """Preempted, and refused while it waited again: the wait is reported with the end, and each has the gain."""
    at_us = ARRIVAL_US + 3_000_000
    wait = Refused(at_us, "client_left", "left", None, gain=ABANDONED)
    return Settled(at_us, Outcome.CLIENT_LEFT, None, 0, None, None, "client_left", wait, gain=ABANDONED)


STORIES = (
    (classified(), admitted(1_000), in_full()),
    (classified(), refused_with_gain()),
    (classified(preemptible=True), admitted(1_000), *preempted(2_000_000, 1_000), in_vain()),
    (classified(), admitted(1_000), settled(2_000_000)),
)
"""Met, refused, abandoned after a preemption, and one of a tier without an objective."""


def test_the_counters_have_every_offered_request_once() -> None:
    measuring = Measuring()
    metrics = measuring.requests(tiers=["high", "batch"], measured=["high"])
    for story in STORIES:
        tell = begin(metrics, received())
        for event in story:
            tell(event)
    assert measuring.values("admission.gain.earned") == {("default", "batch"): 40, ("default", "high"): 0}
    assert measuring.values("admission.gain.attainable") == {("default", "batch"): 160, ("default", "high"): 0}
    outcomes = measuring.values("admission.slo.requests")
    assert {labels: count for labels, count in outcomes.items() if count} == {
        ("default", "met", "batch"): 1,
        ("default", "refused", "batch"): 1,
        ("default", "abandoned", "batch"): 1,
    }
    assert len([labels for labels in outcomes if "high" in labels]) == 5  # reported from the start


def test_the_last_five_minutes_have_every_offered_request_once() -> None:
    recent = Recent()
    for story in STORIES:
        tell = begin(recent, received())
        for event in story:
            tell(event)
    buckets = recent.read("batch", ARRIVAL_NS / 1e9 + 10).buckets
    sums = [sum(getattr(one, name) for one in buckets) for name in ("offered", "met", "gain_earned", "gain_attainable")]
    assert sums == [3, 1, 40, 160]


@pytest.mark.parametrize(("story", "gain"), [(STORIES[0], MET), (STORIES[1], REFUSED), (STORIES[2], ABANDONED)])
def test_the_span_says_what_its_request_earned(story: tuple[object, ...], gain: ServiceGain) -> None:
    spans = {span.name: span for span in _played(story)}
    written = spans["admission"].attributes or {}
    assert written["admission.gain.earned"] == gain.earned
    assert written["admission.gain.attainable"] == gain.attainable
    assert written["admission.slo"] == gain.slo


def test_the_span_of_a_tier_without_an_objective_says_nothing_of_it() -> None:
    (admission,) = [span for span in _played(STORIES[3]) if span.name == "admission"]
    assert not [name for name in admission.attributes or {} if "gain" in name or "slo" in name]


def _played(story: tuple[object, ...]) -> list[object]:  # the spans of one request
    tracing = Tracing()
    observation = tracing.observer.received(received())
    assert observation is not None
    for event in story:
        observation.on_event(event)  # type: ignore[arg-type]
    return list(tracing.exporter.get_finished_spans())


def test_the_speeds_are_those_of_each_engine_and_an_error_that_is_not_known_is_left_out() -> None:
    measuring = Measuring()
    speeds = [
        EngineSpeedDocument("a", 100_000, 200_000, 30_000, 0, True, 1, 1, 0.1, 0.2),
        EngineSpeedDocument("b", 1_000_000, 2_000_000, 300_000, 0, False, 0, 0, None, None),
    ]
    sample = [({"admission.engine": str(speed.engine)}, speed) for speed in speeds]
    kept = PoolMetrics("default", lambda: sample, KINDS, measuring.provider)
    assert kept is not None
    assert measuring.values("admission.engine.time.between_tokens") == {("a", "default"): 0.03, ("b", "default"): 0.3}
    assert measuring.values("admission.engine.prediction_error.first_token") == {("a", "default"): 0.1}
