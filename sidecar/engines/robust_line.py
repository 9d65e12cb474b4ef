"""Robust line through an engine's times, and the newest times that it is fitted to.

The slope is Theil's and Sen's: the median of the slopes between all pairs of points (P. K. Sen, "Estimates of the
regression coefficient based on Kendall's tau", JASA 63, 1968), each weighted by its length (G. L. Sievers, "Weighted
rank statistics for simple linear regression", JASA 73, 1978): an engine works in steps, and a short pair shows little
but these. Up to 29% of the points may be wrong by any amount.

No I/O and no clock. Times are microseconds, sizes are tokens or sequences.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import combinations, pairwise
from statistics import median
from typing import NamedTuple

KEPT = 16
"""Samples of a size class. A median of 16 stands 7 wrong ones."""
ENOUGH = 8
"""Samples from which on a line counts as learned: a median of 8 stands 3 wrong ones."""
RECENT = 512
"""Newest samples that a line is fitted to: an engine that slows down is learned also where its loads changed."""
MOST_BETWEEN_FITS = 64
"""Samples. A fit costs some 200 microseconds, so the more is known the less often it is made: after an eighth more."""
FAR_APART = 1.5
"""Ratio of two sizes that show a slope. Between closer ones the noise of a step would be larger than the slope."""
MOST_ERRORS = 2.2
"""Medians of all errors: 1.5 standard deviations, where a fit loses little with and without wrong samples."""
LARGEST = 1e12
"""Microseconds or tokens: eleven days. Nothing real is larger."""

Point = tuple[float, float]
"""A size, and the time that it took."""


class Line(NamedTuple):
    """A fitted line. `late` is how many times as long as the line the slowest tenth took: 1 says that it is exact.

    `is_slope_seen` is false where no two sizes were far enough apart to show one.
    """

    base_us: float
    slope_us: float
    late: float = 1.0
    is_slope_seen: bool = True

    def at(self, size: float) -> float:
        """The typical time for this size, at least a microsecond."""
        return max(1.0, self.base_us + self.slope_us * size)

    def scaled(self, factor: float) -> Line:
        """The line of an engine that takes so many times as long."""
        return self._replace(base_us=self.base_us * factor, slope_us=self.slope_us * factor)


def fitted(points: Sequence[Point], samples: Sequence[Point] | None = None, default: Line | None = None) -> Line:
    """The line through some points: at least one. Neither figure is negative.

    `samples` are what the points are medians of. With a `default`, errors count in parts of its times, and where no two
    points are far apart the line is the default times what the samples took of it; else it is flat there. A line that
    would begin below zero is one that bends upwards, as with attention over long prompts: the line through zero in its
    place is right for the middle sizes.
    """
    samples = points if samples is None else samples
    usual = Line(1.0, 0.0) if default is None else default
    slope = _slope(points, usual)
    if slope is None and default is not None:
        line = default.scaled(median([took / default.at(size) for size, took in samples]))
    else:
        rate = slope or 0.0
        base = weighted_median([(took - rate * size, 1 / usual.at(size)) for size, took in samples])
        line = Line(base, rate) if base >= 0 else Line(0.0, median([took / size for size, took in samples if size]))
        if line.base_us and line.slope_us:
            line = _refine(line, samples)
    ratios = sorted([took / line.at(size) for size, took in samples])
    late = max(1.0, ratios[int(0.9 * (len(ratios) - 1))])
    return line._replace(late=late, is_slope_seen=slope is not None)


def _refine(line: Line, samples: Sequence[Point]) -> Line:
    """The line moved by least squares in relative errors, none of which counts for more than `MOST_ERRORS` usual ones.

    These are two steps of Huber's estimator from a start that wrong samples did not move (P. J. Bickel, "One-step Huber
    estimates in the linear model", JASA 70, 1975). They halve the spread of a median of medians.
    """
    for _ in range(2):
        parts = [(1 / line.at(size), size / line.at(size), took / line.at(size) - 1) for size, took in samples]
        most = MOST_ERRORS * median([abs(error) for _, _, error in parts])
        errors = [max(-most, min(most, error)) for _, _, error in parts]
        ones = sum([one * one for one, _, _ in parts])
        mixed = sum([one * size for one, size, _ in parts])
        sizes = sum([size * size for _, size, _ in parts])
        by_one = sum([one * error for (one, _, _), error in zip(parts, errors, strict=True)])
        by_size = sum([size * error for (_, size, _), error in zip(parts, errors, strict=True)])
        determinant = ones * sizes - mixed * mixed
        if determinant <= 1e-9 * ones * sizes:
            return line
        base = line.base_us + (by_one * sizes - by_size * mixed) / determinant
        slope = line.slope_us + (ones * by_size - mixed * by_one) / determinant
        if min(base, slope) < 0:
            return line
        line = Line(base, slope)
    return line


def _slope(points: Sequence[Point], usual: Line) -> float | None:
    """The weighted median of the slopes, at least 0. None where no two points are far enough apart."""
    slopes = [
        ((took2 - took1) / (size2 - size1), (size2 - size1) / (usual.at(size1) + usual.at(size2)))
        for (size1, took1), (size2, took2) in combinations(sorted(points), 2)
        if size2 >= FAR_APART * max(size1, 0.5)
    ]
    return max(0.0, weighted_median(slopes)) if slopes else None


def weighted_median(values: Iterable[tuple[float, float]]) -> float:
    """The lower median of values with their weights: at least one."""
    ordered = sorted(values)
    left = sum(weight for _, weight in ordered) / 2
    for value, weight in ordered:
        left -= weight
        if left <= 0:
            return value
    return ordered[-1][0]


class TimesBySize:
    """The newest times of each size class: sizes of one class differ by less than a factor of two.

    So many samples of one size do not push out the others, and what was learned under a light load is still there under
    a heavy one. Memory is bounded: `KEPT` samples of 41 classes.
    """

    __slots__ = ("_classes", "_default", "_refit_at", "line", "points", "samples")

    def __init__(self, default: Line | None = None) -> None:
        self._default = default
        self._classes: dict[int, deque[tuple[int, float, float]]] = {}
        self._refit_at = 0
        self.samples = 0
        self.line: Line | None = None
        self.points: list[Point] = []

    def learn(self, size: float, took_us: float) -> bool:
        """Takes one sample: whether the figures were fitted again. What no clock and no count says changes nothing."""
        if not 0 < took_us <= LARGEST or not 0 <= size <= LARGEST:
            return False
        self.samples += 1
        number = int(size).bit_length()
        samples = self._classes.get(number)
        if samples is None:
            samples = self._classes[number] = deque(maxlen=KEPT)
        samples.append((self.samples, size, took_us))
        if self.samples < self._refit_at:
            return False
        more = 1 if self.samples < ENOUGH else max(ENOUGH // 2, min(MOST_BETWEEN_FITS, self.samples // 8))
        self._refit_at = self.samples + more
        self._fit()
        return True

    def at(self, size: float) -> float | None:
        """The typical time of a size: between the medians of two classes, or that of the nearest. None before any."""
        points = self.points
        if not points:
            return None
        if size <= points[0][0]:
            return points[0][1]
        for (low, low_us), (high, high_us) in pairwise(points):
            if size <= high:
                return low_us + (high_us - low_us) * (size - low) / max(1e-9, high - low)
        return points[-1][1]

    def _fit(self) -> None:
        kept = [self._classes[number] for number in sorted(self._classes)]
        self.points = [_middle(samples) for samples in kept]
        if self.samples < ENOUGH:
            return
        since = self.samples - RECENT
        recent = [[one for one in samples if one[0] > since] for samples in kept]
        recent = [samples for samples in recent if samples]
        everything = [(size, took_us) for samples in recent for _, size, took_us in samples]
        self.line = fitted([_middle(samples) for samples in recent], everything, self._default)


def _middle(samples: Sequence[tuple[int, float, float]]) -> Point:
    return median([size for _, size, _ in samples]), median([took_us for _, _, took_us in samples])
