"""The queue of one tier that is ordered by gain: a fair queue that also knows the ticket which earns most.

Every ticket stands in its tenant's lane of the fair queue (`fair_queue`). A ticket with figures that can earn something
has a place in a heap of its lane, too: by its deadline, or by its density below zero once it is urgent. So urgent
tickets come first there. A heap of the tier has the first place of every lane. So the best ticket is found in
O(log n), whatever waits, and no ticket is out of sight.

A place is one whole number: a heap of 100,000 is far larger than the processor's cache, and a heap of tuples costs it
three times as many misses.

Fairness. Tickets leave in any order here, so the tags of `fair_queue` are kept differently in three places. The virtual
time V is the smallest start of all tenants that wait (one that is served often must not move it, and a ticket that
returned must not hold it). A tenant is charged from
the start of its first ticket, whichever of its tickets is admitted, and the start of its first ticket rises with that.
A tenant is *ahead* while its finish is beyond V by more than two maximal requests, divided by its weight: the maximal
request is the largest since the queue was empty, rounded up to a power of two. Then its lane is set aside: its tickets
are admitted in fair order only, until V has come closer. Where V comes close to very many at one time, they come back a
part at a time, the nearest first. When the maximal request grows, the nearest 32 are looked at again at once. For the
others the old one counts as long as they are aside: they lose their order by gain for longer, but no place in fair
order. Of tenants that wait together none is ahead of itself alone, so at least one lane is never aside. A ticket that
returned was paid for when it was first admitted. It is in a lane of its own, which is never aside.

Entries of tickets that are gone or have changed stay in their heaps until they surface, or are swept out: no heap is
much more than twice as long as what it is for.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace

from sidecar.scheduling.fair_queue import FREED_AT_ONCE, SPARE_ENTRIES, Entry, FairQueue, Lane, LaneWithFirst
from sidecar.scheduling.gain import ARRIVAL_SHIFT, KEY_SHIFT, SEQUENCE_SHIFT, SLOT_BITS, GainTicket, Place, density
from sidecar.scheduling.heaps import Sweep
from sidecar.scheduling.ticket import Ticket

_SLOT = (1 << SLOT_BITS) - 1
SPARE_PLACES = 16
"""Places of tickets that are gone, allowed in a lane beyond the live ones before they are swept out."""
BROUGHT_BACK = 64
"""Lanes that one look at the best ticket brings back from aside: some 0.1 ms."""
LOOKED_AT_AGAIN = 32
"""Lanes aside that are looked at again when the largest request grows."""


class GainLane(LaneWithFirst):
    """A lane whose tickets with figures are in a heap, too.

    `best` is its first place, which stands for it in the tier's heap: others of it there count no more. None while it
    is aside, and while it has no places. `gone` stands for every ticket that has left one of its places: that
    one may be in another lane by now.
    """

    __slots__ = ("best", "gone", "is_aside", "near", "places")

    def __init__(self, tenant: str = "") -> None:
        super().__init__(tenant)
        self.best: Place | None = None
        self.gone: GainTicket | None = None
        self.places: list[Place] = []
        self.is_aside = False
        self.near = 0.0  # the virtual time from which on it was not ahead, when it was set aside


class GainQueue(FairQueue):
    """See `FairQueue`. `cost_us` is what all waiting tickets with figures cost.

    All its tickets are GainTickets. Every decision calls some of its methods several times, so they call little.
    """

    __slots__ = (
        "_aside", "_best", "_bests", "_firsts", "_is_known", "_largest", "_returned_lane", "_slots", "_sweep_aside",
        "_sweep_bests", "_sweep_firsts", "_unused", "cost_us",
    )  # fmt: skip

    _lanes: dict[str, GainLane]  # type: ignore[assignment]  # made by `_new_lane`

    def __init__(self, small_tokens: int = 0, small_requests: int = 0) -> None:
        super().__init__(small_tokens, small_requests)
        self._forget_gain()

    def _forget_gain(self) -> None:
        self._slots: list[GainTicket] = []  # of the places in the heaps of all lanes, each its ticket
        self._unused: list[int] = []  # slots
        self._bests: list[Place] = []  # of the lanes that are not aside
        self._firsts: list[Entry] = []  # of the lanes; the first entry stands
        self._sweep_firsts, self._sweep_bests, self._sweep_aside = Sweep(), Sweep(), Sweep()
        self._aside: list[tuple[float, str]] = []
        self._returned_lane = GainLane()
        self._largest = 0
        self._best: Place | None = None  # where it is known
        self._is_known = False
        self.cost_us = 0

    # -- as a fair queue

    def change_sizes(self, small_tokens: int, small_requests: int) -> None:
        """See `FairQueue.change_sizes`."""
        super().change_sizes(small_tokens, small_requests)
        self._clean()

    def push(self, ticket: Ticket) -> None:
        """See `FairQueue.push`. Its figures come later, with `appraise`."""
        lane = self._lanes.get(ticket.tenant)
        if lane is None:
            self._is_known = False  # V may be smaller now
            super().push(ticket)
            lane = self._lanes[ticket.tenant]
        else:
            weight, waiting = lane.weight, lane.waiting
            super().push(ticket)
            if not waiting or weight != ticket.weight:
                self._is_known = False
            if lane.is_aside and weight != ticket.weight:
                self._bring_back(lane)
        ticket.lane = lane  # type: ignore[attr-defined]  # a GainTicket
        if ticket.tokens > self._largest:
            self._largest = 1 << (ticket.tokens - 1).bit_length()
            self._is_known = False
            self._bring_nearest_back()

    def put_back(self, ticket: Ticket) -> None:
        """See `FairQueue.put_back`."""
        assert isinstance(ticket, GainTicket)
        ticket.is_apart, ticket.lane = True, self._returned_lane
        super().put_back(ticket)
        self._is_known = False
        if ticket.gain is not None:
            self.cost_us += ticket.gain.cost_us
            if not ticket.is_urgent:
                self.await_deadline(ticket)
            elif ticket.density:
                self._stand(ticket, -ticket.density)

    def admit(self, ticket: Ticket) -> None:
        """Takes out a ticket that its tenant is charged for. See the module."""
        assert isinstance(ticket, GainTicket)
        self._virtual = self._now()
        if not ticket.is_apart:
            lane = ticket.lane
            assert lane is not None
            first = lane.first
            assert first is not None
            finish = lane.finish = max(lane.finish, first.start) + ticket.tokens / ticket.weight
            if first is not ticket and finish > first.start:
                self._start_at(first, finish)
        self.remove(ticket)

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
        self._is_known = False
        self.count -= 1
        self.tokens -= ticket.tokens
        self.requests -= ticket.requests
        if not self.count:
            ticket.queued, ticket.place, ticket.lane = False, None, None
            self._start_afresh()
            return
        self._leave_lane(ticket)
        self._clean()

    def _leave_lane(self, ticket: Ticket) -> None:
        super()._leave_lane(ticket)
        self._left_lane(ticket)

    def _left_lane(self, ticket: Ticket) -> None:
        """A ticket that has just left its lane."""
        assert isinstance(ticket, GainTicket)
        place, lane = ticket.place, ticket.lane
        assert lane is not None
        self._leave_place(ticket)
        self._tidy_lane(lane, place)
        waiting = self._returned if lane is self._returned_lane else lane.waiting
        if not waiting:
            lane.first = None
        if len(lane.places) > (2 * waiting + SPARE_PLACES if waiting else 0):  # an empty lane may be forgotten
            self._sweep_lane(lane)
        self._sweep_some_bests()

    def _new_lane(self, tenant: str) -> GainLane:
        return GainLane(tenant)

    def _tag(self, first: Ticket, lane: Lane) -> None:
        lane.first = first  # type: ignore[attr-defined]  # a GainLane
        self._start_at(first, max(self._virtual, lane.finish))

    def _delay(self, lane: GainLane) -> None:
        """The first ticket of a lane that was charged starts where its tenant's finish is."""
        first = lane.first
        assert first is not None
        start = max(self._virtual, lane.finish)
        if start > first.start:
            self._start_at(first, start)
            self._clean()

    def _start_at(self, first: Ticket, start: float) -> None:
        """The first ticket of a lane starts then. Call `_clean` where it started at another time before."""
        first.start = start
        self._enter_heap(first)
        heappush(self._firsts, (start, first.sequence, first))

    def _clean(self) -> None:
        """The first entries of the fair queue's heaps are tickets that wait, with the start that they have."""
        if self._unsorted:
            self._drop_unsorted()
        for heap in (self._small, self._large):
            while heap:
                start, _, ticket = heap[0]
                if ticket.queued and ticket.start == start:
                    break
                heappop(heap)
        firsts = self._firsts
        while firsts:
            start, _, ticket = firsts[0]
            if ticket.queued and ticket.start == start and not ticket.is_apart:  # type: ignore[attr-defined]
                break
            heappop(firsts)
        most = 2 * self._busy + SPARE_ENTRIES
        if len(firsts) > most:
            self._sweep_firsts.some(firsts, _stands_in_lane)
        if len(self._small) + len(self._large) > most + 2 * self._returned:
            self._sweep()

    @staticmethod
    def _counts(entry: Entry) -> bool:
        return entry[2].queued and entry[0] == entry[2].start

    def _start_afresh(self) -> None:
        super()._start_afresh()
        if len(self._slots) + len(self._firsts) + len(self._bests) > FREED_AT_ONCE:
            self._left_over += [self._slots, self._unused, self._bests, self._firsts, self._aside]
        self._forget_gain()

    # -- by gain

    @property
    def has_urgent(self) -> bool:
        """Whether any urgent ticket waits that earns something, of tenants that are not ahead."""
        place = self.best_place()
        return place is not None and place < 0

    def best(self) -> GainTicket | None:
        """The densest urgent ticket, or else the one with the earliest deadline, of tenants that are not ahead."""
        place = self.best_place()
        return None if place is None else self._slots[place & _SLOT]

    def best_place(self) -> Place | None:
        """The place of the best ticket, by what was last computed of densities."""
        if not self._is_known:
            now = self._now()
            if self._aside and self._aside[0][0] <= now:
                self._look_aside(now)
            self._best = self._find_best(now)
            self._is_known = not self._aside or self._aside[0][0] > now  # else others are left to bring back
        return self._best

    def refresh(self, place: Place | None, now_us: int, rival: Place | None, most: int) -> int:
        """Brings the density of the best ticket up to date, as often as that makes another one the best: until it is up
        to date, or comes after the rival. Returns how often, at most so often.
        """
        now, slots, bests = self._now(), self._slots, self._bests
        done = 0
        while done < most and place is not None and place < 0 and (rival is None or place < rival):
            ticket = slots[place & _SLOT]
            lane = ticket.lane
            assert ticket.gain is not None
            assert lane is not None
            now_dense = density(ticket.gain, now_us - ticket.arrived_us)
            fallen = -now_dense - (place >> KEY_SHIFT)
            if not fallen:
                break
            done += 1
            places = lane.places
            if now_dense:
                ticket.place = place = place + (fallen << KEY_SHIFT)
                heapreplace(places, place)
                lane.best = best = places[0]
                heapreplace(bests, best)
            else:  # it can earn nothing any more: the fair order has it
                ticket.place, ticket.stored_density = None, 0
                self._drop_first(lane)
            self._best = place = self._find_best(now)
        return done

    def _drop_first(self, lane: GainLane) -> None:
        """The first of the tier's heap, which is the first of this lane, goes."""
        places = lane.places
        slot = heappop(places) & _SLOT
        self._slots[slot] = _GONE
        self._unused.append(slot)
        if places:
            lane.best = best = places[0]
            heapreplace(self._bests, best)
        else:
            lane.best = None
            heappop(self._bests)

    def await_deadline(self, ticket: GainTicket) -> None:
        """A waiting ticket is ordered by its deadline."""
        self._stand(ticket, ticket.deadline_us)

    def make_urgent(self, ticket: GainTicket, now_us: int) -> None:
        """A waiting ticket is ordered by its density from now on."""
        ticket.is_urgent = True
        assert ticket.gain is not None
        density_now = density(ticket.gain, now_us - ticket.arrived_us)
        if density_now:
            self._stand(ticket, -density_now)
        else:
            place, lane = ticket.place, ticket.lane
            assert lane is not None
            self._leave_place(ticket)
            self._tidy_lane(lane, place)
            ticket.stored_density = 0
            self._is_known = False

    def is_ahead(self, ticket: GainTicket) -> bool:
        """Whether a waiting ticket is of a tenant that is ahead: it is admitted in fair order only."""
        if ticket.is_apart:
            return False
        lane = self._lanes[ticket.tenant]
        return self._now() < self._near(lane)

    def _now(self) -> float:
        """V, as the next admission makes it."""
        firsts, virtual = self._firsts, self._virtual
        return firsts[0][0] if firsts and firsts[0][0] > virtual else virtual

    def _near(self, lane: GainLane) -> float:
        """The virtual time from which on a lane is not ahead."""
        return lane.finish - 2 * self._largest / lane.weight

    def _leave_place(self, ticket: GainTicket) -> None:
        """A ticket has no place any more; the number stays in its lane's heap."""
        place, lane = ticket.place, ticket.lane
        if place is None or lane is None:
            return
        if lane.gone is None:
            lane.gone = GainTicket("", 0, "", 1, 1, 1, 0, 0, (), lane=lane)
        self._slots[place & _SLOT] = lane.gone
        ticket.place = None

    def _tidy_lane(self, lane: GainLane, left: Place | None) -> None:
        """A place was left. Where it was the first of its lane, the next one takes its place. The best of the tier goes
        when it is looked at; the others could else surface very many at one time.
        """
        if left is None or lane.best != left or self._bests[0] == left:
            return
        slots, places = self._slots, lane.places
        while places and slots[places[0] & _SLOT].place != places[0]:
            slot = heappop(places) & _SLOT
            slots[slot] = _GONE
            self._unused.append(slot)
        self._show_best(lane)

    def _stand(self, ticket: GainTicket, key: int) -> None:
        """A ticket has its place in the heap of its lane."""
        self._leave_place(ticket)
        if self._unused:
            slot = self._unused.pop()
            self._slots[slot] = ticket
        else:
            slot = len(self._slots)
            self._slots.append(ticket)
        place = (key << KEY_SHIFT) + (ticket.arrived_us << ARRIVAL_SHIFT) + (ticket.sequence << SEQUENCE_SHIFT) + slot
        ticket.place, lane = place, ticket.lane
        assert lane is not None
        places = lane.places
        heappush(places, place)
        if places[0] == place and not lane.is_aside:
            self._show_best(lane)
            if self._best is None or place < self._best:
                self._is_known = False

    def _show_best(self, lane: GainLane) -> None:
        """A lane that is not aside stands in the tier's heap with its first place."""
        best = lane.places[0] if lane.places else None
        if best == lane.best:
            return
        lane.best = best
        if best is None:
            return
        heappush(self._bests, best)
        self._sweep_some_bests()

    def _sweep_some_bests(self) -> None:
        """Where many first places count no more, some of those go: else all of them could surface at one time."""
        if len(self._bests) > self._busy + self._busy // 4 + SPARE_ENTRIES:
            self._sweep_bests.some(self._bests, self._is_best)

    def _is_best(self, place: Place) -> bool:
        lane = self._slots[place & _SLOT].lane
        return lane is not None and lane.best == place

    def _find_best(self, now: float) -> Place | None:
        """The best of the places of all lanes that are not ahead."""
        heap, slots, double = self._bests, self._slots, 2 * self._largest
        while heap:
            place = heap[0]
            ticket = slots[place & _SLOT]
            lane = ticket.lane
            if lane is None or lane.best != place:
                heappop(heap)
            elif ticket.place != place:
                self._drop_first(lane)
            elif lane is not self._returned_lane and now < (near := lane.finish - double / lane.weight):  # as `_near`
                heappop(heap)
                lane.best, lane.is_aside = None, True
                self._set_aside(near, ticket.tenant)
            else:
                return place
        return None

    def _set_aside(self, near: float, tenant: str) -> None:
        heappush(self._aside, (near, tenant))
        self._lanes[tenant].near = near
        if len(self._aside) > 2 * len(self._lanes) + SPARE_ENTRIES:
            self._sweep_aside.some(self._aside, self._is_set_aside)

    def _is_set_aside(self, entry: tuple[float, str]) -> bool:
        near, tenant = entry
        lane = self._lanes.get(tenant)
        return lane is not None and lane.is_aside and lane.near == near

    def _look_aside(self, now: float) -> None:
        """Brings back lanes that V has come close to."""
        for _ in range(BROUGHT_BACK):
            if not self._aside or self._aside[0][0] > now:
                return
            _, tenant = heappop(self._aside)
            lane = self._lanes.get(tenant)
            if lane is None or not lane.is_aside:
                continue
            if now < self._near(lane):
                lane.near = self._near(lane)
                heappush(self._aside, (lane.near, tenant))
            else:
                self._bring_back(lane)

    def _bring_back(self, lane: GainLane) -> None:
        lane.is_aside = False
        self._show_best(lane)

    def _bring_nearest_back(self) -> None:
        for _ in range(LOOKED_AT_AGAIN):
            if not self._aside:
                return
            _, tenant = heappop(self._aside)
            lane = self._lanes.get(tenant)
            if lane is not None and lane.is_aside:
                self._bring_back(lane)

    def _sweep_lane(self, lane: GainLane) -> None:
        """Drops the places of tickets that are gone or have changed."""
        slots, places = self._slots, lane.places
        lane.places = [place for place in places if slots[place & _SLOT].place == place]
        for slot in [place & _SLOT for place in places if slots[place & _SLOT].place != place]:
            slots[slot] = _GONE
            self._unused.append(slot)
        heapify(lane.places)
        if not lane.is_aside:
            self._show_best(lane)


_GONE = GainTicket("", 0, "", 1, 1, 1, 0, 0, ())
"""What an unused slot has."""


def _stands_in_lane(entry: Entry) -> bool:
    start, _, ticket = entry
    return ticket.queued and ticket.start == start and not ticket.is_apart  # type: ignore[attr-defined]
