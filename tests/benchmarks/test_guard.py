"""The guard's benchmark: its demands, and one short run."""

from __future__ import annotations

import pytest

from benchmarks.guard import QUICK_S, SETTINGS, Outcome, measure, row, text

pytestmark = pytest.mark.long


def test_the_best_constant_limit_is_the_one_with_most_batch_that_holds() -> None:
    limits = {0.1: [Outcome(0.99, 100)], 0.2: [Outcome(0.98, 200)], 0.4: [Outcome(0.5, 400)]}
    found = row(SETTINGS[0], {**limits, "guard": [Outcome(0.96, 191)]})
    assert (found.limit, found.short) == (0.2, [])
    assert row(SETTINGS[0], {**limits, "guard": [Outcome(0.94, 180)]}).short == ["met 0.950", "batch 190"]
    assert row(SETTINGS[1], {**limits, "guard": [Outcome(0.96, 191)]}).short == ["batch 260"], "in bursts"


def test_where_none_holds_it_is_the_one_that_holds_most() -> None:
    limits = {0.1: [Outcome(0.9, 100)], 0.2: [Outcome(0.8, 200)]}
    found = row(SETTINGS[0], {**limits, "guard": [Outcome(0.89, 100)]})
    assert (found.limit, found.short) == (0.1, [])


@pytest.mark.parametrize("finishes", [False, True])
def test_a_short_run_has_a_row_for_each_setting(finishes: bool) -> None:
    rows = measure([1], QUICK_S, (0.1,), finishes=finishes)
    assert len(text(rows).splitlines()) == 1 + len(SETTINGS)
    assert not any("PASS" in line or "short" in line for line in text(rows, has_demands=False).splitlines())
    again = measure([1], QUICK_S, (0.1,), finishes=finishes)
    assert rows == again, "virtual time"
