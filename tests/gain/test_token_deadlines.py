from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.gain.token_deadlines import Earned, GainLedger, Objective, SloOutcome, TokenDeadlines

OBJECTIVE = Objective(ttft_us=1_000, tpot_us=100, weight=4)
GAPS = st.lists(st.tuples(st.integers(0, 400), st.integers(1, 5)), min_size=1, max_size=40)


def literal_gain(objective: Objective, arrived_us: int, times_us: list[int]) -> int:
    """The sum over the tokens, as the page defines it."""
    return sum(
        objective.weight
        for i, at_us in enumerate(times_us, 1)
        if at_us < arrived_us + objective.ttft_us + (i - 1) * objective.tpot_us
    )


def read(deadlines: TokenDeadlines, chunks: list[tuple[int, int]]) -> list[int]:
    """Feeds chunks of (time after the one before, tokens). Returns the time of every token."""
    now_us, events, times = 0, 0, []
    for gap_us, tokens in chunks:
        now_us, events = now_us + gap_us, events + tokens
        times += [now_us] * tokens
        deadlines.read(now_us, events)
    return times


@given(st.integers(0, 5_000), GAPS, st.integers(1, 1000), st.integers(1, 300))
def test_the_gain_is_that_of_the_literal_sum(
    first_us: int, chunks: list[tuple[int, int]], weight: int, tpot: int
) -> None:
    objective = Objective(1_000, tpot, weight)
    deadlines = TokenDeadlines(objective, 0)
    times = read(deadlines, [(first_us, 1), *chunks])
    gain = deadlines.streamed(len(times))
    assert gain.earned == literal_gain(objective, 0, times)
    assert gain.attainable == weight * len(times)


@given(st.integers(0, 5_000), GAPS)
def test_the_outcome_is_that_of_the_benchmarks(first_us: int, chunks: list[tuple[int, int]]) -> None:
    deadlines = TokenDeadlines(OBJECTIVE, 0)
    times = read(deadlines, [(first_us, 1), *chunks])
    mean_us = (times[-1] - times[0]) / (len(times) - 1)
    expected = SloOutcome.TTFT if times[0] >= 1_000 else SloOutcome.TPOT if mean_us > 100 else SloOutcome.MET
    assert deadlines.streamed(len(times)).outcome is expected


@given(st.integers(0, 3_000), st.lists(st.integers(0, 1_500), min_size=1, max_size=30), st.sampled_from([2, 4, 8]))
def test_events_of_several_tokens_are_due_as_the_first_of_them(first_us: int, gaps: list[int], per_event: int) -> None:
    deadlines = TokenDeadlines(OBJECTIVE, 0, tokens_per_event=per_event)
    times = read(deadlines, [(first_us, 1), *((gap, 1) for gap in gaps)])
    due = [1_000 + event * per_event * 100 for event in range(len(times))]
    in_time = sum(at_us < due_us for at_us, due_us in zip(times, due, strict=True))
    assert deadlines.streamed(len(times) * per_event).earned == 4 * in_time * per_event


@given(GAPS, st.integers(0, 10_000), st.integers(0, 10_000))
def test_whatever_an_engine_says_of_its_tokens_the_gain_is_between_nothing_and_all(
    chunks: list[tuple[int, int]], tokens: int, expected: int
) -> None:
    deadlines = TokenDeadlines(OBJECTIVE, 0)
    read(deadlines, chunks)
    for gain in (deadlines.streamed(tokens), deadlines.broken_off(tokens, expected, is_abandoned=True)):
        assert 0 <= gain.earned <= gain.attainable


def test_an_event_that_brings_no_token_is_not_the_first_token() -> None:
    deadlines = TokenDeadlines(OBJECTIVE, 0)
    deadlines.skip(3)
    deadlines.read(999, 4)
    assert deadlines.streamed(1) == Earned(4, 4, SloOutcome.MET)
    late = TokenDeadlines(OBJECTIVE, 0)
    late.skip(3)
    late.read(1_000, 4)
    assert late.streamed(1) == Earned(0, 4, SloOutcome.TTFT)


@given(st.integers(0, 5_000), GAPS, st.integers(0, 4))
def test_events_after_the_last_token_change_nothing(first_us: int, chunks: list[tuple[int, int]], more: int) -> None:
    plain, ended = TokenDeadlines(OBJECTIVE, 0), TokenDeadlines(OBJECTIVE, 0)
    times = read(plain, [(first_us, 1), *chunks])
    read(ended, [(first_us, 1), *chunks])
    for event in range(more):
        ended.read(times[-1], len(times) + event + 1)
    ended.end(more)
    assert ended.events == len(times)
    assert ended.streamed(len(times)) == plain.streamed(len(times))


def test_two_sequences_have_twice_the_tokens_in_the_same_time() -> None:
    deadlines = TokenDeadlines(OBJECTIVE, 0, sequences=2)
    times = read(deadlines, [(900, 1), (0, 1), *[(99, 1), (0, 1)] * 10])
    assert deadlines.streamed(len(times)) == Earned(4 * 22, 4 * 22, SloOutcome.MET)


@pytest.mark.parametrize(
    ("now_us", "admitted_us", "gain"),
    [
        (1_899, 0, Earned(40, 40, SloOutcome.MET)),
        (1_900, 999, Earned(0, 40, SloOutcome.TPOT)),
        (1_900, 1_000, Earned(0, 40, SloOutcome.TTFT)),
    ],
)
def test_an_answer_that_does_not_stream_is_due_when_its_last_token_is(
    now_us: int, admitted_us: int, gain: Earned
) -> None:
    assert TokenDeadlines(OBJECTIVE, 0).whole(10, admitted_us, now_us) == gain


def test_a_request_without_an_answer_counts_by_its_expected_length() -> None:
    refused = TokenDeadlines(OBJECTIVE, 0).broken_off(0, 100, is_abandoned=False)
    assert refused == Earned(0, 400, SloOutcome.REFUSED)


def test_an_answer_that_breaks_off_earned_what_it_brought() -> None:
    deadlines = TokenDeadlines(OBJECTIVE, 0)
    read(deadlines, [(500, 1), (50, 1), (5_000, 1)])
    assert deadlines.broken_off(3, 100, is_abandoned=True) == Earned(8, 400, SloOutcome.ABANDONED)


def test_a_client_may_loosen_an_objective_and_not_tighten_it() -> None:
    assert OBJECTIVE.loosened(5_000, 0) == Objective(5_000, 100, 4)
    assert OBJECTIVE.loosened(1, 99) == OBJECTIVE


def test_a_ledger_adds_up_by_tier_and_forgets_no_outcome() -> None:
    ledger = GainLedger()
    for outcome in SloOutcome:
        ledger.tier("high").add(Earned(1, 3, outcome))
    (document,) = ledger.documents()
    assert (document.tier, document.earned, document.attainable) == ("high", 5, 15)
    assert document.outcomes == dict.fromkeys(["met", "ttft", "tpot", "refused", "abandoned"], 1)


def test_a_ledger_is_bounded_whatever_tiers_policies_bring() -> None:
    ledger = GainLedger()
    for number in range(1000):
        ledger.tier(f"tier-{number}").answered(10)
    assert len(ledger.documents()) == 64
