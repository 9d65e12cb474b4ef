"""The literal reference gives the answers of every scenario of the rules: only then may it judge others."""

from __future__ import annotations

from tests.scheduling import reference
from tests.scheduling.programs import scenarios


def test_it_gives_the_answers_that_were_worked_out() -> None:
    wrong = []
    for scenario in scenarios():
        for step, answer in zip(scenario["steps"], reference.answers(scenario), strict=True):
            expected = {"admitted": step["admitted"], "chosen": step.get("chosen", [])}
            if answer != expected:
                wrong.append(f"{scenario['name']}, at {step['at']}: {answer}, not {expected}; {scenario['lesson']}")
                break
    assert wrong == []


def test_there_is_a_scenario_for_each_of_the_rules() -> None:
    assert len(scenarios()) == 269
