"""Invariant 7 with `order: gain`: the bounds of a wait hold with the floor, `fair` of the reserve, in place of it.

The floods and clauses are those of `test_bounded_wait`. Every ticket has figures of its own, so that the order by gain
disagrees with the fair order as often as it can. Of all clauses, `share` is of the fair order alone: by gain a tenant
is bounded by being ahead (`gain_queue`).
"""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
from floods import LONGEST_LEASE_US as D
from floods import Kind, Request, random_flood, random_policy
from test_bounded_wait import KINDS, show, strong_campaign
from test_gain_oracle import by_gain
from wait_bounds import CLAUSES, Measured, _Play, _TierWatch

from sidecar.scheduling import Ticket
from sidecar.scheduling.gain import GainFigures
from sidecar.scheduling.gain_order import GainOrder, GainTier
from sidecar.scheduling.gain_scheduler import GainScheduler
from sidecar.scheduling.order import Candidate

HELD = [clause for clause in CLAUSES if clause != "share"]
STRONG = {"inside": 0.4, "small": 0.4, "any_small": 0.4}
"""The part of each bound that a flood has to reach, or else it proves nothing."""


class FloorWatch(_TierWatch):
    """What is inside is what is inside the floor."""

    def _is_inside(self, ticket: Ticket) -> bool:
        return self.tier.has_floor_for(ticket)


class GainPlay(_Play):
    """A flood by gain; `luck` gives each ticket its figures."""

    def __init__(self, scheduler: GainScheduler, luck: random.Random) -> None:
        super().__init__(scheduler, D)
        self.luck = luck
        for level, watch in self.watches.items():
            floor = watch.floor_tokens, watch.floor_requests
            self.watches[level] = FloorWatch(watch.tier, floor, D, watch.reserves, self.measured)

    def submit(self, request: Request, now_us: int) -> None:
        before = set(self.waiting)
        super().submit(request, now_us)
        for name in set(self.waiting) - before:
            if self.luck.random() < 0.8:
                self.scheduler.appraise(self.waiting[name][1], self.figures())

    def figures(self) -> GainFigures:
        luck = self.luck
        deadline_us = luck.choice([0, D // 10, D, 10 * D])
        return GainFigures(
            luck.choice([1, 4, 64]), luck.choice([1, 50, 5000]), luck.choice([1, D // 10, D]), deadline_us,
            deadline_us, luck.choice([1, D // 1000, D]),
        )  # fmt: skip


def campaign(kind: Kind, seeds: range, scheduler: type[GainScheduler] = GainScheduler) -> Measured:
    measured = Measured()
    for seed in seeds:
        luck = random.Random(f"gain-{kind}-{seed}")
        fair = luck.choice([Fraction(1, 4), Fraction(1, 2), Fraction(1)])
        policy = by_gain(random_policy(luck, both=kind.both), fair)
        rules = policy.rules()
        measured.add(GainPlay(scheduler(rules), luck).run(random_flood(luck, rules, kind), None))
    return measured


def beyond(measured: Measured) -> dict[str, float]:
    return {clause: measured.worst[clause] for clause in HELD if measured.worst[clause] > 1}


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_bound_holds_with_the_floor_in_place_of_the_reserve(kind):
    measured = strong_campaign(campaign, kind, STRONG)
    show(str(kind), measured)
    assert beyond(measured) == {}
    assert measured.left == 0


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_bound_holds_with_the_floor_in_place_of_the_reserve_for_long(kind):
    measured = campaign(kind, range(1_000, 1_300))
    assert beyond(measured) == {}
    assert measured.left == 0


# Negative controls.


class KnowsNoFloor(GainOrder):
    """Orders everything by gain."""

    def candidate(self, tier: GainTier, ticket: Ticket, now_us: int) -> Candidate:
        return self.beyond(tier, ticket, now_us)

    def first_of_all(self, densest, now_us: int) -> None:
        return None


class PureGain(GainScheduler):
    _order_type = KnowsNoFloor


class FillsFloorsByGain(GainOrder):
    """Counts what earns most for the floor, and not the heads."""

    def candidate(self, tier: GainTier, ticket: Ticket, now_us: int) -> Candidate:
        found = super().candidate(tier, ticket, now_us)
        best = tier.queue.best()
        return found if best is None or ticket is best else self.beyond(tier, ticket, now_us)


class FloorsByGain(GainScheduler):
    _order_type = FillsFloorsByGain


@pytest.mark.parametrize("scheduler", [PureGain, FloorsByGain])
def test_without_floors_in_fair_order_a_flood_breaks_the_bound(scheduler):
    kind = Kind(over=True, tenants=4, both=True)
    for seed in range(0, 200, 10):
        if {"inside", "small"} <= set(beyond(campaign(kind, range(seed, seed + 10), scheduler))):
            return
    pytest.fail("no flood breaks it")
