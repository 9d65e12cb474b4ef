"""The statistic, on orders that are known."""

from __future__ import annotations

import math
import random

import pytest

from sidecar.tools.doctor.burst import BurstPlan
from sidecar.tools.doctor.judgment import Effect, Judgment, ServedRequest, judge
from sidecar.tools.doctor.target import LEVELS


def served(order: list[tuple[int, int]]) -> Judgment:
    """Judges (level, arrival) pairs that got their first tokens one after the other."""
    return judge([ServedRequest(level, arrival, float(at)) for at, (level, arrival) in enumerate(order)], LEVELS)


def burst(requests: int, seed: int = 1) -> list[tuple[int, int]]:
    """Levels and places of arrival as a burst draws them."""
    levels = BurstPlan(requests, 1, None, seed).levels()
    return [(level, arrival) for arrival, level in enumerate(levels)]


def test_an_order_by_priority_is_seen() -> None:
    judgment = served(sorted(burst(36)))
    assert judgment.effect is Effect.BY_PRIORITY
    assert judgment.correlation.value == pytest.approx(math.sqrt(8 / 9), abs=0.005)


def test_an_order_the_wrong_way_round_is_seen() -> None:
    assert served(sorted(burst(36), reverse=True)).effect is Effect.INVERTED


def test_the_order_of_arrival_is_no_effect() -> None:
    judgment = served(burst(36))
    assert judgment.effect is Effect.NONE
    assert judgment.by_arrival.value == 1


def test_half_an_order_is_neither_one_nor_none() -> None:
    """As of two replicas, one of which ignores priorities: their requests come in turns."""
    mixed = zip(sorted(burst(18, 1)), burst(18, 2), strict=True)
    assert served([one for pair in mixed for one in pair]).effect is Effect.UNCLEAR


def test_few_requests_say_nothing() -> None:
    assert served(sorted(burst(23))).effect is Effect.TOO_FEW
    assert served([]).effect is Effect.TOO_FEW


def test_a_head_start_of_the_best_alone_is_an_order() -> None:
    best_first = sorted(burst(36), key=lambda pair: (pair[0] != 0, pair[1]))
    assert served(best_first).effect is Effect.BY_PRIORITY


def test_who_was_never_served_counts_as_last() -> None:
    order = sorted(burst(36))
    cut = [
        ServedRequest(level, arrival, float(at) if at < 24 else math.inf) for at, (level, arrival) in enumerate(order)
    ]
    assert judge(cut, LEVELS).effect is Effect.BY_PRIORITY


def test_a_burst_that_was_cut_short_shows_no_absence_of_order() -> None:
    first_come = burst(36)
    cut = [ServedRequest(level, arrival, float(arrival) if arrival < 9 else math.inf) for level, arrival in first_come]
    judgment = judge(cut, LEVELS)
    assert (judgment.effect, judgment.served) == (Effect.TOO_FEW, 9)


def test_chance_is_hardly_ever_taken_for_an_order() -> None:
    chance = random.Random(5)
    wrong = 0
    for _ in range(400):
        order = burst(36, chance.randrange(10_000))
        chance.shuffle(order)
        wrong += served(order).effect in (Effect.BY_PRIORITY, Effect.INVERTED)
    assert wrong <= 2


def test_levels_are_even_in_every_part_of_a_burst() -> None:
    levels = BurstPlan(40, 4, None, 7).levels()
    assert len(levels) == 40
    assert all(sorted(levels[start : start + 3]) == [0, 1, 2] for start in range(0, 39, 3))
    assert levels != BurstPlan(40, 4, None, 8).levels()


def test_lengths_go_from_one_to_two_times_the_shortest() -> None:
    plan = BurstPlan(40, 10, None, 7)
    assert (min(plan.lengths()), max(plan.lengths())) == (10, 19)
    assert plan.output_tokens == sum(plan.lengths())
