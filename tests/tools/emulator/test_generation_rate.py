"""The generation rate that SGLang reports: the mean over 40 steps that decoded, with the pauses between them."""

from __future__ import annotations

from sidecar.tools.emulator.generation_rate import INTERVAL_STEPS, GenerationRate


def test_nothing_is_said_before_the_first_measurement() -> None:
    rate = GenerationRate()
    for step in range(INTERVAL_STEPS - 1):
        rate.add(2, float(step))
    assert rate.tokens_per_s(INTERVAL_STEPS - 2) == 0.0


def test_it_is_the_tokens_over_the_time_since_the_last_measurement() -> None:
    rate = GenerationRate()
    for step in range(INTERVAL_STEPS + 1):
        rate.add(2 if step else 0, 0.5 * step)
    assert rate.tokens_per_s(0.5 * INTERVAL_STEPS) == 4.0


def test_an_idle_hour_counts_in_the_next_measurement() -> None:
    rate = GenerationRate()
    for step in range(INTERVAL_STEPS + 1):
        rate.add(1 if step else 0, float(step))
    for step in range(INTERVAL_STEPS):
        rate.add(1, 3_640.0)
        assert rate.tokens_per_s(3_640.0) == (1.0 if step < INTERVAL_STEPS - 1 else INTERVAL_STEPS / 3_600.0)


def test_it_is_forgotten_after_thirty_idle_seconds() -> None:
    rate = GenerationRate()
    for step in range(INTERVAL_STEPS + 1):
        rate.add(1 if step else 0, float(step))
    assert [rate.tokens_per_s(INTERVAL_STEPS + idle_s) for idle_s in (0.0, 30.0, 30.1)] == [1.0, 1.0, 0.0]


def test_a_step_of_prefill_alone_does_not_count() -> None:
    rate = GenerationRate()
    for step in range(10 * INTERVAL_STEPS):
        rate.add(0, float(step))
    assert rate.tokens_per_s(10.0 * INTERVAL_STEPS) == 0.0
