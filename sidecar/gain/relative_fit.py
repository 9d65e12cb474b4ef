"""Linear fit of an engine's times, learned as they come. One sample can move it by a bounded part only.

The time of a sample is taken to be `sum(coefficient * feature)`. The fit is least squares in relative errors: each
sample is divided by the time that the fit predicted for it. So it has features whose parts of the prediction add up to
1, and an actual time that is the ratio to the prediction, cut off at a half and at two. No sample counts for more than
that, however long its time and however large its features. The weight of a sample falls by half in about 90 samples.

Samples are taken in batches of eight, all by the prediction before the batch. The first two batches also find the
scale: the median of their ratios to the stated defaults is the factor of the first prediction, whatever it is, so that
a fast and a slow engine are learned equally soon. Coefficients are never negative: of all subsets of features the
least squares solution with the least error is taken. Weak pseudo-samples hold what the samples do not tell apart at
the defaults, times the scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from operator import mul
from statistics import median

BATCH = 8
"""Samples that are taken at once: less work for each, and a prediction does not depend on the order in a batch."""
FIRST = 2 * BATCH
"""Samples before the first fit. The median of 16 holds against 7 wild ones."""
DECAY = 0.94
"""Weight of everything before, at each batch: about 130 samples count, some seconds of a busy engine."""
LOWEST_RATIO, HIGHEST_RATIO = 0.5, 2.0
_PSEUDO_WEIGHT = 0.25
"""Of each default, in samples: it decides only where the samples say nothing."""
_LARGEST = 1e12
"""Microseconds or tokens: eleven days. Nothing real is larger, and no sum of such squares overflows."""

Sample = tuple[Sequence[float], float]
"""Features and the time, in microseconds."""


class RelativeFit:
    """One fit. `coefficients` are the defaults until `FIRST` samples have come. `samples` counts them all.

    Every feature is at least 0, and the first is the constant 1. Every default is above 0.
    """

    __slots__ = ("_anchor", "_defaults", "_pending", "_products", "_targets", "coefficients", "samples")

    def __init__(self, defaults: Sequence[float]) -> None:
        count = len(defaults)
        self._defaults = tuple(defaults)
        self._anchor = self._defaults
        self._products = [[0.0] * count for _ in range(count)]
        self._targets = [0.0] * count
        self._pending: list[Sample] = []
        self.coefficients: tuple[float, ...] = self._defaults
        self.samples = 0

    @property
    def is_known(self) -> bool:
        """Whether the coefficients are learned, and not the defaults."""
        return self.samples >= FIRST

    def predict(self, features: Sequence[float]) -> float:
        """The time for these features, in microseconds; above 0."""
        return predicted(self.coefficients, features)

    def learn(self, features: Sequence[float], took_us: float) -> None:
        """Takes one sample. One that no clock and no count can give changes nothing."""
        if not 0 < took_us <= _LARGEST or not all(0 <= feature <= _LARGEST for feature in features):
            return
        self.samples += 1
        self._pending.append((features, took_us))
        if self.samples % BATCH or self.samples < FIRST:
            return
        if self.samples == FIRST:
            self._anchor = self.coefficients = scaled(self._defaults, self._pending)
        self._take()

    def _take(self) -> None:
        products, targets, now = self._products, self._targets, self.coefficients
        every = range(len(now))
        for row in every:
            targets[row] *= DECAY
            products[row] = [value * DECAY for value in products[row]]
        for features, took_us in self._pending:
            parts, ratio = normalized(now, features, took_us)
            for row in every:
                part = parts[row]
                targets[row] += part * ratio
                for column in every:
                    products[row][column] += part * parts[column]
        self.coefficients = solved(products, targets, self._anchor)
        change = changed(now, self.coefficients, self._pending)
        for row in every:
            targets[row] /= change
            products[row] = [value / change for value in products[row]]
        self._pending = []


def predicted(coefficients: Sequence[float], features: Sequence[float]) -> float:
    """The time that coefficients give: at least a microsecond."""
    return max(1.0, sum(map(mul, coefficients, features), 0.0))


def normalized(coefficients: Sequence[float], features: Sequence[float], took_us: float) -> tuple[list[float], float]:
    """A sample divided by its prediction, and its ratio to that, cut off."""
    expected = predicted(coefficients, features)
    ratio = min(HIGHEST_RATIO, max(LOWEST_RATIO, took_us / expected))
    return [feature / expected for feature in features], ratio


def changed(before: Sequence[float], after: Sequence[float], samples: Sequence[Sample]) -> float:
    """The square of the factor by which the predictions for a batch changed. What was divided by the old ones counts
    for so much too much, beside what is divided by the new ones: an engine that slows down would be learned late.
    """
    expected = [sum(predicted(one, features) for features, _ in samples) for one in (before, after)]
    return (expected[1] / expected[0]) ** 2


def scaled(defaults: Sequence[float], samples: Sequence[Sample]) -> tuple[float, ...]:
    """The defaults, times the median ratio of the samples to what they predict."""
    factor = median(took_us / predicted(defaults, features) for features, took_us in samples)
    return tuple(default * factor for default in defaults)


def solved(products: Sequence[Sequence[float]], targets: Sequence[float], anchor: Sequence[float]) -> tuple[float, ...]:
    """The coefficients, none negative, with the least square error. The anchor is where the pseudo-samples are."""
    count = len(anchor)
    # In units of the anchor: coefficients of very different sizes are solved with the same accuracy.
    matrix = [[products[i][j] * anchor[i] * anchor[j] for j in range(count)] for i in range(count)]
    right = [targets[i] * anchor[i] + _PSEUDO_WEIGHT for i in range(count)]
    for i in range(count):
        matrix[i][i] += _PSEUDO_WEIGHT
    best, least = [0.0] * count, 0.0
    for size in range(count, 0, -1):
        for kept in combinations(range(count), size):
            part = _linear([[matrix[i][j] for j in kept] for i in kept], [right[i] for i in kept])
            # The error of a least squares solution, but for a constant, is what it takes away.
            error = -sum(value * right[i] for value, i in zip(part, kept, strict=True))
            if min(part) >= 0 and error < least:
                best, least = [0.0] * count, error
                for value, i in zip(part, kept, strict=True):
                    best[i] = value
    return tuple(value * unit for value, unit in zip(best, anchor, strict=True))


def _linear(matrix: list[list[float]], right: list[float]) -> list[float]:
    """The solution of a positive definite system, by elimination."""
    count = len(right)
    for pivot in range(count):
        for row in range(pivot + 1, count):
            factor = matrix[row][pivot] / matrix[pivot][pivot]
            for column in range(pivot, count):
                matrix[row][column] -= factor * matrix[pivot][column]
            right[row] -= factor * right[pivot]
    solution = [0.0] * count
    for row in reversed(range(count)):
        known = sum(matrix[row][column] * solution[column] for column in range(row + 1, count))
        solution[row] = (right[row] - known) / matrix[row][row]
    return solution
