"""Places promised to those whom a full queue refused: first come, first served, and in no one's way for nothing."""

from __future__ import annotations

import heapq
import random
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.pools.base import Ask
from sidecar.pools.queue_places import GRACE_S, LEAD_S, LEAST_S, MOST_S, PROMISED, HeldPlaces

START_US = 1_000_000_000
PLACES = 20
DRAIN_PER_S = 2.0
GAP_S = 1 / (PROMISED * DRAIN_PER_S)


def ask(request: int, attempt: int | None = None) -> Ask:
    return Ask(0, "t", 1, 10, 1, request, attempt)


def after(seconds: float) -> int:
    return START_US + round(seconds * 1e6)


def promised(promises: HeldPlaces, request: int, at_s: float = 0.0, attempt: int | None = None) -> float:
    return promises.promise_s(ask(request, attempt), DRAIN_PER_S, after(at_s))


def is_kept_out(promises: HeldPlaces, request: int, at_s: float, free: int = 1, attempt: int | None = None) -> bool:
    return promises.are_in_the_way(ask(request, attempt), free, PLACES, after(at_s))


def test_the_refused_get_times_one_after_the_other_at_the_pace_of_the_drain() -> None:
    promises = HeldPlaces()
    told_s = [promised(promises, request) for request in range(10)]
    assert told_s == pytest.approx([LEAST_S + turn * GAP_S for turn in range(10)], abs=1e-5)


def test_a_free_place_is_kept_for_whom_it_was_promised_to() -> None:
    promises = HeldPlaces()
    told_s = promised(promises, 1)
    assert is_kept_out(promises, 2, told_s)
    assert not is_kept_out(promises, 1, told_s)
    assert not is_kept_out(promises, 2, told_s, free=2)  # more than are held
    promises.kept(ask(1))
    assert not is_kept_out(promises, 2, told_s)


def test_nothing_is_held_long_before_its_time_or_long_behind_it() -> None:
    promises = HeldPlaces()
    told_s = [promised(promises, request) for request in range(20)]
    last_s = told_s[-1]
    for request in range(19):
        promises.kept(ask(request))
    assert not is_kept_out(promises, 99, last_s - LEAD_S - 0.01)
    assert is_kept_out(promises, 99, last_s - LEAD_S + 0.01)
    assert is_kept_out(promises, 99, last_s + GRACE_S - 0.01)
    assert not is_kept_out(promises, 99, last_s + GRACE_S + 0.01)
    assert is_kept_out(HeldPlaces(), 19, last_s) is False


def test_a_client_that_comes_too_early_gets_the_same_time_again() -> None:
    promises = HeldPlaces()
    for request in range(20):
        told_s = promised(promises, request)
    for request in range(6):
        promises.kept(ask(request))
    assert promised(promises, 19, 3.0) == pytest.approx(told_s - 3.0, abs=1e-5)
    assert promised(promises, 20, 3.0) == pytest.approx(told_s - 3.0 + GAP_S, abs=1e-5)  # no one stands in between


def test_who_finds_no_place_at_its_time_keeps_its_promise_and_comes_again_in_a_moment() -> None:
    promises = HeldPlaces()
    told_s = promised(promises, 1)
    for request in range(2, 60):
        promised(promises, request)
    for _ in range(8):  # longer than its first promise would have lasted
        again_s = promised(promises, 1, told_s)
        assert LEAST_S <= again_s <= 1.2 * LEAST_S
        told_s += again_s
    assert told_s > 2 * (LEAD_S + GRACE_S) - LEAST_S
    assert is_kept_out(promises, 99, told_s)
    assert not is_kept_out(promises, 1, told_s)


def test_where_the_drain_slows_down_newcomers_hear_what_stands_before_them_takes() -> None:
    promises = HeldPlaces()
    for request in range(9):
        promises.promise_s(ask(request), 10 * DRAIN_PER_S, START_US)
    assert promised(promises, 9) == pytest.approx(10 * GAP_S, abs=1e-5)


def test_one_that_is_put_off_again_and_again_does_not_keep_others_promises_from_lapsing() -> None:
    promises = HeldPlaces()
    told_s = promised(promises, 1)
    for request in range(2, 6):
        last_s = promised(promises, request)
    while told_s < last_s + LEAD_S + 2 * GRACE_S + LEAST_S:
        told_s += promised(promises, 1, told_s)
    assert is_kept_out(promises, 99, told_s, free=1)
    assert not is_kept_out(promises, 99, told_s, free=2)  # of five that were promised one is left


def test_twins_are_distinguished_by_the_clients_own_count() -> None:
    promises = HeldPlaces()
    first_s, second_s = (promised(promises, 7, attempt=0) for _ in range(2))
    assert second_s > first_s
    assert is_kept_out(promises, 7, second_s, attempt=0)
    assert not is_kept_out(promises, 7, second_s, attempt=1)
    promises.kept(ask(7, 0))  # it came in without a promise, and so takes none
    assert is_kept_out(promises, 8, second_s, free=2)
    promises.kept(ask(7, 1))
    assert not is_kept_out(promises, 8, second_s, free=2)
    assert is_kept_out(promises, 8, second_s, free=1)


