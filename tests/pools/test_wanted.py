"""How many times the room of a pool is wanted: tiers, limits, floors and guards; engines that come and go; the mean."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.errors import TenantLimit
from sidecar.policy.rules import UNLIMITED, Shares, pool_rules
from sidecar.policy.tenant import Account, Limits
from sidecar.pools import Pool
from sidecar.pools.engines import WEIGHT_PERCENT, EngineOffer
from sidecar.pools.guards import GuardFigures
from sidecar.pools.stats import SMOOTHED_OVER_US, Demand, SmoothedDemand, TierUsage, demand
from tests.pools.harness import Clock, ask, policy_of, simple
from tests.support.each import each

HALF = Fraction(1, 2)
FREE, FLOOR, LIMIT, HEADROOM = (
    Shares("batch"),
    Shares("batch", reserve=HALF),
    Shares("batch", limit=HALF),
    Shares("batch", reserve=HALF, lend=Fraction(0)),
)


def times(*tiers: tuple[Shares, TierUsage], guards: Sequence[GuardFigures] = (), requests: int | None = 10) -> float:
    """How many times a pool of 100 tokens and so many requests is wanted at once."""
    shares, usage = zip(*tiers, strict=True)
    rules = pool_rules(tokens=100, requests=requests, tiers=shares)
    return SmoothedDemand().note(demand(rules, usage, guards), 0)


def guard(usable: float, *, is_in_vain: bool = False) -> GuardFigures:
    return GuardFigures("high", 0.1, 0.0, 0.0, 0, 0, is_in_vain, usable)


HIGH, NOTHING = Shares("high"), TierUsage(0, 0, 0, 0)
HIGH_HOLDS = (HIGH, TierUsage(20, 2, 0, 0))


@each(
    ("found", "wanted"),
    [
        (times((FREE, NOTHING)), 0.0),
        (times((FREE, TierUsage(50, 1, 0, 0))), 0.5),
        (times((FREE, TierUsage(50, 9, 0, 0))), 0.9),  # the larger of both counts
        (times((FREE, TierUsage(50, 90, 0, 0)), requests=None), 0.5),
        (times((FREE, TierUsage(100, 1, 250, 5))), 3.5),
        # Inside its floor it waits for a borrower to end; beyond it, for an engine.
        (times((FLOOR, TierUsage(0, 0, 50, 5)), (HIGH, TierUsage(100, 10, 0, 0))), 1.0),
        (times((FLOOR, TierUsage(0, 0, 80, 5)), (HIGH, TierUsage(100, 10, 0, 0))), 1.3),
        (times((FLOOR, TierUsage(60, 5, 20, 2))), 0.8),
        # A tier asks for no more than its own limit: with a larger pool it gets more, and asks for no larger one.
        (times((LIMIT, TierUsage(50, 5, 10**6, 10**4))), 0.5),
        (times((LIMIT, TierUsage(20, 2, 10, 1))), 0.3),
        (times((LIMIT, TierUsage(70, 7, 10, 1))), 0.7),  # its limit has shrunk below what it holds
        (times((HEADROOM, NOTHING), HIGH_HOLDS), 0.7),
        (times((HEADROOM, TierUsage(60, 5, 0, 0)), HIGH_HOLDS), 0.8),
        # Beside a guarded tier the pool is as large as it may be filled, for work beyond a floor.
        (times(HIGH_HOLDS, (FREE, TierUsage(20, 2, 0, 0)), guards=[guard(0.5)]), 0.8),
        (times(HIGH_HOLDS, (FREE, TierUsage(0, 0, 20, 2)), guards=[guard(0.5)]), 0.8),
        (times(HIGH_HOLDS, (FLOOR, TierUsage(20, 2, 0, 0)), guards=[guard(0.5)]), 0.4),
        (times(HIGH_HOLDS, (FREE, NOTHING), guards=[guard(0.5)]), 0.2),
        (times(HIGH_HOLDS, (FREE, TierUsage(20, 2, 0, 0)), guards=[guard(0.5, is_in_vain=True)]), 0.4),
        (times((FREE, TierUsage(20, 2, 0, 0)), HIGH_HOLDS, guards=[guard(0.5)]), 0.4),  # the guarded one is the less
    ],
)
def test_the_formula(found: float, wanted: float) -> None:
    assert found == pytest.approx(wanted)


amounts = st.integers(0, 10**9)
usages = st.builds(TierUsage, amounts, amounts, amounts, amounts)
shares = st.fractions(0, 1, max_denominator=100)


@given(
    tiers=st.lists(st.tuples(st.builds(Shares, st.just("t"), shares, shares, shares), usages), min_size=1, max_size=4),
    sizes=st.tuples(st.none() | st.integers(1, 10**9), st.none() | st.integers(1, 10**6)),
    more=st.integers(1, 10**9),
)
def test_it_is_a_number_at_least_what_is_held_and_never_less_for_more_that_waits(
    tiers: list[tuple[Shares, TierUsage]], sizes: tuple[int | None, int | None], more: int
) -> None:
    of_tiers, usage = zip(*tiers, strict=True)
    rules = pool_rules(tokens=sizes[0], requests=sizes[1], tiers=of_tiers)
    found = demand(rules, usage)
    longer = demand(rules, [*usage[:-1], usage[-1]._replace(queued_tokens=usage[-1].queued_tokens + more)])
    assert found.wanted[0] >= sum(tier.held_tokens for tier in usage)
    assert longer.wanted[0] >= found.wanted[0]
    assert 0 <= SmoothedDemand().note(found, 0) < 1e12
    assert SmoothedDemand().note(demand(None, usage), 0) == float(any(map(any, usage)))


def of(tokens: float, has: float | None = 100.0) -> Demand:
    return Demand((tokens, 0.0), None if has is None else (has, 10.0), is_used=tokens > 0)


def test_the_wanted_room_is_smoothed_over_a_minute_whenever_it_is_looked_at() -> None:
    often, rarely = SmoothedDemand(), SmoothedDemand()
    for smoothed in (often, rarely):
        smoothed.note(of(0), 0)
    for at_us in range(SMOOTHED_OVER_US // 60, SMOOTHED_OVER_US, SMOOTHED_OVER_US // 60):
        often.note(of(100), at_us)
    assert often.note(of(100), SMOOTHED_OVER_US) == pytest.approx(0.632, abs=0.001)
    assert rarely.note(of(100), SMOOTHED_OVER_US) == pytest.approx(0.632, abs=0.001)
    assert rarely.note(of(100), SMOOTHED_OVER_US) == rarely.note(of(100), SMOOTHED_OVER_US)


def test_one_more_engine_counts_at_once() -> None:
    """Else the autoscaler would ask for a third one, for as long as the mean takes."""
    smoothed = SmoothedDemand()
    assert smoothed.note(of(160), 0) == 1.6
    assert smoothed.note(of(160, has=200), 1) == pytest.approx(0.8)


def test_without_an_engine_something_that_waits_wants_one_and_a_minute_without_anything_none() -> None:
    smoothed = SmoothedDemand()
    assert smoothed.note(of(0, has=None), 0) == 0.0
    assert smoothed.note(of(1, has=None), 1) == 1.0
    assert smoothed.note(of(0, has=None), SMOOTHED_OVER_US) == 1.0, "its client has left, or an engine will serve it"
    assert smoothed.note(of(0), SMOOTHED_OVER_US + 1) > 0
    assert smoothed.note(of(0), SMOOTHED_OVER_US + 2) == 0.0, "a mean is never 0, and KEDA would keep the last engine"


# -- of a pool

A, B = (EngineOffer(f"{name}#1", tokens=100, requests=10) for name in "ab")


@pytest.mark.anyio
async def test_an_engine_counts_whole_while_it_is_ready_and_not_at_all_while_it_is_not() -> None:
    clock = Clock()
    policy = policy_of(pool_rules(tokens=None, requests=None, tiers=(Shares("high"), Shares("low"))))
    pool = Pool(policy, clock, weight_percent=WEIGHT_PERCENT)
    waiting = await pool.enter(ask(tokens=80))
    assert pool.demand() == Demand((80, 1), None, is_used=True)
    slow = B._replace(ramp_us=60_000_000, since_us=clock())
    pool.set_engines([A, slow])
    assert waiting.grant is not None
    assert pool.demand() == Demand((80.0, 1.0), (200, 20), is_used=True)
    assert pool.state()["capacity"] == {"tokens": 110, "requests": 11}
    pool.set_engines([A._replace(takes_new=False), slow])  # it is ill, or drains, and what it holds goes on
    assert pool.demand() == Demand((80.0, 1.0), (100, 10), is_used=True)
    pool.drain_engine("b", drains=True)
    pool.set_engines([A._replace(takes_new=False), slow._replace(takes_new=False)])
    assert pool.demand() == Demand((80, 1), None, is_used=True)
    waiting.settle()
    assert pool.demand() == Demand((0, 0), None, is_used=False)


@pytest.mark.anyio
async def test_what_a_tenants_own_limit_refuses_wants_nothing() -> None:
    pool = Pool(simple(tokens=100), Clock())
    limited = msgspec.structs.replace(ask(), accounts=(Account("t", Limits(concurrent_requests=1)),))
    await pool.enter(limited)
    with pytest.raises(TenantLimit):
        await pool.enter(limited)
    assert pool.demand() == Demand((10.0, 1.0), (100, UNLIMITED), is_used=True)


@pytest.mark.anyio
async def test_what_waits_in_other_replicas_is_counted_by_its_tier() -> None:
    rules = pool_rules(tokens=100, requests=10, tiers=(Shares("high"), Shares("low", limit=HALF)))
    pool = Pool(policy_of(rules), Clock())
    await pool.enter(ask(tokens=60))
    found = pool.demand([(30, 1), (400, 40)])
    assert found == Demand((140.0, 7.0), (100, 10), is_used=True)
