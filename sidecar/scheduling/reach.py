"""Which engines each replica's tickets can enter, where replicas see different ones."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sidecar.scheduling.engines import ScheduledEngine
from sidecar.scheduling.queue import FairQueue
from sidecar.scheduling.tickets import Ticket


class Reach:
    """Of a pool's engines, until it has others. `is_divided`: replicas see different ones."""

    def __init__(self, engines: Collection[ScheduledEngine]) -> None:
        self.is_divided = any(e.is_ready and e.unreachable_for for e in engines)
        self._engines = engines
        self._found: dict[str, frozenset[str]] = {}

    def of(self, owner: str) -> frozenset[str]:
        """The ready engines that a replica's tickets can enter."""
        if (found := self._found.get(owner)) is None:
            found = frozenset(e.id for e in self._engines if e.is_ready and owner not in e.unreachable_for)
            self._found[owner] = found
        return found

    def reaches_one(self, owner: str, engines: set[str]) -> bool:
        """True if a replica's tickets can enter one of these, which are ready."""
        return not self.is_divided or not engines.isdisjoint(self.of(owner))

    def heads_elsewhere(self, queue: FairQueue, heads: Sequence[Ticket]) -> list[Ticket]:
        """Rule 3: beside these heads the next that can reach an engine which none before it can."""
        seen, found = self.of(heads[0].owner), list[Ticket]()
        for ticket in queue.first_of_each_owner():
            reached = self.of(ticket.owner)
            if not reached <= seen and ticket not in heads:
                found.append(ticket)
            seen |= reached
        return found

    def places(self, ticket: Ticket, line: Sequence[Ticket]) -> int:
        """Rule 6: the free places in line: one for each engine that it can reach, less those that can reach one too."""
        reached = self.of(ticket.owner)
        return len(reached) - sum(t.tier == ticket.tier and bool(reached & self.of(t.owner)) for t in line)
