"""The decayed, censored histogram against its definition, and against lengths made to hurt it."""

from __future__ import annotations

import itertools
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.lengths.histogram import EDGES, LONGEST, LengthHistogram, bin_for
from tests.lengths import literal
from tests.lengths.literal import Sample

LENGTHS = st.one_of(
    st.integers(0, 100), st.integers(0, 5000), st.integers(0, 2 * LONGEST), st.sampled_from([16, 256, 4096, LONGEST])
)
SAMPLES = st.lists(st.builds(Sample, LENGTHS, st.booleans()), max_size=40)
QUANTILES = st.sampled_from([0.01, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99])


def learned(samples: list[Sample], half_life: int = 2000) -> LengthHistogram:
    histogram = LengthHistogram(half_life)
    for sample in samples:
        histogram.add(sample.length, is_censored=sample.is_censored)
    return histogram


def assert_is_quantile(found: int | None, samples: list[Sample], q: float, beyond: int) -> None:
    """Rounding may decide where a probability is `q` itself, and nowhere else."""
    assert found in {literal.quantile(samples, q, beyond, slack) for slack in (1e-7, 0.0, -1e-7)}


def test_a_bin_is_the_first_edge_that_holds_the_length() -> None:
    for length in [*range(10_000), *range(10_000, LONGEST, 97), LONGEST - 1, LONGEST]:
        assert EDGES[bin_for(length)] == literal.edge_above(length)
        assert bin_for(length) == 0 or EDGES[bin_for(length) - 1] < length
    assert list(EDGES) == sorted(set(EDGES))
    assert EDGES[-1] == LONGEST
    assert all((edge - length) * 128 <= max(length, 16 * 128) for length, edge in itertools.pairwise(EDGES))


@given(SAMPLES, QUANTILES, st.one_of(st.just(0), LENGTHS), st.sampled_from([1, 7, 2000]))
def test_quantiles_are_those_of_the_definition(samples: list[Sample], q: float, beyond: int, half_life: int) -> None:
    found = learned(samples, half_life).quantile(q, beyond)
    assert_is_quantile(found, literal.decayed(samples, half_life), q, beyond)


@given(SAMPLES, QUANTILES, st.one_of(st.just(0), LENGTHS))
def test_a_length_lies_in_the_bin_of_its_quantile(samples: list[Sample], q: float, beyond: int) -> None:
    survival = learned(samples).survival()
    length, edge = survival.length(q, beyond), survival.quantile(q, beyond)
    if length is None or edge is None:
        assert length is edge
        return
    index = bin_for(edge)
    assert max(beyond, EDGES[index - 1] if index else 0) < length <= edge
    higher = survival.length(0.999, beyond)
    assert higher is None or higher >= length


def test_answers_that_are_spread_evenly_give_a_quantile_to_the_token() -> None:
    histogram = learned([Sample(length, False) for length in range(1, 1601)], half_life=10**9)
    found = [histogram.survival().length(*asked) for asked in ((0.5, 0), (0.75, 0), (0.9, 0), (0.905, 0), (0.5, 800))]
    for length, exact in zip(found, [800, 1200, 1440, 1448, 1200], strict=True):
        assert length is not None
        assert 0 <= length - exact <= 1


@given(st.lists(st.tuples(st.builds(Sample, LENGTHS, st.booleans()), st.booleans()), max_size=100), QUANTILES)
def test_an_answer_in_between_is_that_of_the_last_samples_but_a_few(steps: list[tuple[Sample, bool]], q: float) -> None:
    histogram, samples = LengthHistogram(), []
    for sample, is_asked in steps:
        histogram.add(sample.length, is_censored=sample.is_censored)
        samples.append(sample)
        if is_asked:
            found, count = histogram.quantile(q), len(samples)
            prefixes = [samples[: count - late] for late in range(count // 8 + 1)]
            assert any(
                found == literal.quantile(literal.decayed(prefix), q, 0, slack)
                for prefix in prefixes
                for slack in (1e-7, 0.0, -1e-7)
            )


def test_a_share_that_is_met_exactly_is_met() -> None:
    """1 - 0.9 is less than 0.1 in floating point, and a product of shares is rounded too."""
    for count in (10, 20, 50, 100):
        histogram = learned([Sample(16 * number, False) for number in range(1, count + 1)], half_life=10**15)
        for tenths in range(1, 10):
            assert histogram.quantile(tenths / 10) == 16 * count * tenths // 10


def test_nothing_is_said_of_nothing() -> None:
    assert LengthHistogram().quantile(0.9) is None


def test_the_old_lengths_are_forgotten_by_half_in_each_half_life() -> None:
    histogram = learned([Sample(100, False)] * 20_000)
    for _ in range(2000):
        histogram.add(1000, is_censored=False)
    assert histogram.survival().beyond[0] == pytest.approx(0.5, abs=0.01)
    for _ in range(100_000):
        histogram.add(1000, is_censored=False)
    assert histogram.survival().edges == [1008]


def test_a_jump_of_the_lengths_shows_after_a_few_percent_of_the_half_life() -> None:
    histogram = learned([Sample(100, False)] * 20_000)
    needed = 0
    while histogram.quantile(0.9) == 112:
        histogram.add(1000, is_censored=False)
        needed += 1
    assert needed < 450  # a tenth of the weight, and a table that is 64 samples old


def test_quantiles_are_those_of_the_definition_after_scaling_too() -> None:
    samples = [Sample(index % 300, False) for index in range(1000)]
    histogram = learned(samples, half_life=10)  # scales after 200 samples
    for q in (0.1, 0.5, 0.9):
        assert_is_quantile(histogram.quantile(q), literal.decayed(samples, 10), q, 0)


@pytest.mark.parametrize("length", [LONGEST + 1, 10**400, 2**63])
def test_a_length_beyond_all_bins_is_only_known_to_be_longer(length: int) -> None:
    histogram = learned([Sample(length, False)] * 100)
    assert histogram.quantile(0.5) is None
    for _ in range(150):
        histogram.add(10, is_censored=False)
    assert histogram.quantile(0.5) == 16
    assert histogram.quantile(0.9) is None


def test_memory_is_bounded_whatever_is_added() -> None:
    histogram = LengthHistogram()
    for length in range(0, 2 * LONGEST, 13):
        histogram.add(length, is_censored=bool(length % 2))
    complete, censored = histogram._complete, histogram._censored
    assert len(complete) == len(censored) == len(EDGES) == 896
    assert sys.getsizeof(complete) + sys.getsizeof(censored) < 20_000
