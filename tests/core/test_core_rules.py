"""The core gives every answer of the literal reference: of its scenarios, the golden programs, and random programs."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from core_player import CorePlayer
from hypothesis import given
from hypothesis import strategies as st

SCHEDULING = Path(__file__).parent.parent / "scheduling"
sys.path.insert(0, str(SCHEDULING))

import reference  # noqa: E402
from golden_programs import read  # noqa: E402
from record_golden import STEPS, Author, random_header  # noqa: E402


def first_difference(program: dict[str, Any]) -> str | None:
    """The first step whose answer is not the reference's. Its tags are divided as doubles, as a product's are."""
    judge, core = reference.new(program), CorePlayer(program)
    judge.divide = lambda tokens, weight: tokens / weight
    for number, step in enumerate(program["steps"], 1):
        now = round(step["at"] * 1e6)
        judge.do(step, now)
        core.do(step, now)
        expected = (judge.dispatch(now), judge.preempt(now))
        found = (core.dispatch(now), core.preempt(now))
        if found != expected:
            return f"{program['name']}, step {number} {step}: {found}, not {expected}"
    return None


def test_it_gives_the_answers_of_every_scenario() -> None:
    wrong, played = [], 0
    for file in sorted((SCHEDULING / "rules").glob("*.json")):
        for scenario in json.loads(file.read_text(encoding="utf-8")):
            played += 1
            core = CorePlayer(scenario)
            for step in scenario["steps"]:
                now = round(step["at"] * 1e6)
                core.do(step, now)
                entered = [(it["id"], it.get("engine", "pool#1")) for it in step["admitted"]]
                expected = (entered, step.get("chosen", []))
                if (found := (core.dispatch(now), core.preempt(now))) != expected:
                    wrong.append(f"{file.stem}: {scenario['name']}, at {step['at']}: {found}, not {expected}")
                    break
    assert (played, wrong) == (214, [])


def test_it_gives_the_answers_of_golden_programs() -> None:
    assert [found for program in read()[::10] if (found := first_difference(program))] == []


@pytest.mark.long
def test_it_gives_the_answers_of_all_golden_programs() -> None:
    assert [found for program in read() if (found := first_difference(program))] == []


@given(st.integers(0, 2**32), st.booleans(), st.booleans())
def test_it_answers_random_programs_as_the_reference(seed: int, several: bool, by_gain: bool) -> None:
    luck = random.Random(seed)
    header = random_header(luck, f"seed {seed}", several=several, by_gain=by_gain)
    assert first_difference(Author(luck, header).write(STEPS)) is None
