"""Trust in a tenant's hints of its output lengths (`nvext.agent_hints.osl`)."""

from __future__ import annotations

FEWEST_HINTED = 20
"""Answers with a hint before a tenant's hints may lower what its requests hold."""
MOST_BROKEN = 0.05
"""The share of answers that may be longer than twice their hint."""
MARGIN = 2
"""A trusted hint is held so many times: a hint is a guess, and twice it rarely proves too little."""
_KEPT = 0.5 ** (1 / 200)
"""What a sample still counts after one more: half after 200."""


class Hints:
    """How the hints of one tenant held so far. `answers` counts those that showed it; it does not decay."""

    __slots__ = ("_broken", "_weight", "answers")

    def __init__(self) -> None:
        self.answers = 0
        self._weight = 0.0
        self._broken = 0.0

    def learn(self, hint: int, length: int, *, is_censored: bool) -> None:
        """Adds an answer. One that was cut short before twice its hint shows nothing."""
        is_broken = length > MARGIN * hint
        if is_censored and not is_broken:
            return
        self.answers += 1
        self._weight = self._weight * _KEPT + 1.0
        self._broken = self._broken * _KEPT + is_broken

    @property
    def are_trusted(self) -> bool:
        """There were enough answers, and few of them were much longer than their hint."""
        return self.answers >= FEWEST_HINTED and self._broken <= MOST_BROKEN * self._weight
