"""Start-time fair queueing over the tenants of one tier.

Source: Goyal, Vin, Cheng, "Start-time Fair Queueing" (SIGCOMM 1996). A ticket is tagged when it arrives:
`start = max(V, finish of its tenant's ticket before it)` and `finish = start + tokens / weight`, where V, the tier's
virtual time, is the start tag of the ticket admitted last. The head is the smallest start tag; equal tags go by
arrival. Tags start afresh when nobody of the tier waits.

Bound (theorem 1 there): over any interval in which two tenants wait, the tokens admitted for them, each divided by its
weight, differ by at most one maximal ticket of each, divided by its weight.

Tags are doubles, and one addition and one division make each, so that Lua computes the very same ones. A ticket that
leaves the queue stays charged to its tenant until the tags start afresh. A tenant whose finish V has passed needs no
memory, so a tier that is never empty remembers no more tenants than wait or are ahead of V.

A tenant's tickets are tagged in the order in which they arrive, so they stand in a lane, a linked list, and only the
first of each lane is in the heap: what one operation costs depends on how many tenants wait, not on how many tickets.

A ticket that was preempted comes back to the front: it starts at V, which no ticket that waits is ahead of, and is
older than those that start there. Its tenant was charged for it when it first came. It stands in no lane.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from sidecar.scheduling.ticket import Ticket

SPARE_ENTRIES = 64
"""Entries of what is long gone (tickets, tenants) that are allowed beyond the live ones before they are swept out."""


class Lane:
    """One tenant: the finish tag of its latest ticket, and the last of its tickets that wait."""

    __slots__ = ("finish", "last")

    def __init__(self) -> None:
        self.finish = 0.0
        self.last: Ticket | None = None


class FairQueue:
    """The waiting tickets of one tier. Every operation costs O(log tenants), amortized."""

    __slots__ = ("_heap", "_lanes", "_lanes_limit", "_returned", "_virtual", "count", "tokens")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Ticket]] = []  # the first of every lane; its own first entry always waits
        self._lanes: dict[str, Lane] = {}
        self._lanes_limit = SPARE_ENTRIES
        self._virtual = 0.0
        self._returned = 0
        self.count = 0
        self.tokens = 0

    def push(self, ticket: Ticket) -> None:
        """Tags a ticket and puts it in."""
        lane = self._lanes.get(ticket.tenant) or self._open_lane(ticket.tenant)
        ticket.start = max(self._virtual, lane.finish)
        ticket.queued = True
        lane.finish = ticket.start + ticket.tokens / ticket.weight
        self.count += 1
        self.tokens += ticket.tokens
        if lane.last is None:
            heappush(self._heap, (ticket.start, ticket.sequence, ticket))
        else:
            lane.last.behind = ticket
            ticket.ahead = lane.last
        lane.last = ticket

    def put_back(self, ticket: Ticket) -> None:
        """Puts a ticket that was preempted to the front."""
        ticket.start = self._virtual
        ticket.queued = True
        self._returned += 1
        self.count += 1
        self.tokens += ticket.tokens
        heappush(self._heap, (ticket.start, ticket.sequence, ticket))

    def head(self) -> Ticket | None:
        """The ticket that is next, None where nobody waits."""
        return self._heap[0][2] if self._heap else None

    def admit(self, ticket: Ticket) -> None:
        """Takes the head out: the tier's virtual time moves on to it."""
        self._virtual = ticket.start
        self.remove(ticket)

    def remove(self, ticket: Ticket) -> None:
        """Takes any waiting ticket out. A first one's entry stays in the heap until it surfaces or is swept out."""
        self.count -= 1
        self.tokens -= ticket.tokens
        self._leave_lane(ticket)
        if not self.count:
            self._start_afresh()
            return
        while not self._heap[0][2].queued:
            heappop(self._heap)
        if len(self._heap) > 2 * (len(self._lanes) + self._returned) + SPARE_ENTRIES:
            self._heap = [entry for entry in self._heap if entry[2].queued]
            heapify(self._heap)

    def _open_lane(self, tenant: str) -> Lane:
        if len(self._lanes) >= self._lanes_limit:
            self._forget_finished()
        lane = self._lanes[tenant] = Lane()
        return lane

    def _leave_lane(self, ticket: Ticket) -> None:
        if ticket.preemptions:
            ticket.queued = False
            self._returned -= 1
            return
        ahead, behind = ticket.ahead, ticket.behind
        ticket.queued, ticket.ahead, ticket.behind = False, None, None
        if behind is None:
            self._lanes[ticket.tenant].last = ahead
        else:
            behind.ahead = ahead
        if ahead is not None:
            ahead.behind = behind
        elif behind is not None:
            heappush(self._heap, (behind.start, behind.sequence, behind))

    def _forget_finished(self) -> None:
        """Drops the tenants of whom nobody waits and whose next ticket starts at V anyway."""
        self._lanes = {
            tenant: lane for tenant, lane in self._lanes.items() if lane.last is not None or lane.finish > self._virtual
        }
        self._lanes_limit = 2 * len(self._lanes) + SPARE_ENTRIES

    def _start_afresh(self) -> None:
        self._heap.clear()
        self._lanes.clear()
        self._lanes_limit = SPARE_ENTRIES
        self._virtual = 0.0
