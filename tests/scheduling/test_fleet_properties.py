"""Several engines under random operations: the same decisions as the oracle, and what must hold whatever happens."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from copies import copy_of
from fleet_oracle import MOST_CLAIMANTS
from fleets import NAMES, Twins, operate
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from oracle import Policy
from scenario_policy import OF_FLEETS
from strategies import policies, preempting_policies, preempting_policy, random_policy
from test_fleet_scenarios import answers, recorded

from sidecar.policy.rules import Shares
from sidecar.pools.engines import EngineOffer
from sidecar.scheduling.claims import ClaimQueue
from sidecar.scheduling.fleet_scheduler import FleetScheduler
from sidecar.scheduling.fleet_tier import FleetOrder, FleetTier
from sidecar.scheduling.order import Candidate
from sidecar.scheduling.placement import EngineLedger, Placement, Placing
from sidecar.scheduling.ticket import Ticket
from tests.support.examples import examples

QUICK = settings(max_examples=examples(5), stateful_step_count=40, suppress_health_check=list(HealthCheck))
LONG = settings(QUICK, max_examples=400, stateful_step_count=100)


def the_ledgers_add_up(twins: Twins) -> None:
    """No ledger is negative, and the engines hold together what the tiers hold, and what the leases do."""
    scheduler, oracle = twins.scheduler, twins.oracle
    ledgers = scheduler.placement.ledgers.values()
    for ledger in ledgers:
        mine = oracle.on(ledger.id)
        held = ledger.held_tokens, ledger.held_requests, ledger.held_prefill, ledger.unprefilled
        assert min(held) >= 0
        assert held[:3] == tuple(sum(column) for column in zip((0, 0, 0), *map(oracle.holds, mine), strict=True))
        assert ledger.unprefilled == sum(request.unprefilled for request in mine)
        assert ledger.load == ledger.unprefilled * 50 + ledger.held_tokens
    tiers = range(len(twins.policy.tiers))
    by_tier = [(*scheduler.held(tier), scheduler.held_prefill(tier)) for tier in tiers]
    by_engine = [(it.held_tokens, it.held_requests, it.held_prefill) for it in ledgers]
    assert sums(by_tier) == sums(by_engine)


def sums(rows: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip((0, 0, 0), *rows, strict=True))


def no_one_is_lost(twins: Twins) -> None:
    scheduler, oracle = twins.scheduler, twins.oracle
    assert sorted(scheduler._waiting) == sorted(request.id for request in oracle.waiting())
    assert sorted(scheduler._leases) == sorted(request.id for request in oracle.held())
    claimants = [name for tier in scheduler._tiers for name in tier.queue.claimants]
    assert sorted(claimants) == sorted(request.id for request in oracle.claimants())
    assert len(claimants) <= MOST_CLAIMANTS
    for tier in range(len(twins.policy.tiers)):
        waiting = oracle.waiting(tier)
        assert scheduler.queued(tier) == (sum(request.tokens for request in waiting), len(waiting))


def an_engine_that_gets_a_ticket_is_within_its_capacity(twins: Twins, engines: Sequence[str]) -> None:
    for state in twins.scheduler.engines(twins.now_us):
        if state.id in engines:
            assert state.takes_new
            assert state.held_tokens <= state.effective_tokens
            assert state.held_requests <= state.effective_requests


def a_second_look_admits_no_one(twins: Twins) -> None:
    """What waits after a decision waits for something to change."""
    again = copy_of(twins.scheduler)
    again._changed()
    assert again.dispatch(twins.now_us) == []
    change_us = twins.scheduler.next_change_us(twins.now_us)
    assert change_us is None or change_us > twins.now_us


def the_first_with_room_on_its_engine_is_in(twins: Twins) -> None:
    """Work conservation: where one ticket waits, it does not fit the pool, or not its best engine."""
    oracle, now_us = twins.oracle, twins.now_us
    waiting = oracle.waiting()
    if (
        len(waiting) == 1
        and not oracle.is_paused
        and not oracle.is_held_back(now_us)
        and oracle.is_candidate(waiting[0])
    ):
        best = oracle.best(waiting[0], [])
        assert best is None or not oracle.fits(waiting[0], now_us) or not oracle.has_room(best, waiting[0])


def no_one_waits_beside_an_engine_without_patience(twins: Twins) -> None:
    """The first in order that is a claimant without patience, and fits the pool, has room on no engine."""
    oracle, now_us = twins.oracle, twins.now_us
    first = next(iter(oracle.order(now_us)), None)
    if first is None or oracle.is_paused or not oracle.fits(first, now_us) or not oracle.has_any_room():
        return
    best = oracle.best(first, [])
    assert best is None or oracle.entered(first, best, [], now_us) is None


def everyone_gets_in_at_last(twins: Twins) -> None:
    """Once there is an engine large enough, and leases end."""
    twins.pause(is_paused=False)
    twins.hold_back(0)
    twins.set_engine("z", tokens=1000, requests=100, prefill=500)
    for _ in range(len(twins.oracle.waiting()) + 2):
        twins.dispatch()
        for lease in [*twins.oracle.held()]:
            twins.settle(lease.id)
            assert not twins.settle(lease.id)
        twins.now_us += 1_000
    twins.dispatch()
    for lease in [*twins.oracle.held()]:
        twins.settle(lease.id)
    twins.dispatch()
    assert twins.oracle.waiting() == []
    assert [
        (it.held_tokens, it.held_requests, it.unprefilled_tokens) for it in twins.scheduler.engines(twins.now_us)
    ] == [(0, 0, 0)] * len(twins.offers)
    assert footprint(twins.scheduler) == 0


def footprint(scheduler: FleetScheduler) -> int:
    queues = sum(len(tier.queue) + len(tier.queue.claimants) for tier in scheduler._tiers)
    queues += len(scheduler._preemption.leases) + len(scheduler._preemption._victims)
    return queues + len(scheduler._waiting) + len(scheduler._leases) + len(scheduler._overtaking)


class Fleet(RuleBasedStateMachine):
    """Everything that can happen, in any order. hypothesis chooses the random numbers, and so shrinks them."""

    @initialize(policy=st.one_of(policies(), preempting_policies()), engines=st.integers(1, 5))
    def open(self, policy: Policy, engines: int) -> None:
        self.twins = Twins(policy)
        for name in NAMES[:engines]:
            self.twins.set_engine(name)

    @rule(luck=st.randoms(use_true_random=False))
    def anything(self, luck: random.Random) -> None:
        operate(self.twins, luck)

    @rule(luck=st.randoms(use_true_random=False))
    def anything_and_a_decision(self, luck: random.Random) -> None:
        operate(self.twins, luck)
        placed = self.twins.dispatch()
        an_engine_that_gets_a_ticket_is_within_its_capacity(self.twins, [each.engine for each in placed])
        a_second_look_admits_no_one(self.twins)
        the_first_with_room_on_its_engine_is_in(self.twins)
        no_one_waits_beside_an_engine_without_patience(self.twins)

    @invariant()
    def what_is_counted_is_true(self) -> None:
        if hasattr(self, "twins"):
            the_ledgers_add_up(self.twins)
            no_one_is_lost(self.twins)

    def teardown(self) -> None:
        if hasattr(self, "twins"):
            everyone_gets_in_at_last(self.twins)


TestFleet = Fleet.TestCase
TestFleet.settings = QUICK


@pytest.mark.soak
def test_the_scheduler_decides_as_the_oracle_whatever_happens_for_long():
    run_state_machine_as_test(Fleet, settings=LONG)


# Negative controls.


class Greedy(FleetScheduler):
    """Takes whichever engine has room."""

    def place(self, ticket: Ticket) -> EngineLedger | None:
        usable = self.placement.usable(ticket.tokens, ticket.requests, ticket.placing)
        with_room = [it for it in usable if it.has_room(ticket.tokens, ticket.requests, ticket.placing)]
        return next(iter(with_room), None) or super().place(ticket)


class ForgetsClaims(FleetScheduler):
    """Lets others into an engine that was claimed."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.placement = self.Forgetful(self.placement.weight_percent)

    class Forgetful(Placement):
        def claim(self, ledger: EngineLedger, prompt: int) -> bool:
            self.placed += 1
            return self.placed == 16


