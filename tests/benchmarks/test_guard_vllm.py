"""The benchmark of the guard before a real vLLM: its load, its policies, and that its targets can be missed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.guard_vllm import (
    ALONE,
    CONSTANT,
    GUARDED,
    UNBOUNDED,
    Figures,
    Objectives,
    Row,
    best_constant,
    missed,
)
from sidecar.policy.compiler import load

pytestmark = pytest.mark.long

HELD = Figures(
    requests=115,
    met=0.99,
    met_ttft=0.99,
    met_tpot=1.0,
    ttft_p50_ms=40.0,
    ttft_p97_ms=60.0,
    wait_p97_ms=0.0,
    tpot_p50_ms=14.0,
    tpot_p97_ms=18.0,
    batch_tokens_per_s=200.0,
    running=4.0,
    failed=0,
    stalled_ms=10.0,
    load=3.0,
    without_core=0.05,
)
BROKEN = replace(HELD, met=0.1, batch_tokens_per_s=600.0)
FORTY, TWENTY, TEN = CONSTANT


def rows(changed: dict[Row, Figures] | None = None) -> dict[Row, Figures]:
    """A run that reaches every target, but for what is changed."""
    usual = {ALONE: HELD, UNBOUNDED: BROKEN, FORTY: BROKEN, TWENTY: HELD, TEN: HELD, GUARDED: HELD}
    return {**usual, **(changed or {})}


@pytest.mark.parametrize("row", [ALONE, UNBOUNDED, *CONSTANT])
def test_each_policy_can_be_used(tmp_path: Path, row: Row) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(row.policy(Objectives(0.0635, 0.0268)))
    assert load(path).tiers[0].slo.tpot_s == 0.0268


def test_the_best_constant_limit_is_the_largest_that_holds_or_else_the_one_that_holds_most() -> None:
    assert best_constant(rows()) == TWENTY
    assert best_constant(rows({TWENTY: replace(HELD, met=0.95), TEN: replace(HELD, met=0.96)})) == TEN


def test_a_target_that_is_missed_is_named() -> None:
    assert missed(rows()) == []
    without = rows()
    del without[GUARDED]
    assert missed(without) == []
    for changed, named in (
        ({TEN: replace(HELD, failed=3)}, "3 requests failed"),
        ({UNBOUNDED: replace(BROKEN, met=0.6)}, "does not break it"),
        ({TWENTY: BROKEN, TEN: BROKEN}, "no limit holds it"),
        ({GUARDED: replace(HELD, met=0.91)}, "0.910 met the SLO, less than 0.920"),
        ({GUARDED: replace(HELD, batch_tokens_per_s=140.0)}, "0.70 of the batch tokens"),
    ):
        assert [one for one in missed(rows(changed)) if named in one], named
