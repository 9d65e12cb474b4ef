"""The same by definition, and slowly: what the fast code is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

LONGEST = 131_072


class Sample(NamedTuple):
    """One answer: `weight` counts, `length` is exact or, where it is censored, a lower bound."""

    length: int
    is_censored: bool
    weight: float = 1.0


def edge_above(length: int) -> int:
    """The upper edge of a length's bin: 16 wide up to 4,096 tokens, then as wide again with every doubling."""
    length = min(max(length, 1), LONGEST)
    width, up_to = 16, 4096
    while length > up_to:
        width, up_to = 2 * width, 2 * up_to
    return -(-length // width) * width


def edge_below(edge: int) -> int:
    """The lower edge of the bin that ends at an edge."""
    return max(length for length in range(edge - 1024, edge) if length <= 0 or edge_above(length) < edge)


def decayed(samples: Sequence[Sample], half_life: int = 2000) -> list[Sample]:
    """The samples in the order of their arrival, each with half the weight after `half_life` more."""
    count = len(samples)
    return [
        sample._replace(weight=0.5 ** ((count - 1 - index) / half_life), is_censored=_is_censored(sample))
        for index, sample in enumerate(samples)
    ]


def _is_censored(sample: Sample) -> bool:
    return sample.is_censored or sample.length > LONGEST


def survival(samples: Sequence[Sample], length: int) -> float:
    """Kaplan and Meier: the product, over the ends up to `length`, of the share of those at risk that go on."""
    share = 1.0
    for end in sorted({edge_above(sample.length) for sample in samples if not sample.is_censored}):
        if end > length:
            break
        at_risk = sum(sample.weight for sample in samples if edge_above(sample.length) >= end)
        ended = sum(sample.weight for sample in samples if edge_above(sample.length) == end and not sample.is_censored)
        is_last = not any(
            edge_above(sample.length) > end or (edge_above(sample.length) == end and sample.is_censored)
            for sample in samples
        )
        share *= 0.0 if is_last else 1 - ended / at_risk
    return share


def conditional(samples: Sequence[Sample], length: int, beyond: int) -> float:
    """The probability that an answer that is longer than `beyond` is not longer than `length`."""
    longer = survival(samples, beyond)
    return 1 - survival(samples, length) / longer if longer else 0.0


def quantile(samples: Sequence[Sample], q: float, beyond: int, slack: float = 0.0) -> int | None:
    """The smallest edge that the share `q` of the answers longer than `beyond` do not exceed, with so much slack."""
    for end in sorted({edge_above(sample.length) for sample in samples if not sample.is_censored}):
        if end > beyond and conditional(samples, end, beyond) >= q - slack:
            return end
    return None


def length(samples: Sequence[Sample], q: float, beyond: int, slack: float = 0.0) -> int | None:
    """The same inside the bin of that edge, as if the answers were spread evenly there; more than `beyond`."""
    upper = quantile(samples, q, beyond, slack)
    if upper is None:
        return None
    lower = edge_below(upper)
    left = (1 - q) * survival(samples, beyond) * (1 + slack)
    before, after = survival(samples, lower), survival(samples, upper)
    part = min(1.0, max(0.0, (before - left) / (before - after)))
    lower = max(lower, beyond)
    return max(beyond + 1, lower + ceil((upper - lower) * part))


def peak(pairs: Sequence[tuple[int, int]]) -> int:
    """Token by token: all generate one, those that have no more to come leave, and the most in use is kept."""
    running, most = list(pairs), 0
    while running:
        most = max(most, sum(used for used, _ in running))
        running = [(used + 1, remaining - 1) for used, remaining in running if remaining > 0]
    return most
