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
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from sidecar.scheduling.ticket import Ticket

SPARE_ENTRIES = 64
"""Entries of what is long gone (tickets, tenants) that are allowed beyond the live ones before they are swept out."""


class FairQueue:
    """The waiting tickets of one tier. Every operation costs O(log n), amortized."""

    __slots__ = ("_finish", "_finish_limit", "_heap", "_virtual", "count", "tokens")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Ticket]] = []  # its first entry always waits
        self._finish: dict[str, float] = {}
        self._finish_limit = SPARE_ENTRIES
        self._virtual = 0.0
        self.count = 0
        self.tokens = 0

    def push(self, ticket: Ticket) -> None:
        """Tags a ticket and puts it in."""
        start = max(self._virtual, self._finish.get(ticket.tenant, 0.0))
        ticket.start = start
        ticket.queued = True
        self._finish[ticket.tenant] = start + ticket.tokens / ticket.weight
        self.count += 1
        self.tokens += ticket.tokens
        heappush(self._heap, (start, ticket.sequence, ticket))
        if len(self._finish) > self._finish_limit:
            self._forget_finished()

    def head(self) -> Ticket | None:
        """The ticket that is next, None where nobody waits."""
        return self._heap[0][2] if self._heap else None

    def admit(self, ticket: Ticket) -> None:
        """Takes the head out: the tier's virtual time moves on to it."""
        self._virtual = ticket.start
        self.remove(ticket)

    def remove(self, ticket: Ticket) -> None:
        """Takes any waiting ticket out. Its entry stays in the heap until it surfaces or there are too many such."""
        ticket.queued = False
        self.count -= 1
        self.tokens -= ticket.tokens
        if not self.count:
            self._start_afresh()
            return
        heap = self._heap
        while not heap[0][2].queued:
            heappop(heap)
        if len(heap) > 2 * self.count + SPARE_ENTRIES:
            self._heap = [entry for entry in heap if entry[2].queued]
            heapify(self._heap)

    def _forget_finished(self) -> None:
        """Drops the tenants whose next ticket starts at V anyway."""
        self._finish = {tenant: finish for tenant, finish in self._finish.items() if finish > self._virtual}
        self._finish_limit = 2 * len(self._finish) + SPARE_ENTRIES

    def _start_afresh(self) -> None:
        self._heap.clear()
        self._finish.clear()
        self._finish_limit = SPARE_ENTRIES
        self._virtual = 0.0
