"""Preemption in a pool of several engines: room is taken back on one engine.

The rules are those of `preemption`, with two differences. Leases are taken from one engine only: the one that the
served ticket would claim after all tickets before it. And the tickets fit when walks over them alone, one after the
other, would admit the served ticket. Taking a lease from the engine only lowers its score, so the ticket goes there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sidecar.policy.rules import PoolRules
from sidecar.scheduling.fleet_tier import FleetTier
from sidecar.scheduling.order import Candidate, LevelOrder
from sidecar.scheduling.placement import EngineLedger, Placement
from sidecar.scheduling.preemption import Preemption, Room
from sidecar.scheduling.ticket import Ticket


class FleetRoom(Room, Protocol):
    """The room of the pool and of its engines."""

    placement: Placement

    def book_lease(self, lease: Ticket, sign: int) -> None:
        """Books a ticket with its tier and its engine, or takes it out."""

    def place(self, ticket: Ticket) -> EngineLedger | None:
        """The best engine of a ticket, busy or not."""

    def taken_by(self, ticket: Ticket, best: EngineLedger, now_us: int) -> EngineLedger | None:
        """The engine that a ticket enters now, None where it claims its best."""


class FleetPreemption(Preemption):
    """See `Preemption`."""

    _room: FleetRoom

    def __init__(self, tiers: Sequence[FleetTier], order: LevelOrder, room: FleetRoom) -> None:
        super().__init__(tiers, order, room)
        self._fleet_tiers = tiers
        self._target: EngineLedger | None = None
        self._now_us = 0

    def choose(self, order: Sequence[Candidate], rules: PoolRules, now_us: int) -> list[Ticket]:
        """See `Preemption.choose`."""
        self._now_us = now_us
        return super().choose(order, rules, now_us)

    def _all_fit(self, order: Sequence[Candidate]) -> bool:
        served = order[-1]
        if not self._room.fits(served) or not self._has_room_somewhere(served.ticket):
            return False  # what is admitted before it only takes room
        rest, admitted = list(order), []
        is_in = False
        while not is_in and (placed := self._first_of(rest)) is not None:
            candidate, ledger = placed
            ticket, placing = candidate.ticket, candidate.ticket.placing
            placing.engine, placing.prefill = ledger, self._fleet_tiers[ticket.tier].prefill(ticket)
            placing.unprefilled = placing.unprefilled_on(ledger.id)
            self._room.book_lease(ticket, 1)
            admitted.append(ticket)
            rest.remove(candidate)
            is_in = candidate is order[-1]
        for ticket in admitted:
            self._room.book_lease(ticket, -1)
            ticket.placing.engine, ticket.placing.prefill, ticket.placing.unprefilled = None, 0, 0
        return is_in

    def _has_room_somewhere(self, ticket: Ticket) -> bool:
        taking = self._room.placement.taking
        return any(it.has_room(ticket.tokens, ticket.requests, ticket.placing) for it in taking)

    def _first_of(self, rest: Sequence[Candidate]) -> tuple[Candidate, EngineLedger] | None:
        """The ticket that a walk over these alone admits, and its engine."""
        placement = self._room.placement
        placement.begin_walk()
        try:
            for candidate in rest:
                ticket = candidate.ticket
                if not self._room.fits(candidate):
                    if self._room.holds_its_place(candidate):
                        return None
                    continue
                ledger = self._room.place(ticket)
                if ledger is None:
                    continue
                if (taking := self._room.taken_by(ticket, ledger, self._now_us)) is not None:
                    return candidate, taking
                if placement.claim(ledger, ticket.placing.prompt):
                    return None
            return None
        finally:
            placement.end_walk()

    def _for_the_burst(
        self, order: Sequence[Candidate], taken: Sequence[Ticket], rules: PoolRules, now_us: int
    ) -> list[Ticket]:
        if not taken:
            self._target = self._claimed_by_last(order)
        return super()._for_the_burst(order, taken, rules, now_us)

    def _enough(self, order: Sequence[Candidate], rules: PoolRules, now_us: int) -> list[Ticket]:
        self._target = self._claimed_by_last(order)
        return super()._enough(order, rules, now_us)

    def _claimed_by_last(self, order: Sequence[Candidate]) -> EngineLedger | None:
        """The engine that the served ticket would claim if all before it claimed theirs."""
        placement = self._room.placement
        placement.begin_walk()
        for candidate in order[:-1]:
            ledger = self._room.place(candidate.ticket)
            if ledger is not None and self._room.fits(candidate):
                placement.claim(ledger, candidate.ticket.placing.prompt)
        target = self._room.place(order[-1].ticket)
        placement.end_walk()
        return target

    def _eligible(self, served: Candidate, rules: PoolRules, now_us: int) -> list[Ticket]:
        found = super()._eligible(served, rules, now_us)
        return [lease for lease in found if lease.placing.engine is self._target is not None]

    def _book(self, leases: Sequence[Ticket], sign: int) -> None:
        for lease in leases:
            self._room.book_lease(lease, sign)
