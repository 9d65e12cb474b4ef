"""The controller of a guarded tier: what moves its share, what does not, and where it ends."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from sidecar.scheduling.guard import BEGIN, CUT, FAST, LEAST, MOST, GuardedPeriod, GuardState, decide, first_state

HOLD = 0.97
COUNTS = st.integers(0, 200)
SHARES = st.floats(0, 1)
PERIODS = st.builds(GuardedPeriod, COUNTS, COUNTS, SHARES, SHARES, SHARES, st.booleans())
RUNS = st.lists(PERIODS, max_size=40)


def after(run: list[GuardedPeriod], state: GuardState | None = None) -> GuardState:
    state = state or first_state(0.0)
    for period in run:
        state = decide(state, period, HOLD)
    return state


def busy(state: GuardState) -> GuardState:
    """The state once the tier has requests again."""
    return state._replace(share=min(state.share, state.busy))


def engine(state: GuardState, periods: int, most: Callable[[int], float]) -> list[float]:
    """Shares on an engine that is filled at once, and that is in time while no more than `most` of it is held."""
    shares = []
    for number in range(periods):
        is_late = state.share > most(number)
        state = decide(state, GuardedPeriod(0 if is_late else 6, 6 * is_late, state.share, state.share, 0, True), HOLD)
        shares.append(state.share)
    return shares


@given(RUNS, SHARES)
def test_the_share_stays_within_its_bounds(run: list[GuardedPeriod], floors: float) -> None:
    state = first_state(floors)
    assert state.share == max(BEGIN, floors)
    for period in run:
        state = decide(state, period, HOLD)
        assert LEAST <= state.share <= 1.0


@given(RUNS, RUNS)
def test_nothing_is_cut_while_no_more_is_missed_than_is_allowed(
    before: list[GuardedPeriod], run: list[GuardedPeriod]
) -> None:
    state = busy(after(before))._replace(met=0.0, missed=0.0)
    for period in run:
        following = decide(state, period._replace(missed=int(period.met * (1 - HOLD))), HOLD)
        assert following.share >= busy(state).share
        state = following


@given(RUNS, RUNS)
def test_no_miss_moves_anything_while_the_less_important_hold_their_floors(
    before: list[GuardedPeriod], run: list[GuardedPeriod]
) -> None:
    state = after(before)
    for period in run:
        following = decide(state, period._replace(floors=period.held), HOLD)
        assert following.share >= busy(state).share
        state = following


@given(RUNS, PERIODS, COUNTS)
def test_more_misses_never_raise_the_share(before: list[GuardedPeriod], period: GuardedPeriod, more: int) -> None:
    state = after(before)
    requests = period.met + period.missed
    worse = period._replace(met=max(0, period.met - more), missed=period.missed + min(period.met, more))
    assert worse.met + worse.missed == requests
    assert decide(state, worse, HOLD).share <= decide(state, period, HOLD).share


@given(RUNS)
def test_a_share_that_does_not_bind_does_not_grow(before: list[GuardedPeriod]) -> None:
    state = after(before)
    assert decide(state, GuardedPeriod(20, 0, 0.1, 0.2, 0.0, waits=False), HOLD).share <= state.share


@given(st.integers(1, 9), st.integers(0, 14))
def test_fewer_than_ten_requests_cut_nothing(missed: int, met_later: int) -> None:
    state = decide(first_state(0.5), GuardedPeriod(0, missed, 0.5, 0.5, 0.0, waits=True), HOLD)
    assert state.share == 0.5
    state = decide(state, GuardedPeriod(met_later, 9 - missed, 0.5, 0.5, 0.0, waits=True), HOLD)
    assert state.share == (CUT * 0.5 if met_later else 0.5), "with those before they are enough"


def test_where_nothing_misses_all_is_used_in_the_end_but_room_for_the_first_of_a_burst() -> None:
    assert engine(first_state(0.0), 60, lambda _: 1.0)[-1] == MOST


@given(RUNS, PERIODS)
def test_while_the_tier_has_requests_room_for_the_first_of_a_burst_is_left(
    run: list[GuardedPeriod], period: GuardedPeriod
) -> None:
    assert decide(after(run), period._replace(met=max(1, period.met)), HOLD).share <= MOST


@given(RUNS)
def test_without_requests_of_the_tier_all_is_used_in_the_end(before: list[GuardedPeriod]) -> None:
    lull = [GuardedPeriod(0, 0, 0.5, 0.5, 0.0, waits=True)] * 1000
    state = after(lull, after(before))
    assert state.share == 1.0
    back = decide(state, GuardedPeriod(1, 0, 1.0, 1.0, 0.0, waits=False), HOLD)
    assert back.share == state.busy, "it goes on from where it was"


def test_an_engine_three_times_slower_from_one_moment_on_is_followed_within_ten_decisions() -> None:
    shares = engine(first_state(0.0), 200, lambda number: 0.6 if number < 100 else 0.2)
    assert 0.5 < shares[99] <= 0.65
    assert min(shares[100:111]) < 0.2
    settled = shares[120:]
    assert 0.1 < min(settled) <= max(settled) < 0.22, "and it stays near what the engine does now"


def test_after_an_engine_that_stood_still_for_20_s_the_share_comes_back_in_five_minutes() -> None:
    shares = engine(first_state(0.0), 400, lambda number: 0.0 if 200 <= number < 210 else 0.55)
    before = max(shares[180:200])
    assert 0.5 < before <= 0.6
    assert shares[209] < 0.1
    assert max(shares[:360]) <= 0.55 * (1 + FAST)
    assert max(shares[210 : 210 + 150]) > 0.9 * before


def test_an_slo_that_cannot_be_met_ends_at_the_least_and_stays_there() -> None:
    assert set(engine(first_state(0.5), 200, lambda _: 0.0)[40:]) == {LEAST}
