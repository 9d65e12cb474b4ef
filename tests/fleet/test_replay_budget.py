"""The replay budget, and a literal one beside it: a list of everything that happened."""

from __future__ import annotations

import random
from fractions import Fraction

from sidecar.fleet.replay_budget import ReplayBudget

SECOND_US = 1_000_000
TENTH = Fraction(1, 10)


class LiteralBudget:
    """Counts what lies within the present second and the 59 before it, one by one."""

    def __init__(self, share: Fraction) -> None:
        self.share = share
        self.admissions: list[int] = []
        self.replays: list[int] = []

    def admitted(self, now_us: int) -> None:
        self.admissions.append(now_us)

    def take(self, now_us: int) -> bool:
        since = now_us // SECOND_US - 59
        admitted = sum(at // SECOND_US >= since for at in self.admissions)
        replayed = sum(at // SECOND_US >= since for at in self.replays)
        if replayed >= max(10, int(self.share * admitted)):
            return False
        self.replays.append(now_us)
        return True


def test_ten_a_minute_are_allowed_at_any_load() -> None:
    budget = ReplayBudget(TENTH)
    assert [budget.take(0) for _ in range(12)] == [True] * 10 + [False] * 2
    assert not budget.take(59 * SECOND_US)
    assert budget.take(60 * SECOND_US)


def test_a_tenth_of_a_minutes_admissions_is_allowed_at_a_high_load() -> None:
    budget = ReplayBudget(TENTH)
    for number in range(1000):
        budget.admitted(number * 10_000)
    assert sum(budget.take(10 * SECOND_US) for _ in range(500)) == 100
    assert budget.left == 0


def test_admissions_are_forgotten_after_a_minute_and_debt_does_not_go_below_the_least() -> None:
    budget = ReplayBudget(TENTH)
    for _ in range(1000):
        budget.admitted(0)
    assert all(budget.take(30 * SECOND_US) for _ in range(100))
    assert not budget.take(61 * SECOND_US), "the admissions are forgotten, the replays are not yet"
    assert sum(budget.take(90 * SECOND_US) for _ in range(100)) == 10


def test_no_share_leaves_the_least() -> None:
    budget = ReplayBudget(Fraction(0))
    for _ in range(1000):
        budget.admitted(0)
    assert sum(budget.take(1) for _ in range(100)) == 10


def test_a_clock_far_ahead_and_one_that_stands_still() -> None:
    budget = ReplayBudget(TENTH)
    assert sum(budget.take(10**18) for _ in range(20)) == 10
    assert sum(budget.take(10**18 + 10**17) for _ in range(20)) == 10


def test_it_allows_exactly_what_the_literal_one_allows() -> None:
    for seed in range(10):
        chance = random.Random(seed)
        share = Fraction(chance.randint(0, 100), 100)
        budget, literal, now_us = ReplayBudget(share), LiteralBudget(share), chance.randrange(10**9)
        for _ in range(150):
            now_us += chance.choice((0, 1, 1000, 300_000, SECOND_US, 7 * SECOND_US, chance.randrange(90) * SECOND_US))
            for _ in range(chance.choice((0, 1, 5, 40))):
                budget.admitted(now_us)
                literal.admitted(now_us)
            for _ in range(chance.choice((0, 1, 8))):
                assert budget.take(now_us) == literal.take(now_us), (seed, now_us)
