"""The replay budget, and a literal one beside it: a list of everything that happened."""

from __future__ import annotations

import random
from fractions import Fraction

from sidecar.fleet.routing import ReplayBudget

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
