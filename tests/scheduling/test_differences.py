"""The answers that the rules change: each program and scenario, played by today's scheduler and by the reference.

`rules/differences.txt` has the first of each that is another, by the clause that explains it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import reference
from golden_programs import Program, Step, play, read
from test_reference import FILES, RULES, scenarios_of
from todays_scheduler import Today

Admitted = tuple[str, str | None, dict[str, str]]


class Row(NamedTuple):
    program: str
    step: int
    today: str
    by_the_rules: str


class Page:
    """The reference as a player. It gives no reasons."""

    def __init__(self, program: Program) -> None:
        self.pool = reference.new(program)
        self.has_engines = "engines" in program

    def do(self, step: Step, now_us: int) -> None:
        self.pool.do(step, now_us)

    def dispatch(self, now_us: int) -> list[Admitted]:
        return [(ticket, engine if self.has_engines else None, {}) for ticket, engine in self.pool.dispatch(now_us)]

    def preempt(self, now_us: int) -> list[str]:
        return self.pool.preempt(now_us)


class Silent(Today):
    def dispatch(self, now_us: int) -> list[Admitted]:
        return [(ticket, engine, {}) for ticket, engine, _ in super().dispatch(now_us)]


def all_programs() -> Iterator[Program]:
    yield from read()
    for name in FILES:
        yield from ({**scenario, "name": f"{name}: {scenario['name']}"} for scenario in scenarios_of(name))


def table() -> list[Row]:
    text = (RULES / "differences.txt").read_text(encoding="utf-8")
    found = [row.split(" | ") for row in text.splitlines() if " | " in row and not row.startswith("#")]
    return [Row(name, int(step), today, page) for name, step, today, page, *_ in found]


def first_difference(program: Program) -> Row | None:
    today, page = Silent(program), Page(program)
    for number, step in enumerate(program["steps"], 1):
        answers = play(today, step) or "nothing", play(page, step) or "nothing"
        if answers[0] != answers[1]:
            return Row(program["name"], number, *answers)
    return None


PROGRAMS = {program["name"]: program for program in all_programs()}


def wrong_rows(rows: list[Row]) -> list[str]:
    found = [(row, first_difference(PROGRAMS[row.program])) for row in rows]
    return [f"{row}\n  is {now}" for row, now in found if row != now]


def test_the_listed_answers_are_those_that_differ() -> None:
    wrong = wrong_rows(table()[::3])
    assert not wrong, "\n".join(wrong)


@pytest.mark.long
def test_all_listed_answers_differ_and_no_others() -> None:
    listed = {row.program: row for row in table()}
    assert len(PROGRAMS) == 514
    for name, program in PROGRAMS.items():
        assert first_difference(program) == listed.get(name), name


def test_each_answer_has_the_number_of_a_rule_and_one_engine_by_level_is_as_it_was() -> None:
    sections = re.findall(r"^([0-9])\. ", (RULES / "differences.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(sections) <= set("023456789")
    assert [row for row in table() if row.program.startswith(("one level", "lessons:", "random:"))] == []
