"""A request that is admitted at once leaves the scheduler as `submit` and `dispatch` would have left it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import Policy
from strategies import WEIGHTS, policies

from sidecar.policy.rules import PoolRules, Shares
from sidecar.scheduling import Scheduler
from sidecar.scheduling.order import LevelOrder

NEWCOMERS = st.tuples(
    st.just("come"), st.integers(0, 4), st.sampled_from("abcd"), st.integers(1, 30), st.sampled_from([1, 1, 2])
)
PROGRAMS = st.lists(
    st.one_of(
        NEWCOMERS,
        NEWCOMERS,
        st.tuples(st.just("end"), st.integers(0, 30)),
        st.tuples(st.just("resize"), st.integers(0, 30), st.integers(1, 40)),
        st.tuples(st.just("hand_back"), st.integers(0, 30)),
        st.tuples(st.just("hold_back"), st.integers(0, 20)),
    ),
    max_size=60,
)


@dataclass(frozen=True)
class Asked:
    """What one request asks for."""

    tier: int
    tokens: int
    requests: int = 1
    tenant: str = "a"
    weight: int = 1


class Played:
    """A scheduler, and how many of its tickets it admitted at once."""

    def __init__(self, rules: PoolRules, *, tries_at_once: bool) -> None:
        self.scheduler = Scheduler(rules)
        self.tries_at_once = tries_at_once
        self.at_once = self.count = 0

    def play(self, step: tuple[Any, ...], now_us: int, tiers: int) -> None:
        scheduler = self.scheduler
        match step:
            case ("come", tier, tenant, tokens, requests):
                demand = Asked(tier % tiers, tokens, requests, tenant, WEIGHTS[tenant])
                name, self.count = str(self.count), self.count + 1
                if self.tries_at_once and scheduler.admit_at_once(name, demand, now_us):
                    self.at_once += 1
                else:
                    scheduler.submit(name, **asdict(demand), now_us=now_us)
            case ("end", place):
                scheduler.settle(str(place), now_us)
            case ("resize", place, tokens):
                scheduler.resize(str(place), tokens)
            case ("hand_back", place):
                scheduler.hand_back(str(place), now_us, None)
            case ("hold_back", for_us):
                scheduler.hold_back(now_us + for_us)
        scheduler.dispatch(now_us)

    def stands(self, now_us: int) -> tuple[Any, ...]:
        scheduler = self.scheduler
        tiers = [
            (tier.held_tokens, tier.held_requests, tier.latest_admission, tier.owes_until_us)
            for tier in scheduler._tiers
        ]
        leases = [
            (lease.id, lease.sequence, lease.served_before, lease.start, lease.admitted_us, lease.excess, lease.queued)
            for lease in scheduler._leases.values()
        ]
        waiting = [
            (ticket.id, ticket.sequence, ticket.served_before, ticket.start) for ticket in scheduler._waiting.values()
        ]
        tags = [(tier.queue._virtual, tier.queue.tokens, len(tier.queue)) for tier in scheduler._tiers]
        preemptible = [*scheduler._preemption.leases]
        return tiers, leases, waiting, tags, preemptible, scheduler._served, scheduler.next_change_us(now_us)


@given(policy=policies(), program=PROGRAMS, gaps=st.lists(st.integers(0, 3), min_size=60, max_size=60))
def test_admission_at_once_is_admission_through_the_queue(policy: Policy, program: list[Any], gaps: list[int]) -> None:
    now_us, tiers = 0, len(policy.tiers)
    through, at_once = (Played(policy.rules(), tries_at_once=tries) for tries in (False, True))
    for step, gap in zip(program, gaps, strict=False):
        now_us += gap
        through.play(step, now_us, tiers)
        at_once.play(step, now_us, tiers)
        assert at_once.stands(now_us) == through.stands(now_us), step


def test_an_idle_pool_admits_at_once() -> None:
    scheduler = Scheduler(_plain())
    assert scheduler.admit_at_once("1", Asked(0, 10), 0)
    with pytest.raises(ValueError, match="already here"):
        scheduler.admit_at_once("1", Asked(0, 10), 0)


def test_none_is_admitted_at_once_beside_one_that_waits_or_in_another_order() -> None:
    scheduler = Scheduler(_plain())
    scheduler.submit("1", tier=0, tokens=1, now_us=0)
    assert not scheduler.admit_at_once("2", Asked(0, 1), 0)
    other = OtherScheduler(_plain())
    assert not other.admit_at_once("1", Asked(0, 1), 0)


class OtherOrder(LevelOrder):
    """An order that might give a ticket another level."""


class OtherScheduler(Scheduler):
    _order_type = OtherOrder


def _plain() -> PoolRules:
    return Policy(capacity=(100, None), tiers=(Shares("only", Fraction(0), Fraction(1)),)).rules()
