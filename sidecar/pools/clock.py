"""The clock of the pools."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns

Clock = Callable[[], int]


def monotonic_us() -> int:
    """The process's monotonic clock in whole microseconds."""
    return monotonic_ns() // 1000