class CountsNoClaimedPrompts(FleetScheduler):
    """Sends everyone to the engine that everyone wants."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.placement = self.Careless(self.placement.weight_percent)

    class Careless(Placement):
        def claim(self, ledger: EngineLedger, prompt: int) -> bool:
            return super().claim(ledger, 0)


class IsPatientForever(FleetScheduler):
    """Waits for its best engine, whatever happens."""

    def taken_by(self, ticket: Ticket, best: EngineLedger, now_us: int) -> EngineLedger | None:
        taking = super().taken_by(ticket, best, now_us)
        return taking if taking is best else None


class TakesWhatIsClaimed(FleetScheduler):
    """Enters an engine that a ticket before it claimed, once it has no patience."""

    def taken_by(self, ticket: Ticket, best: EngineLedger, now_us: int) -> EngineLedger | None:
        taking = super().taken_by(ticket, best, now_us)
        if taking is not None or now_us < ticket.placing.patient_until_us:
            return taking
        sizes = ticket.tokens, ticket.requests
        usable = self.placement.usable(*sizes, ticket.placing)
        return next((it for it in usable if it.has_room(*sizes, ticket.placing)), None)


class LetsNoClaimForAFloorComeFirst(FleetScheduler):
    """Claimants for floors come in their order, and go where it suits them best at the moment."""

    def in_order_of_walk(self, now_us: int) -> list[Candidate]:
        self._for_floors = set()
        return self._candidates(now_us)


class LetsTheFirstBePassed(FleetScheduler):
    """Admits later tickets of a tier beyond its floor, however long its first has waited for an engine."""

    class Tier(FleetTier):
        def kept_from_being_passed(self, now_us: int) -> None:
            pass

    _tier_type = Tier


class LetsNoOnePass(FleetScheduler):
    """Admits none beyond the floor while the first of the tier waits for its best engine."""

    class Tier(FleetTier):
        def kept_from_being_passed(self, now_us: int) -> Ticket | None:
            return super().kept_from_being_passed(now_us + 60_000_000)

    _tier_type = Tier


class LetsNoOnePassInAPoolOfItsOwn(FleetScheduler):
    """Admits none beyond the floor while the first of the only tier that has any waits for an engine."""

    class Order(FleetOrder):
        def _is_shared(self) -> bool:
            return True

    _order_type = Order


class KeepsWhatCannotGoFromBeingPassed(FleetScheduler):
    """Admits none beyond the floor while the first of the tier waits, and no engine could hold that."""

    class Order(FleetOrder):
        def without_passing(self, order: list[Candidate], placement: Placement, now_us: int) -> list[Candidate]:
            return super().without_passing(order, HoldsEverything(), now_us)

    _order_type = Order


class HoldsEverything(Placement):
    """Engines that could hold everything."""

    def usable(self, tokens: int, requests: int, placing: Placing) -> list[EngineLedger]:
        return [EngineLedger(EngineOffer("any#1", 1, 1))]


class NeverBeginsAnew(FleetScheduler):
    """Goes on with its walk where a better ticket has joined it."""

    def _walk_once(self, now_us: int):
        found = super()._walk_once(now_us)
        return False if found is True else found


class KeepsEveryPrompt(FleetScheduler):
    """Counts a prompt as un-prefilled to the end of the lease."""

    def prefilled(self, ticket_id: str, now_us: int) -> bool:
        lease = self._leases.get(ticket_id)
        return lease is not None and bool(lease.placing.unprefilled)


class KnowsTwoDimensions(FleetScheduler):
    """Counts no un-prefilled tokens in the pool."""

    def fits(self, candidate: Candidate) -> bool:
        before, self._all_prefill = self._all_prefill, -(2**40)
        fits = super().fits(candidate)
        self._all_prefill = before
        return fits


class RefundsNothing(FleetScheduler):
    """Charges a tenant for a claim that came to nothing."""

    class Queue(ClaimQueue):
        def _refund(self, ticket: Ticket) -> None:
            pass

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        for tier in self._tiers:
            tier.queue = self.Queue()
        self._resize_pool()


class IgnoresCaps(FleetScheduler):
    """Sends more to an engine that refuses."""

    def cap(self, engine: str, requests: int, until_us: int, now_us: int) -> None:
        pass


class StartsAtFullSpeed(FleetScheduler):
    """Knows no slow start."""

    def set_engines(self, offers, now_us: int) -> None:
        super().set_engines([offer._replace(ramp_us=0) for offer in offers], now_us)


class ForgetsWhoIsGone(FleetScheduler):
    """Takes what a drained engine still holds for free room."""

    def _refresh(self, now_us: int) -> None:
        super()._refresh(now_us)
        taking = [(it.effective_tokens, it.effective_requests) for it in self.placement.taking]
        whole = sum(tokens for tokens, _ in taking)
        if whole != self.rules.tokens:
            self.rules = self._rules_of(whole, sum(requests for _, requests in taking), None)


BROKEN = (
    Greedy,
    ForgetsClaims,
    CountsNoClaimedPrompts,
    IsPatientForever,
    TakesWhatIsClaimed,
    LetsNoClaimForAFloorComeFirst,
    LetsTheFirstBePassed,
    LetsNoOnePass,
    LetsNoOnePassInAPoolOfItsOwn,
    KeepsWhatCannotGoFromBeingPassed,
    NeverBeginsAnew,
    KeepsEveryPrompt,
    KnowsTwoDimensions,
    RefundsNothing,
    IgnoresCaps,
    StartsAtFullSpeed,
    ForgetsWhoIsGone,
)
IN_NO_SCENARIO = (CountsNoClaimedPrompts, NeverBeginsAnew)
IN_NO_RANDOM_RUN = (TakesWhatIsClaimed, LetsNoOnePassInAPoolOfItsOwn, KeepsWhatCannotGoFromBeingPassed)


def holds(kind: type[FleetScheduler], seed: int, steps: int = 100) -> bool:
    luck = random.Random(seed)
    twins = Twins(random_policy(luck) if seed % 2 else preempting_policy(luck), kind)
    try:
        for name in NAMES[: luck.randint(1, 4)]:
            twins.set_engine(name)
        for _ in range(steps):
            operate(twins, luck)
            if luck.random() < 0.8:
                twins.dispatch()
                no_one_is_lost(twins)
    except AssertionError:
        return False
    return True


def test_a_walk_that_failed_is_made_again_when_an_engine_gets_another_speed():
    """The pool's size stays as it was, and no time passes."""
    twins = Twins(Policy(capacity=(None, None), tiers=(Shares("one"),)), now_us=1000)
    twins.set_engine("a")
    twins.set_engine("b", speed=100)
    twins.submit(tier=0, tokens=30)
    assert [placed.engine for placed in twins.dispatch()] == ["a#1"]
    twins.submit(tier=0, tokens=10, prompt=10)
    assert twins.dispatch() == []  # it claims a
    twins.set_engine("b", speed=1000)
    assert [placed.engine for placed in twins.dispatch()] == ["b#1"]


