"""Verdict on one figure: what was measured, what was to be reached, and whether it was."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """`is_met` is None where it could not be judged: that is no success."""

    what: str
    is_met: bool | None
    detail: str

    @staticmethod
    def at_most(what: str, value: float | None, bound: float) -> Verdict:
        """A figure that must not exceed its bound."""
        return Verdict(what, None if value is None else value <= bound, f"{_shown(value)}, at most {_shown(bound)}")

    @staticmethod
    def at_least(what: str, value: float | None, bound: float) -> Verdict:
        """A figure that must reach its bound."""
        return Verdict(what, None if value is None else value >= bound, f"{_shown(value)}, at least {_shown(bound)}")

    def __str__(self) -> str:
        said = {True: "reached", False: "MISSED", None: "NOT JUDGED"}[self.is_met]
        return f"{self.what:<68} {self.detail:<36} {said}"


def _shown(value: float | None) -> str:
    if value is None:
        return "none"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3f}"


def summary(verdicts: Iterable[Verdict]) -> str:
    """All of them, and how many were reached."""
    found = list(verdicts)
    reached = sum(verdict.is_met is True for verdict in found)
    return "\n".join([*map(str, found), f"{reached} of {len(found)} reached"])
