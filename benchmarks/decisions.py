"""The product's own decisions, without a loop and a clock: what a pool's process asks of its ledger, and is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sidecar.pools.calls import Cap, EngineView, LedgerRules
from sidecar.pools.ledger import Ledger
from sidecar.pools.member import Member
from sidecar.pools.member_events import Entered, TakeBack
from sidecar.scheduling.amounts import UNBOUNDED
from sidecar.scheduling.tickets import ScheduledLease, Ticket

ENGINE = "pool#1"
"""The engine of a pool of one."""


class Decided(NamedTuple):
    """Those that entered, and those whose room is taken back."""

    admitted: list[ScheduledLease]
    taken_back: list[ScheduledLease]


class Decisions:
    """A pool in one process. Its owner says what happens, and asks what follows from it."""

    def __init__(self, rules: LedgerRules, engines: Sequence[EngineView]) -> None:
        self._ledger = Ledger()
        self._member = Member("", rules, heartbeat_us=UNBOUNDED, lazy_us=UNBOUNDED, near=self._ledger)
        self._member.pool.knew = 1
        self._member.view(engines, 0)
        self._waiting: dict[str, Ticket] = {}

    def submit(self, ticket: Ticket) -> None:
        """A request comes."""
        self._waiting[ticket.id] = ticket
        self._member.submit(ticket, ticket.arrived_us)

    def cancel(self, ticket_id: str, now_us: int) -> None:
        """Its client gives up; it still waits."""
        self._member.cancel(self._waiting.pop(ticket_id), now_us)

    def first_byte(self, ticket_id: str, now_us: int) -> None:
        """Its engine has prefilled it."""
        self._member.first_byte(self._member.leases[ticket_id], now_us)

    def settle(self, ticket_id: str, now_us: int) -> None:
        """It has ended."""
        self._member.end(self._member.leases[ticket_id], now_us)

    def requeue(self, ticket_id: str, now_us: int) -> None:
        """Its engine has released it: it waits again."""
        lease = self._member.leases[ticket_id]
        self._member.hand_back(lease, (), now_us)
        self._waiting[ticket_id] = lease.ticket

    def cap(self, requests: int, for_us: int, now_us: int) -> None:
        """The one engine may run so many at most for so long."""
        self._member.tell(Cap(ENGINE, requests, for_us), now_us)

    def decide(self, now_us: int) -> Decided:
        """All that follows now."""
        while (call := self._member.poll(now_us)) is not None:
            self._member.answered(self._ledger.execute(call, now_us)[0], now_us)
        decided = Decided([], [])
        for event in self._member.take_events():
            if isinstance(event, Entered):
                del self._waiting[event.lease.ticket.id]
                decided.admitted.append(event.lease)
            elif isinstance(event, TakeBack):
                decided.taken_back.append(event.lease)
        return decided

    def next_change_us(self) -> int | None:
        """When time alone changes something."""
        due_us = self._member.due_us()
        return None if due_us is None or due_us >= UNBOUNDED else due_us