@pytest.mark.parametrize(
    ("speed", "hits", "engines"),
    [
        (1000, (), ["b#1"]),
        (1000, (("a#1", 10),), []),
        (1000, (("a#1", 10), ("b#1", 10)), ["b#1"]),
        (1000, (("a#1", 10), ("b#1", 9)), []),
        (999, (), []),
    ],
)
def test_a_request_waits_for_a_cache_or_for_speed_and_else_takes_any_room(speed, hits, engines):
    """Engine a is full, and has less to do than b."""
    twins = Twins(Policy(capacity=(None, None), tiers=(Shares("one"),)), now_us=1000)
    twins.set_engine("a", tokens=2000, requests=1, prefill=100)
    twins.submit(tier=0, tokens=30)
    assert [placed.engine for placed in twins.dispatch()] == ["a#1"]
    twins.set_engine("b", tokens=2000, requests=9, prefill=100, speed=speed)
    twins.submit(tier=0, tokens=1500, barred=("a",))
    assert [placed.engine for placed in twins.dispatch()] == ["b#1"]
    twins.submit(tier=0, tokens=10, prompt=10, hits=hits)
    assert [placed.engine for placed in twins.dispatch()] == engines


def test_a_broken_scheduler_is_found_out():
    kinds = [kind for kind in BROKEN if kind not in IN_NO_RANDOM_RUN]
    assert [kind for kind in kinds if all(holds(kind, seed) for seed in range(40))] == []


def test_a_broken_scheduler_gives_some_scenario_a_wrong_answer():
    kinds = [kind for kind in BROKEN if kind not in IN_NO_SCENARIO]
    assert [kind for kind in kinds if all(answers(kind, one) == recorded(one) for one in OF_FLEETS)] == []


def test_the_real_scheduler_gives_every_scenario_the_right_answer():
    wrong = [scenario["name"] for scenario in OF_FLEETS if answers(FleetScheduler, scenario) != recorded(scenario)]
    assert wrong == [], "then the broken ones prove nothing"


@pytest.mark.parametrize("seed", range(3))
def test_the_real_scheduler_passes_the_runs_that_the_broken_ones_fail(seed):
    assert holds(FleetScheduler, seed)
