"""The bound on lines of one kind: the first few of every second pass, the others are counted."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

Kind = TypeVar("Kind")

LINES_PER_S = 20
"""Of one kind: enough for a reader, and 20 lines cost an event loop less than a thousandth of a second."""
WINDOW_S = 1.0
MOST_KINDS = 1000
"""Windows that are kept. There are so many kinds only where a text varies that should not."""


class _Window:
    __slots__ = ("allowed", "began_s", "left_out")

    def __init__(self, began_s: float) -> None:
        self.began_s = began_s
        self.allowed = 0
        self.left_out = 0


class FloodGuard(Generic[Kind]):
    """Lets the first few of each kind pass in every second. Use it from one thread, or under a lock.

    `now_s` is for tests.
    """

    def __init__(self, lines_per_s: int = LINES_PER_S, now_s: Callable[[], float] = time.monotonic) -> None:
        self._lines_per_s = lines_per_s
        self._now_s = now_s
        self._windows: dict[Kind, _Window] = {}

    def allows(self, kind: Kind) -> bool:
        """True if one more may be written; else it is counted."""
        now_s = self._now_s()
        window = self._windows.get(kind)
        if window is None or (now_s - window.began_s >= WINDOW_S and not window.left_out):
            window = self._begin(kind, now_s)
        if window.allowed < self._lines_per_s:
            window.allowed += 1
            return True
        window.left_out += 1
        return False

    def left_out(self) -> list[tuple[Kind, int]]:
        """The number left out of every kind since the last call, for the caller to report; the counts begin again."""
        counts = [(kind, window.left_out) for kind, window in self._windows.items() if window.left_out]
        for kind, _ in counts:
            del self._windows[kind]
        return counts

    def _begin(self, kind: Kind, now_s: float) -> _Window:
        if len(self._windows) >= MOST_KINDS:
            self._windows = {kind: window for kind, window in self._windows.items() if window.left_out}
        window = self._windows[kind] = _Window(now_s)
        return window
