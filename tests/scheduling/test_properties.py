"""All invariants of the admission rules, held by random operations in any order, and the differential to the oracle."""

from __future__ import annotations

import random
from fractions import Fraction

import invariants
import pytest
from broken import ChargesNoGrowth
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from oracle import Oracle, Policy
from recorder import Recorder, as_answer
from strategies import WEIGHTS, policies, preempting_policies

from sidecar.policy.rules import UNLIMITED, Shares, largest_admissible, largest_request
from sidecar.scheduling import Scheduler, Ticket
from tests.support.examples import examples

QUICK = settings(max_examples=examples(50), stateful_step_count=40, suppress_health_check=list(HealthCheck))
LONG = settings(QUICK, max_examples=2000, stateful_step_count=80)

FEW_TOKENS = st.integers(1, 30)
FEW_REQUESTS = st.sampled_from([1, 1, 1, 2, 3])


class Pool(RuleBasedStateMachine):
    """Everything that can happen to a scheduler, in any order, watched by a recorder and played again by the oracle."""

    @initialize(policy=policies())
    def open(self, policy: Policy) -> None:
        self.recorder = Recorder(Scheduler(policy.rules()), policy)
        self.oracle = Oracle(policy, divide=lambda tokens, weight: tokens / weight)
        self.count = 0

    @rule(tier=st.integers(0, 4), tokens=FEW_TOKENS, requests=FEW_REQUESTS, tenant=st.sampled_from("abcd"))
    def submit(self, tier: int, tokens: int, requests: int, tenant: str) -> None:
        ticket = {
            "tier": tier % len(self.recorder.record.policy.tiers),
            "tokens": tokens,
            "requests": requests,
            "tenant": tenant,
            "weight": WEIGHTS[tenant],
        }
        self.recorder.submit(str(self.count), **ticket)
        self.oracle.submit(str(self.count), now_us=self.recorder.now_us, **ticket)
        self.count += 1

    @rule()
    def dispatch(self) -> None:
        self.recorder.dispatch()
        answers = self.oracle.dispatch(self.recorder.now_us)
        assert answers == [decision.reported for decision in self.recorder.latest]
        assert self.oracle.preempt(self.recorder.now_us) == self.recorder.preempt()

    @precondition(lambda self: self.count)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        name = self._any(data)
        self.recorder.keep(name)
        self.oracle.keep(name)

    @precondition(lambda self: self.count)
    @rule(data=st.data())
    def requeue_anybody(self, data: st.DataObject) -> None:
        self._requeue(self._any(data))

    @rule()
    def a_victims_engine_lets_go(self) -> None:
        for victim in [request for request in self.oracle.held() if request.chosen][:1]:
            self._requeue(victim.id)
            self.dispatch()

    def _requeue(self, name: str) -> None:
        self.recorder.requeue(name)
        self.oracle.requeue(name, self.recorder.now_us)

    @precondition(lambda self: self.count)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        name = self._any(data)
        self.recorder.settle(name)
        self.oracle.settle(name, self.recorder.now_us)

    @precondition(lambda self: self.count)
    @rule(data=st.data())
    def settle_the_oldest_lease_and_dispatch(self, data: st.DataObject) -> None:
        for lease in self.recorder.record.held()[:1]:
            self.recorder.settle(lease.id)
            self.oracle.settle(lease.id, self.recorder.now_us)
        self.dispatch()

    @precondition(lambda self: self.count)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = self._any(data)
        self.recorder.cancel(name)
        self.oracle.cancel(name)

    @precondition(lambda self: self.count)
    @rule(data=st.data(), tokens=FEW_TOKENS)
    def resize(self, data: st.DataObject, tokens: int) -> None:
        name = self._any(data)
        self.recorder.resize(name, tokens)
        self.oracle.resize(name, tokens)

    @rule(tier=st.integers(0, 4), tenant=st.sampled_from("abcd"), tokens=st.sampled_from([1, 7, 40, 2**53]))
    def charge(self, tier: int, tenant: str, tokens: int) -> None:
        charged = tier % len(self.recorder.record.policy.tiers), tenant, WEIGHTS[tenant], tokens
        self.recorder.charge(*charged)
        self.oracle.charge(*charged)

    @rule()
    def no_engine_takes_the_latest_lease(self) -> None:
        for lease in [request for request in self.oracle.held() if not request.kept][-1:]:
            self._hand_back(lease.id)

    @rule()
    def the_engine_dies_under_all_that_have_no_first_byte(self) -> None:
        for lease in [request for request in self.oracle.held() if not request.kept]:
            self._hand_back(lease.id)
        self.pause(is_paused=True)

    def _hand_back(self, name: str) -> None:
        self.recorder.hand_back(name)
        self.oracle.hand_back(name, self.recorder.now_us)

    @rule(is_paused=st.sampled_from([True, False, False, False]))
    def pause(self, is_paused: bool) -> None:
        self.recorder.pause(is_paused=is_paused)
        self.oracle.is_paused = is_paused

    @rule(for_us=st.sampled_from([0, 1, 10, 60]))
    def hold_back(self, for_us: int) -> None:
        self.recorder.hold_back(for_us)
        self.oracle.hold_back(self.recorder.now_us + for_us)

    @rule(by_us=st.sampled_from([1, 3, 7, 20, 60]))
    def time_passes(self, by_us: int) -> None:
        self.recorder.pass_time(by_us)

    @invariant()
    def leases_never_exceed_the_pool_but_for_resizes_that_outgrow_it(self) -> None:
        invariants.leases_never_exceed_the_pool_but_for_resizes_that_outgrow_it(self.recorder)

    @invariant()
    def no_ticket_waits_that_the_rules_let_in(self) -> None:
        invariants.no_ticket_waits_that_the_rules_let_in(self.recorder)

    @invariant()
    def every_ticket_that_is_admitted_was_next_and_fitted(self) -> None:
        invariants.every_ticket_that_is_admitted_was_next_and_fitted(self.recorder)

    @invariant()
    def a_floor_is_a_floor(self) -> None:
        invariants.a_floor_is_a_floor(self.recorder)

    @invariant()
    def turns_go_round(self) -> None:
        invariants.turns_go_round(self.recorder)

    @invariant()
    def no_tenant_overtakes_itself_inside_a_tier(self) -> None:
        invariants.no_tenant_overtakes_itself_inside_a_tier(self.recorder)

    @invariant()
    def service_of_backlogged_tenants_differs_by_one_largest_ticket_each(self) -> None:
        invariants.service_of_backlogged_tenants_differs_by_one_largest_ticket_each(self.recorder)

    @invariant()
    def every_ticket_ends_once_and_ending_it_twice_changes_nothing(self) -> None:
        invariants.every_ticket_ends_once_and_ending_it_twice_changes_nothing(self.recorder)

    @invariant()
    def the_figures_of_every_tier_are_those_of_the_record(self) -> None:
        invariants.the_figures_of_every_tier_are_those_of_the_record(self.recorder)

    @invariant()
    def starvation_is_what_the_record_of_all_admissions_says(self) -> None:
        invariants.starvation_is_what_the_record_of_all_admissions_says(self.recorder)

    @invariant()
    def a_preempted_lease_may_be_and_must_be(self) -> None:
        invariants.a_ticket_preempts_only_once_it_has_waited_long_enough(self.recorder)
        invariants.victims_are_less_important_preemptible_and_not_kept(self.recorder)
        invariants.no_one_is_preempted_more_often_than_the_policy_says(self.recorder)
        invariants.a_victims_tier_is_not_below_its_reserve_without_it(self.recorder)
        invariants.victims_are_enough_and_none_of_them_could_be_spared(self.recorder)

    @invariant()
    def freed_room_goes_to_whom_it_was_freed_for(self) -> None:
        invariants.freed_room_goes_to_whom_it_was_freed_for(self.recorder)

    @invariant()
    def time_alone_admits_no_one_before_the_next_change(self) -> None:
        if not self.recorder.dispatched:
            return
        record, now_us = self.recorder.record, self.recorder.now_us
        next_us = self.recorder.scheduler.next_change_us(now_us)
        assert next_us is None or next_us > now_us
        if record.is_paused:
            assert next_us is None
            return
        last_us = now_us + 1_000 if next_us is None else next_us - 1
        for at_us in {now_us + 1, (now_us + last_us) // 2, last_us} if last_us > now_us else ():
            assert record.next_admission(at_us) is None

    def teardown(self) -> None:
        """However it went, once every ticket has left nothing is held and nothing is remembered."""
        if not hasattr(self, "recorder"):
            return
        for number in range(self.count):
            self.recorder.cancel(str(number))
            self.recorder.settle(str(number))
            self.recorder.settle(str(number))
        invariants.every_ticket_ends_once_and_ending_it_twice_changes_nothing(self.recorder)
        assert self.recorder.ends.total() == self.count
        assert footprint(self.recorder.scheduler) == 0

    def _any(self, data: st.DataObject) -> str:
        """Any ticket there ever was, so that most of them are settled, canceled or resized when that is too late."""
        return str(data.draw(st.integers(0, self.count - 1)))


class FullPool(Pool):
    """One that the least important tier fills from the start, under a policy by which much is preempted."""

    @initialize(policy=preempting_policies(), sizes=st.lists(st.integers(3, 20), min_size=3, max_size=8))
    def open(self, policy: Policy, sizes: list[int]) -> None:
        self.recorder = Recorder(Scheduler(policy.rules()), policy)
        self.oracle = Oracle(policy, divide=lambda tokens, weight: tokens / weight)
        self.count = 0
        for tokens in sizes:
            self.submit(len(policy.tiers) - 1, tokens, 1, "a")
        self.dispatch()

    @precondition(lambda self: self.count)
    @rule(tier=st.integers(0, 2), tokens=st.integers(5, 30), by_us=st.sampled_from([0, 5]))
    def somebody_more_important_comes(self, tier: int, tokens: int, by_us: int) -> None:
        self.submit(tier, tokens, 1, "b")
        self.dispatch()
        self.time_passes(by_us)
        self.dispatch()

    @rule()
    def all_victims_let_go(self) -> None:
        for victim in [request for request in self.oracle.held() if request.chosen]:
            self._requeue(victim.id)
        self.dispatch()


def footprint(scheduler: Scheduler) -> int:
    """How many things a scheduler remembers, wherever it keeps them."""
    queues = sum(len(tier.queue) for tier in scheduler._tiers)
    queues += len(scheduler._preemption.leases) + len(scheduler._preemption._victims)
    return queues + len(scheduler._waiting) + len(scheduler._leases) + len(scheduler._overtaking)


TestPool, TestFullPool = Pool.TestCase, FullPool.TestCase
TestPool.settings = TestFullPool.settings = QUICK


@pytest.mark.soak
@pytest.mark.parametrize("kind", [Pool, FullPool])
def test_the_invariants_hold_whatever_happens_in_any_order_for_long(kind):
    run_state_machine_as_test(kind, settings=LONG)


def decisions_of(policy: Policy, operations: list, every_us: int | None) -> list[tuple[str, int]]:
    """Who is admitted or preempted when, by deciding at every moment, or (None) only at events and `next_change_us`."""
    scheduler, admitted = Scheduler(policy.rules()), []
    events = {at_us: [operation for operation in operations if operation[0] == at_us] for at_us, *_ in operations}
    change_us = None
    for now_us in range(200):
        for number, (_, what, tier, tokens) in enumerate(events.get(now_us, [])):
            if what == "submit":
                scheduler.submit(f"{now_us}-{number}", tier=tier % len(policy.tiers), tokens=tokens, now_us=now_us)
            elif what == "let go" and scheduler._preemption._victims:
                scheduler.requeue(next(iter(scheduler._preemption._victims)), now_us)
            elif what == "settle" and scheduler._leases:
                scheduler.settle(next(iter(scheduler._leases)), now_us)
        if every_us or now_us in events or now_us == change_us:
            admitted += [(admission.ticket.id, now_us) for admission in scheduler.dispatch(now_us)]
            admitted += [(f"preempted {victim.id}", now_us) for victim in scheduler.preempt(now_us)]
            change_us = scheduler.next_change_us(now_us)
    return admitted


OPERATIONS = st.lists(
    st.tuples(
        st.integers(0, 120), st.sampled_from(["submit", "submit", "settle", "let go"]), st.integers(0, 4), FEW_TOKENS
    ),
    min_size=1,
    max_size=40,
)


@settings(max_examples=examples(50))
@given(policy=policies(), operations=OPERATIONS)
def test_dispatching_at_events_and_at_the_next_change_misses_no_one(policy, operations):
    assert decisions_of(policy, operations, every_us=1) == decisions_of(policy, operations, every_us=None)


def alone(policy: Policy, tier: int, tokens: int, requests: int) -> list:
    """Who an idle pool admits once its only ticket has aged as far as it can."""
    scheduler = Scheduler(policy.rules())
    scheduler.submit("only", tier=tier, tokens=tokens, requests=requests, now_us=0)
    return scheduler.dispatch(1_000_000)


@given(policy=policies())
def test_largest_is_what_an_idle_pool_admits_after_aging_and_one_more_never_is(policy):
    for tier in range(len(policy.tiers)):
        tokens, requests = largest_admissible(policy.rules(), tier)
        if tokens > 0 and requests > 0:
            assert len(alone(policy, tier, tokens, requests)) == 1
        assert not alone(policy, tier, max(tokens, 0) + 1, 1)
        assert not alone(policy, tier, 1, max(requests, 0) + 1)


@given(policy=policies())
def test_the_size_limit_is_that_of_the_page(policy):
    oracle = Oracle(policy)
    for tier in range(len(policy.tiers)):
        most = [UNLIMITED if size is None else size for size in oracle.size_limit(tier)]
        assert list(largest_request(policy.rules(), tier)) == most


@given(operations=st.lists(st.tuples(st.booleans(), st.integers(1, 30), st.sampled_from("abc")), max_size=60))
def test_exact_fractions_and_doubles_admit_alike_where_weights_are_powers_of_two(operations):
    policy = Policy((40, None), STRICT.tiers)
    exact, scheduler = Oracle(policy), Scheduler(policy.rules())
    for number, (submits, tokens, tenant) in enumerate(operations):
        ticket = {"tier": number % 2, "tokens": tokens, "tenant": tenant, "weight": WEIGHTS[tenant]}
        if submits:
            exact.submit(str(number), now_us=number, **ticket)
            scheduler.submit(str(number), now_us=number, **ticket)
        elif exact.held():
            oldest = exact.held()[0].id
            exact.settle(oldest, number)
            scheduler.settle(oldest, number)
        assert exact.dispatch(number) == [as_answer(admission) for admission in scheduler.dispatch(number)]


PAID = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30), st.sampled_from([0, 0, 0, 5, 60])), min_size=20)


