"""The queue of one tier: start-time fair queueing over its tenants.

Source: Goyal, Vin, Cheng, "Start-time Fair Queueing" (SIGCOMM 1996); tickets are tagged and charged later here. A
ticket gets its start tag when it becomes the first of its tenant: `start = max(V, finish of its tenant)`, where V is
the tier's virtual time. Its tenant is charged when it is admitted: `finish = max(start, finish) + tokens / weight`,
and then `V = max(V, start)`. The head is the smallest start tag; equal tags go by arrival. Tags start afresh when no
ticket of the tier waits. So a ticket that leaves the queue costs its tenant nothing, however many leave.

Bound (theorem 1 there): over any interval in which two tenants wait, the tokens admitted for them, each divided by its
weight, differ by at most one maximal ticket of each, divided by its weight.

Tags are doubles, and one addition and one division make each, so that Lua computes the very same ones. A tenant whose
finish V has passed needs no memory: a tier that is never empty remembers only tenants that wait or are ahead of V.

The tickets of a tenant form a lane, a linked list in order of arrival. Only the first of each lane is in a heap: the
cost of one operation depends on how many tenants wait, not on how many tickets. There are two heaps, because a tier
that owes (see `scheduler`) admits tickets no larger than its reserve before a larger head: one for the tenants whose
first is no larger than the reserve, one for the others.

A full queue's places are shared as service is. A tenant's share of them is `places * weight / weights`, the weights
being those of all tenants that wait. A newcomer whose tenant would still be within its share takes the place of the
newest ticket of the tenant that is furthest above its own (`displaced`). So a flood fills only the part of the queue
that the others leave. A queue of very many tenants keeps them by how many tickets they have (`tenants_by_use`).

A lease may come to use more than it was admitted with. Its tenant is charged for that, too (`charge`); else a tenant of
many short answers and a few very long ones would get far more than its share. Nothing is given back for a lease that
becomes smaller: what it held, no one else could use.

A ticket that returns (it was preempted, or no engine took it) starts at V, or with the head where that starts before V:
small tickets have passed it then. So no ticket that came later is before one that returned. Its tenant was charged when
it was first admitted. It stands in no lane.

No operation takes long, however many tenants wait: entries and tenants that are gone are swept out in slices
(`heaps`). Where the reserve changes, the tickets are sorted anew into small and large ones, a part with every
operation. The head is known meanwhile, but not the first small ticket: none passes a larger head until they are sorted.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import Any

from sidecar.scheduling.heaps import Sweep
from sidecar.scheduling.tenants_by_use import SEARCHED, TenantsByUse
from sidecar.scheduling.ticket import Ticket

SPARE_ENTRIES = 64
"""Entries of tickets and tenants that are gone, allowed beyond the live ones before they are swept out."""
SORTED_AT_ONCE = 128
"""Entries that one operation sorts anew into small and large ones: some 0.1 ms."""
FREED_AT_ONCE = 64
"""Entries and tenants of an earlier queue that a ticket which comes frees: some 20 us."""
LANES_LOOKED_AT = 4
"""Tenants that one which comes or is forgotten looks at, in turn: those that need no memory are forgotten."""

Entry = tuple[float, int, Ticket]


class Lane:
    """One tenant: the finish tag of its latest admission, how many of its tickets wait, and the last of them.

    `weight` is that of the ticket that came last.
    """

    __slots__ = ("finish", "last", "tenant", "waiting", "weight")

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.finish = 0.0
        self.last: Ticket | None = None
        self.waiting = 0
        self.weight = 0


class LaneWithFirst(Lane):
    """A lane that knows its first ticket: what it says is valid while any waits in it."""

    __slots__ = ("first",)

    def __init__(self, tenant: str) -> None:
        super().__init__(tenant)
        self.first: Ticket | None = None


class FairQueue:
    """The waiting tickets of one tier. Every operation costs O(log tenants), amortized.

    A ticket is small when it needs no more than `small_tokens` and `small_requests`, its tier's reserve.
    """

    __slots__ = (
        "_busy",
        "_by_use",
        "_lanes",
        "_lanes_in_turn",
        "_large",
        "_left_over",
        "_returned",
        "_small",
        "_sweeps",
        "_unsorted",
        "_virtual",
        "_weights",
        "count",
        "requests",
        "small_requests",
        "small_tokens",
        "tokens",
    )

    def __init__(self, small_tokens: int = 0, small_requests: int = 0) -> None:
        self._small: list[Entry] = []  # the first of a lane, or one that returned; the first entry always waits
        self._large: list[Entry] = []
        self._unsorted: list[list[Entry]] = []  # heaps of both kinds
        self._sweeps = Sweep(), Sweep()
        self._left_over: list[list[Any] | dict[str, Any] | deque[Any]] = []  # of a long queue that is empty now
        self._lanes: dict[str, Lane] = {}
        self._lanes_in_turn: deque[Lane] = deque()  # in the order in which they are looked at; some are gone
        self._virtual = 0.0
        self._returned = 0
        self._busy = 0  # tenants that wait
        self._weights = 0  # of all of them
        self._by_use: TenantsByUse | None = None  # of a queue that has had very many tenants
        self.count = 0
        self.tokens = self.requests = 0
        self.small_tokens = small_tokens
        self.small_requests = small_requests

    def change_sizes(self, small_tokens: int, small_requests: int) -> None:
        """The tier has another reserve. Where many tenants wait, call `sort_some` until nothing `is_unsorted`."""
        if (small_tokens, small_requests) == (self.small_tokens, self.small_requests):
            return
        self.small_tokens, self.small_requests = small_tokens, small_requests
        self._unsorted += [heap for heap in (self._small, self._large) if heap]
        self._small, self._large = [], []
        self.sort_some()

    @property
    def is_unsorted(self) -> bool:
        """Whether the tickets are still being sorted into small and large ones."""
        return bool(self._unsorted)

    def sort_some(self) -> None:
        """Sorts the next entries. They are taken from the end of a heap, so that it stays one."""
        heaps = self._unsorted
        for _ in range(SORTED_AT_ONCE):
            if not heaps:
                return
            entry = heaps[-1].pop()
            if not heaps[-1]:
                heaps.pop()
            if self._counts(entry):
                heappush(self._small if self.is_small(entry[2]) else self._large, entry)

    def is_small(self, ticket: Ticket) -> bool:
        """Whether a ticket is no larger than the tier's reserve."""
        return ticket.tokens <= self.small_tokens and ticket.requests <= self.small_requests

    def push(self, ticket: Ticket) -> None:
        """Puts a ticket in, as the last of its tenant."""
        lane = self._lanes.get(ticket.tenant)
        if lane is None:
            lane = self._add_lane(ticket.tenant)
        if self._unsorted:
            self.sort_some()
        if self._left_over:
            self._free_some()
        ticket.queued = True
        self.count += 1
        self.tokens += ticket.tokens
        self.requests += ticket.requests
        if lane.last is None:
            self._busy += 1
            self._tag(ticket, lane)
        else:
            lane.last.next = ticket
            ticket.previous = lane.last
        lane.last = ticket
        if self._by_use is not None:
            self._by_use.change(lane.tenant, lane.weight, lane.waiting, ticket.weight, lane.waiting + 1)
        self._weights += ticket.weight - (lane.weight if lane.waiting else 0)
        lane.weight = ticket.weight
        lane.waiting += 1

    def put_back(self, ticket: Ticket) -> None:
        """Puts a ticket that returns in, behind none that came later."""
        head = self.head()
        ticket.start = self._virtual if head is None else min(self._virtual, head.start)
        ticket.queued = True
        self._returned += 1
        self.count += 1
        self.tokens += ticket.tokens
        self.requests += ticket.requests
        self._enter_heap(ticket)

    def head(self) -> Ticket | None:
        """The ticket that is next, None where none waits."""
        if self._unsorted:
            return min(heap[0] for heap in self._heaps() if heap)[2]
        if not self._large:
            return self._small[0][2] if self._small else None
        if not self._small:
            return self._large[0][2]
        return min(self._small[0], self._large[0])[2]

    def small_head(self) -> Ticket | None:
        """The next of the tickets that are the first of their tenant and no larger than the reserve. None while they
        are being sorted.
        """
        return self._small[0][2] if self._small and not self._unsorted else None

    def is_within_share(self, tenant: str, weight: int, places: int, promised: int = 0) -> bool:
        """Whether one more ticket of a tenant, with the places `promised` to it, is within its share of all places."""
        waiting, weights = self._with(tenant, weight)
        return (waiting + promised + 1) * weights <= places * weight

    def displaced(self, tenant: str, weight: int, places: int) -> Ticket | None:
        """The ticket whose place a newcomer takes. None where its tenant would be above its share, or no other is.

        Of tenants equally far above theirs the first by name gives its place.
        """
        if not self.is_within_share(tenant, weight, places):
            return None
        _, weights = self._with(tenant, weight)
        if self._by_use is not None:
            furthest = self._by_use.furthest_above(weights, places)
            return None if furthest is None else self._lanes[furthest].last
        excess, name = 0, ""
        for other, lane in self._lanes.items():
            own = places * lane.weight - lane.waiting * weights
            if own <= excess and lane.waiting and (own < excess or other < name):
                excess, name = own, other
        return self._lanes[name].last if excess < 0 else None

    def _with(self, tenant: str, weight: int) -> tuple[int, int]:
        """How many tickets of a tenant wait, and the weights of all that wait and of the tenant."""
        lane = self._lanes.get(tenant)
        if lane is None or not lane.waiting:
            return 0, self._weights + weight
        return lane.waiting, self._weights + weight - lane.weight

    def admit(self, ticket: Ticket) -> None:
        """Takes out a ticket that its tenant is charged for: the tier's virtual time moves on to its start."""
        if self.count > 1:  # otherwise the tags start afresh
            start = ticket.start
            if start > self._virtual:  # noqa: PLR1730  # `max` is one call more
                self._virtual = start
            if not ticket.returns:
                lane = self._lanes[ticket.tenant]
                # Where its tenant was charged since the ticket became the first, the finish is beyond its start.
                if lane.finish < start:  # noqa: PLR1730
                    lane.finish = start
                lane.finish += ticket.tokens / ticket.weight
        self.remove(ticket)

    def charge(self, tenant: str, weight: int, tokens: int) -> None:
        """A lease of a tenant uses so many tokens more than its tenant was charged for: its next tickets start later.

        The first that waits keeps its start. Nothing changes where no ticket of the tier waits: the tags start afresh.
        """
        if not self.count:
            return
        lane = self._lanes.get(tenant)
        if lane is None:
            lane = self._add_lane(tenant)
        lane.finish = max(self._virtual, lane.finish) + tokens / weight

    def remove(self, ticket: Ticket) -> None:
        """Takes any waiting ticket out. The entry of a first one stays in its heap until it surfaces or is swept."""
        self.count -= 1
        self.tokens -= ticket.tokens
        self.requests -= ticket.requests
        if not self.count:
            ticket.queued = False
            self._start_afresh()
            return
        self._leave_lane(ticket)
        self._drop_gone()

    def __len__(self) -> int:
        """Everything that is remembered: entries of the heaps, and tenants."""
        return sum(map(len, self._heaps())) + len(self._lanes)

    def _heaps(self) -> list[list[Entry]]:
        return [self._small, self._large, *self._unsorted]

    def _new_lane(self, tenant: str) -> Lane:
        return Lane(tenant)

    def _tag(self, first: Ticket, lane: Lane) -> None:
        first.start = max(self._virtual, lane.finish)
        self._enter_heap(first)

    def _enter_heap(self, ticket: Ticket) -> None:
        is_small = ticket.tokens <= self.small_tokens and ticket.requests <= self.small_requests
        heappush(self._small if is_small else self._large, (ticket.start, ticket.sequence, ticket))

    def _leave_lane(self, ticket: Ticket) -> None:
        if ticket.returns:
            ticket.queued = False
            self._returned -= 1
            return
        previous, following = ticket.previous, ticket.next
        ticket.queued, ticket.previous, ticket.next = False, None, None
        lane = self._lanes[ticket.tenant]
        lane.waiting -= 1
        if self._by_use is not None:
            self._by_use.change(lane.tenant, lane.weight, lane.waiting + 1, lane.weight, lane.waiting)
        if not lane.waiting:
            self._busy -= 1
            self._weights -= lane.weight
            if lane.finish <= self._virtual:
                del self._lanes[ticket.tenant]
                self._forget_lanes()
        if following is None:
            lane.last = previous
        else:
            following.previous = previous
        if previous is not None:
            previous.next = following
        elif following is not None:
            self._tag(following, lane)

    def _free_some(self) -> None:
        for _ in range(FREED_AT_ONCE):
            if not self._left_over:
                return
            things = self._left_over[-1]
            if not things:
                self._left_over.pop()
            elif isinstance(things, dict):
                things.popitem()
            else:
                things.pop()

    def _drop_gone(self) -> None:
        """The first entry of each heap always waits. Of the others some that are gone are swept out."""
        if self._unsorted:
            self._drop_unsorted()
        for heap in (self._small, self._large):
            while heap and not heap[0][2].queued:
                heappop(heap)
        if len(self._small) + len(self._large) > 2 * (self._busy + self._returned) + SPARE_ENTRIES:
            self._sweep()

    def _drop_unsorted(self) -> None:
        self.sort_some()
        for heap in self._unsorted:
            while heap and not self._counts(heap[0]):
                heappop(heap)
        self._unsorted = [heap for heap in self._unsorted if heap]

    def _sweep(self) -> None:
        for sweep, heap in zip(self._sweeps, (self._small, self._large), strict=True):
            sweep.some(heap, self._counts)

    @staticmethod
    def _counts(entry: Entry) -> bool:
        """Whether an entry of the heaps stands for a ticket that waits."""
        return entry[2].queued

    def _add_lane(self, tenant: str) -> Lane:
        if len(self._lanes_in_turn) >= SPARE_ENTRIES:
            self._forget_lanes()
        if self._by_use is None and len(self._lanes) == SEARCHED:
            self._by_use = TenantsByUse()
            for other in self._lanes.values():
                self._by_use.change(other.tenant, 0, 0, other.weight, other.waiting)
        lane = self._lanes[tenant] = self._new_lane(tenant)
        self._lanes_in_turn.append(lane)
        return lane

    def _forget_lanes(self) -> None:
        """Drops lanes without waiting tickets whose next ticket would start at V anyway: of the next few in turn."""
        lanes, in_turn = self._lanes, self._lanes_in_turn
        for _ in range(min(LANES_LOOKED_AT, len(in_turn))):
            lane = in_turn.popleft()
            if lane.last is not None or lane.finish > self._virtual:
                in_turn.append(lane)
            elif lanes.get(lane.tenant) is lane:
                del lanes[lane.tenant]

    def _start_afresh(self) -> None:
        """Forgets all. Where that is much, the tickets that come free it: to free very many at once takes long."""
        if len(self) + len(self._lanes_in_turn) > FREED_AT_ONCE:
            self._left_over += [*self._heaps(), self._lanes, self._lanes_in_turn]
            if self._by_use is not None:
                self._left_over += self._by_use.parts()
            self._small, self._large, self._unsorted, self._lanes, self._lanes_in_turn = [], [], [], {}, deque()
        else:
            self._small.clear()
            self._large.clear()
            self._unsorted.clear()
            self._lanes.clear()
            self._lanes_in_turn.clear()
        self._by_use = None
        self._virtual = 0.0
        self._returned = self._busy = self._weights = 0
