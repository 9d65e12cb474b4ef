from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.engines.robust_line import Line
from sidecar.engines.speed import (
    DEFAULTS,
    STALE_AFTER,
    Coefficients,
    EngineSpeed,
    EngineSpeeds,
    VotedTimes,
    group_for,
)

TENANTS = {group_for(f"tenant-{number}"): f"tenant-{number}" for number in range(500)}
"""One tenant of each group."""
LINE = Line(20_000.0, 125.0)


def served(speed: EngineSpeed, at_us: int, tokens: int, first_us: int, token_us: int) -> int:
    """One request alone at the engine, with an answer of 64 tokens. Returns when it ended."""
    call = speed.sent("acme", tokens, at_us)
    since = speed.first_token(call, at_us + first_us)
    until = speed.load(at_us + first_us + 63 * token_us)
    speed.tokens_came(call, since, until, 63.0)
    speed.ended(call, until.at_us)
    return until.at_us


def test_a_new_engine_has_the_stated_defaults() -> None:
    assert EngineSpeed().coefficients == DEFAULTS == Coefficients(125_000, 250_000, 25_000, 20_000, is_known=False)
    assert EngineSpeeds().typical() == DEFAULTS


def test_asking_for_an_engine_does_not_remember_it_and_their_number_is_bounded() -> None:
    speeds = EngineSpeeds()
    speeds.typical()
    assert not speeds.engines
    for number in range(1000):
        speeds.engine(f"pod-{number}")
    assert len(speeds.engines) == 256
    assert "pod-999" in speeds.engines


def test_the_tokens_before_a_request_count_and_not_only_its_own() -> None:
    """An engine computes prompts one after the other: the wait for a first token is that of all before it."""
    speed, now_us, draw = EngineSpeed(), 0, random.Random(2)
    for _ in range(60):
        calls = [speed.sent("acme", draw.randrange(100, 2000), now_us) for _ in range(draw.randrange(1, 6))]
        for call in calls:
            now_us = call.sent_us + 10_000 + 50 * call.backlog
            speed.first_token(call, now_us)
        for call in calls:
            speed.ended(call, now_us)
        now_us += 100_000
    assert speed.coefficients.prefill_ns == pytest.approx(50_000, rel=0.1)
    assert (speed.unprefilled, speed.running, speed.generating.now) == (0, 0, 0)


def test_an_output_token_costs_the_part_of_a_step_that_a_sequence_has() -> None:
    speed, now_us = EngineSpeed(), 0
    for _ in range(40):
        calls = [speed.sent("acme", 10, now_us) for _ in range(20)]
        loads = [speed.first_token(call, now_us + 20_000) for call in calls]
        now_us += 20_000 + 63 * 30_000
        for call, since in zip(calls, loads, strict=True):
            speed.tokens_came(call, since, speed.load(now_us), 63.0)
        for call in calls:
            speed.ended(call, now_us)
    assert speed.coefficients.token_us == pytest.approx(30_000, rel=0.05)
    assert speed.coefficients.output_ns == pytest.approx(1_500_000, rel=0.1)


def test_two_replicas_share_a_step_between_twice_as_many_sequences() -> None:
    speeds = EngineSpeeds()
    alone = speeds.engine("a").coefficients
    speeds.share(2)
    for shared in (speeds.engine("a").coefficients, speeds.engine("new").coefficients):
        assert (shared.output_ns, shared.token_us) == (alone.output_ns // 2, alone.token_us)


def test_the_time_per_token_is_predicted_for_the_load_of_the_moment() -> None:
    speed, now_us, draw = EngineSpeed(), 0, random.Random(3)
    for _ in range(300):
        many = draw.randrange(1, 100)
        calls = [speed.sent("acme", 10, now_us) for _ in range(many)]
        loads = [speed.first_token(call, now_us + 5_000) for call in calls]
        now_us += 5_000 + 63 * (8_000 + 300 * many)
        speed.tokens_came(calls[0], loads[0], speed.load(now_us), 63.0)
        for call in calls:
            speed.ended(call, now_us)
    for many in (5, 50, 90):
        calls = [speed.sent("acme", 10, now_us) for _ in range(many)]
        assert speed.token.at(speed.running) == pytest.approx(8_000 + 300 * many, rel=0.15)
        for call in calls:
            speed.ended(call, now_us)


def test_a_prompt_of_an_answer_that_does_not_stream_counts_for_its_predicted_time() -> None:
    speed = EngineSpeed()
    call = speed.sent("acme", 800, 0, streams=False)
    assert speed.unprefilled == 800
    speed.load(call.predicted_us - 1)
    assert speed.unprefilled == 800
    speed.load(call.predicted_us)
    assert speed.unprefilled == 0
    speed.ended(call, 10**7)
    assert (speed.unprefilled, speed.running) == (0, 0)


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from("sftes"), st.integers(-50, 10**6)), max_size=80))
def test_whatever_ends_in_whatever_order_nothing_stays_behind(steps: list[tuple[int, str, int]]) -> None:
    speed, calls, now_us = EngineSpeed(), [], 0
    for which, step, more_us in steps:
        now_us = max(0, now_us + more_us)
        if step == "s":
            calls.append(speed.sent("acme", which * 100, now_us, sequences=1 + which % 2, streams=which > 1))
        elif calls:
            call = calls[which % len(calls)]
            if step == "f":
                speed.first_token(call, now_us)
            elif step == "t":
                speed.tokens_came(call, speed.load(0), speed.load(now_us), float(which * 10))
            else:
                speed.ended(call, now_us)
    for call in calls:
        speed.ended(call, now_us)
    speed.load(10**12)
    assert (speed.running, speed.generating.now, speed.unprefilled) == (0, 0, 0)
    assert min(speed.coefficients.token_us, speed.coefficients.output_ns) >= 1


