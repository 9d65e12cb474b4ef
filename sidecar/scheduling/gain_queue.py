"""The queue of one tier that is ordered by gain: a fair queue that also knows the ticket which earns most.

Every ticket stands in its tenant's lane of the fair queue (`fair_queue`). A ticket with figures stands in one of two
heaps of its lane, too: by deadline, or by density once it is urgent. Two heaps of the tier have the first of every
lane. So the best ticket is found in O(log n), whatever waits, and no ticket is out of sight.

Fairness. Tickets leave in any order here, so the tags of `fair_queue` are kept differently in three places. The virtual
time V is the smallest start of all tenants that wait (one that is served often must not move it, and a ticket that
returned must not hold it). A tenant is charged from
the start of its first ticket, whichever of its tickets is admitted, and the start of its first ticket rises with that.
A tenant is *ahead* while its finish is beyond V by more than two maximal requests, divided by its weight: the maximal
request is the largest since the queue was empty, rounded up to a power of two. Then its lane is set aside: its tickets
are admitted in fair order only, until V has come closer. Of tenants that wait together none is ahead of itself alone,
so at least one lane is never aside. A ticket that returned was paid for when it was first admitted. It is in a lane of
its own, which is never aside.

Entries of tickets that are gone or have changed stay in their heaps until they surface, or are swept out.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace

from sidecar.scheduling.fair_queue import SPARE_ENTRIES, Entry, FairQueue, Lane
from sidecar.scheduling.gain import GainTicket
from sidecar.scheduling.ticket import Ticket

Place = tuple[int, int, int, GainTicket, bool]
"""The deadline, or the density below zero; the arrival, the sequence, the ticket, and whether it had returned."""
_First = tuple[int, int, int, int, "GainLane"]
"""The same three of the first of a lane, the number of this entry, and the lane."""


class GainLane(Lane):
    """A lane whose tickets with figures are in two heaps, too. `first` is valid while any ticket waits in it.

    The two entries are the numbers of those that stand for it in the tier's heaps: others of it there count no more.
    """

    __slots__ = ("calm", "calm_entry", "first", "is_aside", "urgent", "urgent_entry")

    def __init__(self) -> None:
        super().__init__()
        self.first: Ticket | None = None
        self.calm_entry = 0
        self.urgent_entry = 0
        self.calm: list[Place] = []
        self.urgent: list[Place] = []
        self.is_aside = False

    def earliest(self) -> Place | None:
        """The ticket with the earliest deadline of those that are not urgent."""
        calm = self.calm
        while calm and not _is_calm(calm[0]):
            heappop(calm)
        return calm[0] if calm else None

    def densest(self) -> Place | None:
        """The densest urgent ticket, by what was last computed."""
        urgent = self.urgent
        while urgent and not _is_urgent(urgent[0]):
            heappop(urgent)
        return urgent[0] if urgent else None


def _is_calm(place: Place) -> bool:
    ticket = place[3]
    return ticket.queued and not ticket.is_urgent and ticket.is_apart is place[4]


def _is_urgent(place: Place) -> bool:
    ticket = place[3]
    return ticket.queued and place[0] == -ticket.density and ticket.is_apart is place[4]


class GainQueue(FairQueue):
    """See `FairQueue`. `cost_us` is what all waiting tickets with figures cost."""

    __slots__ = (
        "_aside", "_calm", "_densest", "_entries", "_firsts", "_gone", "_is_known", "_largest", "_returned_lane",
        "_urgent", "cost_us",
    )  # fmt: skip

    _lanes: dict[str, GainLane]  # type: ignore[assignment]  # made by `_new_lane`

    def __init__(self, small_tokens: int = 0, small_requests: int = 0) -> None:
        super().__init__(small_tokens, small_requests)
        self._forget_gain()

    def _forget_gain(self) -> None:
        self._calm: list[_First] = []
        self._urgent: list[_First] = []
        self._entries = 0
        self._firsts: list[Entry] = []  # of the lanes; the first entry stands
        self._aside: list[tuple[float, str]] = []
        self._returned_lane = GainLane()
        self._largest = 0
        self._gone = 0
        self._densest: Place | None = None  # where it is known
        self._is_known = False
        self.cost_us = 0

    # -- as a fair queue

    def change_sizes(self, small_tokens: int, small_requests: int) -> None:
        """See `FairQueue.change_sizes`."""
        super().change_sizes(small_tokens, small_requests)
        self._clean()

    def push(self, ticket: Ticket) -> None:
        """See `FairQueue.push`."""
        assert isinstance(ticket, GainTicket)
        known = self._lanes.get(ticket.tenant)
        weight = None if known is None else known.weight
        self._is_known = False
        super().push(ticket)
        if ticket.tokens > self._largest:
            self._largest = 1 << (ticket.tokens - 1).bit_length()
            self._bring_all_back()
        lane = self._lanes[ticket.tenant]
        if lane.is_aside and weight != ticket.weight:
            self._bring_back(lane)
        self._enter(ticket, lane)

    def put_back(self, ticket: Ticket) -> None:
        """See `FairQueue.put_back`."""
        assert isinstance(ticket, GainTicket)
        ticket.is_apart = True
        super().put_back(ticket)
        self._enter(ticket, self._returned_lane)

    def admit(self, ticket: Ticket) -> None:
        """Takes out a ticket that its tenant is charged for. See the module."""
        assert isinstance(ticket, GainTicket)
        lane = None if ticket.is_apart else self._lanes[ticket.tenant]
        self._virtual = self._now()
        if lane is not None:
            assert lane.first is not None
            lane.finish = max(lane.finish, lane.first.start) + ticket.tokens / ticket.weight
        self.remove(ticket)
        if lane is not None and lane.waiting and self.count:
            self._delay(lane)

    def charge(self, tenant: str, weight: int, tokens: int) -> None:
        """See `FairQueue.charge`. The first ticket that waits starts later, too."""
        if not self.count:
            return
        self._is_known = False
        super().charge(tenant, weight, tokens)
        lane = self._lanes[tenant]
        if lane.waiting:
            self._delay(lane)

    def remove(self, ticket: Ticket) -> None:
        """See `FairQueue.remove`."""
        assert isinstance(ticket, GainTicket)
        if ticket.gain is not None:
            self.cost_us -= ticket.gain.cost_us
            self._gone += 1
        self._is_known = False
        super().remove(ticket)
        self._clean()
        if self._gone > 2 * self.count + SPARE_ENTRIES:
            self._sweep_gain()

    def _new_lane(self) -> GainLane:
        return GainLane()

    def _tag(self, first: Ticket, lane: Lane) -> None:
        assert isinstance(lane, GainLane)
        lane.first = first
        super()._tag(first, lane)
        heappush(self._firsts, (first.start, first.sequence, first))

    def _delay(self, lane: GainLane) -> None:
        """The first ticket of a lane that was charged starts where its tenant's finish is."""
        first = lane.first
        assert first is not None
        start = max(self._virtual, lane.finish)
        if start > first.start:
            self._start_at(first, start)

    def _start_at(self, first: Ticket, start: float) -> None:
        """The first ticket of a lane starts at another time."""
        first.start = start
        self._enter_heap(first)
        heappush(self._firsts, (start, first.sequence, first))
        self._clean()

    def _clean(self) -> None:
        """The first entries of the fair queue's heaps are tickets that wait, with the start that they have."""
        for heap in (self._small, self._large):
            while heap and not _stands(heap[0]):
                heappop(heap)
        firsts = self._firsts
        while firsts and not _stands_in_lane(firsts[0]):
            heappop(firsts)
        if len(firsts) > 2 * len(self._lanes) + SPARE_ENTRIES:
            self._firsts = [entry for entry in firsts if _stands_in_lane(entry)]
            heapify(self._firsts)
        if len(self._small) + len(self._large) > 2 * (len(self._lanes) + self._returned) + SPARE_ENTRIES:
            self._sweep()

    @staticmethod
    def _live(heap: list[Entry]) -> Iterator[Entry]:
        return (entry for entry in heap if _stands(entry))

    def _start_afresh(self) -> None:
        super()._start_afresh()
        self._forget_gain()

    # -- by gain

    @property
    def has_urgent(self) -> bool:
        """Whether any urgent ticket waits that earns something, of tenants that are not ahead."""
        return self.densest() is not None

    def appraise(self, ticket: GainTicket) -> None:
        """A ticket that was just put in has its figures now."""
        self._enter(ticket, self._returned_lane if ticket.is_apart else self._lanes[ticket.tenant])

    def best(self) -> GainTicket | None:
        """The densest urgent ticket, or else the one with the earliest deadline, of tenants that are not ahead."""
        place = self.densest() or self.earliest()
        return None if place is None else place[3]

    def densest(self) -> Place | None:
        """The densest urgent ticket of tenants that are not ahead, by what was last computed."""
        if not self._is_known:
            if self._aside:
                self._look_aside()
            self._densest = self._first_urgent()
            self._is_known = True
        return self._densest

    def earliest(self) -> Place | None:
        """The ticket with the earliest deadline of those that are not urgent, of tenants that are not ahead. Call it
        after `densest`.
        """
        return self._first_calm()

    def renew(self, place: Place, density: int) -> None:
        """The densest ticket has another density, a lower one."""
        ticket = place[3]
        ticket.density = density
        self._is_known = False
        lane = self._returned_lane if ticket.is_apart else self._lanes[ticket.tenant]
        if density:
            heapreplace(lane.urgent, (-density, *place[1:]))
        else:
            heappop(lane.urgent)

    def make_urgent(self, ticket: GainTicket, now_us: int) -> None:
        """A waiting ticket is ordered by its density from now on."""
        ticket.is_urgent = True
        ticket.density = ticket.density_at(now_us)
        lane = self._returned_lane if ticket.is_apart else self._lanes[ticket.tenant]
        self._enter_urgent(self._urgent_place(ticket), lane)

    def is_ahead(self, ticket: GainTicket) -> bool:
        """Whether a waiting ticket is of a tenant that is ahead: it is admitted in fair order only."""
        if ticket.is_apart:
            return False
        lane = self._lanes[ticket.tenant]
        return self._now() < self._near(lane)

    def _now(self) -> float:
        """V, as the next admission makes it."""
        return max(self._virtual, self._firsts[0][0]) if self._firsts else self._virtual

    def _near(self, lane: GainLane) -> float:
        """The virtual time from which on a lane is not ahead."""
        return lane.finish - 2 * self._largest / lane.weight

    @staticmethod
    def _urgent_place(ticket: GainTicket) -> Place:
        return -ticket.density, ticket.arrived_us, ticket.sequence, ticket, ticket.is_apart

    def _enter(self, ticket: GainTicket, lane: GainLane) -> None:
        if ticket.gain is None:
            return
        self.cost_us += ticket.gain.cost_us
        self._is_known = False
        if ticket.is_urgent:
            self._enter_urgent(self._urgent_place(ticket), lane)
            return
        place = (ticket.deadline_us, ticket.arrived_us, ticket.sequence, ticket, ticket.is_apart)
        heappush(lane.calm, place)
        if lane.calm[0] is place and not lane.is_aside:
            heappush(self._calm, self._calm_first(place, lane))

    def _enter_urgent(self, place: Place, lane: GainLane) -> None:
        if not place[3].density:  # it can earn nothing any more: the fair order has it
            return
        self._is_known = False
        heappush(lane.urgent, place)
        if lane.urgent[0] is place and not lane.is_aside:
            heappush(self._urgent, self._urgent_first(place, lane))

    def _calm_first(self, place: Place, lane: GainLane) -> _First:
        self._entries = lane.calm_entry = self._entries + 1
        return (*place[:3], self._entries, lane)

    def _urgent_first(self, place: Place, lane: GainLane) -> _First:
        self._entries = lane.urgent_entry = self._entries + 1
        return (*place[:3], self._entries, lane)

    def _first_urgent(self) -> Place | None:
        """The densest of the first tickets of all lanes that are not ahead. Decisions call it, so it calls little."""
        heap, now = self._urgent, self._now()
        while heap:
            key, _, sequence, number, lane = heap[0]
            if lane.is_aside or number != lane.urgent_entry:
                heappop(heap)
                continue
            urgent = lane.urgent
            first = urgent[0] if urgent and _is_urgent(urgent[0]) else lane.densest()
            if first is None:
                heappop(heap)
            elif first[0] != key or first[2] != sequence:
                heapreplace(heap, self._urgent_first(first, lane))
            elif lane is not self._returned_lane and now < self._near(lane):
                heappop(heap)
                self._set_aside(lane, first[3].tenant)
            else:
                return first
        return None

    def _first_calm(self) -> Place | None:
        """The one with the earliest deadline of the first tickets of all lanes that are not ahead."""
        heap, now = self._calm, self._now()
        while heap:
            key, _, sequence, number, lane = heap[0]
            if lane.is_aside or number != lane.calm_entry:
                heappop(heap)
                continue
            first = lane.earliest()
            if first is None:
                heappop(heap)
            elif first[0] != key or first[2] != sequence:
                heapreplace(heap, self._calm_first(first, lane))
            elif lane is not self._returned_lane and now < self._near(lane):
                heappop(heap)
                self._set_aside(lane, first[3].tenant)
            else:
                return first
        return None

    def _set_aside(self, lane: GainLane, tenant: str) -> None:
        lane.is_aside = True
        heappush(self._aside, (self._near(lane), tenant))

    def _look_aside(self) -> None:
        """Brings back the lanes that V has come close to."""
        now = self._now()
        while self._aside and self._aside[0][0] <= now:
            _, tenant = heappop(self._aside)
            lane = self._lanes.get(tenant)
            if lane is None or not lane.is_aside:
                continue
            if now < self._near(lane):
                heappush(self._aside, (self._near(lane), tenant))
            else:
                self._bring_back(lane)

    def _bring_back(self, lane: GainLane) -> None:
        lane.is_aside = False
        if (densest := lane.densest()) is not None:
            heappush(self._urgent, self._urgent_first(densest, lane))
        if (earliest := lane.earliest()) is not None:
            heappush(self._calm, self._calm_first(earliest, lane))

    def _bring_all_back(self) -> None:
        for _, tenant in self._aside:
            lane = self._lanes.get(tenant)
            if lane is not None and lane.is_aside:
                self._bring_back(lane)
        self._aside.clear()

    def _sweep_gain(self) -> None:
        """Drops the entries of tickets that are gone or have changed."""
        self._gone = 0
        lanes = [self._returned_lane, *self._lanes.values()]
        for lane in lanes:
            lane.calm = [place for place in lane.calm if _is_calm(place)]
            lane.urgent = [place for place in lane.urgent if _is_urgent(place)]
            heapify(lane.calm)
            heapify(lane.urgent)
        self._calm, self._urgent = [], []
        for lane in lanes:
            if not lane.is_aside:
                self._bring_back(lane)


def _stands(entry: Entry) -> bool:
    return entry[2].queued and entry[0] == entry[2].start


def _stands_in_lane(entry: Entry) -> bool:
    ticket = entry[2]
    assert isinstance(ticket, GainTicket)
    return ticket.queued and entry[0] == ticket.start and not ticket.is_apart
