"""The statistics, against definitions that are slow but plain."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.tools.loadgen import Distribution, quantile, spearman, starvation_s

numbers = st.floats(-1e6, 1e6)
few = st.integers(0, 5).map(float)  # ties
pairs = st.lists(st.tuples(few | numbers, few | numbers), min_size=4, max_size=40)


@given(st.lists(numbers, min_size=1), st.floats(0, 1))
def test_a_quantile_is_a_measured_value_with_that_part_of_the_values_below(values: list[float], part: float) -> None:
    found = quantile(values, part)
    assert found in values
    assert sum(value < found for value in values) <= part * len(values)
    assert sum(value <= found for value in values) >= min(len(values), math.floor(part * len(values)) + 1)


def test_no_values_have_no_quantile_and_no_distribution() -> None:
    assert Distribution.of([]) is None
    with pytest.raises(ValueError, match="no values"):
        quantile([], 0.5)


def test_a_distribution_has_three_percentiles_and_the_mean() -> None:
    values = [float(value) for value in range(200)]
    random.Random(1).shuffle(values)
    assert Distribution.of(values) == Distribution(p50=100.0, p95=190.0, p99=198.0, mean=99.5)


def _mid_ranks(values: list[float]) -> list[float]:
    return [sum(other < value for other in values) + (values.count(value) + 1) / 2 for value in values]


@given(pairs)
def test_spearman_is_pearsons_correlation_of_mid_ranks(found: list[tuple[float, float]]) -> None:
    xs, ys = [x for x, _ in found], [y for _, y in found]
    correlation = spearman(xs, ys)
    if len(set(xs)) == 1 or len(set(ys)) == 1:
        assert correlation is None
        return
    assert correlation.value == pytest.approx(statistics.correlation(_mid_ranks(xs), _mid_ranks(ys)), abs=1e-9)
    assert correlation.n == len(found)
    assert -1 <= correlation.low <= correlation.value <= correlation.high <= 1


def test_the_interval_is_that_of_bonett_and_wright() -> None:
    # r = 0.5 from n = 28 pairs: z = 0.549306, standard error sqrt(1.125 / 25) = 0.212132, z +- 0.415771.
    ys = _pairs_with_rank_correlation(28, 0.5)
    found = spearman(list(range(28)), ys)
    r = found.value
    error = math.sqrt((1 + r * r / 2) / 25)
    assert math.atanh(found.high) - math.atanh(r) == pytest.approx(1.959964 * error, rel=1e-6)
    assert math.atanh(r) - math.atanh(found.low) == pytest.approx(1.959964 * error, rel=1e-6)


def _pairs_with_rank_correlation(count: int, wanted: float) -> list[float]:
    rng = random.Random(5)
    return [index * wanted + rng.gauss(0, count * 0.25) for index in range(count)]


def test_where_there_is_no_correlation_to_speak_of_there_is_none() -> None:
    assert spearman([1, 2, 3], [1, 2, 3]) is None
    assert spearman([1, 1, 1, 1], [1, 2, 3, 4]) is None
    assert spearman([1, 2, 3, 4], [5, 5, 5, 5]) is None
    with pytest.raises(ValueError, match="4 values have no correlation with 3"):
        spearman([1, 2, 3, 4], [1, 2, 3])


moments = st.integers(0, 50).map(float)
requests = st.lists(st.tuples(moments, moments).map(lambda pair: (pair[0], pair[0] + pair[1])), max_size=25)


@given(requests)
def test_starvation_is_what_comparing_every_pair_gives(found: list[tuple[float, float]]) -> None:
    """Times are whole seconds, so equal ones are common: what was sent, or served, at once overtakes no one."""
    sent, first = [pair[0] for pair in found], [pair[1] for pair in found]
    starved = starvation_s(sent, first)
    for index, (sent_s, first_s) in enumerate(found):
        later = [served_s for at_s, served_s in found if at_s > sent_s and served_s < first_s]
        at_least = first_s - min(later, default=first_s)
        # Requests sent at the same time have an order too, that of being served: it adds no starvation.
        assert starved[index] == pytest.approx(at_least, abs=1e-5)
