"""When an ended process is started again: at once, then after growing pauses, and not for ever."""

from __future__ import annotations

import signal

PAUSES_S = (0.0, 1.0, 2.0, 4.0)
"""A process that ends once was unlucky; one that ends again and again would take the processor from the others."""
STEADY_S = 10.0
"""A process that ran for so long has not failed at its start."""


class Restarts:
    """The restarts of one process."""

    def __init__(self) -> None:
        self.total = 0
        self._in_a_row = 0

    def pause_s(self, ran_s: float) -> float | None:
        """How long to wait before the next start, in seconds. None: the process has ended too often in a row.

        `ran_s` is for how long it did its work, 0 where it did not come so far.
        """
        if ran_s >= STEADY_S:
            self._in_a_row = 0
        if self._in_a_row >= len(PAUSES_S):
            return None
        self._in_a_row += 1
        self.total += 1
        return PAUSES_S[self._in_a_row - 1]

    def pause_again_s(self) -> float:
        """Pause before a start that may be repeated for as long as it takes."""
        self.total += 1
        return PAUSES_S[-1]


def how_it_ended(code: int) -> str:
    """In words, from a process's return code."""
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
