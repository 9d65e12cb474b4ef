"""Invariant 7 with `order: gain` and several engines, by floods that never end.

Every flooding tier always has tickets that wait: dense ones, urgent ones and worthless ones, of every size up to the
size limit. In between come quiet tickets that earn little or nothing, no larger than their tier's floor. Engines differ
in size and in speed, are drained, slowed and lost; leases are handed back.

The ticket that is first for its tier's floor in fair order, no larger than that and than an engine, is admitted within
`MOST_LEASES` D, D the longest lease: D until it is inside the floor, since nothing after it is admitted for the floor;
D until it fits the pool, where it holds its place; D for its engine, which it keeps, and for each claimant for a floor
before it (there are at most 16). Counted from the latest change of the engines. Of equal engines a few D are the worst
that was found (`WORST_LEASES`).
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import count

import pytest
from fleet_oracle import FleetOracle
from floods import LONGEST_LEASE_US
from gain_fleet_oracle import GainFleetOracle
from gain_oracle import GainPolicy
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.policy.rules import UNLIMITED, Shares, largest_request
from sidecar.pools.engines import EngineOffer
from sidecar.scheduling import Admission, Ticket
from sidecar.scheduling.claims import MOST_CLAIMANTS
from sidecar.scheduling.fleet_scheduler import FleetScheduler
from sidecar.scheduling.gain import GainFigures
from sidecar.scheduling.gain_fleet import GainFleetTier
from sidecar.scheduling.gain_fleet_scheduler import GainFleetScheduler
from sidecar.scheduling.order import Candidate, OrderClass
from tests.support.examples import examples

D = 1_000 * LONGEST_LEASE_US
"""As long as twice the patience of a claimant without a hit."""
MOST_LEASES = 2 + MOST_CLAIMANTS
WORST_LEASES = 9
CHANGES_END, FLOOD_ENDS, ALL_ENDS = 12 * D, 36 * D, 100 * D
ALWAYS_WAITING = 6
"""Of each tenant that floods."""


def random_policy(luck: random.Random) -> GainPolicy:
    """Two to four tiers; every dimension of the reserves fits into any pool, after rounding."""
    tiers = luck.randint(2, 4)
    parts = [luck.choice([0, 1, 2, 4]) for _ in range(tiers - 1)] + [luck.choice([1, 2])]
    whole = Fraction(luck.choice([20, 50, 80]), 100 * sum(parts))
    return GainPolicy(
        capacity=(None, None),
        tiers=tuple(
            Shares(f"t{level}", part * whole, luck.choice([Fraction(0), Fraction(1, 2), Fraction(1), Fraction(1)]))
            for level, part in enumerate(parts)
        ),
        promote_after_us=luck.choice([None, D // 7, 3 * D]),
        ceiling=luck.randrange(tiers),
        fair=luck.choice([Fraction(1, 4), Fraction(1, 2), Fraction(1)]),
    )


@dataclass
class Flood:
    """A flood on a pool of several engines. `waited` is the longest wait of a ticket that is first for its floor."""

    seed: int
    engines: int
    equal: bool
    scheduler: type[GainFleetScheduler] = GainFleetScheduler
    waited: float = 0.0
    quiet: int = 0
    now_us: int = 0
    since: dict[str, int] = field(default_factory=dict)

    def play(self) -> Flood:
        self.luck = random.Random(f"{self.seed}-{self.engines}-{self.equal}")
        policy = random_policy(self.luck)
        self.pool = self.pool_of(policy)
        self.offers = {f"e{number}": self.offer(f"e{number}#1") for number in range(self.engines)}
        self.pool.set_engines(self.offers.values(), 0)
        self.whole = self.pool.rules  # a lost engine's leases make the pool larger for a while
        tiers = range(len(policy.tiers))
        self.loud = self.luck.sample(tiers, self.luck.randint(1, len(tiers)))
        self.sizes = self.luck.choice([("any",), ("large",), ("small",), ("small", "large"), ("floor", "one")])
        self.events, self.order, self.changes, self.is_changing = [], count(), count(2), True
        self.waiting: dict[str, Ticket] = {}
        self.running: dict[str, Ticket] = {}
        while self.now_us < FLOOD_ENDS or (self.waiting and self.now_us < ALL_ENDS):
            self.step()
        return self

    def pool_of(self, policy: GainPolicy) -> FleetScheduler:
        return self.scheduler(GainFleetOracle(policy).rules_of, 300)

    def appraise(self, ticket: Ticket, gain: GainFigures) -> None:
        self.pool.appraise(ticket, gain)

    def offer(self, engine: str) -> EngineOffer:
        if self.equal:
            return EngineOffer(engine, 100, 16, 40)
        choice = self.luck.choice
        speed = choice([1000, 1000, 500])
        return EngineOffer(engine, choice([60, 100, 200]), choice([8, 30]), choice([20, 50, UNLIMITED]), speed)

    def step(self) -> None:
        if self.now_us < FLOOD_ENDS:
            self.flood()
        for admission in self.pool.dispatch(self.now_us):
            self.admitted(admission)
        firsts = [ticket.id for tier in self.pool._tiers for ticket in self.first_for_floor(tier)]
        self.since = {name: self.since.get(name, self.now_us) for name in firsts}
        change_us = self.pool.next_change_us(self.now_us) or (CHANGES_END + 1 if self.is_changing else ALL_ENDS)
        ends_us = self.events[0][0] if self.events else ALL_ENDS
        self.now_us = min(ends_us, max(change_us, self.now_us + D // 40))
        self.waited = max([self.waited, *((self.now_us - since_us) / D for since_us in self.since.values())])
        while self.events and self.events[0][0] == self.now_us:
            *_, what, ticket = heapq.heappop(self.events)
            self.happens(what, ticket)
        if self.is_changing and self.luck.random() < 0.03:
            self.change()
            self.since = {}
        if self.is_changing and self.now_us > CHANGES_END:
            self.is_changing = False
            self.offers = {name: offer._replace(takes_new=True) for name, offer in self.offers.items()}
            self.pool.set_engines(self.offers.values(), self.now_us)
            self.since = {}

    def first_for_floor(self, tier: GainFleetTier) -> list[Ticket]:
        """The first ticket that waits, in fair order, where it is no larger than the floor and an engine that is up."""
        rules = tier.rules
        waiting = [*tier.queue.claimants.values(), tier.queue.head()]
        firsts = sorted((it for it in waiting if it is not None), key=lambda it: (it.start, it.sequence))[:1]
        return [
            ticket
            for ticket in firsts
            if ticket.tokens <= rules.reserve_tokens and ticket.requests <= rules.reserve_requests
            if tier.prefill(ticket) <= rules.reserve_prefill
            if any(it.takes_new and ticket.tokens <= it.tokens for it in self.offers.values())
        ]

    # The flood.

    def flood(self) -> None:
        waiting = Counter((ticket.tier, ticket.tenant) for ticket in self.waiting.values())
        for level in self.loud:
            for tenant in ("loud", "louder"):
                for _ in range(ALWAYS_WAITING - waiting[level, tenant]):
                    tokens = self.size(level, self.luck.choice(self.sizes))
                    self.submit(level, tokens, self.luck.randint(0, tokens), tenant)
        floors = [tier for tier in self.whole.tiers if tier.reserve_tokens]
        tier = self.luck.choice(floors)
        if self.luck.random() < 0.3 and not waiting[tier.level, "quiet"]:
            largest = min(tier.reserve_tokens, *(it.tokens for it in self.offers.values()))
            tokens = self.luck.choice([largest, max(1, largest // 2), 1])
            self.submit(tier.level, tokens, self.luck.randint(0, min(tokens, tier.reserve_prefill)), "quiet")
            self.quiet += 1

    def size(self, level: int, habit: str) -> int:
        most = max(1, min(largest_request(self.whole, level)[0], max(it.tokens for it in self.offers.values())))
        if habit == "small":
            return self.luck.randint(max(1, most // 12), max(1, most // 6))
        return {"large": most, "floor": max(1, min(most, self.whole.tiers[level].reserve_tokens)), "one": 1}.get(
            habit, self.luck.randint(1, most)
        )

    def submit(self, level: int, tokens: int, prompt: int, tenant: str) -> None:
        name, luck = f"{tenant}{next(self.order)}", self.luck
        hits = [(luck.choice(list(self.offers.values())).id, prompt)] if luck.random() < 0.3 else []
        ticket = self.pool.submit(
            name, tier=level, tokens=tokens, now_us=self.now_us, tenant=tenant, prompt=prompt, hits=hits
        )
        self.waiting[name] = ticket
        deadline_us = luck.choice([0, D // 10, D, 10 * D])
        if tenant != "quiet":
            figures = GainFigures(64, 5_000, luck.choice([1, 100, D]), deadline_us, deadline_us, luck.choice([1, D]))
            self.appraise(ticket, figures)
        elif luck.random() < 0.5:
            self.appraise(ticket, GainFigures(1, 1, D, 10 * D, 0, 1))

    # What happens to leases and engines.

    def admitted(self, admission: Admission) -> None:
        ticket, luck = admission.ticket, self.luck
        self.running[ticket.id] = self.waiting.pop(ticket.id)
        held_us = D if luck.random() < 0.7 else luck.randint(1, D)
        for what, after_us in (("prefilled", luck.randint(1, held_us)), ("settled", held_us)):
            at_us = self.now_us + after_us
            heapq.heappush(self.events, (at_us, next(self.order), ticket.returns, what, ticket))

    def happens(self, what: str, ticket: Ticket) -> None:
        if ticket.id not in self.running:
            return  # handed back, and it waits
        if what == "prefilled":
            self.pool.prefilled(ticket.id, self.now_us)
        else:
            self.pool.settle(self.running.pop(ticket.id).id, self.now_us)

    def change(self) -> None:
        luck, name = self.luck, self.luck.choice(list(self.offers))
        offer = self.offers[name]
        what = luck.choice(["drained", "back", "lost", "slow", "handed back"])
        if what == "handed back" and self.running:
            ticket = luck.choice(list(self.running.values()))
            self.pool.hand_back(ticket.id, self.now_us, None)
            self.waiting[ticket.id] = self.running.pop(ticket.id)
        elif what == "drained" and sum(it.takes_new for it in self.offers.values()) > 1:
            self.offers[name] = offer._replace(takes_new=False)
        elif what == "back":
            self.offers[name] = offer._replace(takes_new=True)
        elif what == "slow":
            self.offers[name] = offer._replace(speed=luck.choice([300, 1000]))
        elif what == "lost":  # and here again, empty
            self.offers[name] = offer._replace(id=f"{name}#{next(self.changes)}")
        self.pool.set_engines(self.offers.values(), self.now_us)


@settings(max_examples=examples(4))
@given(seed=st.integers(0, 10**9), engines=st.integers(2, 6), equal=st.booleans())
def test_a_request_no_larger_than_its_floor_gets_in_whatever_the_flood_earns(seed, engines, equal):
    flood = Flood(seed, engines, equal).play()
    assert flood.waited <= MOST_LEASES
    assert not flood.waiting
    assert flood.quiet


@pytest.mark.parametrize("engines", [2, 3])
def test_among_equal_engines_it_waits_a_few_leases(engines):
    waited = max(Flood(seed, engines, equal=True).play().waited for seed in range(4))
    assert 1 < waited <= WORST_LEASES, "or the flood proves nothing"


@pytest.mark.soak
@pytest.mark.parametrize("engines", [2, 3, 4, 8])
@pytest.mark.parametrize("equal", [True, False])
def test_no_flood_keeps_a_request_out_for_long(engines, equal):
    for seed in range(1_000, 1_150):
        flood = Flood(seed, engines, equal).play()
        assert flood.waited <= (WORST_LEASES if equal else MOST_LEASES), seed
        assert not flood.waiting, seed


# Negative controls.


class HasNoFloors(GainFleetScheduler):
    """Orders everything by gain."""

    class Tier(GainFleetTier):
        def for_floor(self, now_us: int):
            return iter(())

    _tier_type = Tier


class FillsFloorsWithWhateverFits(GainFleetScheduler):
    """A later ticket of the tier takes the room of the floor that an earlier claimant waits for."""

    class Tier(GainFleetTier):
        def for_floor(self, now_us: int):
            for ticket in self.in_fair_order(now_us):
                if self.has_floor_for(ticket):
                    yield ticket, OrderClass.INSIDE
                elif now_us >= self.owes_until_us and self.is_below_floor():
                    yield ticket, OrderClass.TURN

    _tier_type = Tier


class ForgetsClaims(GainFleetScheduler):
    """A claimant for a floor comes in its order, and goes where it suits it best at the moment."""

    def in_order_of_walk(self, now_us: int) -> list[Candidate]:
        self._for_floors = set()
        return self._candidates(now_us)


@pytest.mark.parametrize(("scheduler", "engines"), [(HasNoFloors, 2), (FillsFloorsWithWhateverFits, 4)])
def test_without_floors_in_fair_order_a_flood_keeps_a_request_out(scheduler, engines):
    for seed in range(20):
        if Flood(seed, engines, True, scheduler).play().waited > MOST_LEASES:
            return
    pytest.fail("no flood keeps any out")


def waited_beside_small_ones(pool: FleetScheduler) -> float:
    """How long, in D, a ticket of 80% of an engine waits beside those of a better tier, each of 10% of one.

    Ten clients of that tier send one after the other, half of what the two engines hold and as much as its reserve.
    """
    pool.set_engines([EngineOffer("a#1", 100, UNLIMITED), EngineOffer("b#1", 100, UNLIMITED)], 0)
    luck, ends, names = random.Random(0), [(number, "") for number in range(10)], count()
    for at_us, name in iter(lambda: heapq.heappop(ends), None):
        pool.settle(name, at_us)
        pool.submit(f"small{next(names)}", tier=0, tokens=10, now_us=at_us)
        if len(ends) == 9 and at_us > 2 * D and not any(it.startswith("large") for it in pool._waiting):
            pool.submit("large", tier=1, tokens=80, now_us=at_us)
        for ticket, *_ in pool.dispatch(at_us):
            if ticket.id == "large":
                return (at_us - ticket.arrived_us) / D
            heapq.heappush(ends, (at_us + luck.randint(D // 2, D), ticket.id))
        if at_us > 100 * D:
            break
    return 100.0


HALVES = GainPolicy(
    (None, None), (Shares("high", Fraction(1, 2), Fraction(1)), Shares("normal", Fraction(2, 5), Fraction(1))),
    fair=Fraction(1),
)  # fmt: skip


def test_small_tickets_on_every_engine_keep_no_large_one_out():
    rules_of = GainFleetOracle(HALVES).rules_of
    assert waited_beside_small_ones(GainFleetScheduler(rules_of)) <= 1
    assert waited_beside_small_ones(ForgetsClaims(rules_of)) == 100
    assert waited_beside_small_ones(FleetScheduler(FleetOracle(HALVES).rules_of)) <= 1
