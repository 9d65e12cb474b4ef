"""Rule 10, by gain: the best of the tickets of one tier that are not shown."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import islice

from sidecar.scheduling.queue import FairQueue
from sidecar.scheduling.tickets import Ticket

MOST_LOOKS = 64
"""So many tickets are looked at in one search; the next goes on. It bounds the time of one call."""


TENANTS_LOOKED_AT = 8
"""So many tenants, or users, that were ahead are looked at in one search, in turn: they may be so no more."""


class BestByGain:
    """A heap by what tickets of `queue` earned when they were looked at last: with time they earn only less.

    Entries of those that left the queue are dropped when they come up. When they may be the most, what is left moves
    from an `old` heap, four entries a push.
    """

    def __init__(self, queue: FairQueue) -> None:
        self._queue = queue
        self._heap: list[tuple[int, tuple[int, str, int], int, Ticket]] = []
        self._old: list[tuple[int, tuple[int, str, int], int, Ticket]] = []
        self._pushes = 0
        self._ahead: dict[tuple[str, str | None], list[Ticket]] = {}

    def __bool__(self) -> bool:
        return bool(self._heap or self._old or self._ahead)

    def add(self, ticket: Ticket) -> None:
        """One that is not shown from now on."""
        if ticket.gain is not None:
            self._push(ticket, ticket.gain.earned_after(0))

    def find(self, now_us: int, is_ahead: Callable[[Ticket], bool]) -> Ticket | None:
        """The best that earns something, and whose tenant and user are not ahead."""
        for who in [*islice(self._ahead, TENANTS_LOOKED_AT)]:
            tickets = self._ahead.pop(who)
            for _ in range(0 if is_ahead(tickets[0]) else min(len(tickets), MOST_LOOKS)):
                self.add(tickets.pop())
            if tickets:
                self._ahead[who] = tickets
        for _ in range(MOST_LOOKS):
            heap = min((heap for heap in (self._heap, self._old) if heap), default=None)
            if heap is None:
                break
            less, _, _, ticket = heap[0]
            earned = ticket.earned(now_us)
            waits = earned > 0 and ticket in self._queue
            is_behind = waits and is_ahead(ticket)
            if waits and earned == -less and not is_behind:
                return ticket
            heapq.heappop(heap)
            if is_behind:
                self._ahead.setdefault((ticket.tenant, ticket.user), []).append(ticket)
            elif waits:
                self._push(ticket, earned)
        return None

    def _push(self, ticket: Ticket, earned: int) -> None:
        if not self._old and len(self._heap) > 2 * len(self._queue) + MOST_LOOKS:
            self._old, self._heap = self._heap, []
        for _ in range(min(4, len(self._old))):
            entry = self._old.pop()
            if entry[3] in self._queue:
                heapq.heappush(self._heap, entry)
        self._pushes += 1
        heapq.heappush(self._heap, (-earned, ticket.arrival, self._pushes, ticket))
