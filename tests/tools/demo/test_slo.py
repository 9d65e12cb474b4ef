"""The demo's second scene: its figures, from what clients saw, and what a person reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sidecar.policy.compiler import load
from sidecar.tools.demo.figures import Arrival, ArrivalStream
from sidecar.tools.demo.slo import (
    BATCH,
    FREE,
    HELD,
    NIGHTLY,
    PEOPLE,
    POLICIES,
    SloMeasurement,
    arrivals,
    measure,
    summary,
)
from sidecar.tools.loadgen import Planned, Seen


def seen(stream: ArrivalStream, ttft_s: float, tpot_s: float, error: str | None = None) -> tuple[Arrival, Seen]:
    """An answer of eleven tokens."""
    one = Seen(
        Planned(0.0, "", {}, b""), 1.0, 1.0 + ttft_s, 1.0 + ttft_s + 10 * tpot_s, 200, error, 11, 50, {}, None, 0
    )
    return Arrival(0.0, stream, 50, 11), one


def run(name: str, met: float, failed: int = 0) -> SloMeasurement:
    times = {"p50": 0.045, "p95": 0.1, "p99": 0.2}
    return SloMeasurement(name, 50, failed, met, times, times, 100, 220.0, stalled_s=0.3)


def test_an_answer_meets_the_slo_by_both_times_and_what_is_broken_off_counts_for_nothing() -> None:
    pairs = [
        seen(PEOPLE, 0.4, 0.05),
        seen(PEOPLE, 0.6, 0.05),
        seen(PEOPLE, 0.4, 0.07),
        seen(PEOPLE, 0.4, 0.05, error="it failed"),
        seen(NIGHTLY, 3.0, 0.2),
        seen(NIGHTLY, 3.0, 0.2, error="no complete answer within 2 s"),
    ]
    found = measure(HELD, *zip(*pairs, strict=True), 2.0, 0.1)
    assert (found.requests, found.failed, found.met) == (4, 1, 0.25)
    assert (found.batch_answered, found.batch_tokens_per_s) == (1, 5.5)
    assert found.tpot_s["p50"] == pytest.approx(0.05)


def test_the_two_policies_differ_in_hold_alone(tmp_path: Path) -> None:
    for name, text in POLICIES.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    free, held = (load(tmp_path / f"{name}.yaml") for name in (FREE, HELD))
    assert (free.tiers[0].hold, float(held.tiers[0].hold)) == (0, 0.97)
    assert free.tiers[1] == held.tiers[1]
    assert free.tiers[0].slo == replace(held.tiers[0].slo, hold=None)


def test_batch_comes_at_once_and_people_one_by_one() -> None:
    coming = arrivals(20.0, seed=1)
    assert coming == arrivals(20.0, seed=1) != arrivals(20.0, seed=2)
    assert [one.at_s for one in coming if one.stream is NIGHTLY] == [0.0] * BATCH
    assert all(0 < one.at_s < 15 for one in coming if one.stream is PEOPLE)


def test_the_summary_has_a_column_for_each_run() -> None:
    said = summary([run(FREE, 0.02), run(HELD, 0.98)]).splitlines()
    assert said[0].startswith("Batch work fills the engine")
    assert said[3].split() == ["In", "short", "without", "hold", "hold:", "97%"]
    assert [line.split()[-2:] for line in said[4:]] == [["2%", "98%"], ["0.20", "s"], ["45", "ms"], ["220", "220"]]
    assert max(map(len, said)) <= 120


def test_the_conclusion_of_the_summary_claims_nothing_that_the_figures_do_not_show() -> None:
    assert "do not differ clearly" in summary([run(FREE, 0.9), run(HELD, 0.98)])
    assert "run for 0.30 s" in summary([run(FREE, 0.9), run(HELD, 0.98)])
    assert "Requests failed" in summary([run(FREE, 0.0), run(HELD, 0.98, failed=1)])
