"""Trust in learned output lengths: raised by preemptions, one step a reading, and back after a calm."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.lengths.trust import CALM_US, Trust
from sidecar.policy.choices import Learn

SECOND = 1_000_000
LADDERS = {
    Learn.OFF: [(1.0, False)],
    Learn.CAUTIOUS: [(0.95, False), (0.975, False), (0.9875, False), (0.99, False)],
    Learn.FULL: [(0.90, True), (0.95, True), (0.975, True), (0.9875, True), (0.99, True), (0.99, False)],
}


def in_force(trust: Trust) -> tuple[float, bool]:
    return trust.quantile, trust.uses_overlap


def began(learn: Learn) -> Trust:
    trust = Trust(learn, 0)
    trust.preempted(0, 0, 0)
    return trust


def test_without_a_counter_the_base_stays() -> None:
    trust = Trust(Learn.FULL, 0)
    for minute in range(60):
        trust.look(minute * 60 * SECOND)
        assert in_force(trust) == (0.90, True)


def test_what_the_engine_counted_before_this_process_is_no_reason() -> None:
    trust = Trust(Learn.CAUTIOUS, 0)
    trust.preempted(2**60, SECOND, 10)
    assert trust.quantile == 0.95


def test_another_mode_begins_at_its_base_and_the_same_changes_nothing() -> None:
    trust = began(Learn.CAUTIOUS)
    changes: list[float] = []
    trust.on_change.append(lambda: changes.append(trust.quantile))
    trust.preempted(10, SECOND, 1)
    trust.change_mode(Learn.CAUTIOUS)
    assert trust.is_raised
    trust.change_mode(Learn.FULL)
    assert (in_force(trust), trust.is_raised) == ((0.90, True), False)
    trust.change_mode(Learn.OFF)
    trust.preempted(99, 2 * SECOND, 1)
    assert in_force(trust) == (1.0, False)
    assert changes == [0.975, 0.90, 1.0]


def test_each_change_is_logged_and_said_in_a_sentence(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sidecar.lengths")
    trust = began(Learn.FULL)
    reasons = [trust.reason]
    for second in range(1, 6):
        trust.preempted(10 * second, second * SECOND, 0)
        reasons.append(trust.reason)
    trust.look(5 * SECOND + CALM_US)
    assert reasons == [
        "learn is full, and the engine has not preempted more than is tolerated",
        *["the engine preempted requests, so the quantile is above the 0.9 of learn: full"] * 4,
        "the engine went on to preempt requests at quantile 0.99, so the overlap is not used",
    ]
    assert [record.__dict__["event"] for record in caplog.records] == ["quantile_raised"] * 5 + ["quantile_lowered"]
    assert caplog.messages[0] == (
        "requests that the engine preempted: 10. Leases hold quantile 0.95 of the output lengths, less the overlap, "
        "from now on"
    )
    assert caplog.messages[-1] == (
        "no preemption for 1m: leases hold quantile 0.99 of the output lengths, less the overlap, from now on"
    )


# -- the rule, literally

Readings = list[tuple[int, int, int]]
"""Seconds since the reading before, new preemptions, newly admitted requests."""
readings = st.lists(st.tuples(st.integers(0, 700), st.integers(0, 3), st.integers(0, 1_500)), max_size=30)
modes = st.sampled_from(list(Learn))


def literal(learn: Learn, given_readings: Readings) -> list[int]:
    """The step after each reading: request by request, preemption by preemption, second by second."""
    step = bucket = calm_s = 0
    steps = []
    for seconds, preemptions, admitted in given_readings:
        for _ in range(seconds):
            calm_s += 1
            if calm_s == 60 and not preemptions:
                step, bucket, calm_s = max(0, step - 1), 0, 0
        for _ in range(admitted):
            bucket -= bucket > 0
        for _ in range(preemptions):
            bucket, calm_s = bucket + 1_000, 0
        if bucket > 1_000:
            step, bucket = min(step + 1, len(LADDERS[learn]) - 1), 0
        steps.append(step)
    return steps


def run(learn: Learn, given_readings: Readings) -> list[int]:
    trust, now_s, total, admitted = began(learn), 0, 0, 0
    steps = []
    for seconds, preemptions, entered in given_readings:
        now_s, total, admitted = now_s + seconds, total + preemptions, admitted + entered
        trust.preempted(total, now_s * SECOND, admitted)
        steps.append(LADDERS[learn].index(in_force(trust)))
    return steps


@given(modes, readings)
def test_the_rule_is_what_it_says(learn: Learn, given_readings: Readings) -> None:
    assert run(learn, given_readings) == literal(learn, given_readings)


@given(modes, st.lists(st.tuples(st.integers(0, 700), st.integers(0, 3), st.integers(0, 1_500), st.integers(0, 3))))
def test_more_preemptions_never_lead_to_a_lower_step(learn: Learn, found: list[tuple[int, int, int, int]]) -> None:
    fewer = run(learn, [(seconds, new, admitted) for seconds, new, admitted, _ in found])
    more = run(learn, [(seconds, new + besides, admitted) for seconds, new, admitted, besides in found])
    assert all(low <= high for low, high in zip(fewer, more, strict=True))


wild = st.one_of(st.integers(0, 5), st.integers(0, 2**70), st.just(2**60), st.integers(-5, 0))


@given(modes, st.lists(st.tuples(wild, st.integers(-(2**40), 2**62), wild)))
def test_hostile_counters_and_clocks_move_one_step_at_most_and_end_at_the_base(
    learn: Learn, found: list[tuple[int, int, int]]
) -> None:
    trust, ladder = Trust(learn, 0), LADDERS[learn]
    step = latest_us = 0
    for total, now_us, admitted in found:
        trust.preempted(total, now_us, admitted)
        before, step = step, ladder.index(in_force(trust))
        assert step <= before + 1
        assert trust.reason
        latest_us = max(latest_us, now_us)
    for _ in ladder:
        latest_us += CALM_US
        trust.look(latest_us)
    assert in_force(trust) == ladder[0]
