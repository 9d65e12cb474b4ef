"""The fit as its definition says it: every answer is computed anew from all samples, with nothing kept between."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import chain, combinations
from math import prod
from statistics import median

BATCH, FIRST, DECAY, PSEUDO = 8, 16, 0.94, 0.25


def literal_coefficients(defaults: Sequence[float], samples: Sequence[tuple[Sequence[float], float]]) -> list[float]:
    """The coefficients after these samples."""
    whole = len(samples) // BATCH * BATCH
    if whole < FIRST:
        return list(defaults)
    factor = median(took / _time(defaults, features) for features, took in samples[:FIRST])
    anchor = [value * factor for value in defaults]
    rows: list[tuple[int, list[float], float]] = []
    changes = dict[int, float]()
    now, begin = anchor, 0
    for end in range(FIRST, whole + 1, BATCH):
        for features, took in samples[begin:end]:
            expected = _time(now, features)
            rows.append((end, [value / expected for value in features], min(2.0, max(0.5, took / expected))))
        weighted = [
            (DECAY ** ((end - at) // BATCH) / prod(changes[one] for one in changes if one >= at), parts, ratio)
            for at, parts, ratio in rows
        ]
        before, now = now, _least_squares(anchor, weighted)
        expected = [sum(_time(one, features) for features, _ in samples[begin:end]) for one in (before, now)]
        changes[end] = (expected[1] / expected[0]) ** 2
        begin = end
    return now


def _time(coefficients: Sequence[float], features: Sequence[float]) -> float:
    return max(1.0, sum(one * feature for one, feature in zip(coefficients, features, strict=True)))


def _least_squares(anchor: Sequence[float], rows: list[tuple[float, list[float], float]]) -> list[float]:
    """Of all sets of features, the solution without negative coefficients that has the least error."""
    count = len(anchor)
    pseudo = [(PSEUDO, [1 / anchor[i] if i == j else 0.0 for j in range(count)], 1.0) for i in range(count)]
    every = [
        (Fraction(weight), [Fraction(part) for part in parts], Fraction(ratio))
        for weight, parts, ratio in rows + pseudo
    ]
    best: tuple[Fraction, list[Fraction]] | None = None
    for kept in chain.from_iterable(combinations(range(count), size) for size in range(1, count + 1)):
        matrix = [[sum(w * p[i] * p[j] for w, p, _ in every) for j in kept] for i in kept]
        right = [sum(w * p[i] * r for w, p, r in every) for i in kept]
        solution = [Fraction(0)] * count
        for i, value in zip(kept, _cramer(matrix, right), strict=True):
            solution[i] = value
        if min(solution) < 0:
            continue
        error = sum(w * (r - sum(s * part for s, part in zip(solution, p, strict=True))) ** 2 for w, p, r in every)
        if best is None or error < best[0]:
            best = error, solution
    assert best is not None
    return [float(value) for value in best[1]]


def _cramer(matrix: list[list[Fraction]], right: list[Fraction]) -> list[Fraction]:
    whole = _determinant(matrix)
    return [
        _determinant([[*row[:i], value, *row[i + 1 :]] for row, value in zip(matrix, right, strict=True)]) / whole
        for i in range(len(right))
    ]


def _determinant(matrix: list[list[Fraction]]) -> Fraction:
    if len(matrix) == 1:
        return matrix[0][0]
    return sum(
        (
            (-1) ** column * matrix[0][column] * _determinant([[*r[:column], *r[column + 1 :]] for r in matrix[1:]])
            for column in range(len(matrix))
        ),
        Fraction(0),
    )
