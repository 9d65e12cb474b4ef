"""What the scheduler tidies up or sorts anew goes in slices: the same decisions, and a bounded part of it a step."""

from __future__ import annotations

import heapq
import random
from collections import deque
from fractions import Fraction

import pytest

from sidecar.policy.rules import PoolRules, Shares, pool_rules
from sidecar.scheduling import Scheduler, fair_queue
from sidecar.scheduling.fair_queue import FREED_AT_ONCE, LANES_LOOKED_AT, SORTED_AT_ONCE, SPARE_ENTRIES, FairQueue
from sidecar.scheduling.gain import GainFigures, GainTicket
from sidecar.scheduling.gain_queue import BROUGHT_BACK, GainQueue
from sidecar.scheduling.gain_scheduler import GainScheduler
from sidecar.scheduling.heaps import SWEPT_AT_ONCE, Sweep, take_out
from sidecar.scheduling.ticket import Ticket
from tests.support.walks import random_walks


@random_walks(20)
def test_a_heap_stays_one_whichever_entry_is_taken_out(seed: int) -> None:
    luck = random.Random(seed)
    heap = [luck.randrange(50) for _ in range(luck.randrange(1, 60))]
    heapq.heapify(heap)
    left = sorted(heap)
    while heap:
        place = luck.randrange(len(heap))
        left.remove(heap[place])
        take_out(heap, place)
        assert all(heap[(child - 1) // 2] <= heap[child] for child in range(1, len(heap)))
        assert sorted(heap) == left


def test_a_sweep_looks_at_a_few_entries_at_a_time_and_leaves_none_that_counts_no_more() -> None:
    heap, looked_at = list(range(1_000)), 0

    def counts(entry: int) -> bool:
        nonlocal looked_at
        looked_at += 1
        return entry % 7 == 0

    sweep = Sweep()
    while looked_at < 1_000:
        before = looked_at
        sweep.some(heap, counts)
        assert 0 < looked_at - before <= SWEPT_AT_ONCE
    assert sorted(heap) == list(range(0, 1_000, 7))


def new_ticket(number: int, tenant: str, tokens: int, kind: type[Ticket] = Ticket) -> Ticket:
    return kind(str(number), 0, tenant, 1, tokens, 1, 0, number, ())


class Observed(FairQueue):
    """A queue that counts the tickets it sorts, and the entries it sweeps."""

    __slots__ = ("sorted", "swept")

    def __init__(self) -> None:
        self.sorted = self.swept = 0
        super().__init__()

    def is_small(self, ticket: Ticket) -> bool:
        self.sorted += 1
        return super().is_small(ticket)


@pytest.mark.parametrize("kind", [FairQueue, GainQueue])
@pytest.mark.parametrize("seed", range(2))
def test_a_queue_that_is_sorted_in_slices_has_the_heads_of_one_that_is_sorted_at_once(
    kind: type[FairQueue], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    luck, in_slices, at_once = random.Random(seed), kind(40, 1), kind(40, 1)
    of_ticket = GainTicket if kind is GainQueue else Ticket
    waiting: list[tuple[Ticket, Ticket]] = []

    def both(does: str, one: tuple, other: tuple) -> None:
        monkeypatch.setattr(fair_queue, "SORTED_AT_ONCE", 3)
        getattr(in_slices, does)(*one)
        monkeypatch.setattr(fair_queue, "SORTED_AT_ONCE", 10_000)
        getattr(at_once, does)(*other)

    was_unsorted = 0
    for number in range(1, 2_000):
        chance = luck.random()
        if chance < 0.5 or not waiting:
            figures = number, f"tenant-{luck.randrange(60)}", luck.randrange(1, 100), of_ticket
            waiting.append((new_ticket(*figures), new_ticket(*figures)))
            both("push", *([ticket] for ticket in waiting[-1]))
        elif chance < 0.54:
            sizes = luck.choice([(0, 0), (20, 1), (50, 1), (80, 1), (200, 1)])
            both("change_sizes", sizes, sizes)
        else:
            head = next(pair for pair in waiting if pair[1] is at_once.head())
            pair = head if chance < 0.75 else luck.choice(waiting)
            waiting.remove(pair)
            both("admit" if pair is head else "remove", *([ticket] for ticket in pair))
        head, other = in_slices.head(), at_once.head()
        assert (head and head.id) == (other and other.id)
        was_unsorted += in_slices.is_unsorted
        small, other = in_slices.small_head(), at_once.small_head()
        assert (small and small.id) == (None if in_slices.is_unsorted else other and other.id)
    assert was_unsorted > 100


@pytest.mark.parametrize("kind", [FairQueue, GainQueue])
@pytest.mark.parametrize("seed", range(2))
def test_a_queue_of_many_tenants_finds_the_one_that_a_search_finds(
    kind: type[FairQueue], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fair_queue, "SEARCHED", 8)
    luck, queue, of_ticket = random.Random(seed), kind(40, 1), GainTicket if kind is GainQueue else Ticket
    waiting: list[Ticket] = []
    found = afresh = 0
    for number in range(3_000):
        if luck.random() < (0.55 if number % 1_000 < 800 else 0.0) or not waiting:
            weight = luck.choice([1, 1, 2, 5])
            ticket = of_ticket(str(number), 0, f"tenant-{luck.randrange(60)}", weight, 9, 1, 0, number, ())
            waiting.append(ticket)
            queue.push(ticket)
        else:
            head = queue.head()
            ticket = luck.choice([head, luck.choice(waiting)])
            assert ticket is not None
            waiting.remove(ticket)
            (queue.admit if ticket is head else queue.remove)(ticket)
            afresh += not waiting
        tenant, weight, places = f"tenant-{luck.randrange(90)}", luck.choice([1, 9]), luck.randrange(1, 2 + queue.count)
        by_use, queue._by_use = queue._by_use, None
        expected = queue.displaced(tenant, weight, places)
        queue._by_use = by_use
        assert queue.displaced(tenant, weight, places) is expected
        found += by_use is not None and expected is not None
    assert found > 500
    assert afresh


def test_tenants_that_are_not_ahead_any_more_come_back_a_part_at_a_time_and_none_is_forgotten() -> None:
    queue, tenants = GainQueue(1, 1), 5 * BROUGHT_BACK
    holder = GainTicket("holder", 0, "holder", 1, 4, 1, 0, 0, ())
    queue.push(holder)
    tickets = [GainTicket(f"{n}", 0, f"tenant-{n % tenants}", 1, 4, 1, 0, n + 1, ()) for n in range(4 * tenants)]
    for ticket in tickets:
        ticket.gain = GainFigures(1, 1 + ticket.sequence, 1, 0, 10**9, 1)
        queue.push(ticket)
        queue.make_urgent(ticket, 0)
    while (best := queue.best()) is not None:
        queue.admit(best)
    assert sum(lane.is_aside for lane in queue._lanes.values()) == tenants
    queue.admit(holder)
    for part in range(1, 6):
        assert queue.best() is not None
        assert sum(lane.is_aside for lane in queue._lanes.values()) == (5 - part) * BROUGHT_BACK
    best = queue.best()
    assert best is max((ticket for ticket in tickets if ticket.queued), key=lambda ticket: ticket.sequence)


def test_other_reserves_sort_a_bounded_number_of_tickets_with_each_step() -> None:
    queue = Observed()
    for number in range(20 * SORTED_AT_ONCE):
        queue.push(new_ticket(number, f"tenant-{number}", 1 + number % 100))
    queue.sorted = 0
    queue.change_sizes(50, 1)
    steps = 1
    while queue.is_unsorted:
        before = queue.sorted
        queue.sort_some()
        steps += 1
        assert queue.sorted - before <= SORTED_AT_ONCE
    assert queue.sorted == 20 * SORTED_AT_ONCE
    assert steps == 20


@pytest.mark.parametrize("leaves", ["the newest", "any"])
def test_entries_of_tickets_that_gave_up_stay_in_proportion(leaves: str) -> None:
    queue, luck = FairQueue(1, 1), random.Random(1)
    tickets = [new_ticket(number, f"tenant-{number}", 1) for number in range(1_000)]
    for ticket in tickets:
        queue.push(ticket)
    for number in range(1_000, 30_000):
        place = -1 if leaves == "the newest" else luck.randrange(len(tickets))
        tickets[place], tickets[-1] = tickets[-1], tickets[place]
        queue.remove(tickets.pop())
        tickets.append(new_ticket(number, f"tenant-{luck.randrange(1_000)}-{number}", 1))
        queue.push(tickets[-1])
        assert len(queue) < 8 * 1_000


class InTurn(deque):
    """The lanes in turn, which counts how many of them are looked at."""

    looked_at = 0

    def popleft(self):
        InTurn.looked_at += 1
        return super().popleft()


def test_a_new_tenant_looks_at_a_few_others_and_those_at_rest_are_forgotten() -> None:
    queue = FairQueue(1, 1)
    queue._lanes_in_turn = InTurn()
    for number in range(2):
        queue.push(new_ticket(number, "stays", 1))
    for number in range(2, 5_000):
        ticket = new_ticket(number, f"tenant-{number}", 1)
        before = InTurn.looked_at
        queue.push(ticket)
        assert InTurn.looked_at - before <= LANES_LOOKED_AT
        queue.charge(ticket.tenant, 1, 1)
        queue.remove(ticket)
        queue._virtual += 1  # as by an admission: the tenant's finish is passed
        assert len(queue._lanes) <= 2 * SPARE_ENTRIES
        assert len(queue._lanes_in_turn) <= 2 * SPARE_ENTRIES


def test_a_tenant_that_comes_and_goes_again_and_again_is_in_turn_once() -> None:
    queue = FairQueue(1, 1)
    for number in range(100):
        queue.push(new_ticket(number, f"stays-{number}", 1))
    for number in range(100, 5_000):
        ticket = new_ticket(number, "comes and goes", 1)
        queue.push(ticket)
        queue.remove(ticket)
        assert len(queue._lanes_in_turn) <= 100 + 2 * SPARE_ENTRIES


def test_nothing_is_left_to_forget_at_once_where_all_gave_up() -> None:
    queue = FairQueue(1, 1)
    tickets = [new_ticket(number, f"tenant-{number}", 1) for number in range(1_000)]
    for ticket in tickets:
        queue.push(ticket)
    for ticket in tickets[:-1]:
        queue.remove(ticket)
    assert len(queue._lanes) == 1
    assert len(queue._lanes_in_turn) <= SPARE_ENTRIES


@pytest.mark.parametrize("kind", [FairQueue, GainQueue])
def test_what_a_long_queue_leaves_behind_is_freed_by_the_tickets_that_come(kind: type[FairQueue]) -> None:
    queue, tenants, of_ticket = kind(1, 1), 30 * FREED_AT_ONCE, GainTicket if kind is GainQueue else Ticket
    tickets = [new_ticket(number, f"tenant-{number}", 1, of_ticket) for number in range(tenants)]
    for ticket in tickets:
        queue.push(ticket)
        queue.charge(ticket.tenant, 1, 100)  # so that none of them is forgotten before
    for ticket in tickets:
        queue.remove(ticket)
    left = [sum(map(len, queue._left_over))]
    assert left[0] >= tenants
    assert len(queue) == 0
    while queue._left_over:
        queue.push(new_ticket(tenants + len(left), "newcomer", 1, of_ticket))
        left.append(sum(map(len, queue._left_over)))
        assert left[-2] - left[-1] <= FREED_AT_ONCE
    assert len(left) >= 30
    assert queue.head().id == str(tenants + 1)


@pytest.mark.parametrize("kind", [FairQueue, GainQueue])
def test_entries_stay_in_proportion_to_the_tenants_that_wait_not_to_those_that_are_ahead(kind: type[FairQueue]) -> None:
    queue, tenants, of_ticket = kind(1, 1), 2_000, GainTicket if kind is GainQueue else Ticket
    tickets = [new_ticket(number, f"tenant-{number}", 1, of_ticket) for number in range(tenants)]
    for ticket in tickets:
        queue.push(ticket)
        queue.charge(ticket.tenant, 1, 100)
    for left in range(tenants - 1, 0, -1):
        queue.remove(tickets[left])
        assert len(queue._lanes) == tenants
        assert len(queue._small) + len(queue._large) <= 2 * left + 2 * SPARE_ENTRIES


def rules(reserve: Fraction, *, is_by_gain: bool) -> PoolRules:
    tiers = tuple(Shares(name, reserve=reserve) for name in ("high", "low"))
    return pool_rules(tokens=1_000, requests=None, tiers=tiers, promote_after_us=1_000_000, is_by_gain=is_by_gain)


@pytest.mark.parametrize("kind", [Scheduler, GainScheduler])
def test_dispatches_finish_the_sorting_that_other_reserves_began(kind: type[Scheduler]) -> None:
    is_by_gain = kind is GainScheduler
    scheduler = kind(rules(Fraction(1, 10), is_by_gain=is_by_gain))
    scheduler.submit("fills", tier=0, tokens=1_000, now_us=0)
    scheduler.dispatch(0)
    for number in range(5 * SORTED_AT_ONCE):
        scheduler.submit(str(number), tier=1, tokens=60, now_us=1, tenant=str(number))
    scheduler.change_rules(rules(Fraction(1, 20), is_by_gain=is_by_gain))
    now_us, pauses = 1, 0
    while scheduler._tiers[1].queue.is_unsorted:
        again_us = scheduler.next_change_us(now_us)
        assert again_us is not None
        assert again_us - now_us <= 1_000
        now_us = again_us
        assert scheduler.dispatch(now_us) == []
        pauses += 1
    assert pauses >= 3
    assert not scheduler._unsorted


def test_deadlines_of_tickets_that_gave_up_stay_in_proportion() -> None:
    scheduler = GainScheduler(rules(Fraction(1, 10), is_by_gain=True))
    scheduler.submit("fills", tier=0, tokens=1_000, now_us=0)
    scheduler.dispatch(0)
    names: list[str] = []
    for number in range(6_000):
        ticket = scheduler.submit(str(number), tier=1, tokens=1, now_us=number, tenant=str(number % 7))
        scheduler.appraise(ticket, GainFigures(1, 10, 10, 60_000_000, 0, 9))
        names.append(str(number))
        if len(names) > 500:
            assert scheduler.cancel(names.pop(-2), number)
        scheduler.dispatch(number)
        assert len(scheduler._deadlines) < 6 * 501
