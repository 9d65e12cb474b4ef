"""Histogram of the output lengths of one kind of request: decayed, censored, with conditional quantiles.

Bins are 16 tokens wide up to 4,096 tokens. From there their width doubles with every doubling of the length, so that a
bin is never wider than 1/128 of the lengths in it, and a histogram takes 14 KB at most.

A sample is censored where the answer was cut short, by max_tokens or by a disconnect: its length is a lower bound.
The distribution is the product-limit estimate of Kaplan and Meier (Nonparametric Estimation from Incomplete
Observations, 1958), with weights: a sample counts half after 2,000 more.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from math import ceil

BIN_TOKENS = 16
FINE_BINS = 256
"""Bins of 16 tokens; those after them come in octaves of half as many."""
FINE_TOKENS = BIN_TOKENS * FINE_BINS
LONGEST = 131_072
"""Tokens. A longer answer is known only to be longer: it counts as censored here."""
HALF_LIFE = 2000
"""Samples after which a sample counts half."""
_LARGEST_STEP = 2.0**20
"""The weight of the newest sample at which all weights are scaled back to 1; the older ones, worth a millionth, go."""
_STALE_SHARE = 8
"""The table is rebuilt when an eighth of the samples is newer than it, so that learning and asking cost the same on
average however they alternate."""
_STALE_MOST = 64
_TOLERANCE = 1 + 1e-9
"""Rounding of the survival probabilities must not push a quantile on to the next edge."""


def bin_for(length: int) -> int:
    """The bin of a length: 0 up to 16 tokens, 1 up to 32, and so on. The last one also has all that is longer."""
    if length <= FINE_TOKENS:
        return (length - 1) // BIN_TOKENS if length > 0 else 0
    last = min(length, LONGEST) - 1
    octave = last.bit_length() - 12
    return FINE_BINS // 2 * octave + (last >> (4 + octave))


def _edge(index: int) -> int:
    if index < FINE_BINS:
        return BIN_TOKENS * (index + 1)
    octave, rest = divmod(index - FINE_BINS, FINE_BINS // 2)
    return (FINE_BINS // 2 + 1 + rest) << (5 + octave)


EDGES = tuple(_edge(index) for index in range(bin_for(LONGEST) + 1))
"""The upper edge of each bin, in tokens."""
_FINE = tuple(bin_for(length) for length in range(FINE_TOKENS + 1))
"""The bins of the lengths that most answers have."""


class Survival:
    """The share of answers that are longer than each length: the product-limit estimate of weights by bin.

    `edges` are the lengths where it falls, `beyond` the shares that are longer than each of them.
    """

    __slots__ = ("_negated", "edges")

    def __init__(self, complete: Sequence[float], censored: Sequence[float]) -> None:
        at_risk, falls = 0.0, []
        for index in range(len(complete) - 1, -1, -1):
            ended = complete[index]
            after = at_risk + censored[index]
            at_risk = after + ended
            if ended > 0.0:
                falls.append((EDGES[index], after / at_risk))
        falls.reverse()
        self.edges = [edge for edge, _ in falls]
        self._negated: list[float] = []
        share = 1.0
        for _, kept in falls:
            share *= kept
            self._negated.append(-share)

    @property
    def beyond(self) -> list[float]:
        """The share of answers that are longer than the edge of the same index."""
        return [-share for share in self._negated]

    def quantile(self, q: float, beyond: int = 0) -> int | None:
        """The smallest edge that at least the share `q` of the answers longer than `beyond` do not exceed.

        None where the samples do not say: none is longer, or too many of those are censored. O(log bins).
        """
        edges, negated = self.edges, self._negated
        before = bisect_right(edges, beyond)
        left = 1.0 - q if before == 0 else (q - 1.0) * negated[before - 1]
        found = bisect_left(negated, -left * _TOLERANCE, before)
        return edges[found] if found < len(edges) else None

    def length(self, q: float, beyond: int = 0) -> int | None:
        """Quantile inside its bin, as if the answers were spread evenly there: its upper edge holds 8 tokens too much.

        More than `beyond`, and never above `quantile`. None where that is None.
        """
        edges, negated = self.edges, self._negated
        before = bisect_right(edges, beyond)
        left = 1.0 - q if before == 0 else (q - 1.0) * negated[before - 1]
        found = bisect_left(negated, -left * _TOLERANCE, before)
        if found >= len(edges):
            return None
        upper = edges[found]
        index = bin_for(upper)
        lower = max(beyond, EDGES[index - 1] if index else 0)
        longer = 1.0 if found == 0 else -negated[found - 1]
        falls = longer + negated[found]
        part = (longer - left) / falls if falls > 0.0 else 1.0
        return max(beyond + 1, lower + ceil((upper - lower) * min(1.0, max(0.0, part))))


class LengthHistogram:
    """The lengths of one kind of request. Not thread-safe; the same calls give the same answers.

    `samples` counts the complete samples, `censored` the others; neither decays. The table is too old when they are
    `stale_from` together.
    """

    __slots__ = (
        "_censored", "_complete", "_growth", "_step", "_survival", "censored", "samples", "stale_from",
    )  # fmt: skip

    def __init__(self, half_life: int = HALF_LIFE) -> None:
        self._growth = 2.0 ** (1.0 / half_life)
        self.clear()

    def clear(self) -> None:
        """Forgets every sample."""
        self.samples = self.censored = self.stale_from = 0
        self._complete = array("d")
        self._censored = array("d")
        self._step = 1.0
        self._survival: Survival | None = None

    def add(self, length: int, is_censored: bool) -> None:
        """Adds the output length of one sequence, in tokens, at least 0; `is_censored` where it was cut short."""
        if length <= FINE_TOKENS:
            index = _FINE[length]
        else:
            index, is_censored = bin_for(length), is_censored or length > LONGEST
        step = self._step * self._growth
        try:
            if is_censored:
                self._censored[index] += step
                self.censored += 1
            else:
                self._complete[index] += step
                self.samples += 1
        except IndexError:
            self._widen(index + 1)
            self.add(length, is_censored)
            return
        self._step = step
        if step > _LARGEST_STEP:
            self._scale()

    def _widen(self, bins: int) -> None:
        more = bytes(8 * (bins - len(self._complete)))
        self._complete.frombytes(more)
        self._censored.frombytes(more)

    def _scale(self) -> None:
        step, self._step = self._step, 1.0
        for weights in (self._complete, self._censored):
            for index, weight in enumerate(weights):
                if weight:
                    weights[index] = weight / step if weight > 1.0 else 0.0

    def survival(self) -> Survival:
        """The distribution, at most an eighth of the samples (64 of them) old."""
        survival = self._survival
        if survival is None or self.samples + self.censored >= self.stale_from:
            survival = self._survival = self._tabulate()
        return survival

    def _tabulate(self) -> Survival:
        known = self.samples + self.censored
        # So many new samples are an eighth of all when they are a seventh of those that the table has.
        self.stale_from = known + max(1, min(_STALE_MOST, -(-known // (_STALE_SHARE - 1))))
        return Survival(self._complete, self._censored)

    def length(self, q: float, beyond: int = 0) -> int | None:
        """See `Survival.length`."""
        return self.survival().length(q, beyond)

    def quantile(self, q: float, beyond: int = 0) -> int | None:
        """See `Survival.quantile`."""
        return self.survival().quantile(q, beyond)