def test_no_one_is_promised_more_than_the_most_and_those_are_spread() -> None:
    promises = HeldPlaces()
    told_s = [promised(promises, request) for request in range(400)]
    assert max(told_s) <= MOST_S
    assert len(set(told_s)) == len(told_s)
    assert sum(said > MOST_S - LEAST_S for said in told_s) < 50
    assert is_kept_out(promises, 399, 0.0)  # it was promised nothing
    assert not is_kept_out(promises, 0, 0.0)


def test_a_queue_that_never_moved_promises_nothing() -> None:
    promises = HeldPlaces()
    assert promises.promise_s(ask(1), 0.0, START_US) >= 0.8 * MOST_S
    assert not is_kept_out(promises, 2, MOST_S)


def test_of_many_replicas_each_expects_as_much_of_the_others() -> None:
    promises = HeldPlaces()
    told_us = after(promised(promises, 1))
    assert promises.are_in_the_way(ask(2), 3, PLACES, told_us, replicas=3)
    assert not promises.are_in_the_way(ask(2), 4, PLACES, told_us, replicas=3)
    assert not promises.are_in_the_way(ask(2, attempt=1), 1, PLACES, told_us, replicas=3)  # promised it elsewhere
    assert promises.are_in_the_way(ask(2, attempt=1), 1, PLACES, told_us)


# Whatever happens

steps = st.lists(
    st.tuples(
        st.sampled_from(["refuse", "enter", "wait"]),
        st.integers(0, 12),
        st.sampled_from([None, 0, 1]),
        st.floats(0, 8),
    ),
    max_size=120,
)


@given(steps, st.integers(1, 9), st.floats(0.1, 50))
def test_whatever_happens_half_of_the_queue_stays_open_and_all_promises_end(
    taken: list[tuple[str, int, int | None, float]], places: int, drain_per_s: float
) -> None:
    promises, now_us = HeldPlaces(), START_US
    for step, request, attempt, seconds in taken:
        who = ask(request, attempt)
        if step == "refuse":
            assert 0.8 * LEAST_S <= promises.promise_s(who, drain_per_s, now_us) <= MOST_S
        elif step == "enter":
            promises.kept(who)
        else:
            now_us += round(seconds * 1e6)
        assert not promises.are_in_the_way(who, places // 2 + 1, places, now_us)
        assert len(promises._promises) == sum(map(len, promises.by_request.values()))
    now_us += round((MOST_S + GRACE_S + 1) * 1e6)
    assert not promises.are_in_the_way(ask(99), 1, places, now_us)
    assert (promises._promises, promises.by_request) == ([], {})


@given(st.lists(st.tuples(st.integers(0, 30), st.floats(0, 0.5)), min_size=2, max_size=60))
def test_who_was_refused_first_comes_in_first(refusals: list[tuple[int, float]]) -> None:
    promises, now_s = HeldPlaces(), 0.0
    times_s: dict[int, float] = {}
    for request, pause_s in refusals:
        now_s += pause_s
        at_s = now_s + promised(promises, request, now_s)
        if request in times_s and times_s[request] > now_s + LEAD_S:
            assert at_s == pytest.approx(times_s[request], abs=1e-5)  # one request, one promise
        elif request not in times_s and at_s < now_s + 0.8 * MOST_S:
            assert all(at_s > earlier_s - 1e-5 for other, earlier_s in times_s.items() if other != request)
            times_s[request] = at_s
        times_s.setdefault(request, at_s)


# In sum


@pytest.mark.parametrize("load", [1.2, 1.5])
@pytest.mark.parametrize("seed", range(3))
def test_in_an_overload_who_comes_on_time_gets_in(load: float, seed: int) -> None:
    drain_per_s, rng, numbers = 8.0, random.Random(seed), count(1)
    assert share_that_gets_in(HeldPlaces(), drain_per_s, load, rng, numbers) >= 0.9
    assert share_that_gets_in(None, drain_per_s, load, rng, numbers) < 0.5  # negative control: a guess is not kept


def share_that_gets_in(
    promises: HeldPlaces | None, drain_per_s: float, load: float, rng: random.Random, numbers: count[int]
) -> float:
    """A minute of Poisson arrivals at a queue of 20 that drains at random moments, half a second late each."""
    waiting, came_back, got_in = PLACES, 0, 0
    events: list[tuple[float, int, bool]] = []
    for rate, is_arrival in ((drain_per_s, False), (drain_per_s * load, True)):
        at_s = 0.0
        while at_s < 60:
            at_s += rng.expovariate(rate)
            heapq.heappush(events, (at_s, next(numbers), is_arrival))
    refused: set[int] = set()
    while events and events[0][0] < 60:
        at_s, number, is_arrival = heapq.heappop(events)
        if not is_arrival:
            waiting -= waiting > 0
            continue
        free, is_back = PLACES - waiting, number in refused
        enters = free > 0 and not (promises and is_kept_out(promises, number, at_s, free))
        came_back += is_back
        got_in += is_back and enters
        refused.discard(number)
        if enters:
            waiting += 1
            if promises:
                promises.kept(ask(number))
        else:
            told_s = promises.promise_s(ask(number), drain_per_s, after(at_s)) if promises else PLACES / drain_per_s
            heapq.heappush(events, (at_s + told_s + rng.uniform(0, 0.5), number, True))
            if not is_back:
                refused.add(number)
    return got_in / came_back
