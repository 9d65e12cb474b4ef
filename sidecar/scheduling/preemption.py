"""Rule 7: room that is taken back for the first in order that has waited long enough."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from sidecar.scheduling.amounts import NOTHING, Amount, plus
from sidecar.scheduling.engines import Gone
from sidecar.scheduling.scheduler import OTHER, Candidate, Place, Scheduler
from sidecar.scheduling.tickets import ScheduledLease, Ticket


@dataclass(frozen=True)
class Shortage:
    """A ticket that is to be `served`, at its place in order, on the first engine where the room can be had.

    `engines`: those that it would enter, the one that it wants first. Each with those that come before the ticket, want
    that engine, and fit or hold their place. `burst`: what else waits of an always_first tier. `closed`: levels whose
    leases stay, because a head of theirs in class 4 comes before it.
    """

    engines: Mapping[str, Sequence[Ticket]]
    served: Ticket
    place: Place
    burst: Sequence[Ticket]
    closed: frozenset[int]


def shortage(
    scheduler: Scheduler, now_us: int, gone: Gone, order: Sequence[Candidate] | None = None
) -> Shortage | None:
    """The shortage for which room is to be taken back now, if any. `gone` is taken back already. `order`: where it is
    known.
    """
    if not scheduler.may_preempt():
        return None
    scheduler.look(now_us)
    tiers = scheduler.rules.tiers
    order = scheduler.in_order() if order is None else order
    for n, candidate in enumerate(order):
        at, place, ticket = n, candidate.place, candidate.ticket
        after_us = tiers[ticket.tier].preempt_after_us
        if after_us is not None and now_us - ticket.arrived_us >= after_us:
            break
    else:
        return None
    engines = _engines_for(scheduler, candidate, order[:at])
    burst: list[Ticket] = []
    if tiers[ticket.tier].always_first:
        waiting = sorted(scheduler.tiers[ticket.tier].queue, key=lambda t: (t.number, t.owner))
        burst = [other for other in waiting if other is not ticket]
    closed = frozenset(
        level
        for level in range(ticket.tier + 1, len(tiers))
        if any(scheduler.place(head, OTHER) < place for head in scheduler.heads(level))
    )
    found = Shortage(engines, ticket, place, burst, closed)
    for engine, before in engines.items():
        if not any(_Search(scheduler, found, engine, now_us, gone).lacking(ticket)):
            return replace(found, engines={engine: before}) if burst else None  # enough is on its way there
    return found if engines else None


def _engines_for(scheduler: Scheduler, candidate: Candidate, earlier: Sequence[Candidate]) -> dict[str, list[Ticket]]:
    """`Shortage.engines`. One before it that holds its place for an engine keeps it from others."""
    before, holding = dict[str | None, list[Ticket]](), set[str | None]()
    for _, ticket, order_class in earlier:
        wanted, fits = scheduler.wanted(ticket), scheduler.fits(ticket)
        if not fits and scheduler.holds(ticket, order_class):
            holding.add(wanted)
        elif not fits:
            continue
        before.setdefault(wanted, []).append(ticket)
    engines = scheduler.would_enter(candidate.ticket, candidate.order_class)
    return {it: before.get(it, []) for n, it in enumerate(engines) if n == 0 or holding <= {it}}


class Returnable:
    """The leases that may be taken back as far as they say so themselves, by engine and tier, in order of entering."""

    def __init__(self) -> None:
        self._of: dict[tuple[str, int], dict[str, ScheduledLease]] = {}

    def add(self, lease: ScheduledLease) -> None:
        """One that entered."""
        self._of.setdefault((lease.engine, lease.ticket.tier), {})[lease.ticket.id] = lease

    def remove(self, lease: ScheduledLease) -> None:
        """One that has ended, is kept or is taken back."""
        self._of.get((lease.engine, lease.ticket.tier), {}).pop(lease.ticket.id, None)

    def on(self, engine: str, levels: Iterable[int]) -> Iterator[ScheduledLease]:
        """Leases of these tiers on one engine, of a tier the last that entered first."""
        for level in levels:
            yield from reversed(self._of.get((engine, level), {}).values())


def leases_to_take_back(
    scheduler: Scheduler, found: Shortage, leases: Returnable, now_us: int, gone: Gone
) -> list[ScheduledLease]:
    """The leases whose room is enough, on the first engine that has such; empty where none has."""
    scheduler.look(now_us)
    levels = list(_levels_that_give(scheduler, found, gone))
    for engine in found.engines:
        search = _Search(scheduler, found, engine, now_us, gone)
        if (chosen := search.leases(leases.on(engine, levels))) is not None:
            return chosen
    return []


def _levels_that_give(scheduler: Scheduler, found: Shortage, gone: Gone) -> Iterator[int]:
    """The less important tiers that may be above their floors, the least important first."""
    tiers = scheduler.rules.tiers
    for level in range(len(tiers) - 1, found.served.tier, -1):
        may_give = tiers[level].preemptible and level not in found.closed  # else the room would go back to one of it
        if may_give and not scheduler.would_be_below_floor(level, NOTHING, gone):
            yield level


class _Search:
    """Looks for leases on one engine whose room is enough for a group, to which one ticket after the other is added.

    What more leases give free only helps those that fit already, so each step looks at one ticket or one lease.
    """

    def __init__(self, scheduler: Scheduler, found: Shortage, engine: str, now_us: int, gone: Gone) -> None:
        self._scheduler, self._found, self._now, self._gone = scheduler, found, now_us, gone
        self._engine = scheduler.engines[engine]
        self._left: Iterator[ScheduledLease] = iter(())
        self._chosen, self._freed, self._chosen_of = list[ScheduledLease](), _NO_ROOM, dict[int, Amount]()
        self._in_pool, self._on_engine = NOTHING, NOTHING  # what comes before the next of the group
        for ticket in found.engines[engine]:
            self._comes_before(ticket)

    def leases(self, those_there: Iterator[ScheduledLease]) -> list[ScheduledLease] | None:
        """None where all that may be taken is not enough for the ticket that is served.

        Of an always_first tier as much as all that waits needs, one ticket more at a time, while that can be had.
        """
        served, self._left = self._found.served, those_there
        group, lacking = NOTHING if served.is_for_floor else self._scheduler.need(served), self.lacking(served)
        if not self._take(lacking):
            return None
        taken = len(self._chosen)
        for ticket in self._found.burst:
            if self._scheduler.is_within_limit(ticket, group):
                more = _most(lacking, self.lacking(ticket))
                if not self._take(more):
                    break
                group, lacking, taken = plus(group, self._scheduler.need(ticket)), more, len(self._chosen)
        return self._needed(self._chosen[:taken], lacking)

    def lacking(self, ticket: Ticket) -> Room:
        """Room that has to be freed for one more of the group. It comes before those that are added after it."""
        pool = self._scheduler.lacking(ticket, self._in_pool, self._gone)
        tokens, requests, sent = self._engine.lacking(
            ticket, self._now, self._on_engine, self._gone.on(self._engine.id)
        )
        self._comes_before(ticket)
        return max(pool[0], tokens), max(pool[1], requests), pool[2], sent

    def _comes_before(self, ticket: Ticket) -> None:
        self._in_pool = plus(self._in_pool, self._scheduler.need(ticket))
        self._on_engine = plus(self._on_engine, (ticket.tokens, ticket.requests, ticket.sent_to(self._engine.id)))

    def _take(self, lacking: Room) -> bool:
        """Takes until so much is free. False where all that may be taken is not enough."""
        while not _covers(self._freed, lacking):
            lease = next(filter(self._may_take, self._left), None)
            if lease is None:
                return False
            tier = lease.ticket.tier
            self._chosen.append(lease)
            self._freed = _changed(self._freed, lease, 1)
            self._chosen_of[tier] = plus(self._chosen_of.get(tier, NOTHING), lease.amount)
        return True

    def _needed(self, taken: list[ScheduledLease], lacking: Room) -> list[ScheduledLease]:
        """The last chosen that are not needed are spared."""
        freed, needed = _NO_ROOM, list[ScheduledLease]()
        for lease in taken:
            freed = _changed(freed, lease, 1)
        for lease in reversed(taken):
            if _covers(rest := _changed(freed, lease, -1), lacking):
                freed = rest
            else:
                needed.append(lease)
        return needed[::-1]

    def _may_take(self, lease: ScheduledLease) -> bool:
        """It may end; its tier keeps its floor without those taken before it; its room would not go back to it."""
        scheduler, ticket = self._scheduler, lease.ticket
        stays = lease.is_kept or lease.is_chosen or ticket.is_in_floor
        if stays or lease.returns >= scheduler.rules.max_preemptions or not scheduler.could_come_back(ticket):
            return False
        taken = plus(self._chosen_of.get(ticket.tier, NOTHING), lease.amount)
        if scheduler.would_be_below_floor(ticket.tier, taken, self._gone):
            return False
        return scheduler.place(ticket, OTHER) >= self._found.place


Room: TypeAlias = tuple[int, int, int, int]
"""Tokens, requests, prompt tokens in the pool, and those that were sent to the engine."""

_NO_ROOM: Room = (0, 0, 0, 0)


def _most(a: Room, b: Room) -> Room:
    return max(a[0], b[0]), max(a[1], b[1]), max(a[2], b[2]), max(a[3], b[3])


def _covers(freed: Room, lacking: Room) -> bool:
    return freed[0] >= lacking[0] and freed[1] >= lacking[1] and freed[2] >= lacking[2] and freed[3] >= lacking[3]


def _changed(freed: Room, lease: ScheduledLease, sign: int) -> Room:
    tokens, requests, prompt = lease.amount
    return freed[0] + sign * tokens, freed[1] + sign * requests, freed[2] + sign * prompt, freed[3] + sign * lease.sent
