"""The queue of one tier of several engines that is ordered by gain: its claimants may be any of its tickets.

A ticket that claims an engine has left its lane, and its tenant was charged for it as by an admission: from the start
of the tenant's first ticket. From then on that is its own start, so it keeps its place in fair order: as a claimant,
and in the queue if it has to return, where it stands in the lane of those that returned. That its tenant is ahead does
not matter any more.
"""

from __future__ import annotations

from sidecar.scheduling.claims import ClaimQueue
from sidecar.scheduling.fair_queue import Lane
from sidecar.scheduling.gain import GainTicket
from sidecar.scheduling.gain_queue import GainLane, GainQueue
from sidecar.scheduling.ticket import Ticket


class GainClaimQueue(ClaimQueue, GainQueue):
    """See `ClaimQueue` and `GainQueue`. Every operation costs O(log n), a refund too."""

    @property
    def largest(self) -> int:
        """The maximal request by which a tenant may be ahead (`gain_queue`)."""
        return self._largest

    @property
    def has_urgent(self) -> bool:
        """See `GainQueue.has_urgent`."""
        return super().has_urgent or any(
            isinstance(ticket, GainTicket) and ticket.is_urgent for ticket in self.claimants.values()
        )

    def claim(self, ticket: Ticket, now_us: int) -> None:
        """See `ClaimQueue.claim`."""
        assert isinstance(ticket, GainTicket)
        ticket.stored_density = ticket.density
        lane = None if ticket.is_apart else self._lanes[ticket.tenant]
        self._is_known = False
        super().claim(ticket, now_us)
        ticket.is_claiming = True
        if ticket.placing.charge:
            ticket.start = ticket.placing.charged_from
        if lane is not None and lane.waiting:
            self._delay(lane)

    def go_back(self, ticket: Ticket) -> None:
        """See `ClaimQueue.go_back`. A ticket that claimed by gain is not the head before its time."""
        super().go_back(ticket)
        if ticket.placing.charge:
            ticket.start = ticket.placing.charged_from
            self._enter_heap(ticket)
            self._clean()

    def make_urgent(self, ticket: GainTicket, now_us: int) -> None:
        """See `GainQueue.make_urgent`. A claimant stands in no heap."""
        if ticket.is_claiming:
            ticket.is_urgent, ticket.stored_density = True, ticket.density_at(now_us)
        else:
            super().make_urgent(ticket, now_us)

    def _no_claimant(self, ticket: Ticket) -> None:
        assert isinstance(ticket, GainTicket)
        super()._no_claimant(ticket)
        ticket.is_claiming = False
        if ticket.gain is not None:
            self.cost_us -= ticket.gain.cost_us

    def _leave_lane(self, ticket: Ticket) -> None:
        super()._leave_lane(ticket)
        if ticket.placing.is_back:  # `ClaimQueue` has it in no lane
            self._left_lane(ticket)

    def _reach(self, ticket: Ticket) -> None:  # noqa: ARG002  # whichever leaves, the first start of all counts
        self._virtual = self._now()

    def _first_start(self, ticket: Ticket, lane: Lane) -> float:  # noqa: ARG002  # it may be any of its lane
        assert isinstance(lane, GainLane)
        assert lane.first is not None
        return lane.first.start

    def _refund(self, ticket: Ticket) -> None:
        """See `ClaimQueue._refund`. The lane is not ahead any more, where the claim had made it so."""
        placing, lane = ticket.placing, self._lanes.get(ticket.tenant)
        if lane is None or lane.finish != placing.charge:
            return
        lane.finish = placing.charged_from
        self._is_known = False
        first = lane.first
        start = max(self._virtual, lane.finish)
        if lane.waiting and first is not None and start < first.start:
            self._start_at(first, start)
            self._clean()
        if lane.is_aside:
            self._bring_back(lane)

    def _new_lane(self, tenant: str) -> GainLane:
        return GainQueue._new_lane(self, tenant)

    def _drop_gone(self) -> None:
        self._clean()
