"""The short list of steps answers as the whole list of admissions would, however often it is shortened."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.scheduling.overtaking import (
    GONE_THROUGH,
    LOOKED_AT,
    SPARE_TICKETS,
    STEPS_AT_ONCE,
    Overtaking,
    TicketOvertaking,
)
from sidecar.scheduling.ticket import Ticket
from tests.support.walks import random_walks


def literal(admissions: list[tuple[int, int]], arrival: int) -> int | None:
    return next((at_us for other, at_us in admissions if other > arrival), None)


@given(order=st.permutations(range(1, 25)), count=st.integers(0, 24), shorten_every=st.integers(1, 6))
def test_every_waiting_ticket_learns_when_it_was_first_overtaken(order, count, shorten_every):
    overtaking, admissions, waiting = Overtaking(), [], sorted(order)
    for now_us, arrival in enumerate(order[:count]):
        overtaking.admitted(arrival, now_us)
        admissions.append((arrival, now_us))
        waiting.remove(arrival)
        if now_us % shorten_every == 0:
            overtaking.forget_all_but(waiting)
            assert len(overtaking) <= len(waiting) + 1
        assert [literal(admissions, ticket) for ticket in waiting] == [overtaking.first_after(t) for t in waiting]


def test_newcomers_that_go_straight_in_stay_one_step():
    overtaking = Overtaking()
    for arrival in range(10, 1_000):
        overtaking.admitted(arrival, now_us=arrival)
    assert len(overtaking) == 1
    assert overtaking.first_after(3) == 10
    assert overtaking.first_after(999) is None


def test_with_no_step_there_is_nothing_to_forget():
    overtaking = Overtaking()
    overtaking.forget_all_but([1, 2, 3])
    assert len(overtaking) == 0
    assert overtaking.first_after(1) is None


def ticket_of(arrival: int) -> Ticket:
    return Ticket(str(arrival), 0, "", 1, 1, 1, 0, arrival, ())


class Waiting(dict[str, Ticket]):
    """The tickets that wait, which counts how many of them are looked at."""

    looked_at = 0

    def get(self, key, default=None):
        self.looked_at += 1
        return super().get(key, default)


class Crowd:
    """Tickets that come, are admitted, give up and are handed back, with every admission beside them."""

    def __init__(self) -> None:
        self.overtaking, self.waiting, self.admissions = TicketOvertaking(), Waiting(), []
        self.leases: list[Ticket] = []
        self.arrivals = self.latest = self.now_us = 0

    def come(self) -> None:
        self.arrivals += 1
        ticket = self.waiting[str(self.arrivals)] = ticket_of(self.arrivals)
        self.overtaking.came(ticket)

    def admit(self, ticket: Ticket) -> None:
        self.now_us += 1
        ticket.overtaken_us = self.known(ticket)
        del self.waiting[ticket.id]
        self.leases.append(ticket)
        self.latest = max(self.latest, ticket.sequence)
        self.admissions.append((ticket.sequence, self.now_us))
        if self.waiting:
            self.overtaking.admitted(ticket.sequence, self.now_us)
        self.overtaking.look(ticket, self.waiting)

    def give_up(self, ticket: Ticket) -> None:
        del self.waiting[ticket.id]
        self.overtaking.look(ticket, self.waiting)

    def hand_back(self, ticket: Ticket) -> None:
        self.leases.remove(ticket)
        ticket.overtaken_after, ticket.returns = max(ticket.sequence, self.latest), ticket.returns + 1
        self.waiting[ticket.id] = ticket
        if ticket.overtaken_us is None:
            self.overtaking.hand_back(ticket)
        else:
            self.overtaking.part(ticket.overtaken_after)

    def known(self, ticket: Ticket) -> int | None:
        noted_us = ticket.overtaken_us
        return self.overtaking.first_after(ticket.overtaken_after or ticket.sequence) if noted_us is None else noted_us

    def literally(self, ticket: Ticket, handed_back: dict[str, int | None]) -> int | None:
        before_us = handed_back.get(ticket.id)
        return literal(self.admissions, ticket.overtaken_after or ticket.sequence) if before_us is None else before_us


def test_leases_that_are_handed_back_and_admitted_again_are_no_step_for_one_that_came_back_with_them() -> None:
    """The record was empty when all came back, since none had waited: the third joined the step of the second."""
    crowd = Crowd()
    for _ in range(3):
        crowd.come()
    first, second, third = leases = list(crowd.waiting.values())
    for ticket in leases:
        crowd.admit(ticket)
    for ticket in leases:
        crowd.hand_back(ticket)
    crowd.come()
    crowd.admit(second)
    crowd.admit(third)
    assert crowd.known(first) is None
    crowd.admit(crowd.waiting["4"])
    assert crowd.known(first) == crowd.now_us == crowd.literally(first, {})


@random_walks(6)
def test_tickets_that_come_leave_and_return_learn_the_same_in_slices(seed: int) -> None:
    luck, crowd, handed_back = random.Random(seed), Crowd(), {}
    stays = luck.choice([0.2, 0.5, 0.8])
    for _ in range(3_000):
        first, chance = next(iter(crowd.waiting.values()), None), luck.random()
        if first is None or chance < 0.5 + stays / 10:
            crowd.come()
        elif chance < 0.6:
            crowd.admit(first if luck.random() < stays else luck.choice(list(crowd.waiting.values())))
        elif chance < 0.8 or not crowd.leases:
            crowd.give_up(luck.choice(list(crowd.waiting.values())))
        else:
            lease = luck.choice(crowd.leases)
            handed_back[lease.id] = lease.overtaken_us
            crowd.hand_back(lease)
        for ticket in luck.sample(list(crowd.waiting.values()), min(3, len(crowd.waiting))):
            assert crowd.known(ticket) == crowd.literally(ticket, handed_back)


@pytest.mark.parametrize("leaves", ["the newest is admitted", "any is admitted", "any but the first gives up"])
def test_no_departure_looks_at_more_than_a_few_tickets_and_little_is_remembered(leaves: str) -> None:
    luck, crowd, most = random.Random(1), Crowd(), 0
    for _ in range(5_000):
        crowd.come()
    standing = list(range(2, 5_001))
    for _ in range(40_000):
        before = crowd.waiting.looked_at
        crowd.come()
        standing.append(crowd.arrivals)
        if leaves == "the newest is admitted":
            crowd.admit(crowd.waiting[str(standing.pop())])
        else:
            place = luck.randrange(len(standing))
            standing[place], standing[-1] = standing[-1], standing[place]
            ticket = crowd.waiting[str(standing.pop())]
            (crowd.admit if leaves == "any is admitted" else crowd.give_up)(ticket)
        most = max(most, crowd.waiting.looked_at - before)
        assert len(crowd.overtaking) <= 3 * len(crowd.waiting) + SPARE_TICKETS + 3 * STEPS_AT_ONCE
    assert 0 < most <= 2 * LOOKED_AT + GONE_THROUGH
