from __future__ import annotations

import msgspec
import pytest

from sidecar.gain.token_deadlines import Objective
from sidecar.tools.replay.figures import RunFigures, lines, measure
from sidecar.tools.replay.table import table
from tests.tools.replay.seen import TIERS, seen

OBJECTIVES = {"high": Objective(1_000_000, 100_000, 4), "normal": Objective(3_000_000, 200_000, 1)}


def figures(*found: object, objectives: dict[str, Objective] | None = None) -> RunFigures:
    chosen = OBJECTIVES if objectives is None else objectives
    return measure("replay", "by tier", TIERS, found, [64] * len(found), objectives=chosen)  # type: ignore[arg-type]


def test_attainment_and_gain_are_over_all_that_was_offered() -> None:
    run = figures(
        seen("high", 0.0, 0.5, runs_s=1.0),  # 11 tokens, 0.1 s apart
        seen("high", 0.0, 0.5, runs_s=2.0),  # 0.2 s apart: the sixth is due at 1.5 s, when it comes
        seen("high", 0.0, 1.5, runs_s=0.0),  # the first six, due at 1.0 to 1.5 s, are late
        seen("high", 0.0, None, error="503", output_tokens=0),
        seen("batch", 0.0, 9.0),
    )
    high = run.objectives.tiers["high"]
    assert (high.requests, high.met) == (4, 1)
    assert high.tdg == pytest.approx((11 + 5 + 5) / 44)
    assert list(run.objectives.tiers) == ["high"]


def test_tokens_of_a_heavier_tier_count_for_more() -> None:
    run = figures(seen("high", 0.0, 0.5, output_tokens=10), seen("normal", 0.0, 9.0, output_tokens=10, runs_s=0.9))
    assert run.objectives.total.tdg == pytest.approx(40 / 50)


def test_goodput_is_that_of_both_benchmarks_which_differ_for_one_token() -> None:
    run = figures(seen("high", 0.0, 0.5, runs_s=0.5), seen("high", 9.0, 0.5, runs_s=0.5, output_tokens=1))
    assert run.objectives.total.goodput_vllm == pytest.approx(2 / 10)
    assert run.objectives.total.goodput_aiperf == pytest.approx(1 / 10)


def test_an_answer_that_does_not_stream_is_good_for_none_of_them() -> None:
    run = figures(seen("high", 0.0, None))
    assert (run.objectives.total.met, run.objectives.total.goodput_vllm) == (0, 0)


def test_without_an_objective_nothing_is_said() -> None:
    run = figures(seen("high", 0.0, 0.5), objectives={})
    assert run.objectives is None
    assert lines(run.objectives) == []
    assert "Goodput" not in table([run])


def test_the_table_and_the_json_have_them() -> None:
    run = figures(seen("high", 0.0, 0.5), seen("high", 0.0, None, error="503"))
    shown = table([run])
    assert "Objectives over all 2 requests offered: 50.0% met, TDG 50.0%. By tier: high 50.0% met, TDG 50.0%." in shown
    assert "requests/s as vLLM's benchmark defines it" in shown
    assert msgspec.json.decode(msgspec.json.encode(run))["objectives"]["total"]["met"] == 1
