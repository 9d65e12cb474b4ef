"""The core gives every answer of the literal reference: of its scenarios, and of random programs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scheduling.player import first_difference
from tests.scheduling.programs import programs, random_program, scenarios


def test_it_gives_the_answers_of_every_scenario() -> None:
    assert [found for scenario in scenarios() if (found := first_difference(scenario))] == []


@given(st.integers(0, 2**32), st.booleans(), st.booleans())
def test_it_answers_random_programs_as_the_reference(seed: int, several: bool, by_gain: bool) -> None:
    assert first_difference(random_program(seed, several=several, by_gain=by_gain)) is None


@pytest.mark.long
def test_it_gives_the_answers_of_300_programs() -> None:
    assert [found for program in programs(range(300)) if (found := first_difference(program))] == []


def test_the_programs_reach_each_word() -> None:
    steps = [step for program in programs(range(40)) for step in program["steps"]]
    assert {step["do"] for step in steps} == {
        *("submit", "cancel", "settle", "prefilled", "keep", "requeue", "hand_back", "resize", "charge", "cap"),
        *("engines", "wait"),
    }
    assert sum(bool(step["chosen"]) for step in steps) > 3
