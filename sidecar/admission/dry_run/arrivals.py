"""Arrivals of one tier: whether its clients send the next request because an earlier one has ended.

Such clients ("closed loop", B. Schroeder, A. Wierman, M. Harchol-Balter, "Open Versus Closed: A Cautionary Tale", NSDI
2006) send as often as they are answered. When enforcing, they would send more or fewer than they do while observing, so
no dry run can know how long they would wait.

An arrival *follows* where a request of the tier has ended shortly before: within `SHORTLY` of the mean time between
arrivals. Independent arrivals follow by chance in `1 - exp(-SHORTLY)` of all cases, which is 26%. Those of a closed
loop without a pause follow nearly always; a client that pauses for longer is not found. Only arrivals at a time when
the pool would be full count: at other times it does not matter.
"""

from __future__ import annotations

SHORTLY = 0.3
_WEIGHT = 1 / 16
"""Of a new interval in the mean: the rate is that of the last few seconds."""


class Arrivals:
    """Counts arrivals and those that follow. Times in microseconds of one clock."""

    __slots__ = ("_before_us", "_end_us", "_ended", "_mean_us", "counted", "followed")

    def __init__(self) -> None:
        self.counted = 0
        self.followed = 0
        self._before_us: int | None = None
        self._end_us = 0
        self._ended = 0
        self._mean_us = 0.0

    def arrived(self, now_us: int, *, is_crowded: bool) -> None:
        """A request has come; `is_crowded` says whether more is under way than the pool has room for."""
        if self._before_us is not None:
            between_us = now_us - self._before_us
            self._mean_us += (between_us - self._mean_us) * (_WEIGHT if self._mean_us else 1.0)
            if is_crowded:
                self.counted += 1
                if self._ended and now_us - self._end_us <= SHORTLY * self._mean_us:
                    self.followed += 1
                    self._ended -= 1  # one end lets one request go
        self._before_us = now_us

    def ended(self, now_us: int) -> None:
        """A request has ended."""
        if now_us - self._end_us > SHORTLY * self._mean_us:
            self._ended = 0
        self._ended += 1
        self._end_us = now_us
