"""A lease that waits again, because it was preempted or no engine took it: its place, and what was served before it."""

from __future__ import annotations

from fractions import Fraction

import invariants
import pytest
from oracle import Policy
from recorder import Recorder

from sidecar.policy.rules import Shares
from sidecar.scheduling import Admission, Scheduler

HIGH, LOW = 0, 1


def pool(capacity: int, low: Shares, *, preempt_after_us: int | None = None) -> Policy:
    return Policy((capacity, None), (Shares("high", preempt_after_us=preempt_after_us), low), max_preemptions=2)


def enter(scheduler: Scheduler, name: str, tier: int, tokens: int, tenant: str = "") -> list[str]:
    scheduler.submit(name, tier=tier, tokens=tokens, tenant=tenant, now_us=0)
    return names(scheduler.dispatch(0))


def names(admissions: list[Admission]) -> list[str]:
    return [admission.ticket.id for admission in admissions]


@pytest.mark.parametrize("preemptible", [False, True])
@pytest.mark.parametrize("resized", [5, 12, 30])
def test_no_lease_is_served_ahead_of_itself_though_it_was_resized(preemptible: bool, resized: int):
    """It counted as served with what it held as it was admitted."""
    scheduler = Scheduler(pool(100, Shares("low", preemptible=preemptible)).rules())
    assert enter(scheduler, "mine", LOW, 12) == ["mine"]
    assert enter(scheduler, "other", LOW, 20) == ["other"]
    for times in range(1, 3):
        scheduler.resize("mine", resized * times)
        assert scheduler.hand_back("mine", 1, None)
        (again,) = scheduler.dispatch(1)
        assert list(again.wait.served_ahead) == [0, 20]


@pytest.mark.parametrize("is_preempted", [False, True])
def test_a_ticket_that_returns_stands_before_a_later_one_of_its_tenant_that_small_ones_have_passed(is_preempted: bool):
    """While the tier owes, small tickets go before `giant`: the virtual time is then beyond its start."""
    low = Shares("low", reserve=Fraction(1, 10), preemptible=True)
    scheduler = Scheduler(pool(100, low, preempt_after_us=0).rules())
    enter(scheduler, "turn", LOW, 50, tenant="c")
    enter(scheduler, "top", HIGH, 45)
    assert enter(scheduler, "elder", LOW, 5, tenant="a") == ["elder"]
    enter(scheduler, "giant", LOW, 60, tenant="a")
    for name in ("small-1", "small-2", "small-3"):
        enter(scheduler, name, LOW, 9, tenant="b")
    scheduler.settle("turn", 10)  # the tier owes 40 us
    assert names(scheduler.dispatch(10)) == ["small-1", "small-2", "small-3"]
    scheduler.submit("high", tier=HIGH, tokens=26, now_us=10)
    assert scheduler.dispatch(10) == []
    if is_preempted:
        for name in ("small-1", "small-2", "small-3"):
            scheduler.keep(name)
        assert [victim.id for victim in scheduler.preempt(10)] == ["elder"]
        assert scheduler.requeue("elder", 10)
    else:
        assert scheduler.hand_back("elder", 10, None)
    assert names(scheduler.dispatch(10)) == ["high"]
    for name in ("top", "high", "small-1", "small-2", "small-3"):
        scheduler.settle(name, 60)
    assert names(scheduler.dispatch(60)) == ["elder", "giant"]


def test_while_the_tier_owes_a_small_ticket_passes_a_giant_of_its_own_tenant_that_returned():
    """The one case in which a tenant overtakes itself: the tier's small tickets need not wait until it owes no more."""
    policy = pool(40, Shares("low", reserve=Fraction(1, 10), preemptible=True), preempt_after_us=0)
    recorder = Recorder(Scheduler(policy.rules()), policy)
    recorder.submit("top", tier=HIGH, tokens=10, tenant="b")
    recorder.dispatch()
    for number, tokens in enumerate([3, 5, 3, 9, 20, 3]):
        recorder.submit(str(number), tier=LOW, tokens=tokens, tenant="a")
    assert recorder.dispatch() == ["0", "1", "2", "3"]
    recorder.pass_time(1)
    for number in range(3):
        recorder.settle(str(number))
    assert recorder.dispatch() == ["4"]
    recorder.submit("high", tier=HIGH, tokens=12, tenant="b")
    assert recorder.dispatch() == []
    assert recorder.preempt() == ["4"]
    recorder.requeue("4")
    assert recorder.record.owes(LOW, recorder.now_us)
    assert recorder.dispatch() == ["high", "5"]
    invariants.no_tenant_overtakes_itself_inside_a_tier(recorder)


def test_once_the_tier_owes_nothing_the_giant_goes_first():
    policy = pool(40, Shares("low", reserve=Fraction(1, 10), preemptible=True))
    recorder = Recorder(Scheduler(policy.rules()), policy)
    recorder.submit("giant", tier=LOW, tokens=40, tenant="a")
    assert recorder.dispatch() == ["giant"]
    recorder.submit("small", tier=LOW, tokens=4, tenant="a")
    recorder.pass_time(1)
    recorder.hand_back("giant")
    recorder.pass_time(9)
    assert recorder.record.owes(LOW, recorder.now_us) is False
    assert recorder.dispatch() == ["giant"]
    invariants.no_tenant_overtakes_itself_inside_a_tier(recorder)
