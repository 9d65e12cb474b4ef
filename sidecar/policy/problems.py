"""Problems in a policy: what is wrong, where, and what would be right. One line each, all reported at once."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

Path = tuple[str | int, ...]
"""Where a value stands in a file: ("tiers", "high", "reserve")."""

Found = Iterator[tuple[Path, str]]
"""Sentences about values, each with where its value stands."""

_ADDRESS = re.compile(r":/+")
_KEY = re.compile(r"\bsk-[\w-]{4,}|sk-[\w-]{16,}")
"""An API key as `sidecar keys new` and the providers make them, also where something was left before it."""


@dataclass(frozen=True, slots=True)
class FilePlace:
    """A line of a file, counted from 1; None for the file as a whole, such as one that cannot be read."""

    file: str
    line: int | None

    def __str__(self) -> str:
        file = printable(self.file, 300)
        return file if self.line is None else f"{file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake or one warning. `message` reads *what is wrong; what would be right*; `place` is None if unknown."""

    path: str
    message: str
    place: FilePlace | None = None

    def __str__(self) -> str:
        return ": ".join(str(part) for part in (self.place, self.path, self.message) if part)


class PolicyError(ValueError):
    """A policy that cannot be used. `problems` holds every mistake found; as text it is one line for each."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


def dotted(path: Path) -> str:
    """`("tiers", "high", "reserve")` as an operator reads it: `tiers.high.reserve`; a list counts from 0: `keys[0]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{printable(part)}"
    return text.removeprefix(".")


def masked(text: str) -> str:
    """The text with `***` for an address's user and password and for API keys, wherever one was written by mistake."""
    text = _KEY.sub("sk-***", text)
    before, at, after = text.rpartition("@")
    begin = _ADDRESS.search(before)
    return f"{before[: begin.end()]}***@{after}" if at and begin else text


def printable(text: str, longest: int = 60) -> str:
    """The text on one line, not longer than a line and without a password or a key, whatever it holds."""
    text = masked(text)
    short = text if len(text) <= longest else text[: longest - 3] + "..."
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in short)


def quoted(text: str) -> str:
    """The text in double quotes, safe to show on one line."""
    return f'"{printable(text)}"'


def unknown(what: str, name: str, known: Sequence[str]) -> str:
    """The message for a name that does not exist, with the nearest one that does."""
    return f"{quoted(name)} is no {what}; {suggestion(name, known, f'the {what}s are')}"


def suggestion(name: str, known: Sequence[str], otherwise: str) -> str:
    """`did you mean "high"?`, or where nothing is near: `otherwise` and all that there is."""
    near = difflib.get_close_matches(name.lower()[:60], known, n=1, cutoff=0.6)
    return f"did you mean {quoted(near[0])}?" if near else f"{otherwise} {', '.join(map(printable, known))}"
