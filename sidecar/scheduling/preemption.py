"""Rule 7: room that is taken back for the first in order that has waited long enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sidecar.scheduling.amounts import NOTHING, plus
from sidecar.scheduling.scheduler import OTHER, Gone, Place, Scheduler
from sidecar.scheduling.tickets import Lease, Ticket


@dataclass(frozen=True)
class Shortage:
    """A ticket that is to be `served` on an engine, at its place in order.

    `before`: those that come before it, want the same engine, and fit or hold their place. `burst`: what else waits of
    an always_first tier. `closed`: levels whose leases stay, because a head of theirs in class 4 comes before it.
    """

    engine: str
    served: Ticket
    place: Place
    before: Sequence[Ticket]
    burst: Sequence[Ticket]
    closed: frozenset[int]


def shortage(scheduler: Scheduler, now_us: int, gone: Gone) -> Shortage | None:
    """What room is to be taken back for now, if any. `gone` is taken back already."""
    if not scheduler.may_preempt():
        return None
    scheduler.look(now_us)
    tiers = scheduler.rules.tiers
    order = scheduler.in_order()
    for n, candidate in enumerate(order):
        at, place, ticket = n, candidate.place, candidate.ticket
        after_us = tiers[ticket.tier].preempt_after_us
        if after_us is not None and now_us - ticket.arrived_us >= after_us:
            break
    else:
        return None
    engine = scheduler.wanted(ticket)
    if engine is None:
        return None
    before = [
        c.ticket
        for c in order[:at]
        if scheduler.wanted(c.ticket) == engine
        and (scheduler.fits(c.ticket) or scheduler.holds(c.ticket, c.order_class))
    ]
    burst: list[Ticket] = []
    if tiers[ticket.tier].always_first:
        waiting = sorted(scheduler.tiers[ticket.tier].queue, key=lambda t: (t.number, t.owner))
        burst = [other for other in waiting if other is not ticket]
    closed = frozenset(
        level
        for level in range(ticket.tier + 1, len(tiers))
        if any(scheduler.place(head, OTHER) < place for head in scheduler.heads(level))
    )
    found = Shortage(engine, ticket, place, before, burst, closed)
    is_served = not burst and _Search(scheduler, found, (), now_us, gone).is_enough([], [ticket])
    return None if is_served else found


def leases_to_take_back(
    scheduler: Scheduler, found: Shortage, leases: Sequence[Lease], now_us: int, gone: Gone
) -> list[Lease]:
    """The leases whose room is enough; empty where all together are not."""
    scheduler.look(now_us)
    return _Search(scheduler, found, leases, now_us, gone).leases()


class _Search:
    """Looks for leases on one engine whose room is enough."""

    def __init__(self, scheduler: Scheduler, found: Shortage, leases: Sequence[Lease], now_us: int, gone: Gone) -> None:
        self._scheduler, self._found, self._now, self._gone = scheduler, found, now_us, gone
        self._engine = scheduler.engines[found.engine]
        candidates = [lease for lease in leases if lease.engine == found.engine and self._may_end(lease)]
        candidates.sort(key=lambda lease: (lease.ticket.tier, lease.entered))
        self._candidates, self._taken = candidates, list[Lease]()  # the last is the next to be taken

    def leases(self) -> list[Lease]:
        """Of an always_first tier as much as all that waits needs, one ticket more at a time, while that can be had."""
        group = [self._found.served]
        taken = self._take_for(group)
        if taken is None:
            return []
        for ticket in self._found.burst:
            more = [*group, ticket]
            if self._scheduler.is_within_limit(more):
                enough = self._take_for(more)
                if enough is None:
                    break
                group, taken = more, enough
        return self._needed(taken, group)

    def _needed(self, taken: list[Lease], group: Sequence[Ticket]) -> list[Lease]:
        """The last chosen that are not needed are spared."""
        for lease in reversed(taken):
            rest = [other for other in taken if other is not lease]
            if self.is_enough(rest, group):
                taken = rest
        return taken

    def _take_for(self, group: Sequence[Ticket]) -> list[Lease] | None:
        """Least important tiers first, the last that entered first, beside those that were taken for fewer."""
        while not self.is_enough(self._taken, group):
            while self._candidates and not self._may_take(self._candidates[-1]):
                self._candidates.pop()
            if not self._candidates:
                return None
            self._taken.append(self._candidates.pop())
        return self._taken.copy()

    def is_enough(self, taken: Sequence[Lease], group: Sequence[Ticket]) -> bool:
        """Whether all of the group fit with those before, if these leases end."""
        gone = self._gone.beside(taken)
        freed, in_pool, on_engine = gone.on(self._engine.id), NOTHING, NOTHING
        for number, ticket in enumerate([*self._found.before, *group], -len(self._found.before)):
            if number >= 0 and not (
                self._engine.has_room(ticket, self._now, on_engine, freed)
                and self._scheduler.fits(ticket, in_pool, gone)
            ):
                return False
            in_pool = plus(in_pool, self._scheduler.need(ticket))
            on_engine = plus(on_engine, (ticket.tokens, ticket.requests, ticket.sent_to(self._engine.id)))
        return True

    def _may_end(self, lease: Lease) -> bool:
        ticket, rules = lease.ticket, self._scheduler.rules
        if ticket.tier <= self._found.served.tier or not rules.tiers[ticket.tier].preemptible:
            return False
        if lease.is_kept or lease.is_chosen or ticket.is_in_floor or lease.returns >= rules.max_preemptions:
            return False
        # Otherwise its room would go back to one of its tier.
        return self._scheduler.could_come_back(ticket) and ticket.tier not in self._found.closed

    def _may_take(self, lease: Lease) -> bool:
        """Its tier keeps its floor without those that were taken before it; and its room would not go back to it."""
        scheduler, ticket = self._scheduler, lease.ticket
        if scheduler.would_be_below_floor(ticket.tier, self._gone.beside([*self._taken, lease])):
            return False
        return scheduler.place(ticket, OTHER) >= self._found.place
