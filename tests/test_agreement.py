"""A thousand replayed requests: the answers, the spans and the metrics tell of the same waits."""

from __future__ import annotations

import pytest

from benchmarks.agreement import MOST_APART, measure, table, worst


@pytest.mark.long
def test_waits_and_starvation_add_up_to_the_same_wherever_they_are_reported() -> None:
    found = measure(1000)
    assert worst(found) <= MOST_APART, table(found)
    answers = found["answers"]
    assert set(answers) == {"high", "normal", "low", "batch"}
    assert answers["low"].starvation_s > answers["high"].starvation_s, "an overload in which nothing was overtaken"
    assert answers["batch"].queue_wait_s > 1.0
