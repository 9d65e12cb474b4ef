"""The fast order by gain gives the answers of the literal one, whatever happens in whatever order."""

from __future__ import annotations

import random
from fractions import Fraction

from gain_oracle import GainOracle, GainPolicy
from hypothesis import given, settings
from hypothesis import strategies as st
from recorder import as_answer
from strategies import WEIGHTS, policies, preempting_policies

from sidecar.policy.rules import Shares, pool_rules
from sidecar.scheduling.gain import GainFigures
from sidecar.scheduling.gain_scheduler import GainScheduler
from tests.support.examples import examples

FAIR = st.sampled_from([Fraction(1, 4), Fraction(1, 4), Fraction(1), Fraction(0)])
STEPS = 60


def by_gain(policy, fair: Fraction) -> GainPolicy:
    return GainPolicy(**{**vars(policy), "fair": fair})


def figures(luck: random.Random) -> GainFigures | None:
    """Small numbers, so that tickets are often equal, late or worthless."""
    if luck.random() < 0.2:
        return None
    deadline_us = luck.choice([0, 5, 20, 60])
    return GainFigures(
        weight=luck.choice([1, 2, 4]),
        tokens=luck.choice([1, 2, 5, 9]),
        cost_us=luck.choice([1, 3, 10, 40]),
        deadline_us=deadline_us,
        start_by_us=max(0, deadline_us - luck.choice([0, 3, 10])),
        slack_us=luck.choice([1, 2, 7]),
    )


class Twins:
    """A scheduler and the oracle: the same operations, and the same answers."""

    def __init__(self, policy: GainPolicy, seed: int) -> None:
        self.luck = random.Random(seed)
        self.policy = policy
        self.fast = GainScheduler(policy.rules())
        self.slow = GainOracle(policy)
        self.now_us = 0
        self.count = 0

    def play(self, steps: int) -> None:
        operations = [self.submit] * 6 + [self.dispatch] * 5 + [self.settle] * 3 + [self.pass_time] * 3
        operations += [self.cancel, self.resize, self.charge, self.requeue, self.hand_back, self.keep, self.hold_back]
        for _ in range(steps):
            self.luck.choice(operations)()
        self.dispatch()

    def drain(self) -> None:
        """Ends what is held, again and again: every ticket is admitted in the end, whatever it earns.

        Those that no pool would have taken are canceled: they could stand before others for good.
        """
        self.hold_back_no_more()
        while True:
            for ticket in self.slow.waiting():
                sizes = zip(self.slow.sizes(ticket), self.slow.admissible(ticket.tier), strict=True)
                if any(most is not None and size > most for size, most in sizes):
                    assert self.fast.cancel(ticket.id, self.now_us) is not None
                    assert self.slow.cancel(ticket.id)
            self.now_us += 10_000  # all have aged as far as they ever do
            self.dispatch()
            if not self.slow.held():
                break
            for lease in self.slow.held():
                assert self.fast.settle(lease.id, self.now_us)
                assert self.slow.settle(lease.id, self.now_us)
        assert self.slow.waiting() == []
        assert self.fast.waiting() == 0

    def hold_back_no_more(self) -> None:
        self.fast.hold_back(0)
        self.slow.hold_back(0)

    def submit(self) -> None:
        tenant = self.luck.choice("abcd")
        gain = figures(self.luck)
        ticket = {
            "tier": self.luck.randrange(len(self.policy.tiers)),
            "tokens": self.luck.randint(1, self.luck.choice([4, 30])),
            "requests": self.luck.choice([1, 1, 1, 2, 3]),
            "tenant": tenant,
            "weight": WEIGHTS[tenant] if self.luck.random() < 0.9 else 1,
        }
        submitted = self.fast.submit(str(self.count), now_us=self.now_us, **ticket)
        if gain is not None:
            self.fast.appraise(submitted, gain)
        self.slow.submit(str(self.count), now_us=self.now_us, gain=gain, **ticket)
        self.count += 1

    def dispatch(self) -> None:
        admissions = self.fast.dispatch(self.now_us)
        answers = []
        self.slow.make_urgent(self.now_us)
        passed = []
        while (chosen := self.slow.next_admission(self.now_us)) is not None:
            passed.append(self.slow.overtakes(chosen, self.now_us))
            answers.append(self.slow.admit(chosen.id, self.now_us))
        assert [as_answer(admission) for admission in admissions] == answers
        assert [{tier: why.value for tier, why in admission.passed} for admission in admissions] == passed
        assert [ticket.id for ticket in self.fast.preempt(self.now_us)] == self.slow.preempt(self.now_us)
        for tier in range(len(self.policy.tiers)):
            assert self.fast.held(tier) == self.slow.used(tier)
            state = self.fast._tiers[tier]
            assert (state.floor_tokens, state.floor_requests) == self.slow.floor_used(tier)
            waiting = [request.gain for request in self.slow.waiting(tier) if request.gain is not None]
            assert state.queue.cost_us == sum(gain.cost_us for gain in waiting)

    def pass_time(self) -> None:
        self.now_us += self.luck.choice([1, 1, 4, 15, 100])

    def any(self) -> str:
        return str(self.luck.randrange(self.count + 1))

    def settle(self) -> None:
        held = self.slow.held()
        name = self.luck.choice(held).id if held else self.any()
        assert self.fast.settle(name, self.now_us) == self.slow.settle(name, self.now_us)

    def cancel(self) -> None:
        name = self.any()
        assert (self.fast.cancel(name, self.now_us) is not None) == self.slow.cancel(name)

    def resize(self) -> None:
        name, tokens = self.any(), self.luck.randint(1, 30)
        assert self.fast.resize(name, tokens) == self.slow.resize(name, tokens)

    def charge(self) -> None:
        tenant = self.luck.choice("abcd")
        charged = self.luck.randrange(len(self.policy.tiers)), tenant, WEIGHTS[tenant], self.luck.choice([1, 7, 90])
        self.fast.charge(*charged)
        self.slow.charge(*charged)

    def requeue(self) -> None:
        chosen = [request.id for request in self.slow.held() if request.chosen] or [self.any()]
        assert self.fast.requeue(chosen[0], self.now_us) == self.slow.requeue(chosen[0], self.now_us)

    def hand_back(self) -> None:
        name = self.any()
        assert self.fast.hand_back(name, self.now_us, self.overtaken_us(name)) == self.slow.hand_back(name, self.now_us)

    def overtaken_us(self, name: str) -> int | None:
        found = next((request for request in self.slow.held() if request.id == name), None)
        return None if found is None else self.slow.overtaken_at_us(found)

    def keep(self) -> None:
        name = self.any()
        assert self.fast.keep(name) == self.slow.keep(name)

    def hold_back(self) -> None:
        if self.luck.random() < 0.3:
            until_us = self.now_us + self.luck.choice([0, 5, 30])
            self.fast.hold_back(until_us)
            self.slow.hold_back(until_us)


