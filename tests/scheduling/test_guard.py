"""The controller of a guarded tier: what moves it, what does not, and where it ends."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sidecar.scheduling.guard import BEGIN, LEAST, GuardedPeriod, GuardState, decide, first_state

HOLD = 0.97
COUNTS = st.integers(0, 200)
SHARES = st.floats(0, 1)
SEEN = st.builds(GuardedPeriod, COUNTS, COUNTS, COUNTS, COUNTS, SHARES, SHARES, SHARES)
RUNS = st.lists(SEEN, min_size=1, max_size=60)


def after(run: list[GuardedPeriod], state: GuardState | None = None) -> GuardState:
    state = state or first_state(0.0)
    for seen in run:
        state = decide(state, seen, HOLD)
    return state


@given(RUNS, SHARES)
def test_g_stays_within_its_bounds(run: list[GuardedPeriod], floors: float) -> None:
    state = first_state(floors)
    assert max(BEGIN, floors) == state.g
    for seen in run:
        state = decide(state, seen, HOLD)
        assert LEAST <= state.g <= 1.0


@given(RUNS, RUNS)
def test_nothing_is_cut_while_the_tier_meets_its_slo(before: list[GuardedPeriod], run: list[GuardedPeriod]) -> None:
    state = after(before)._replace(met=0, missed=0, busy=1.0)
    for seen in run:
        following = decide(state, seen._replace(missed=0), HOLD)
        assert following.g >= state.g
        state = following


@given(RUNS, RUNS)
def test_no_miss_moves_anything_while_the_less_important_hold_their_floors(
    before: list[GuardedPeriod], run: list[GuardedPeriod]
) -> None:
    state = after(before)._replace(busy=1.0)
    for seen in run:
        following = decide(state, seen._replace(floors=seen.held), HOLD)
        assert following.g >= state.g
        state = following


def test_where_nothing_misses_all_is_used_in_the_end() -> None:
    busy = GuardedPeriod(met=5, missed=0, tickets=5, waits=3, held=0.5, total=0.9, floors=0.0)
    assert after([busy] * 60).g == 1.0
