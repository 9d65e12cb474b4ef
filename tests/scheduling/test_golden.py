"""The golden programs: the scheduler still gives every recorded answer, so that each change of one is reviewed.

`record_golden.py` records the answers anew.
"""

from __future__ import annotations

from golden_programs import FILE, differences, read, report, rows
from todays_scheduler import Today

PROGRAMS = read()
ONE = [program for program in PROGRAMS if program["name"].startswith("one ")]


def of_a_fleet(program: dict) -> Today:
    return Today(program, is_fleet=True)


def test_the_schedulers_give_the_recorded_answers() -> None:
    assert len(PROGRAMS) == 300
    found = differences(PROGRAMS, Today)
    assert not found, report(found)


def test_one_engine_is_a_fleet_of_one() -> None:
    assert len(ONE) == 150
    found = differences(ONE, of_a_fleet)
    assert not found, report(found)


def test_the_programs_reach_each_word_and_each_reason() -> None:
    steps = [step for program in PROGRAMS for step in program["steps"]]
    assert {step["do"] for step in steps} == {
        *("submit", "cancel", "settle", "prefilled", "keep", "requeue", "hand_back", "resize", "charge", "cap"),
        *("engines", "wait"),
    }
    answers = " ".join(step["answer"] for step in steps)
    reasons = ("always_first", "reserve", "reserve_turn", "level", "gain", "limit", "passed_over", "claim")
    assert [reason for reason in reasons if f"{reason}:" not in answers] == []
    assert answers.count("!") > 30


def test_another_scheduler_is_noticed_and_the_report_names_the_program_the_step_and_both_answers() -> None:
    """A negative control: a newcomer is admitted after all others of its tier, whatever its tenant had."""

    class Unfair(Today):
        def submit(self, step: dict, now_us: int) -> None:
            super().submit({**step, "tenant": "", "weight": 1}, now_us)

    (program,) = (it for it in PROGRAMS if it["name"] == "one level 1")
    step = next(it for it in program["steps"] if it["answer"])
    changed = {**program, "steps": [it if it is not step else {**it, "answer": "> r99"} for it in program["steps"]]}
    (report,) = differences([changed], Today)
    assert report.startswith("one level 1, step ")
    assert f"\n  - > r99\n  + {step['answer']}" in report
    assert len(differences(PROGRAMS, Unfair)) > 20


def test_the_file_is_what_its_programs_say() -> None:
    assert "\n".join(row for program in PROGRAMS for row in rows(program)) == FILE.read_text(encoding="utf-8")
