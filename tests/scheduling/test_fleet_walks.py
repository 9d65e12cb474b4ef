"""A walk begins anew a bounded number of times, however many tickets wait."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
import scattered
import test_gain_fleet
from fleets import Twins, operate
from scattered import TENTHS, TIERS, WithoutOracle, crowd, fill, let_wait, scatter, walks_of
from test_fleet_properties import everyone_gets_in_at_last, no_one_is_lost, the_ledgers_add_up
from test_gain_fleet import GainTwins
from test_gain_oracle import by_gain

from sidecar.scheduling.claims import MOST_CLAIMANTS, MOST_NEW_CLAIMANTS
from tests.support.walks import random_walks

ORDERS = ("level", "gain")
CUT_SHORT = {"level": (2, 7), "gain": (3, 2)}
"""Seeds of `play`."""


@pytest.fixture(autouse=True)
def figures_that_fall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_gain_fleet.figures", scattered.falling)


def twins_of(order: str, seed: int) -> Twins:
    return GainTwins(by_gain(TENTHS, Fraction(1, 4)), seed=seed) if order == "gain" else Twins(TENTHS)


class Alone(WithoutOracle, GainTwins):
    """A scheduler by gain."""


class AloneByLevel(WithoutOracle, Twins):
    """A scheduler by level."""


def alone_of(order: str) -> WithoutOracle:
    return Alone(by_gain(TENTHS, Fraction(1, 4))) if order == "gain" else AloneByLevel(TENTHS)


@pytest.mark.parametrize("order", ORDERS)
def test_a_decision_begins_no_more_walks_however_many_wait(order):
    began = {}
    for waiting in (100, 1_000):
        alone, luck = alone_of(order), random.Random(1)
        fill(alone, luck)
        let_wait(alone, luck, waiting, charged=order == "level")
        scatter(alone)
        with walks_of(alone.scheduler) as walks:
            assert alone.dispatch() == []
        began[waiting] = walks
    assert began[100] == began[1_000]
    assert max(began[100]) == 1 + MOST_NEW_CLAIMANTS
    assert len(began[100]) == 1 + MOST_CLAIMANTS // MOST_NEW_CLAIMANTS, "then there are too many claimants"


def test_later_decisions_find_those_that_earn_most_though_the_first_looks_at_a_part():
    alone, luck = alone_of("gain"), random.Random(1)
    fill(alone, luck)
    let_wait(alone, luck, 100, charged=False)
    scatter(alone)
    scheduler = alone.scheduler
    with walks_of(scheduler) as walks:
        for _ in range(2 + 100 // MOST_NEW_CLAIMANTS):
            alone.dispatch()
    assert walks[1:6] == [1 + MOST_NEW_CLAIMANTS] * 5
    assert walks[-1] == 1
    standing = {name for tier in scheduler._tiers for name in tier.queue.claimants}
    left = [ticket.density_at(alone.now_us) for name, ticket in scheduler._waiting.items() if name not in standing]
    floors = scheduler._for_floors
    best = [scheduler._waiting[name].density_at(alone.now_us) for name in standing - floors]
    assert len(standing) == MOST_CLAIMANTS
    assert len(best) >= len(standing) - 2 * len(TIERS)
    assert min(best) >= max(left)


def play(order: str, seed: int, steps: int) -> int:
    """The same decisions as the oracle, over scattered room. The most that a walk began."""
    luck, twins = random.Random(seed), twins_of(order, seed)
    crowd(twins, luck, charged=order == "level")
    with walks_of(twins.scheduler) as walks:
        for step in range(-3, steps):
            if step >= 0:
                operate(twins, luck)
            twins.dispatch()
            no_one_is_lost(twins)
            the_ledgers_add_up(twins)
    everyone_gets_in_at_last(twins)
    return max(walks)


@pytest.mark.parametrize(("order", "seeds"), CUT_SHORT.items())
def test_it_decides_as_the_literal_rules_do_where_a_walk_is_cut_short(order, seeds):
    began = [play(order, seed, 10) for seed in seeds]
    assert 1 + MOST_NEW_CLAIMANTS in began
    assert max(began) > 1 + MOST_NEW_CLAIMANTS, "and those that no engine could hold do not count"


@random_walks(8)
def test_it_decides_as_the_literal_rules_do_where_nearly_every_walk_is_cut_short(seed):
    """Random operations reach more cases with a lower bound, and everyone gets in with any."""
    with pytest.MonkeyPatch.context() as patched:
        for module in ("fleet_oracle", "sidecar.scheduling.fleet_scheduler"):
            patched.setattr(f"{module}.MOST_NEW_CLAIMANTS", seed % 3)
        test_gain_fleet.play(seed // 3, 100)


@pytest.mark.soak
@pytest.mark.parametrize("order", ORDERS)
def test_it_decides_as_the_literal_rules_do_where_walks_are_cut_short_for_long(order):
    for seed in range(100, 200):
        assert play(order, seed, 60) <= MOST_CLAIMANTS + MOST_NEW_CLAIMANTS