# -- attacks


@pytest.mark.parametrize("factor", [1000.0, 0.001])
@pytest.mark.parametrize("share", [1, 50])
def test_a_liar_among_three_tenants_moves_nothing_however_much_it_sends(factor: float, share: int) -> None:
    names, draw, fit = list(TENANTS.values()), random.Random(4), VotedTimes(LINE, 1000.0)
    for _ in range(200):
        for honest in names[:3]:
            size = draw.uniform(100, 3000)
            fit.learn(honest, size, (30_000 + 60 * size) * draw.lognormvariate(0, 0.2))
        for _ in range(share):
            fit.learn(names[3], draw.uniform(1, 10), 30_000 * factor)
    assert fit.line_or_default.at(1000) == pytest.approx(90_000, rel=0.2)


def test_the_slower_of_two_tenants_does_not_make_the_engine_look_slow() -> None:
    fast, slow, *_ = TENANTS.values()
    fit = VotedTimes(LINE, 1000.0)
    for _ in range(200):
        fit.learn(fast, 1000.0, 90_000.0)
        fit.learn(slow, 1000.0, 9_000_000.0)
    assert fit.at(fit.mean) == pytest.approx(90_000, rel=0.05)


def test_a_group_that_says_nothing_any_more_does_not_count() -> None:
    old, new, *_ = TENANTS.values()
    fit = VotedTimes(LINE, 1000.0)
    for _ in range(64):
        fit.learn(old, 1000.0, 10_000.0)
    for _ in range(2 * STALE_AFTER):
        fit.learn(new, 1000.0, 90_000.0)
    assert fit.at(fit.mean) == pytest.approx(90_000, rel=0.05)


@given(st.lists(st.tuples(st.floats(0, 1e12), st.floats(0, 1e12)), min_size=1, max_size=100))
def test_whatever_one_tenant_sends_the_figures_stay_whole_and_in_bounds(samples: list[tuple[float, float]]) -> None:
    speed = EngineSpeed()
    for tokens, took_us in samples:
        call = speed.sent("acme", int(tokens), 0)
        speed.first_token(call, int(took_us))
        speed.ended(call, int(took_us))
    found = speed.coefficients
    assert all(isinstance(value, int) for value in (found.prefill_ns, found.output_ns, found.token_us, found.first_us))
    assert found.cost_us(1, 1) >= 1
    assert speed.first.error is None or 0 <= speed.first.error <= 1


def test_an_answer_of_a_few_tokens_says_nothing_of_the_time_per_token() -> None:
    speed = EngineSpeed()
    for _ in range(100):
        call = speed.sent("acme", 10, 0)
        since = speed.first_token(call, 1000)
        speed.tokens_came(call, since, speed.load(5000), 7.0)
        speed.ended(call, 5000)
    assert (speed.first.samples, speed.token.samples) == (100, 0)


def test_the_typical_engine_is_the_one_in_the_middle_of_those_that_are_known() -> None:
    speeds = EngineSpeeds()
    assert speeds.engine("only").coefficients == speeds.typical()
    for name, token_us in (("a", 30_000), ("b", 10_000), ("c", 20_000), ("d", 90_000)):
        at_us = 0
        for tokens in range(50, 4000, 50):
            at_us = served(speeds.engine(name), at_us + 1000, tokens, 30_000 + 40 * tokens, token_us)
    speeds.engine("no answer yet")
    assert speeds.typical() == speeds.engine("c").coefficients  # of the two in the middle the faster one
