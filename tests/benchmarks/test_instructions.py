"""Budgets of instructions: what exceeds one fails, and what cannot be compared is never passed over in silence."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from benchmarks.instructions import __main__ as command
from benchmarks.instructions import budgets, marks
from benchmarks.instructions.counters import (
    IDLE,
    Callgrind,
    CannotCount,
    Perf,
    call,
    perf_total,
)

pytestmark = pytest.mark.long

NEEDS_VALGRIND = pytest.mark.skipif(None in map(shutil.which, ("valgrind", "vgdb")), reason="valgrind is not installed")
HERE = {"build": budgets.python_build(), "packages": budgets.installed_packages()}
PERF_OUTPUT = "# started on Sun Nov 22 05:08:26 2026\n\n{}\n"


def entry(**instructions: int) -> budgets.Entry:
    return budgets.Entry(budgets.python_build(), budgets.installed_packages(), instructions)


@pytest.mark.parametrize(
    ("lines", "total"),
    [
        ("2718281828,,instructions:u,915000000,100.00,1.21,insn per cycle", 2_718_281_828),
        (
            "2000,,cpu_core/instructions:u/,900,90.00,,\n3000,,cpu_atom/instructions:u/,100,10.00,,",
            5000,
        ),
        ("2000,,cpu_core/instructions:u/,900,90.00,,\n<not counted>,,cpu_atom/instructions:u/,0,0.00,,", 2000),
    ],
)
def test_the_output_of_perf_is_read(lines: str, total: int) -> None:
    assert perf_total(PERF_OUTPUT.format(lines)) == total


@pytest.mark.parametrize(
    "lines", ["", "<not supported>,,instructions:u,0,100.00,,", "<not counted>,,instructions:u,0,0.00,,"]
)
def test_a_processor_without_a_counter_is_no_figure(lines: str) -> None:
    with pytest.raises(CannotCount):
        perf_total(PERF_OUTPUT.format(lines))


def test_perf_subtracts_what_a_program_costs_without_repetitions() -> None:
    def run(prefix: Sequence[str], _environment: Mapping[str, str], parts: Mapping[str, int]) -> dict[str, float]:
        [(name, count)] = parts.items()
        each = {"mounted": 400, "pool": 90}[name]
        Path(prefix[prefix.index("-o") + 1]).write_text(f"{5_000_000 + each * count},,instructions:u,1,100.00,,\n")
        return {}

    assert Perf().measure(run, ["mounted", "pool", IDLE]) == {"mounted": 400, "pool": 90}


def dumps(prefix: Sequence[str], totals: Sequence[int]) -> None:
    output = prefix[-1].removeprefix("--callgrind-out-file=")
    for number, total in enumerate(totals, start=1):
        Path(f"{output}.{number}").write_text(f"totals: {total}\n")


def test_callgrind_counts_what_is_between_two_marks() -> None:
    def run(prefix: Sequence[str], environment: Mapping[str, str], parts: Mapping[str, int]) -> dict[str, float]:
        assert environment[marks.CALLGRIND_VARIABLE]
        assert environment["PYTHONHASHSEED"] == "0"
        dumps(prefix, [9_000_000, 400 * parts["mounted"], 1_000_000, 90 * parts["mounted_chunk"]])
        return {}

    measured = Callgrind().measure(run, ["mounted", "mounted_chunk"])
    assert measured == {"mounted": 400, "mounted_chunk": 90}
    with pytest.raises(CannotCount, match="4 dumps instead of 6"):
        Callgrind().measure(run, ["mounted", "mounted_chunk", "pool"])


@pytest.mark.parametrize("slower", [1, 3])
def test_background_tasks_are_subtracted_however_long_a_busy_machine_took(slower: int) -> None:
    def run(prefix: Sequence[str], _environment: Mapping[str, str], parts: Mapping[str, int]) -> dict[str, float]:
        seconds = {"proxied": 10.0 * slower, IDLE: 5.0}
        work = {"proxied": 400 * parts["proxied"], IDLE: 0}
        dumps(prefix, [n for name in parts for n in (7, work[name] + round(2_000_000 * seconds[name]))])
        return seconds

    assert Callgrind().measure(run, ["proxied", IDLE]) == {"proxied": 400}


@NEEDS_VALGRIND
def test_callgrind_counts_a_real_program() -> None:
    """Twice the repetitions are twice the instructions; the rest of the program is not counted."""
    program = (
        "import sys; from benchmarks.instructions import marks\n"
        "for repetitions in sys.argv[1:]:\n"
        "    marks.begin()\n"
        "    for i in range(int(repetitions)): str(i)\n"
        "    marks.end()\n"
    )

    def run(prefix: Sequence[str], environment: Mapping[str, str], parts: Mapping[str, int]) -> dict[str, float]:
        repetitions = [str(int(name) * count) for name, count in parts.items()]
        call([*prefix, sys.executable, "-c", program, *repetitions], environment)
        return {}

    measured = Callgrind().measure(run, ["10", "20"])
    assert measured["20"] == pytest.approx(2 * measured["10"], rel=0.02)
    assert 1_000 < measured["10"] < 50_000


def test_the_command_names_the_figure_the_budget_and_the_packages_that_changed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    older = budgets.Entry(HERE["build"], {**HERE["packages"], "starlette": "0.1"}, {"mounted": 340_000})
    assert command.check({"mounted": 400_000.0}, older, "perf") == 1
    said = capsys.readouterr().err
    assert "BUDGET EXCEEDED: mounted: 400,000 instructions, +17.6% to the budget of 340,000" in said
    assert "starlette 0.1 -> " in said
    assert command.check({"mounted": 360_000.0}, older, "perf") == 0


@pytest.mark.parametrize(
    ("of", "reason"),
    [
        (None, f"no budgets for perf and Python {budgets.python_minor()}"),
        (budgets.Entry("CPython s390x", {}, {"mounted": 1}), "of the build 'CPython s390x'"),
        (entry(pool=1), "no budget for mounted"),
    ],
)
def test_what_cannot_be_compared_is_said_loudly_and_fails_nothing(
    of: budgets.Entry | None, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.check({"mounted": 400_000.0}, of, "perf") == 0
    said = capsys.readouterr()
    assert "NOT CHECKED" in said.err
    assert reason in said.err
    assert "within" not in said.out


def test_a_machine_without_any_tool_is_not_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    monkeypatch.setattr(sys, "argv", ["instructions", "--check"])
    assert command.main() == 0
    said = capsys.readouterr().err
    assert "NOT CHECKED: perf: perf is not installed; callgrind: valgrind and vgdb not installed" in said


def test_written_budgets_leave_those_of_other_tools_and_pythons_alone(tmp_path: Path) -> None:
    file = tmp_path / "budgets.json"
    other = {**HERE, "instructions": {"mounted": 7}}
    file.write_text(json.dumps({"perf": {"3.9": other}}))
    budgets.write(file, "perf", {"mounted": 400_000.4, "pool": 90_000})
    budgets.write(file, "perf", {"pool": 80_000})
    assert budgets.read(file)["perf"]["3.9"] == other
    assert budgets.entry_of(file, "perf") == entry(mounted=400_000, pool=80_000)
    assert budgets.entry_of(file, "callgrind") is None


def test_every_committed_entry_has_every_budget() -> None:
    wanted = {name for name, figure in command.FIGURES.items() if figure.has_budget}
    tools = [counter.name for counter in command.COUNTERS]
    by_tool = budgets.read(budgets.FILE)
    entries = [entry for tool in tools for entry in by_tool.get(tool, {}).values()]
    assert entries
    assert all(set(entry["instructions"]) == wanted for entry in entries)