def paid_ahead(kind: type[Scheduler], sizes: list[tuple[int, int, int]]) -> tuple[Fraction, Fraction]:
    """By how much two tenants that always wait differ at most in what they used, and the bound on it.

    Every third size is what the lease then comes to use beyond its own; the tenant of that lease pays for it.
    """
    scheduler = kind(Policy((1000, 1), (Shares("one"),)).rules())
    used, ahead, number = {"a": Fraction(0), "b": Fraction(0)}, [Fraction(0)], 0
    for tenant in "abab":
        scheduler.submit(f"{tenant}{number}", tier=0, tokens=1, now_us=0, tenant=tenant, weight=WEIGHTS[tenant])
        number += 1
    for moment, (one, other, growth) in enumerate(sizes):
        for admission in scheduler.dispatch(moment):
            ticket = admission.ticket
            tenant, weight = ticket.tenant, ticket.weight
            again = {"tokens": one if tenant == "a" else other, "tenant": tenant, "weight": weight}
            scheduler.submit(f"{tenant}{number}", tier=0, now_us=moment, **again)
            number += 1
            if growth and tenant == "a":
                scheduler.charge(0, tenant, weight, growth)
            used[tenant] += Fraction(ticket.tokens + (growth if tenant == "a" else 0), weight)
            ahead.append(used["a"] - used["b"])
            scheduler.settle(ticket.id, moment)
    grown = max(growth for *_, growth in sizes)
    largest = max(one for one, *_ in sizes) + Fraction(max(other for _, other, _ in sizes), WEIGHTS["b"])
    return max(ahead) - min(ahead), largest + 2 * grown


