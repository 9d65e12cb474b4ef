"""The fit of an engine's times: exact where the samples are, near where they are noisy, stated where there are none."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.engines.robust_line import ENOUGH, KEPT, Line, Point, TimesBySize

DEFAULT = Line(20_000.0, 125.0)
SIZES = st.floats(0, 1e6)
TIMES = st.floats(0.001, 1e9)


def learned(samples: list[Point], default: Line | None = DEFAULT) -> TimesBySize:
    times = TimesBySize(default)
    for size, took_us in samples:
        times.learn(size, took_us)
    return times


def line_of(samples: list[Point], default: Line | None = DEFAULT) -> Line:
    line = learned(samples, default).line
    assert line is not None
    return line


def drawn(seed: int, count: int, base_us: float, slope_us: float) -> list[Point]:
    """An engine's first tokens, with a spread of a third."""
    draw = random.Random(seed)
    sizes = [draw.lognormvariate(6.5, 1.2) for _ in range(count)]
    return [(size, (base_us + slope_us * size) * draw.lognormvariate(0, 0.3)) for size in sizes]


def test_a_line_is_found_exactly() -> None:
    line = line_of([(size, 20_000 + 90 * size) for size in range(10, 8000, 37)])
    assert line == (pytest.approx(20_000, rel=0.01), pytest.approx(90), pytest.approx(1, abs=0.01), True)


@pytest.mark.parametrize("seed", range(5))
def test_a_fifth_of_wrong_samples_does_no_harm(seed: int) -> None:
    luck, samples = random.Random(seed), []
    for _ in range(400):
        size = luck.choice((60, 250, 1000, 4000, 9000))
        took_us = 20_000 + 90 * size
        samples.append((size, took_us * luck.uniform(0.9, 1.1) if luck.random() < 0.8 else took_us * 30))
    line = line_of(samples)
    assert line.slope_us == pytest.approx(90, rel=0.15)
    assert line.at(4000) == pytest.approx(380_000, rel=0.15)


def test_an_engine_that_works_in_steps_shows_its_rate_all_the_same() -> None:
    # Steps of 50 ms and 512 tokens; a request comes at any moment of a step.
    luck = random.Random(1)
    sizes = [luck.choice((100, 1000, 4000, 8000)) for _ in range(200)]
    line = line_of([(size, 50_000 * (-(-size // 512) + luck.random())) for size in sizes])
    assert line.slope_us == pytest.approx(50_000 / 512, rel=0.1)


@pytest.mark.parametrize(("base_us", "slope_us"), [(15_000, 30), (40_000, 250), (300_000, 5_000), (2_000, 4)])
def test_it_finds_the_line_of_a_fast_and_of_a_slow_engine(base_us: float, slope_us: float) -> None:
    line = line_of(drawn(2, 400, base_us, slope_us))
    assert line.slope_us == pytest.approx(slope_us, rel=0.2)
    assert line.at(1000) == pytest.approx(base_us + 1000 * slope_us, rel=0.15)


def test_nothing_is_fitted_to_a_few_samples_and_what_they_took_is_known_all_the_same() -> None:
    times = learned([(100.0, 5.0)] * (ENOUGH - 1))
    assert times.line is None
    assert times.at(100) == 5
    assert learned([]).at(100) is None


def test_one_size_shows_no_slope_it_scales_what_is_usual() -> None:
    assert line_of([(10, 5)] * ENOUGH, None) == (5, 0, 1, False)
    assert line_of([(1000, 290_000)] * ENOUGH) == (pytest.approx(40_000), pytest.approx(250), 1, False)


def test_what_gets_faster_with_its_size_has_no_slope() -> None:
    assert line_of([(size, 10_000 - size) for size in range(1, 5000, 50)]).slope_us == 0


def test_a_line_that_would_begin_below_zero_goes_through_it() -> None:
    line = line_of([(size, 50 * size + size**2 / 100) for size in range(100, 4000, 50)])
    assert line.base_us == 0
    assert line.at(1500) == pytest.approx(50 * 1500 + 1500**2 / 100, rel=0.15)


@given(st.integers(0, 1000), SIZES, TIMES)
def test_one_sample_moves_a_prediction_by_a_few_percent(seed: int, size: float, took_us: float) -> None:
    """Whatever it says: 16 tokens in a nanosecond, or a million that took a quarter of an hour."""
    honest = drawn(seed, 207, 20_000, 50)
    before, after = line_of([*honest, honest[0]]), line_of([*honest, (size, took_us)])
    for asked in (100.0, 1000.0, 4000.0):
        assert 0.8 < after.at(asked) / before.at(asked) < 1.25


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf"), 1e300])
def test_what_no_clock_and_no_count_says_is_not_taken(wrong: float) -> None:
    times = learned([(100.0, wrong), (wrong, 1000.0), (100.0, 0.0)] * 50)
    assert (times.samples, times.line, times.points) == (0, None, [])


def test_between_sizes_it_is_between_their_times_and_beyond_them_that_of_the_nearest() -> None:
    times = learned([(size, 10_000 + 1_000 * size) for size in (1, 4, 16, 64)] * 20)
    assert [times.at(size) for size in (0, 1, 10, 64, 1000)] == [11_000, 11_000, 20_000, 74_000, 74_000]


def test_memory_is_bounded_and_new_samples_replace_old_ones_of_their_size() -> None:
    times = learned([(size % 3000, 1000.0) for size in range(6_000)])
    assert sum(map(len, times._classes.values())) <= 12 * KEPT
    for _ in range(1000):
        times.learn(99_000, 3000.0)
    assert times.at(99_000) == 3000
    assert times.at(100) == 1000
