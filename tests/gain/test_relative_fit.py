from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.gain.relative_fit import FIRST, RelativeFit
from tests.gain.literal import literal_coefficients
from tests.support.examples import examples

DEFAULTS = (20_000.0, 125.0)
TOKENS = st.floats(0, 1e6)
TIMES = st.floats(0.001, 1e9)


def learned(samples: list[tuple[tuple[float, ...], float]], defaults: tuple[float, ...] = DEFAULTS) -> RelativeFit:
    fit = RelativeFit(defaults)
    for features, took_us in samples:
        fit.learn(features, took_us)
    return fit


def drawn(seed: int, count: int, fixed_us: float, per_token_us: float) -> list[tuple[tuple[float, ...], float]]:
    """An engine's first tokens, with a spread of a third."""
    draw = random.Random(seed)
    sizes = [draw.lognormvariate(6.5, 1.2) for _ in range(count)]
    return [((1.0, size), (fixed_us + per_token_us * size) * draw.lognormvariate(0, 0.3)) for size in sizes]


@given(st.lists(st.tuples(st.tuples(st.just(1.0), TOKENS), TIMES), max_size=60))
def test_it_is_the_literal_fit_with_two_features(samples: list[tuple[tuple[float, ...], float]]) -> None:
    expected = literal_coefficients(DEFAULTS, samples)
    assert learned(samples).coefficients == pytest.approx(expected, rel=1e-5, abs=1e-6)


@settings(max_examples=examples(10))
@given(st.integers(0, 10**6), st.integers(16, 64))
def test_it_is_the_literal_fit_with_three_features(seed: int, count: int) -> None:
    draw = random.Random(seed)
    samples = []
    for _ in range(count):
        requests = draw.uniform(1, 256)
        features = (1.0, requests, requests * draw.uniform(10, 4000))
        samples.append((features, draw.lognormvariate(10, 1)))
    defaults = (10_000.0, 100.0, 0.05)
    expected = literal_coefficients(defaults, samples)
    assert learned(samples, defaults).coefficients == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_the_defaults_stand_until_enough_was_seen() -> None:
    assert learned(drawn(1, FIRST - 1, 1e6, 1e3)).coefficients == DEFAULTS
    assert learned(drawn(1, FIRST, 1e6, 1e3)).coefficients != DEFAULTS


@pytest.mark.parametrize(("fixed_us", "per_token_us"), [(15_000, 30), (40_000, 250), (300_000, 5_000), (2_000, 4)])
def test_it_finds_the_line_of_a_fast_and_of_a_slow_engine(fixed_us: float, per_token_us: float) -> None:
    fit = learned(drawn(2, 400, fixed_us, per_token_us))
    assert fit.coefficients[1] == pytest.approx(per_token_us, rel=0.2)
    assert fit.predict((1.0, 1000.0)) == pytest.approx(fixed_us + 1000 * per_token_us, rel=0.15)


def test_it_follows_an_engine_that_becomes_four_times_as_slow() -> None:
    fit = learned([*drawn(3, 600, 20_000, 50), *drawn(4, 400, 80_000, 200)])
    assert fit.predict((1.0, 1000.0)) == pytest.approx(280_000, rel=0.2)


@given(st.integers(0, 1000), TOKENS, TIMES)
def test_one_sample_moves_a_prediction_by_a_few_percent(seed: int, tokens: float, took_us: float) -> None:
    """Whatever it says: 16 tokens in a nanosecond, or a million that took a quarter of an hour."""
    honest = drawn(seed, 207, 20_000, 50)
    before, after = learned([*honest, honest[0]]), learned([*honest, ((1.0, tokens), took_us)])
    for size in (100.0, 1000.0, 4000.0):
        ratio = after.predict((1.0, size)) / before.predict((1.0, size))
        assert 0.85 < ratio < 1.18


def test_a_tenth_of_wild_samples_hardly_moves_it() -> None:
    draw = random.Random(5)
    wild = [(one, took_us * 1000 if draw.random() < 0.1 else took_us) for one, took_us in drawn(6, 800, 20_000, 50)]
    assert learned(wild).predict((1.0, 1000.0)) == pytest.approx(70_000, rel=0.25)


@pytest.mark.parametrize("took_us", [0.0, -1.0, float("nan"), float("inf"), 1e300])
def test_what_no_clock_says_is_not_taken(took_us: float) -> None:
    fit = learned([((1.0, 100.0), took_us)] * 50)
    assert (fit.samples, fit.coefficients) == (0, DEFAULTS)


@pytest.mark.parametrize("tokens", [-1.0, float("nan"), float("inf"), 1e300])
def test_what_no_count_says_is_not_taken(tokens: float) -> None:
    fit = learned([((1.0, tokens), 1000.0)] * 50)
    assert (fit.samples, fit.coefficients) == (0, DEFAULTS)
