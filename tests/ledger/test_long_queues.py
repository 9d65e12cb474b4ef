"""25,000 waiting are as cheap as 250: the ledger knows 32 of each tier, and a decision looks at no more than that."""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from sidecar.pools.calls import BIDS_SHOWN
from sidecar.scheduling.queue import FairQueue
from sidecar.scheduling.tickets import Ticket, TicketGain
from tests.ledger.one_replica import OneReplica
from tests.support.each import each

TIERS = [{"name": "high", "reserve": 0.3}, {"name": "low", "reserve": 0.1}]
SHOWN = (BIDS_SHOWN + 1) * len(TIERS)
"""Those next in fair order, and by gain the best."""


class Crowd:
    """So many wait in a full pool, each of a tenant of its own or of few, each tenant with so many users."""

    def __init__(self, number: int, order: str, tenants: int, users: int = 0) -> None:
        self.one = OneReplica({"tiers": TIERS, "order": order, "capacity": {"tokens": 100}})
        self.now = 1_000_000
        self.largest_call = 0
        for each_one in range(number):
            gain = TicketGain(1, 10, 1_000 + each_one, 10**12, 10) if order == "gain" else None
            ticket = Ticket(
                f"{each_one}", each_one % 2, f"{each_one % tenants}", 10,
                arrived_us=self.now, number=each_one, gain=gain, user=f"{each_one % users}" if users else None,
            )  # fmt: skip
            self.one.member.submit(ticket, self.now)
        self.pump()

    def pump(self) -> int:
        """Calls until there is nothing more to say. Returns how many entered."""
        entered, execute = 0, self.one.ledger.execute

        def watched(call: Any, now: int) -> Any:
            self.largest_call = max(self.largest_call, len(msgspec.msgpack.encode(call)))
            return execute(call, now)

        self.one.ledger.execute = watched  # type: ignore[method-assign]
        while (found := self.one.pump(self.now)[0]) or self.one.member.due_us() == self.now:
            entered += len(found)
        del self.one.ledger.execute
        return entered

    def steps(self, number: int) -> int:
        """How many functions are called while so many end, one after the other, and others enter."""
        called = 0

        def count(_frame: Any, event: str, _what: Any) -> None:
            nonlocal called
            called += event == "call"

        entered = 0
        for _ in range(number):
            self.now += 1_000
            lease = next(iter(self.one.member.leases.values()))
            sys.setprofile(count)
            try:
                self.one.member.end(lease, self.now)
                entered += self.pump()
            finally:
                sys.setprofile(None)
        assert entered == number
        return called


@each(
    ("order", "tenants", "users"),
    [("level", 20_000, 0), ("level", 3, 0), ("gain", 20_000, 0), ("gain", 3, 0), ("level", 1, 20_000), ("gain", 1, 3)],
)
def test_one_enters_for_one_that_ends_at_the_same_cost_however_many_wait(order: str, tenants: int, users: int) -> None:
    few, many = Crowd(250, order, tenants, users), Crowd(25_000, order, tenants, users)
    assert len(many.one.member.leases) == 10
    assert many.steps(20) < 2 * few.steps(20)
    for crowd in (few, many):
        assert crowd.one.ledger.state is not None
        assert sum(len(member.bids) for member in crowd.one.ledger.state.members.values()) <= SHOWN
        assert crowd.largest_call < 40_000


def test_what_gave_up_is_forgotten_and_the_others_keep_their_order() -> None:
    queue, one = FairQueue(), Ticket("stays", 0, "a", 5, number=0)
    queue.add(one)
    for number in range(1, 1_000):
        queue.add(gone := Ticket(f"{number}", 0, f"{number}", 1, number=number))
        queue.remove(gone)
        assert len(queue._order) < 100
        assert queue.next() is one


def test_who_is_put_behind_what_costs_nothing_stays_where_it_is() -> None:
    queue = FairQueue()
    for number, tenant in enumerate("ab"):
        queue.add(Ticket(tenant, 0, tenant, 5, number=number))
    queue.put_behind("a")
    assert queue.next().id == "a"  # type: ignore[union-attr]


def test_one_that_is_shown_before_its_users_first_has_a_place_and_the_first_comes_after_it() -> None:
    queue, tickets = FairQueue(), [Ticket(f"{n}", 0, "a", 5, number=n, user="u") for n in range(3)]
    for ticket in tickets:
        queue.add(ticket)
    queue.show(tickets[1])
    assert [ticket.place for ticket in tickets[:2]] == [10, 5]
    queue.pass_time("a", 5)
    queue.give_back(tickets[1])
    queue.take_back(tickets[1])
    assert [ticket for ticket in tickets if ticket in queue] == tickets
