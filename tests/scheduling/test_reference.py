"""The literal reference gives the answers of every scenario of the rules: only then may it judge others."""

from __future__ import annotations

import json
from pathlib import Path

import reference

from tests.support.each import each

RULES = Path(__file__).parent / "rules"
FILES = ("lessons", "random", "fleet", "gain", "dense")


def scenarios_of(name: str) -> list[dict]:
    return json.loads((RULES / f"{name}.json").read_text(encoding="utf-8"))


@each("name", FILES)
def test_it_gives_the_answers_that_were_worked_out(name: str) -> None:
    wrong = []
    for scenario in scenarios_of(name):
        for step, answer in zip(scenario["steps"], reference.answers(scenario), strict=True):
            expected = {"admitted": step["admitted"], "chosen": step.get("chosen", [])}
            if answer != expected:
                wrong.append(f"{scenario['name']}, at {step['at']}: {answer}, not {expected}; {scenario['lesson']}")
                break
    assert wrong == []


def test_there_is_a_scenario_for_each_of_the_rules() -> None:
    assert sum(len(scenarios_of(name)) for name in FILES) == 214
