"""Golden programs: a file of random programs with the answers that a scheduler gave, step by step.

A program has the words of `rules/*.json`, which no class of the product knows: a header of JSON, and a row for each
step, `[AT] VERB WORDS > ADMITTED ! CHOSEN`. AT is in seconds, that of the row before where it is left out. ADMITTED are
ids, `@` an engine, and in brackets each rule by which the ticket passed the head of other tiers that had come before,
with these tiers. CHOSEN are leases to be taken back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

Program = dict[str, Any]
Step = dict[str, Any]

FILE = Path(__file__).parent / "golden" / "programs.txt"
GAIN = ("weight", "tokens", "cost", "deadline", "start_by", "slack")
NUMBERS = {"requests", "prompt", "tokens", "weight"}
ROWS: dict[str, tuple[str, ...]] = {
    "submit": ("id", "tier", "tokens", "tenant", "weight"),
    "cancel": ("id",),
    "settle": ("id",),
    "prefilled": ("id",),
    "keep": ("id",),
    "requeue": ("id",),
    "hand_back": ("id",),
    "resize": ("id", "tokens"),
    "charge": ("tier", "tenant", "weight", "tokens"),
    "cap": ("engine", "requests", "until"),
    "engines": ("engines",),
    "wait": (),
}
"""The words of each step, in order. `requests`, `prompt`, `hits`, `barred` and `gain` follow by name."""


class Player(Protocol):
    """A scheduler with one program."""

    def do(self, step: Step, now_us: int) -> None: ...

    def dispatch(self, now_us: int) -> list[tuple[str, str | None, dict[str, str]]]: ...

    def preempt(self, now_us: int) -> list[str]: ...


def play(player: Player, step: Step) -> str:
    """One step, and its answer as the file writes it."""
    now_us = round(step["at"] * 1e6)
    player.do(step, now_us)
    admitted = [_admitted(*each) for each in player.dispatch(now_us)]
    chosen = player.preempt(now_us)
    return " ".join(
        [*(["> " + " ".join(admitted)] if admitted else []), *(["! " + " ".join(chosen)] if chosen else [])]
    )


def _admitted(ticket: str, engine: str | None, reasons: dict[str, str]) -> str:
    by_rule: dict[str, list[str]] = {}
    for tier, rule in reasons.items():
        by_rule.setdefault(rule, []).append(tier)
    why = ";".join(f"{rule}:{','.join(tiers)}" for rule, tiers in by_rule.items())
    return ticket + (f"@{engine}" if engine else "") + (f"({why})" if why else "")


def read(path: Path = FILE) -> list[Program]:
    programs: list[Program] = []
    at = ""
    for row in path.read_text(encoding="utf-8").splitlines():
        if row.startswith("{"):
            programs.append({**json.loads(row), "steps": []})
            at = "0"
        elif row:
            at, asked = row.split(" ", 1) if row[0].isdigit() else (at, row)
            programs[-1]["steps"].append(step_of(f"{at} {asked}"))
    return programs


def write(programs: Iterable[Program], path: Path = FILE) -> None:
    path.write_text("\n".join(row for program in programs for row in rows(program)), encoding="utf-8")


def rows(program: Program) -> Iterator[str]:
    header = {key: value for key, value in program.items() if key != "steps"}
    yield json.dumps(header, separators=(",", ":"))
    before = "0"
    for step in program["steps"]:
        at, row = row_of(step).split(" ", 1)
        yield f"{row if at == before else f'{at} {row}'} {step['answer']}".rstrip()
        before = at
    yield ""


def row_of(step: Step) -> str:
    """A step without its answer."""
    words = [f"{step['at']:g}", step["do"], *(_text(name, step[name]) for name in ROWS[step["do"]])]
    named = ("requests", "prompt", "hits", "barred", "gain") if step["do"] in ("submit", "hand_back") else ()
    return " ".join([*words, *(f"{name}={_text(name, step[name])}" for name in named if name in step)])


def _text(name: str, value: Any) -> str:
    if name == "engines":
        return json.dumps(value, separators=(",", ":"))
    if name == "gain":
        return ",".join(f"{value[name]:g}" for name in GAIN)
    if isinstance(value, (list, tuple)):
        return ",".join(":".join(map(str, each)) if isinstance(each, (list, tuple)) else each for each in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def step_of(row: str) -> Step:
    marks = [at for mark in (" > ", " ! ") if (at := row.find(mark)) >= 0]
    asked, answer = (row[: min(marks)], row[min(marks) + 1 :]) if marks else (row, "")
    at, verb, *words = asked.split(" ")
    names = ROWS[verb]
    step: Step = {"at": float(at), "do": verb, **dict(zip(names, words, strict=False))}
    step |= dict(word.split("=") for word in words[len(names) :])
    return {name: _value(name, value) for name, value in step.items()} | {"answer": answer}


def _value(name: str, value: Any) -> Any:
    if name in NUMBERS:
        return int(value)
    if name == "until":
        return float(value)
    if name == "hits":
        return [(engine, int(tokens)) for engine, tokens in (each.split(":") for each in value.split(",") if each)]
    if name == "barred":
        return [each for each in value.split(",") if each]
    if name == "engines":
        return json.loads(value)
    if name == "gain":
        figures = dict(zip(GAIN, map(float, value.split(",")), strict=True))
        return figures | {each: int(figures[each]) for each in ("weight", "tokens")}
    return value


MOST_SHOWN = 20


def report(found: list[str]) -> str:
    """The first of the differences, for a reviewer."""
    more = [f"and {len(found) - MOST_SHOWN} programs more"] if len(found) > MOST_SHOWN else []
    return "\n".join(
        ["the first other answer of each program (record_golden.py records them anew):", *found[:MOST_SHOWN], *more]
    )


def differences(programs: Iterable[Program], player_of: Callable[[Program], Player]) -> list[str]:
    """The first answer of each program that is not the recorded one, in words for a reviewer."""
    found = []
    for program in programs:
        player = player_of(program)
        for number, step in enumerate(program["steps"], 1):
            if (answer := play(player, step)) != step["answer"]:
                found.append(
                    f"{program['name']}, step {number}: {row_of(step)}\n"
                    f"  - {step['answer'] or 'nothing'}\n  + {answer or 'nothing'}"
                )
                break
    return found