@settings(max_examples=examples(50))
@given(sizes=PAID)
def test_what_two_tenants_use_differs_by_a_ticket_of_each_and_what_grew_since_the_last(sizes):
    difference, bound = paid_ahead(Scheduler, sizes)
    assert difference <= bound


def test_a_scheduler_that_charges_no_growth_breaks_that_bound():
    difference, bound = paid_ahead(ChargesNoGrowth, [(10, 10, 60)] * 50)
    assert difference > bound


STRICT = Policy(
    capacity=(100, None),
    tiers=(Shares("first", limit=Fraction(1, 10)), Shares("second")),
)


def stuck(scheduler: Scheduler) -> Ticket:
    """A ticket above its tier's limit: it waits for ever and holds no one but its own tier."""
    return scheduler.submit("stuck", tier=0, tokens=50, now_us=0)


def test_a_stuck_ticket_does_not_make_the_scheduler_remember_two_hundred_thousand_operations():
    scheduler, luck, most = Scheduler(STRICT.rules()), random.Random(1), 0
    stuck(scheduler)
    for number in range(50_000):  # a submission, a dispatch and an end in both tiers: four operations and more
        tenant = f"tenant-{luck.randrange(50)}"
        scheduler.submit(f"a{number}", tier=0, tokens=1, now_us=number, tenant=tenant)
        scheduler.submit(f"b{number}", tier=1, tokens=luck.randint(1, 50), now_us=number, tenant=tenant)
        admitted = scheduler.dispatch(number)
        scheduler.cancel(f"a{number}", number)
        for admission in admitted:
            scheduler.settle(admission.ticket.id, number)
        most = max(most, footprint(scheduler))
    assert most < 1_500
    scheduler.cancel("stuck", 50_000)
    assert footprint(scheduler) == 0


def test_a_tier_that_is_never_empty_forgets_tenants_whose_turn_has_passed():
    scheduler, most = Scheduler(STRICT.rules()), 0
    scheduler.submit("first", tier=1, tokens=100, now_us=0, tenant="steady")
    for number in range(5_000):
        scheduler.submit(f"{number}-s", tier=1, tokens=100, now_us=number, tenant="steady")
        scheduler.submit(f"{number}-n", tier=1, tokens=100, now_us=number, tenant=f"newcomer-{number}")
        for _ in range(2):
            for admission in scheduler.dispatch(number):
                scheduler.settle(admission.ticket.id, number)
        assert scheduler.waiting() == 1
        most = max(most, footprint(scheduler))
    assert most < 1_500
