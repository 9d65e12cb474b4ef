"""Claimants: tickets that have left the fair queue of their tier for a claim on an engine.

A ticket that fits the pool, but not its best engine, becomes a claimant: the next ticket of its tier is then looked at,
too. Its tenant is charged as by an admission, and it still counts in its tier's queue. A claimant that leaves is
refunded where its tenant was charged for no other ticket since. One that has to return to the queue stands there like a
ticket that was handed back: in no lane, before all that came later, and not charged again.
"""

from __future__ import annotations

from heapq import heappop, heappush

from sidecar.policy.rules import UNLIMITED
from sidecar.scheduling.fair_queue import Entry, FairQueue, Lane, LaneWithFirst
from sidecar.scheduling.placement import NEVER_US
from sidecar.scheduling.ticket import Ticket

MOST_CLAIMANTS = 16
"""The most claimants of a pool between two walks. The others return to their queues."""
MOST_NEW_CLAIMANTS = 4
"""Of one walk, of those that claimed an engine. Each costs a store up to 0.3 ms; another walk makes more."""


class ClaimQueue(FairQueue):
    """The queue of one tier, and its claimants, by their ids. It has no slots, so that another order can inherit it.

    A ticket is small when it needs no more than the tier's reserve in each dimension: `small_prefill` in un-prefilled
    prompt tokens.
    """

    def __init__(self) -> None:
        super().__init__()
        self.claimants: dict[str, Ticket] = {}
        self.small_prefill = UNLIMITED

    def change_small_prefill(self, small_prefill: int) -> None:
        """Another limit for small tickets. Call `change_sizes` after it: it applies both."""
        if small_prefill != self.small_prefill:
            self.small_prefill = small_prefill
            self.small_tokens = -1  # so that there is something to change

    def is_small(self, ticket: Ticket) -> bool:
        """Whether a ticket is no larger than the tier's reserve."""
        return super().is_small(ticket) and ticket.placing.uncached <= self.small_prefill

    def claim(self, ticket: Ticket, now_us: int) -> None:
        """A waiting ticket becomes a claimant."""
        placing = ticket.placing
        if placing.patient_until_us == NEVER_US:
            placing.patient_until_us = now_us + placing.patience_us
        self._reach(ticket)
        if not (ticket.returns or placing.is_back):
            lane = self._lanes[ticket.tenant]
            placing.charged_from = max(lane.finish, self._first_start(ticket, lane))
            lane.finish = placing.charge = placing.charged_from + ticket.tokens / ticket.weight
        self._leave_lane(ticket)
        self._drop_gone()
        placing.is_claimant = True
        self.claimants[ticket.id] = ticket

    def go_back(self, ticket: Ticket) -> None:
        """A claimant stands in the queue again."""
        self._no_claimant(ticket)
        ticket.placing.is_back = True
        self.put_back(ticket)

    def _no_claimant(self, ticket: Ticket) -> None:
        del self.claimants[ticket.id]
        ticket.placing.is_claimant = False
        ticket.placing.kept = None
        self.count -= 1
        self.tokens -= ticket.tokens
        self.requests -= ticket.requests

    def admit(self, ticket: Ticket) -> None:
        """Takes out a ticket that is admitted. Its tenant is charged, unless it was for its claim."""
        placing = ticket.placing
        if not placing.is_claimant and placing.is_back and self.count > 1:
            self._reach(ticket)
        if placing.is_claimant or placing.is_back:
            self._take_out(ticket)
        else:
            super().admit(ticket)
        placing.is_back = False
        placing.charge = 0.0

    def remove(self, ticket: Ticket) -> None:
        """Takes any waiting ticket out; a claim that it made costs its tenant nothing."""
        if ticket.placing.charge:
            self._refund(ticket)
        self._take_out(ticket)

    def _reach(self, ticket: Ticket) -> None:
        """The tier's virtual time moves on to a ticket that leaves the queue."""
        self._virtual = max(self._virtual, ticket.start)

    def _first_start(self, ticket: Ticket, lane: Lane) -> float:  # noqa: ARG002  # the ticket is the first of its lane
        """The start of the first ticket of the lane that a ticket stands in."""
        return ticket.start

    def _take_out(self, ticket: Ticket) -> None:
        if not ticket.placing.is_claimant:
            super().remove(ticket)
            return
        self._no_claimant(ticket)
        if not self.count:
            self._start_afresh()

    def _refund(self, ticket: Ticket) -> None:
        """The lane's finish falls back, and so does the start of its first ticket."""
        placing, lane = ticket.placing, self._lanes.get(ticket.tenant)
        if lane is None or lane.finish != placing.charge:
            return
        lane.finish = placing.charged_from
        assert isinstance(lane, LaneWithFirst)
        first, start = lane.first, max(self._virtual, lane.finish)
        if lane.waiting and first is not None and start < first.start:
            first.start = start
            self._enter_heap(first)

    def _new_lane(self, tenant: str) -> LaneWithFirst:
        return LaneWithFirst(tenant)

    def _tag(self, first: Ticket, lane: Lane) -> None:
        assert isinstance(lane, LaneWithFirst)
        lane.first = first
        super()._tag(first, lane)

    @staticmethod
    def _counts(entry: Entry) -> bool:
        """See `FairQueue._counts`. A ticket whose start fell back has left an entry with the one before."""
        return entry[2].queued and entry[0] == entry[2].start

    def _drop_gone(self) -> None:
        for heap in (self._small, self._large):
            while heap and not self._counts(heap[0]):
                heappop(heap)
        super()._drop_gone()

    def _enter_heap(self, ticket: Ticket) -> None:
        heap = self._small if self.is_small(ticket) else self._large
        heappush(heap, (ticket.start, ticket.sequence, ticket))

    def _leave_lane(self, ticket: Ticket) -> None:
        if ticket.placing.is_back:
            ticket.queued = False
            self._returned -= 1
        else:
            super()._leave_lane(ticket)
