"""The short list of steps answers as the whole list of admissions would, however often it is shortened."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.scheduling.overtaking import Overtaking


def literal(admissions: list[tuple[int, int]], arrival: int) -> int | None:
    return next((at_us for other, at_us in admissions if other > arrival), None)


@settings(deadline=None, database=None, max_examples=200)
@given(order=st.permutations(range(1, 25)), count=st.integers(0, 24), shorten_every=st.integers(1, 6))
def test_every_waiting_ticket_learns_when_it_was_first_overtaken(order, count, shorten_every):
    overtaking, admissions, waiting = Overtaking(), [], sorted(order)
    for now_us, arrival in enumerate(order[:count]):
        overtaking.admitted(arrival, now_us)
        admissions.append((arrival, now_us))
        waiting.remove(arrival)
        if now_us % shorten_every == 0:
            overtaking.forget_all_but(waiting)
            assert len(overtaking) <= len(waiting) + 1
        assert [literal(admissions, ticket) for ticket in waiting] == [overtaking.first_after(t) for t in waiting]


def test_newcomers_that_go_straight_in_stay_one_step():
    overtaking = Overtaking()
    for arrival in range(10, 1_000):
        overtaking.admitted(arrival, now_us=arrival)
    assert len(overtaking) == 1
    assert overtaking.first_after(3) == 10
    assert overtaking.first_after(999) is None


def test_with_no_step_there_is_nothing_to_forget():
    overtaking = Overtaking()
    overtaking.forget_all_but([1, 2, 3])
    assert len(overtaking) == 0
    assert overtaking.first_after(1) is None
