"""Several engines and the order by gain, under random operations: the same decisions as the literal rules."""

from __future__ import annotations

import random
from dataclasses import dataclass
from fractions import Fraction

import pytest
from fleets import NAMES, Twins, operate
from gain_fleet_oracle import GainFleetOracle
from gain_oracle import GainPolicy
from oracle import Policy
from strategies import preempting_policy, random_policy
from test_fleet_properties import (
    an_engine_that_gets_a_ticket_is_within_its_capacity,
    everyone_gets_in_at_last,
    no_one_is_lost,
    the_ledgers_add_up,
)
from test_gain_oracle import by_gain, figures

from sidecar.scheduling.gain_fleet_scheduler import GainFleetScheduler
from tests.support.walks import random_walks


@dataclass
class GainTwins(Twins):
    """A scheduler by gain beside its oracle."""

    policy: GainPolicy
    kind: type[GainFleetScheduler] = GainFleetScheduler
    seed: int = 0

    def __post_init__(self) -> None:
        self.luck = random.Random(self.seed)
        self.oracle = GainFleetOracle(self.policy)
        self.scheduler = self.kind(self.oracle.rules_of, 200)

    def submit(self, **ticket) -> str:
        name, gain = str(self.count), figures(self.luck)
        self.count += 1
        submitted = self.scheduler.submit(name, now_us=self.now_us, **ticket)
        if gain is not None:
            self.scheduler.appraise(submitted, gain)
        self.oracle.submit(name, now_us=self.now_us, gain=gain, **ticket)
        return name


def floors_and_costs_add_up(twins: GainTwins) -> None:
    for level, tier in enumerate(twins.scheduler._tiers):
        assert (tier.floor_tokens, tier.floor_requests, tier.floor_prefill) == twins.oracle.floor_used(level)
        waiting = [request.gain for request in twins.oracle.waiting(level) if request.gain is not None]
        assert tier.queue.cost_us == sum(gain.cost_us for gain in waiting)


def policy_by(luck: random.Random, seed: int) -> GainPolicy:
    policy: Policy = random_policy(luck) if seed % 2 else preempting_policy(luck)
    return by_gain(policy, luck.choice([Fraction(1, 4), Fraction(1, 4), Fraction(1), Fraction(0)]))


def play(seed: int, steps: int) -> None:
    luck = random.Random(seed)
    twins = GainTwins(policy_by(luck, seed), seed=seed)
    for name in NAMES[: luck.randint(1, 4)]:
        twins.set_engine(name)
    for _ in range(steps):
        operate(twins, luck)
        if luck.random() < 0.8:
            placed = twins.dispatch()
            an_engine_that_gets_a_ticket_is_within_its_capacity(twins, [each.engine for each in placed])
            change_us = twins.scheduler.next_change_us(twins.now_us)
            assert change_us is None or change_us > twins.now_us
        the_ledgers_add_up(twins)
        no_one_is_lost(twins)
        floors_and_costs_add_up(twins)
    everyone_gets_in_at_last(twins)


@random_walks(12)
def test_it_decides_as_the_literal_rules_do(seed):
    play(seed, 100)


def test_a_larger_ticket_brings_tenants_back_that_were_ahead():
    """Though it is no head, nor the best of its tier: a walk that had admitted none is made again."""
    play(7073, 120)


@pytest.mark.soak
def test_it_decides_as_the_literal_rules_do_for_long():
    for seed in range(1_000, 4_000):
        play(seed, 150)
