"""Tenants' limits against the definition of what they allow, computed another way: from all that ever came, at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from sidecar.errors import RemainingLimit, RemainingLimits
from sidecar.policy.tenant import Limits
from sidecar.scheduling.rate_limit import FEWEST_SWEPT, GUESSED_US, Charge, ExceededLimit, Limit, RateLimiter

MINUTE_US = 60_000_000


@dataclass
class Literal:
    """The definition, without any state: by how much what came in some stretch up to now exceeds what it may carry.

    Each amount may be changed afterwards: what hindsight knows.
    """

    limits: Limits
    came: list[tuple[int, int]] = field(default_factory=list)

    def has_room(self, tokens: int, now_us: int) -> bool:
        """Whether no stretch of time that ends now carries more than the burst and what drains in it."""
        carried, per_minute = tokens, self.limits.tokens_per_minute or 0
        for start_us, amount in [(now_us, 0), *reversed(self.came)]:
            carried += amount
            if carried * MINUTE_US > per_minute * (self.limits.burst_us + now_us - start_us):
                return False
        return True


def of_tokens(per_minute: int, burst_s: float = 60) -> Limits:
    return Limits(tokens_per_minute=per_minute, burst_us=round(burst_s * 1e6))


BURSTS_S = st.sampled_from([0.5, 1, 10, 60])
LIMITS = st.builds(of_tokens, st.sampled_from([7, 60, 600, 1000, 99_999_999]), BURSTS_S)
COUNTED = st.builds(of_tokens, st.sampled_from([7, 60, 600, 1000, 19_999_999]), BURSTS_S)
"""Limits whose levels stay below `FULLEST`, however much more than its estimate is used: beyond it nothing counts."""
# Pauses around what a few tokens take to drain, so that every refusal is a close one.
PAUSES_US = st.one_of(st.integers(0, 3), st.integers(0, 2_000_000), st.integers(0, 90_000_000))
PARTS = st.sampled_from([Fraction(part, 8) for part in range(9)])
USED = st.sampled_from([Fraction(part, 8) for part in range(17)])
FEW = settings(phases=[Phase.explicit, Phase.reuse, Phase.generate])


def most_at_once(limits: Limits) -> int:
    return max(1, (limits.tokens_per_minute or 0) * limits.burst_us // MINUTE_US)


@given(LIMITS, st.lists(st.tuples(PAUSES_US, PARTS), max_size=40))
@FEW
def test_what_conforms_is_exactly_what_the_definition_allows(limits: Limits, asked: list[tuple[int, Fraction]]) -> None:
    limiter, literal, now_us = RateLimiter(), Literal(limits), 10**15
    for pause_us, part in asked:
        now_us += pause_us
        tokens = 1 + round(part * most_at_once(limits))
        over = limiter.over("t", limits, tokens, now_us)
        assert (over is None) == literal.has_room(tokens, now_us)
        if over is None:
            limiter.charge("t", limits, tokens, now_us)
            literal.came.append((now_us, tokens))


@given(LIMITS, st.lists(st.tuples(PAUSES_US, PARTS), min_size=1, max_size=40))
@FEW
def test_a_refusal_says_the_very_microsecond_from_which_on_it_conforms(
    limits: Limits, asked: list[tuple[int, Fraction]]
) -> None:
    limiter, now_us = RateLimiter(), 10**15
    for pause_us, part in asked:
        now_us += pause_us
        tokens = 1 + round(part * most_at_once(limits))
        over = limiter.over("t", limits, tokens, now_us)
        if over is not None and over.fits_after_us is not None:
            assert limiter.over("t", limits, tokens, now_us + over.fits_after_us - 1) is not None
            now_us += over.fits_after_us
            assert limiter.over("t", limits, tokens, now_us) is None
        if over is None or over.fits_after_us is not None:
            limiter.charge("t", limits, tokens, now_us)


@dataclass
class Run:
    """A request that was let in: its charge, its place in the replay, what it asked for."""

    charge: Charge
    place: int
    tokens: int


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), PAUSES_US, PARTS),
        st.tuples(st.just("end"), PAUSES_US, st.integers(0, 50), USED),
    ),
    min_size=10,
    max_size=60,
)


@given(COUNTED, STEPS)
@FEW
def test_no_correction_ever_lets_in_more_than_charging_what_was_used_from_the_start(
    limits: Limits, steps: list[tuple[object, ...]]
) -> None:
    """The replay charges at the arrival what was used, of all that is known by then: its level is never the higher."""
    limiter, replay, now_us = RateLimiter(), Literal(limits), 10**15
    running: list[Run] = []
    for step in steps:
        now_us += step[1]  # type: ignore[operator]
        match step:
            case ("ask", _, Fraction() as part):
                tokens = 1 + round(part * most_at_once(limits))
                if limiter.over("t", limits, tokens, now_us) is None:
                    assert replay.has_room(tokens, now_us)
                    running.append(Run(limiter.charge("t", limits, tokens, now_us), len(replay.came), tokens))
                    replay.came.append((now_us, tokens))
            case ("end", _, int() as index, Fraction() as part) if running:
                run = running.pop(index % len(running))
                used = round(part * run.tokens)
                limiter.correct(run.charge, used, now_us)
                replay.came[run.place] = (replay.came[run.place][0], used)


def test_a_refund_gives_back_what_has_not_drained() -> None:
    limits, limiter = of_tokens(600), RateLimiter()
    charge = limiter.charge("t", limits, 600, 0)
    limiter.correct(charge, 100, 20_000_000)  # 400 are left of it, 500 of it were not used
    assert limiter.allowance("t", limits, 20_000_000).tokens == RemainingLimit(600, 600, 0)


def test_an_absurd_usage_is_bounded() -> None:
    limits, limiter = of_tokens(600), RateLimiter()
    limiter.correct(limiter.charge("t", limits, 1, 0), 2**60, 0)
    over = limiter.over("t", limits, 1, 0)
    assert over is not None
    assert (over.fits_after_us or 0) * 600 < 2**53


# -- requests, and several at once


def test_the_smallest_burst_still_lets_one_request_through() -> None:
    limits, limiter = Limits(requests_per_minute=3, burst_us=10_000_000), RateLimiter()
    limiter.charge("t", limits, 1, 0)
    assert limiter.over("t", limits, 1, 0) == ExceededLimit(Limit.REQUESTS, 20_000_000)
    assert limiter.over("t", limits, 1, 20_000_000) is None


def test_as_many_requests_run_at_once_as_all_holders_together_may_have() -> None:
    limits, limiter = Limits(concurrent_requests=2), RateLimiter()
    charge = limiter.charge("t", limits, 10, 0)
    limiter.hold("a", "t", 1)
    assert limiter.over("t", limits, 1, 1) is None
    limiter.hold_only("b", {"t": 1, "other": 5})
    assert limiter.over("t", limits, 1, 1) == ExceededLimit(Limit.CONCURRENT, GUESSED_US), "none has ended yet"
    limiter.correct(charge, 5, 4_000_000)
    assert limiter.over("t", limits, 1, 4_000_000) == ExceededLimit(Limit.CONCURRENT, 2_000_000), (
        "4 s each, two at once"
    )
    assert limiter.allowance("t", limits, 4_000_000) == RemainingLimits()
    limiter.forget("b")
    assert limiter.over("t", limits, 1, 1) is None
    limiter.hold("a", "t", 0)
    assert limiter.held("a", "t") == 0


def test_how_long_requests_take_is_known_for_some_minutes_after_they_have_all_ended() -> None:
    limits, limiter = Limits(concurrent_requests=1), RateLimiter()
    limiter.correct(limiter.charge("t", limits, 10, 0), 5, 4_000_000)
    limiter.hold("a", "t", 1)
    for now_us, after_us in ((604_000_000, 4_000_000), (1_204_000_001, GUESSED_US)):
        assert limiter.over("t", limits, 1, now_us) == ExceededLimit(Limit.CONCURRENT, after_us)


def test_what_was_charged_before_the_buckets_were_last_empty_is_not_refunded() -> None:
    limits, limiter = Limits(tokens_per_minute=600, requests_per_minute=60), RateLimiter()
    limiter.correct(limiter.charge("t", limits, 100, 0), 0, 0)
    limiter.charge("t", limits, 1, 0)
    limiter.correct(limiter.charge("t", limits, 100, 0), 0, 0)
    charge = limiter.charge("t", limits, 100, 0)
    assert charge.refunded == 200
    assert limiter.allowance("t", limits, 10_100_000).tokens == RemainingLimit(600, 600, 0)
    limiter.charge("t", limits, 100, 10_100_000)
    limiter.refund_request(charge, 10_100_000)
    limiter.correct(charge, 0, 10_100_000)
    assert limiter.allowance("t", limits, 10_100_000) == RemainingLimits(
        RemainingLimit(60, 59, 1_000_000), RemainingLimit(600, 500, 10_000_000)
    )


def test_the_last_of_several_limits_to_free_is_the_one_that_is_reported() -> None:
    limits, limiter = Limits(requests_per_minute=60, tokens_per_minute=600, burst_us=1_000_000), RateLimiter()
    limiter.charge("t", limits, 10, 0)
    assert limiter.over("t", limits, 1, 0) == ExceededLimit(Limit.REQUESTS, 1_000_000)
    assert limiter.over("t", limits, 11, 0) == ExceededLimit(Limit.TOKENS, None), "larger than the bucket: never"


# -- other limits, other tenants, memory


@pytest.mark.parametrize(("after", "left"), [(of_tokens(6000), 5400), (of_tokens(60), 0), (Limits(), None)])
def test_a_changed_limit_counts_from_the_next_request_on(after: Limits, left: int | None) -> None:
    limiter = RateLimiter()
    charge = limiter.charge("t", of_tokens(600), 600, 0)
    tokens = limiter.allowance("t", after, 0).tokens
    assert left == (None if tokens is None else tokens.left)
    limiter.correct(charge, 600, MINUTE_US)


def test_memory_is_bounded_by_the_tenants_that_are_not_at_rest() -> None:
    limits, limiter = of_tokens(60_000), RateLimiter()
    for number in range(20 * FEWEST_SWEPT):
        now_us = number * 10_000
        charge = limiter.charge(f"tenant-{number}", limits, 100, now_us)  # at rest a tenth of a second later
        limiter.correct(charge, 100, now_us)
        assert len(limiter) <= FEWEST_SWEPT


def test_of_100_000_users_in_a_minute_those_are_kept_that_came_last() -> None:
    limiter, once = RateLimiter(), Limits(requests_per_minute=1)
    for number in range(100_000):
        limiter.keep_within(user := f"acme user {number}", 1_000)
        assert limiter.over(user, once, 1, number) is None
        limiter.charge(user, once, 1, number)
    limiter.keep_within("other user 1", 1_000)
    assert len(limiter) == 1_000
    assert limiter.over("acme user 99999", once, 1, 100_000) is not None
    assert limiter.over("acme user 98999", once, 1, 100_000) is None