@settings(max_examples=examples(50))
@given(policy=policies(), fair=FAIR, seed=st.integers(0, 2**32))
def test_it_decides_as_the_literal_rules_do(policy, fair: Fraction, seed: int) -> None:
    twins = Twins(by_gain(policy, fair), seed)
    twins.play(STEPS)
    twins.drain()


@settings(max_examples=examples(50))
@given(policy=preempting_policies(), fair=FAIR, seed=st.integers(0, 2**32))
def test_it_preempts_as_the_literal_rules_do(policy, fair: Fraction, seed: int) -> None:
    Twins(by_gain(policy, fair), seed).play(STEPS)


def test_tickets_of_tenants_that_came_once_leave_nothing():
    rules = pool_rules(tokens=10, requests=None, tiers=(Shares("only"),), is_by_gain=True)
    scheduler = GainScheduler(rules)
    scheduler.submit("held", tier=0, tokens=10, now_us=0)
    scheduler.dispatch(0)
    scheduler.submit("waits on", tier=0, tokens=1, now_us=0)
    for number in range(1_000):
        ticket = scheduler.submit(str(number), tier=0, tokens=1, now_us=0, tenant=str(number))
        scheduler.appraise(ticket, GainFigures(1, number + 1, 1, 0, 0, 1))
        scheduler.dispatch(0)
        scheduler.cancel(str(number), 0)
    assert len(scheduler._tiers[0].queue._slots) == 1


def test_another_decision_at_the_same_time_makes_no_more_urgent():
    """A call of the store decides after each operation, and once more: it must not differ from one process."""
    scheduler = GainScheduler(pool_rules(tokens=1, requests=None, tiers=(Shares("only"),)))
    scheduler.submit("running", tier=0, tokens=1, now_us=0)
    scheduler.dispatch(0)
    tickets = [scheduler.submit(str(number), tier=0, tokens=1, now_us=0) for number in range(100)]
    for ticket in tickets:
        scheduler.appraise(ticket, GainFigures(1, 1, 1, 1_000, 1_000, 1))
    for now_us, urgent in ((1_000, 16), (1_000, 16), (1_001, 32), (1_010, 48)):
        scheduler.dispatch(now_us)
        assert sum(ticket.is_urgent for ticket in tickets) == urgent
