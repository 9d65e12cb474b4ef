"""What is learned of an engine: exact where the samples are, near where they are noisy, stated where there are none."""

from __future__ import annotations

import random
import sys

import pytest

from sidecar.admission.dry_run.service_time import (
    ENOUGH,
    KEPT,
    ModelTimes,
    OutputLengths,
    SizeClasses,
    TokenTimes,
    WholeTimes,
    fitted,
)


def samples_of(pairs: list[tuple[float, float]]) -> SizeClasses:
    samples = SizeClasses()
    for size, value in pairs:
        samples.add(size, value)
    return samples


def test_a_line_is_found_exactly() -> None:
    line = fitted(samples_of([(size, 20_000 + 90 * size) for size in range(10, 8000, 37)]))
    assert line is not None
    assert line.per_token_us == pytest.approx(90)
    assert line.base_us == pytest.approx(20_000, rel=0.01)
    assert line.late == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("seed", range(5))
def test_a_fifth_of_wrong_samples_does_no_harm(seed: int) -> None:
    luck = random.Random(seed)
    pairs = []
    for _ in range(400):
        size = luck.choice((60, 250, 1000, 4000, 9000))
        value = 20_000 + 90 * size
        pairs.append((size, value * luck.uniform(0.9, 1.1) if luck.random() < 0.8 else value * 30))
    line = fitted(samples_of(pairs))
    assert line is not None
    assert line.per_token_us == pytest.approx(90, rel=0.15)
    assert line.at(4000) == pytest.approx(380_000, rel=0.15)


def test_an_engine_that_works_in_steps_shows_its_rate_all_the_same() -> None:
    # Steps of 50 ms and 512 tokens; a request comes at any moment of a step.
    luck = random.Random(1)
    sizes = [luck.choice((100, 1000, 4000, 8000)) for _ in range(200)]
    line = fitted(samples_of([(size, 50_000 * (-(-size // 512) + luck.random())) for size in sizes]))
    assert line is not None
    assert line.per_token_us == pytest.approx(50_000 / 512, rel=0.1)


def test_few_samples_are_no_line_and_one_size_has_no_slope() -> None:
    assert fitted(samples_of([(10, 5)] * (ENOUGH - 1))) is None
    line = fitted(samples_of([(10, 5)] * ENOUGH))
    assert line is not None
    assert (line.base_us, line.per_token_us) == (5, 0)


def test_what_gets_faster_with_its_size_has_no_slope() -> None:
    line = fitted(samples_of([(size, 10_000 - size) for size in range(1, 5000, 50)]))
    assert line is not None
    assert line.per_token_us == 0


def test_samples_of_a_prompt_alone_replace_the_others_where_they_are_of_sizes_far_apart() -> None:
    samples = SizeClasses()
    for size in (100, 1000, 8000) * 10:
        samples.add(size * 3, 5e6, is_sure=False)  # delayed by others
    for size in (100, 1000, 8000) * 10:
        samples.add(size, 100 * size)
    line = fitted(samples)
    assert line is not None
    assert (line.base_us, line.per_token_us) == (pytest.approx(0), pytest.approx(100))


@pytest.mark.long
def test_memory_is_bounded_and_new_samples_replace_old_ones() -> None:
    model = ModelTimes()
    for size in range(20_000):
        model.learn_first_byte(size, 1000.0, is_alone=True)
        model.tokens.learn(size % 300, 10.0)
        model.wholes.learn(size, 10, 1000.0)
        model.lengths_of(0).learn(size, None)
    assert len(model.first_bytes.samples()) <= 32 * KEPT
    assert sys.getsizeof(model.lengths_of(0)._lengths) < 20_000
    for _ in range(2 * KEPT):
        model.learn_first_byte(99_000, 3000.0, is_alone=True)
    assert max(value for _, value in model.first_bytes.samples()) == 3000.0
    assert model.first_byte is not None


def test_time_per_token_by_what_generates_and_no_correction_within_the_noise() -> None:
    times = TokenTimes()
    assert times.at(3) is None
    assert times.stretch(2, 60) == 1
    for _ in range(20):
        for generating in (1, 4, 16, 64):
            times.learn(generating, 10_000 + 1_000 * generating)
    assert times.at(1) == pytest.approx(11_000)
    assert times.at(10) == pytest.approx(20_000)
    assert times.at(1000) == pytest.approx(74_000)
    assert times.stretch(16, 64) == pytest.approx(26 / 74)
    assert times.stretch(4, 4.5) == 1
    assert times.knows(1)


def test_of_a_crowd_alone_it_is_not_known_what_few_take() -> None:
    times = TokenTimes()
    for _ in range(20):
        times.learn(60, 70_000)
    assert not times.knows(8)
    assert times.knows(40)


@pytest.mark.parametrize("seed", range(3))
def test_responses_that_are_not_streamed_show_their_parts(seed: int) -> None:
    luck, times = random.Random(seed), WholeTimes()
    assert times.at(100, 10) is None
    for _ in range(200):
        prompt, output = luck.choice((50, 500, 4000)), luck.choice((5, 20, 100, 300))
        times.learn(prompt, output, (30_000 + 90 * prompt + 20_000 * output) * luck.uniform(0.95, 1.05))
    for prompt, output in ((50, 300), (4000, 5), (4000, 300), (500, 60)):
        assert times.at(prompt, output) == pytest.approx(30_000 + 90 * prompt + 20_000 * output, rel=0.25)


def test_lengths_are_drawn_as_they_were_seen() -> None:
    lengths = OutputLengths()
    assert lengths.draw(100) is None
    assert lengths.draw(None) is None
    for tokens in (20, 40, 60) * 20:
        lengths.learn(tokens, 200)
    drawn = [lengths.draw(1000) for _ in range(600)]
    assert set(drawn) == {100.0, 200.0, 300.0}
    assert sum(one or 0 for one in drawn) / 600 == pytest.approx(200, rel=0.1)
    assert lengths.draw(None) is None  # those without a maximum are other requests
    lengths.learn(7, None)
    assert lengths.draw(None) == 7


def test_a_tier_without_lengths_of_its_own_uses_those_of_another() -> None:
    model = ModelTimes()
    assert model.drawn_length(1, 100) is None
    model.lengths_of(0).learn(50, 100)
    assert model.drawn_length(1, 100) == 50
