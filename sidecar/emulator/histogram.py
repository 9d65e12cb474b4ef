"""A Prometheus histogram: counts under rising bounds, and the sum."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate


class Histogram:
    """Observations in constant memory. `bounds` rise; +Inf is implied."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.sum = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    @property
    def count(self) -> int:
        """How many observations there were."""
        return sum(self._counts)

    def observe(self, value: float) -> None:
        """Adds one observation."""
        self.sum += value
        self._counts[bisect_left(self.bounds, value)] += 1

    def buckets(self) -> Iterator[tuple[str, int]]:
        """Each bound as Prometheus writes it, with the count at or below it."""
        names = [*map(str, self.bounds), "+Inf"]
        return zip(names, accumulate(self._counts), strict=True)
