"""The scheduler of a pool that orders by gain: the rules of `scheduler`, with `gain_order` in place of the levels.

Rule 3. A ticket keeps its place beside what the other tiers hold in their floors, and their headroom: all that was
admitted by gain is after it.

Preemption takes no lease that counts in its tier's floor, and none of a tier whose floor is not full.

Urgent is a ticket whose deadline is nearer than half of the time that the engines need for all that waits: from the
start, or from a dispatch on, which makes up to 64 of them urgent, those with the earliest deadlines first. It stays
urgent: more engines or fewer tickets do not take that back.

Bounded wait. The bounds of `scheduler` hold for the heads of the tiers, with the floors in place of the reserves.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from sidecar.policy.rules import PoolRules
from sidecar.scheduling.fair_queue import SPARE_ENTRIES
from sidecar.scheduling.gain import GainFigures, GainTicket
from sidecar.scheduling.gain_order import GainOrder, GainTier
from sidecar.scheduling.gain_queue import Place
from sidecar.scheduling.order import Candidate, OrderClass
from sidecar.scheduling.scheduler import Scheduler
from sidecar.scheduling.ticket import Admission, Rule, Ticket

MOST_MADE_URGENT = 64
"""Tickets that become urgent in one dispatch."""
MOST_REFRESHED = 2
"""Densities that one decision brings up to date."""
LOOK_AGAIN_US = 100_000
"""Densities fall all the time. So long after a decision the order may be another, though nothing else happened."""

_ALWAYS_FIRST, _, _, _OTHER = OrderClass


class GainScheduler(Scheduler):
    """See `Scheduler`. Call `appraise` after `submit`, before anything else, for a ticket that can earn something."""

    _tiers: tuple[GainTier, ...]
    _order: GainOrder
    _ticket_type = GainTicket
    _tier_type: type[GainTier] = GainTier
    _order_type: type[GainOrder] = GainOrder
    _first: Candidate | None = None  # in order, where the latest decision knew it
    _refreshed_us: int | None = None
    _refreshes_left = 0  # at that time

    def __init__(self, rules: PoolRules) -> None:
        super().__init__(rules)
        self._deadlines: list[tuple[int, int, int, GainTicket]] = []

    def appraise(self, ticket: Ticket, gain: GainFigures) -> None:
        """Gives a ticket that was just submitted its figures. It may be urgent at once."""
        assert isinstance(ticket, GainTicket)
        ticket.gain = gain = gain.bounded()
        if gain.deadline_us < self._patience_us(gain.cost_us):
            ticket.is_urgent, ticket.density = True, ticket.density_at(ticket.arrived_us)
        self._tiers[ticket.tier].queue.appraise(ticket)
        self._await_deadline(ticket)

    def dispatch(self, now_us: int) -> list[Admission]:
        """See `Scheduler.dispatch`."""
        if not self.is_paused:
            self._make_urgent(now_us)
        return super().dispatch(now_us)

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

    def holds_its_place(self, candidate: Candidate) -> bool:
        """See `Scheduler.holds_its_place`, with the floors in place of the reserves."""
        ticket = candidate.ticket
        if candidate.order_class is _ALWAYS_FIRST:
            return True
        tokens, requests = self.rules.tokens - ticket.tokens, self.rules.requests - ticket.requests
        for level, tier in enumerate(self._tiers):
            if level == ticket.tier:
                continue
            rules = tier.rules
            if rules.always_first:
                kept_tokens, kept_requests = tier.held_tokens, tier.held_requests
            else:
                kept_tokens = min(tier.floor_tokens, rules.reserve_tokens)
                kept_requests = min(tier.floor_requests, rules.reserve_requests)
            if level < candidate.headroom_level:
                kept_tokens = max(kept_tokens, rules.headroom_tokens)
                kept_requests = max(kept_requests, rules.headroom_requests)
            tokens -= kept_tokens
            requests -= kept_requests
        return tokens >= 0 and requests >= 0

    def _next_admission(self, now_us: int) -> Candidate | None:
        densest = self._refresh_densities(now_us)
        self._first = None if now_us < self._held_back_until_us else self._order.first_of_all(densest, now_us)
        if self._first is not None:
            if self.fits(self._first):
                return self._first
            if self.holds_its_place(self._first):
                return None
            self._first = None
        return super()._next_admission(now_us)

    def _passed(self, candidate: Candidate, now_us: int) -> Sequence[tuple[int, Rule]]:
        if candidate is not self._first or candidate.order_class is not _OTHER:
            return super()._passed(candidate, now_us)
        rule, passed = self._order.rule_beyond(candidate), []
        own, place = candidate.ticket.tier, candidate[3:5]
        for level, tier in enumerate(self._tiers):
            head = tier.queue.head()
            if head is not None and level != own and (head.arrived_us, head.sequence) < place:
                passed.append((level, Rule.LIMIT if tier.is_at_limit(head) else rule))
        return passed

    def _firsts(self, now_us: int) -> list[Ticket]:
        best = (tier.queue.best() for tier in self._tiers if tier.queue.count and not tier.rules.always_first)
        return [*super()._firsts(now_us), *(ticket for ticket in best if ticket is not None)]

    def _refresh_densities(self, now_us: int) -> list[Place | None]:
        """Brings densities up to date, the highest of all tiers first, until the highest one is. Returns the densest
        ticket of every tier.

        At most 2 at one time, and 2 more for each admission: another decision at the same time changes nothing.
        """
        if now_us != self._refreshed_us:
            self._refreshed_us, self._refreshes_left = now_us, MOST_REFRESHED
        found = [None if tier.rules.always_first else tier.queue.densest() for tier in self._tiers]
        while self._refreshes_left:
            places = [place for place in found if place is not None]
            if not places:
                break
            place = min(places)
            ticket = place[3]
            density = ticket.density_at(now_us)
            if density == ticket.density:
                break
            self._refreshes_left -= 1
            self._renew(place, density)
            found[ticket.tier] = self._tiers[ticket.tier].queue.densest()
        return found

    def _renew(self, place: Place, density: int) -> None:
        self._tiers[place[3].tier].queue.renew(place, density)

    def _patience_us(self, more_us: int = 0) -> int:
        """A ticket whose deadline is nearer than this is urgent. `more_us`: the cost of one that is in no queue yet."""
        return (sum(tier.queue.cost_us for tier in self._tiers) + more_us) // (2 * self._engines_that_work())

    def _engines_that_work(self) -> int:
        return 1

    def _make_urgent(self, now_us: int) -> int:
        """How many tickets become urgent."""
        if not self._deadlines:
            return 0
        before_us = now_us + self._patience_us()
        made = 0
        while self._deadlines and made < MOST_MADE_URGENT:
            deadline_us, _, _, ticket = self._deadlines[0]
            if not _is_calm(ticket):
                heappop(self._deadlines)
            elif deadline_us < before_us:
                heappop(self._deadlines)
                self._tiers[ticket.tier].queue.make_urgent(ticket, now_us)
                made += 1
            else:
                break
        if len(self._deadlines) > 2 * len(self._waiting) + SPARE_ENTRIES:
            self._deadlines = [entry for entry in self._deadlines if _is_calm(entry[3])]
            heapify(self._deadlines)
        return made

    def _await_deadline(self, ticket: GainTicket) -> None:
        if ticket.gain is not None and not ticket.is_urgent:
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
        ticket.density = ticket.density_at(now_us)
        super()._return(ticket, now_us)
        self._await_deadline(ticket)


def _is_calm(ticket: GainTicket) -> bool:
    return ticket.is_waiting and not ticket.is_urgent
