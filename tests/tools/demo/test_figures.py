"""The demo's figures, from logs written by hand whose answers are known."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from sidecar.tools.demo.figures import Arrival, ArrivalStream, RunMeasurement, measure
from sidecar.tools.emulator.generation import ServedGeneration
from sidecar.tools.loadgen import Planned, Seen

TIERS = ("high", "batch")


def request(
    number: int,
    arrived_s: float,
    admitted_s: float | None,
    end_s: float = 100.0,
    *,
    tier: str = "batch",
    tokens: int = 10,
    ttft_s: float | None = 1.0,
    door_wait_s: float = 0.0,
) -> tuple[Arrival, Seen, ServedGeneration]:
    """What its client saw, and the engine's line of it. It reached the engine when the sidecar let it go."""
    arrival = Arrival(arrived_s, ArrivalStream(tier, "sk", 1.0), tokens // 2, tokens - tokens // 2)
    error = "it failed" if ttft_s is None else None
    headers = {"x-admission-wait-ms": f"{door_wait_s * 1000}"}
    planned = Planned(arrived_s, "", {}, b"")
    seen = Seen(planned, 0.0, ttft_s, 1.0, 200, error, 1, None, headers, f"chatcmpl-{number:08d}", 0)
    at_engine_s = arrived_s + door_wait_s
    log = ServedGeneration(f"{number:08d}", None, at_engine_s, admitted_s, admitted_s, end_s, aborted=False)
    return arrival, seen, log


def figures(requests: Sequence[tuple[Arrival, Seen, ServedGeneration]], slots: int = 2) -> RunMeasurement:
    arrivals, seen, log = zip(*requests, strict=True)
    shuffled = list(log)
    random.Random(1).shuffle(shuffled)
    return measure("a run", TIERS, arrivals, seen, shuffled, slots=slots)


def test_starvation_begins_when_somebody_who_came_later_goes_first() -> None:
    run = figures(
        [
            request(1, 0.0, 9.0),  # overtaken at 3 and at 5: it starves from 3 on
            request(2, 1.0, 3.0, tier="high"),
            request(3, 2.0, 5.0, tier="high"),
        ]
    )
    assert run.tiers["batch"].queue_wait_s["p50"] == 9.0
    assert run.tiers["batch"].starvation_s["p50"] == pytest.approx(6.0, abs=1e-5)
    assert run.tiers["high"].starvation_s["p99"] == 0.0


def test_the_wait_at_the_sidecar_counts_as_waiting_wherever_it_was() -> None:
    run = figures([request(1, 0.0, 7.0, door_wait_s=6.5), request(2, 1.0, 2.0, tier="high", door_wait_s=0.5)])
    assert run.tiers["batch"].queue_wait_s["p50"] == 7.0
    assert run.tiers["batch"].starvation_s["p50"] == pytest.approx(5.0, abs=1e-5)
    assert run.tiers["high"].queue_wait_s["p50"] == 1.0


def test_shares_are_of_the_tokens_that_got_a_slot_during_the_overload() -> None:
    run = figures(
        [
            request(1, 0.0, 0.0, tokens=1000),  # the engine was not full yet
            request(2, 3.0, 4.0, tier="high", tokens=30),
            request(3, 3.0, 5.0, tokens=10),
            request(4, 10.0, 99.0, tokens=1000),  # no one arrived any more
        ]
    )
    assert run.tiers["high"].share == pytest.approx(0.75)
    assert run.tiers["batch"].share == pytest.approx(0.25)


def test_utilization_is_the_part_of_the_slots_in_use_during_the_overload() -> None:
    # From 2 s to 10 s: one of two slots is in use all the time, the other for half of it.
    run = figures([request(1, 0.0, 0.0, 50.0), request(2, 1.0, 1.0, 6.0), request(3, 10.0, 10.0, 12.0)])
    assert run.utilization == pytest.approx(0.75)


def test_a_run_too_short_to_fill_the_engine_counts_from_its_middle() -> None:
    run = figures([request(1, 0.0, 0.0, 50.0), request(2, 1.0, 1.5, 50.0), request(3, 2.0, 2.0, 50.0)])
    assert run.utilization == pytest.approx(0.75)
    assert run.tiers["batch"].share == 1.0


def test_what_failed_is_counted_and_is_in_no_figure() -> None:
    run = figures([request(1, 0.0, 1.0), request(2, 0.0, 1.0, ttft_s=None), request(3, 0.0, None, tier="high")])
    assert run.failed == 2
    assert set(run.tiers) == {"batch"}
    assert (run.tiers["batch"].requests, run.tiers["batch"].answered) == (2, 1)


def test_a_run_of_which_nothing_came_back_has_no_figures() -> None:
    run = figures([request(1, 0.0, None, ttft_s=None)])
    assert (run.failed, run.utilization, dict(run.tiers)) == (1, 0.0, {})
