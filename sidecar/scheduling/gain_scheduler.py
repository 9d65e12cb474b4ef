"""The scheduler of a pool that orders by gain: the rules of `scheduler`, with `gain_order` in place of the levels.

Rule 3. A ticket keeps its place beside what the other tiers hold in their floors, and their headroom: all that was
admitted by gain is after it.

Preemption takes no lease that counts in its tier's floor, and none of a tier whose floor is not full.

Urgent is a ticket whose deadline is nearer than half of the time that the engines need for all that waits: from the
start, or from a dispatch on: up to 16 of them become so at one time, those with the earliest deadlines first. It stays
urgent: more engines or fewer tickets do not take that back.

Bounded wait. The bounds of `scheduler` hold for the heads of the tiers, with the floors in place of the reserves.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from operator import attrgetter

from sidecar.policy.rules import PoolRules
from sidecar.scheduling.fair_queue import SPARE_ENTRIES
from sidecar.scheduling.gain import GainFigures, GainTicket
from sidecar.scheduling.gain_order import GainOrder, GainTier
from sidecar.scheduling.heaps import Sweep
from sidecar.scheduling.order import Candidate, OrderClass
from sidecar.scheduling.scheduler import Scheduler
from sidecar.scheduling.ticket import Admission, Rule, Ticket

MOST_MADE_URGENT = 16
"""Tickets that become urgent at one time."""
MOST_REFRESHED = 2
"""Densities that one decision brings up to date."""
LOOK_AGAIN_US = 100_000
"""Densities fall all the time. So long after a decision the order may be another, though nothing else happened."""

_OTHER = OrderClass.OTHER

Deadline = tuple[int, int, int, GainTicket]


class GainScheduler(Scheduler):
    """See `Scheduler`. Call `appraise` after `submit`, before anything else, for a ticket that can earn something."""

    _tiers: tuple[GainTier, ...]
    _order: GainOrder
    _ticket_type = GainTicket
    _tier_type: type[GainTier] = GainTier
    _order_type: type[GainOrder] = GainOrder
    _in_reserve = attrgetter("floor_tokens", "floor_requests")
    _first: Candidate | None = None  # in order, where the latest decision knew it
    _refreshed_us: int | None = None
    _refreshes_left = 0  # at that time
    _urged_us: int | None = None
    _urges_left = 0

    def __init__(self, rules: PoolRules) -> None:
        super().__init__(rules)
        self._deadlines: list[Deadline] = []  # of calm tickets
        self._sweep_deadlines = Sweep()

    def appraise(self, ticket: Ticket, gain: GainFigures) -> None:
        """Gives a ticket that was just submitted its figures. It may be urgent at once."""
        assert isinstance(ticket, GainTicket)
        ticket.gain = gain = gain.bounded()
        queue = self._tiers[ticket.tier].queue
        queue.cost_us += gain.cost_us
        if gain.deadline_us < self._patience_us():
            queue.make_urgent(ticket, ticket.arrived_us)
        else:
            self._await_deadline(ticket)

    def dispatch(self, now_us: int, most: int | None = None) -> list[Admission]:
        """See `Scheduler.dispatch`."""
        if not self.is_paused:
            self._make_urgent(now_us)
        return super().dispatch(now_us, most)

    def preempt(self, now_us: int) -> list[Ticket]:
        """See `Scheduler.preempt`."""
        if self._may_preempt(now_us):
            self._refresh_densities(now_us)
        return super().preempt(now_us)

    def _may_preempt(self, now_us: int) -> bool:
        rules = self.rules
        return (
            bool(self._waiting and rules.max_preemptions)
            and not (self.is_paused or self.is_held_back(now_us))
            and any(tier.preemptible for tier in rules.tiers)
            and any(tier.queue.count and tier.rules.preempt_after_us is not None for tier in self._tiers)
        )

    def resize(self, ticket_id: str, tokens: int) -> bool:
        """See `Scheduler.resize`."""
        lease = self._leases.get(ticket_id)
        before = 0 if lease is None else lease.tokens
        is_held = super().resize(ticket_id, tokens)
        if isinstance(lease, GainTicket) and lease.in_floor:
            self._tiers[lease.tier].book_floor(tokens - before, 0)
        return is_held

    def next_change_us(self, now_us: int) -> int | None:
        """See `Scheduler.next_change_us`. A ticket becomes urgent, or densities have fallen."""
        found = super().next_change_us(now_us)
        if not self._waiting or self.is_paused:
            return found
        changes = [] if found is None else [found]
        while self._deadlines and not _is_calm(self._deadlines[0][3]):
            heappop(self._deadlines)
        if self._deadlines:
            changes.append(max(now_us + 1, self._deadlines[0][0] - self._patience_us() + 1))
        if any(tier.queue.has_urgent for tier in self._tiers):
            changes.append(now_us + LOOK_AGAIN_US)
        return min(changes, default=None)

    def _next_admission(self, now_us: int) -> Candidate | None:
        best = self._refresh_densities(now_us)
        first = None if now_us < self._held_back_until_us else self._order.first_of_all(best, now_us)
        if first is not None:
            if self.fits(first):
                self._first = first
                return first
            if self.holds_its_place(first):
                return None
        self._first = None
        return super()._next_admission(now_us)

    def _passed(self, candidate: Candidate, now_us: int) -> Sequence[tuple[int, Rule]]:
        if candidate is not self._first or candidate.order_class is not _OTHER:
            return super()._passed(candidate, now_us)
        passed: list[tuple[int, Rule]] = []
        rule = self._order.rule_beyond(candidate)
        own, arrived_us, sequence = candidate.ticket.tier, candidate.arrived_us, candidate.sequence
        for level, tier in enumerate(self._tiers):
            if level == own or (head := tier.queue.head()) is None or head.arrived_us > arrived_us:
                continue
            if head.arrived_us < arrived_us or head.sequence < sequence:
                is_at_limit = tier.rules.limited and tier.is_at_limit(head)
                passed.append((level, Rule.LIMIT if is_at_limit else rule))
        return passed

    def _firsts(self, now_us: int) -> list[Ticket]:
        best = (tier.queue.best() for tier in self._tiers if tier.queue.count and not tier.rules.always_first)
        return [*super()._firsts(now_us), *(ticket for ticket in best if ticket is not None)]

    def _refresh_densities(self, now_us: int) -> GainTicket | None:
        """Brings densities up to date, the highest of all tiers first, until the highest one is. Returns the best
        ticket of all tiers.

        At most 2 at one time, and 2 more for each admission: another decision at the same time changes nothing.
        """
        if now_us != self._refreshed_us:
            self._refreshed_us, self._refreshes_left = now_us, MOST_REFRESHED
        while True:
            best = rival = queue = None
            for each in self._order.queues:
                place = each.best_place()
                if place is None:
                    continue
                if best is None or place < best:
                    best, rival, queue = place, best, each
                elif rival is None or place < rival:
                    rival = place
            if queue is None:
                return None
            refreshed = queue.refresh(best, now_us, rival, self._refreshes_left) if self._refreshes_left else 0
            if not refreshed:
                return queue.best()
            self._refreshes_left -= refreshed
            self._note_refreshed()
            best = queue.best_place()
            if best is not None and (rival is None or best < rival):
                return queue.best()

    def _note_refreshed(self) -> None:
        """Densities have changed."""

    def _patience_us(self) -> int:
        """A ticket whose deadline is nearer than this is urgent."""
        cost_us = 0
        for tier in self._tiers:
            cost_us += tier.queue.cost_us
        return cost_us // (2 * self._engines_that_work())

    def _engines_that_work(self) -> int:
        return 1

    def _make_urgent(self, now_us: int) -> int:
        """How many tickets become urgent."""
        deadlines, made = self._deadlines, 0
        if not deadlines:
            return 0
        if now_us != self._urged_us:
            self._urged_us, self._urges_left = now_us, MOST_MADE_URGENT
        before_us = now_us + self._patience_us()
        while deadlines and made < self._urges_left:
            deadline_us, _, _, ticket = deadlines[0]
            if not _is_calm(ticket):
                heappop(deadlines)
            elif deadline_us < before_us:
                heappop(deadlines)
                self._tiers[ticket.tier].queue.make_urgent(ticket, now_us)
                made += 1
            else:
                break
        self._urges_left -= made
        if len(deadlines) > 2 * len(self._waiting) + SPARE_ENTRIES:
            self._sweep_deadlines.some(deadlines, _waits_calmly)
        return made

    def _await_deadline(self, ticket: GainTicket) -> None:
        self._tiers[ticket.tier].queue.await_deadline(ticket)
        self._note_deadline(ticket)

    def _note_deadline(self, ticket: GainTicket) -> None:
        heappush(self._deadlines, (ticket.deadline_us, ticket.arrived_us, ticket.sequence, ticket))

    def _admit(self, candidate: Candidate, now_us: int) -> Admission:
        ticket = candidate.ticket
        assert isinstance(ticket, GainTicket)
        admission = super()._admit(candidate, now_us)
        self._refreshes_left += MOST_REFRESHED
        ticket.in_floor = candidate.order_class is not _OTHER
        if ticket.in_floor:
            self._tiers[ticket.tier].book_floor(ticket.tokens, ticket.requests)
        return admission

    def _release(self, lease: Ticket, now_us: int) -> None:
        assert isinstance(lease, GainTicket)
        if lease.in_floor:
            self._tiers[lease.tier].book_floor(-lease.tokens, -lease.requests)
            lease.in_floor = False
        super()._release(lease, now_us)

    def _return(self, ticket: Ticket, now_us: int) -> None:
        assert isinstance(ticket, GainTicket)
        ticket.stored_density = ticket.density_at(now_us)
        super()._return(ticket, now_us)
        if ticket.gain is not None and not ticket.is_urgent:
            self._note_deadline(ticket)


def _is_calm(ticket: GainTicket) -> bool:
    return ticket.is_waiting and not ticket.is_urgent


def _waits_calmly(deadline: Deadline) -> bool:
    return _is_calm(deadline[3])
