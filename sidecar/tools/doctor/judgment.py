"""Judgment of a burst: in which order requests were served.

The statistic is Spearman's rank correlation of level (0 is the most important) and time to first token, over those that
had to wait for a slot. A scheduler that uses priority brings it near +0.94, the most that three equal classes allow.
One that uses the arrival brings it near 0, because arrivals were shuffled within blocks of one request per level.

A request waited if its first token came after the first answer of the burst was complete. Before that no slot can have
become free. The other requests found a slot when they arrived, whatever their priority, and say nothing.

Under "the order has nothing to do with the level" each assignment of levels is equally likely, and the correlation has
mean 0 and variance 1 / (n - 1) exactly (Kendall, "Rank correlation methods", 1948). So its p-value needs no assumption
about the engine. The thresholds below were chosen with `benchmarks/doctor_error_rates.py`; docs/tools.md#doctor has the
rates.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from sidecar.tools.loadgen import Correlation, spearman

FEWEST = 24
"""Requests that waited, below which there is no judgment: eight of each level."""
STRONG = 0.6
"""From this correlation on an order is one by priority. One replica of two that ignores it brings it to about 0.5."""
CERTAIN = 0.001
"""The p-value that must come with it."""
NEGLIGIBLE = 0.6
"""An interval that stays within this on both sides leaves no room for a scheduler that uses priority."""


class Effect(str, Enum):
    """Effect of the priorities on the order of the first tokens."""

    BY_PRIORITY = "by priority"
    INVERTED = "inverted"
    NONE = "none"
    UNCLEAR = "unclear"
    TOO_FEW = "too few"


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """One request of a burst: its level, its place in the order of arrival, and when its first token came.

    `first_token_s` is infinite for a request that was still waiting when the burst was cut short.
    """

    level: int
    arrival: int
    first_token_s: float


@dataclass(frozen=True, slots=True)
class Judgment:
    """Judgment from the requests that waited. `medians_s` is by level; `by_arrival` the correlation with arrival.

    `served` are those that got their first token before the burst was cut short.
    """

    effect: Effect
    waited: int
    served: int
    correlation: Correlation | None
    by_arrival: Correlation | None
    p_value: float | None
    medians_s: tuple[float | None, ...]


def judge(waited: Sequence[ServedRequest], levels: int) -> Judgment:
    """Judges the requests of a burst that waited."""
    ttfts_s = [one.first_token_s for one in waited]
    correlation = spearman([float(one.level) for one in waited], ttfts_s)
    p_value = None if correlation is None else _p_value(correlation)
    by_level = [[one.first_token_s for one in waited if one.level == level] for level in range(levels)]
    served = sum(not math.isinf(ttft_s) for ttft_s in ttfts_s)
    return Judgment(
        effect=_effect(correlation, p_value, len(waited), served),
        waited=len(waited),
        served=served,
        correlation=correlation,
        by_arrival=spearman([float(one.arrival) for one in waited], ttfts_s),
        p_value=p_value,
        medians_s=tuple(statistics.median(values) if values else None for values in by_level),
    )


def _effect(correlation: Correlation | None, p_value: float | None, waited: int, served: int) -> Effect:
    if correlation is None or p_value is None or waited < FEWEST:
        return Effect.TOO_FEW
    if p_value <= CERTAIN and abs(correlation.value) >= STRONG:
        return Effect.BY_PRIORITY if correlation.value > 0 else Effect.INVERTED
    if served < FEWEST:  # those that were not share the last rank: an order among few can be found, not its absence
        return Effect.TOO_FEW
    if correlation.low > -NEGLIGIBLE and correlation.high < NEGLIGIBLE:
        return Effect.NONE
    return Effect.UNCLEAR


def _p_value(correlation: Correlation) -> float:
    """Two-sided, with the exact variance of all permutations and the normal form that they are near to from 20 on."""
    return math.erfc(abs(correlation.value) * math.sqrt((correlation.n - 1) / 2))
