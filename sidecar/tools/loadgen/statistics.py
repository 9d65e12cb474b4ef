"""Statistics of a run: quantiles, a rank correlation with its interval, and starvation as clients see it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_NORMAL_975 = statistics.NormalDist().inv_cdf(0.975)
_FEWEST_FOR_CORRELATION = 4  # Fisher's z has a standard error of 1 / sqrt(n - 3)


@dataclass(frozen=True, slots=True)
class Distribution:
    """A summary of measured values. The percentiles are values that were measured, never interpolated."""

    p50: float
    p95: float
    p99: float
    mean: float

    @staticmethod
    def of(values: Sequence[float]) -> Distribution | None:
        """None for no values at all."""
        if not values:
            return None
        ordered = sorted(values)
        return Distribution(
            p50=_at(ordered, 0.50), p95=_at(ordered, 0.95), p99=_at(ordered, 0.99), mean=statistics.fmean(ordered)
        )


@dataclass(frozen=True, slots=True)
class Correlation:
    """A rank correlation of `n` pairs, with the bounds of its 95 % confidence interval."""

    value: float
    low: float
    high: float
    n: int


def quantile(values: Sequence[float], part: float) -> float:
    """The measured value below which `part` (0 to 1) of the values lie. Raises ValueError for none."""
    if not values:
        raise ValueError("no values have no quantile")
    return _at(sorted(values), part)


def spearman(xs: Sequence[float], ys: Sequence[float]) -> Correlation | None:
    """Spearman's rank correlation of pairs; ties have the mean of their ranks.

    The interval is Fisher's z with the standard error of Bonett and Wright, "Sample size requirements for estimating
    Pearson, Kendall and Spearman correlations", Psychometrika 65 (2000): sqrt((1 + r^2 / 2) / (n - 3)). None where
    there is none to speak of: fewer than four pairs, or all x or all y alike. Raises ValueError where a partner is
    missing.
    """
    if len(xs) != len(ys):
        raise ValueError(f"{len(xs)} values have no correlation with {len(ys)}")
    if len(xs) < _FEWEST_FOR_CORRELATION or len(set(xs)) < 2 or len(set(ys)) < 2:
        return None
    value = max(-1.0, min(1.0, statistics.correlation(_ranks(xs), _ranks(ys))))
    if abs(value) == 1.0:  # as far as z goes: it is infinite, and so are its bounds
        return Correlation(value, value, value, len(xs))
    spread = _NORMAL_975 * math.sqrt((1 + value**2 / 2) / (len(xs) - 3))
    z = math.atanh(value)
    return Correlation(value, math.tanh(z - spread), math.tanh(z + spread), len(xs))


def starvation_s(sent: Sequence[float], first_token: Sequence[float]) -> list[float]:
    """How long each request starved, in seconds: while a request that was sent later had its first token already.

    That is the time from the first such moment to its own first token, and 0 where nothing that was sent later went
    first. Both sequences are in the same order; moments that are equal to the microsecond overtake none.
    """
    found, overtaken_us = [0.0] * len(sent), math.inf
    for index in sorted(range(len(sent)), key=lambda index: (sent[index], first_token[index]), reverse=True):
        moment_us = int(first_token[index] * 1e6)
        found[index] = max(0.0, moment_us - overtaken_us) / 1e6
        overtaken_us = min(overtaken_us, moment_us)
    return found


def _at(ordered: Sequence[float], part: float) -> float:
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1; equal values share the mean of theirs."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end < len(order) and values[order[end]] == values[order[start]]:
            end += 1
        for index in order[start:end]:
            ranks[index] = (start + 1 + end) / 2
        start = end
    return ranks
