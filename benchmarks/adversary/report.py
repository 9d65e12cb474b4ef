"""One line of the table: an attack, what it did, and what was asked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    """One figure, and what is asked of it; `holds` is None where nothing is."""

    attack: str
    figure: str
    asked: str = ""
    holds: bool | None = None


def at_most(attack: str, value: float, limit: float, unit: str = "", digits: int = 2) -> Line:
    """A figure that must not be above a limit."""
    return Line(attack, f"{value:.{digits}f}{unit}", f"at most {limit:g}{unit}", value <= limit)


def at_least(attack: str, value: float, limit: float, unit: str = "", digits: int = 2) -> Line:
    """A figure that must not be below a limit."""
    return Line(attack, f"{value:.{digits}f}{unit}", f"at least {limit:g}{unit}", value >= limit)


_MARKS = {None: "", True: "holds", False: "BROKEN"}


def table(lines: Sequence[Line]) -> str:
    """A line for each figure."""
    return "\n".join(f"{one.attack:72}{one.figure:>26}  {one.asked:30}{_MARKS[one.holds]}".rstrip() for one in lines)


def as_json(lines: Sequence[Line]) -> str:
    """The same for programs."""
    found = [
        {"attack": one.attack.strip(), "figure": one.figure, "asked": one.asked, "holds": one.holds} for one in lines
    ]
    return json.dumps(found, indent=2) + "\n"
