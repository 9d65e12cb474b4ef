"""Replay budget: a broken engine must not double the load of the others.

Within any minute at most a share of that minute's admissions is replayed, and `LEAST` replays in any case. The minute
slides in steps of a second. One object costs 60 pairs of numbers, and a request one addition.
"""

from __future__ import annotations

from fractions import Fraction

LEAST = 10
"""Replays within a minute that are allowed at any load: else the engine of a quiet pool could not fail unseen."""
MINUTE_S = 60
_SECOND_US = 1_000_000


class ReplayBudget:
    """The replays of one pool in one process. Times are microseconds of one clock that does not go back."""

    def __init__(self, share: Fraction, least: int = LEAST) -> None:
        self.share = share
        self._least = least
        self._admissions = [0] * MINUTE_S
        self._replays = [0] * MINUTE_S
        self._admitted = self._replayed = 0
        self._second = 0

    def admitted(self, now_us: int) -> None:
        """A request was admitted. A replay's own admission is none."""
        self._slide(now_us)
        self._admissions[self._second % MINUTE_S] += 1
        self._admitted += 1

    def take(self, now_us: int) -> bool:
        """Takes one replay out of the budget. False, and nothing changes, where none is left."""
        self._slide(now_us)
        if self.left <= 0:
            return False
        self._replays[self._second % MINUTE_S] += 1
        self._replayed += 1
        return True

    @property
    def left(self) -> int:
        """Replays that were left at the last call."""
        return max(self._least, int(self.share * self._admitted)) - self._replayed

    def _slide(self, now_us: int) -> None:
        """Forgets the seconds that lie a minute back."""
        second = now_us // _SECOND_US
        for passed in range(self._second + 1, min(second, self._second + MINUTE_S) + 1):
            self._admitted -= self._admissions[passed % MINUTE_S]
            self._replayed -= self._replays[passed % MINUTE_S]
            self._admissions[passed % MINUTE_S] = self._replays[passed % MINUTE_S] = 0
        self._second = max(second, self._second)
