"""Rule 9: the best by gain of a tier, in its queue and in the heap of those that are not shown."""

from __future__ import annotations

import pytest

from sidecar.scheduling.queue import BestByGain, FairQueue
from sidecar.scheduling.tickets import MOST_OF_GAIN, Ticket, TicketGain

SECOND = 1_000_000


def ticket(name: str, tenant: str, number: int, tokens: int = 10) -> Ticket:
    gain = TicketGain(weight=1, tokens=10, cost_us=SECOND, start_by_us=0, slack_us=SECOND)
    return Ticket(name, 0, tenant, tokens, number=number, gain=gain)


def test_what_earns_less_with_time_is_found_at_once() -> None:
    queue = FairQueue(by_gain=True)
    best = BestByGain(queue)
    for number in range(3):
        waits = ticket(f"{number}", "a", number)
        queue.add(waits)
        best.add(waits)
    for seconds, found in ((0, "0"), (3, "0"), (9, "0"), (10, None)):
        chosen = best.find(seconds * SECOND, lambda _: False)
        assert (chosen.id if chosen else None) == found


def test_those_that_wait_are_found_when_entries_of_those_that_left_are_dropped() -> None:
    queue = FairQueue(by_gain=True)
    best = BestByGain(queue)
    waiting = [ticket(f"{number}", "a", number) for number in range(300)]
    for number, waits in enumerate(waiting):
        queue.add(waits)
        best.add(waits)
        if number % 10:
            queue.remove(waits)
    found = []
    while (chosen := best.find(0, lambda _: False)) is not None:
        found.append(int(chosen.id))
        queue.remove(chosen)
    assert found == list(range(0, 300, 10))


def test_of_a_tenant_that_is_ahead_none_is_found_until_it_is_not() -> None:
    queue, tenants = FairQueue(by_gain=True), ["a"]
    best = BestByGain(queue)
    only = ticket("only", "a", 0)
    queue.add(only)
    best.add(only)
    assert best.find(0, lambda it: it.tenant in tenants) is None
    tenants.clear()
    assert best.find(0, lambda it: it.tenant in tenants) is only


def test_a_tenant_that_is_charged_for_growth_may_be_ahead_in_the_same_moment() -> None:
    queue = FairQueue(by_gain=True)
    only = ticket("only", "a", 0)
    queue.add(only)
    assert queue.best(0) is only
    queue.charge("a", 1_000, 1)
    assert queue.best(0) is None


@pytest.mark.parametrize("start_by_us", [-1, 7, 2 * MOST_OF_GAIN])
def test_figures_of_gain_are_bounded(start_by_us: int) -> None:
    found = TicketGain(3, 0, 2 * MOST_OF_GAIN, start_by_us, 0).bounded()
    assert found == TicketGain(3, 1, MOST_OF_GAIN, min(max(0, start_by_us), MOST_OF_GAIN), 1)
