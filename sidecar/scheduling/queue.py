"""Rule 2: the queue of one tier. Its tenants take turns by start-time fair queueing (Goyal, Vin, Cheng 1996)."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

from sidecar.scheduling.tickets import BY_PLACE, LanePlace, Ticket

if TYPE_CHECKING:
    from sidecar.scheduling.user_turns import UserTurns


class FairQueue:
    """The waiting tickets of one tier, in the order of their tenants' tags.

    `by_gain`: the virtual time is the smallest start tag of those that wait; else the largest of those that left.
    Tags never go back: when the queue becomes empty all tenants start afresh at a virtual time beyond every tag. Not
    while `are_more` of the tier wait elsewhere: they are in the queue, too.
    """

    def __init__(self, by_gain: bool = False) -> None:
        self.by_gain = by_gain
        self.are_more: Callable[[], bool] = _are_none
        self.start_after: Callable[[Ticket], float] = _after_none
        """The tag of the first of those that wait elsewhere and come after a ticket among its tenant's users."""
        self.runs_out = False
        """Whether the next may be one of those that wait elsewhere, since that was looked at last."""
        self.virtual = 0.0
        self.afresh = 0
        """How often all tags started afresh."""
        self.finish: dict[str, float] = {}
        self.largest = 1
        """The most that a ticket was charged for since the queue was empty."""
        self._lanes: dict[str, list[Ticket]] = {}
        self.users: dict[str, UserTurns] = {}  # of the tenants whose users take turns, whose lanes they fill
        self._returned: set[Ticket] = set()
        self._count = 0
        # A heap of first tickets; entries that are not true any more are dropped when they come up.
        self._order: list[tuple[float, tuple[int, str, int], int, Ticket]] = []
        self._pushes = 0
        self._changes = 0
        self._best: tuple[tuple[int, int, float], Ticket | None] = (0, -1, 0.0), None
        # The best, as of a moment, so many changes, and a virtual time.
        self._most_tags = 64  # from so many on, tags that are not beyond the virtual time are forgotten
        self._tops: dict[str, Ticket] = {}

    def __len__(self) -> int:
        return self._count

    def __contains__(self, ticket: Ticket) -> bool:
        if ticket.has_returned:
            return ticket in self._returned
        if ticket.user is not None:
            return (users := self.users.get(ticket.tenant)) is not None and ticket in users
        lane = self._lanes.get(ticket.tenant, ())
        at = bisect_left(lane, ticket.lane_place, key=BY_PLACE)
        return at < len(lane) and lane[at] is ticket

    def __iter__(self) -> Iterator[Ticket]:
        for tenant in self._lanes:
            yield from self._in_lane(tenant)
        yield from self._returned

    def add(self, ticket: Ticket) -> None:
        """One that came, or that came back: it waits outside of its tenant's queue and is not charged again."""
        self.largest = max(self.largest, ticket.charged)
        self._count += 1
        self._changes += 1
        if ticket.has_returned:
            first = self.next()
            ticket.start = self.virtual if first is None or first.start is None else min(self.virtual, first.start)
            self._returned.add(ticket)
            self._push(ticket)
        elif not self._takes_turns(ticket):
            insort(self._lanes.setdefault(ticket.tenant, []), ticket, key=BY_PLACE)
        else:
            self._find_users(ticket.tenant).add(ticket)
        self._tag(ticket.tenant)

    def remove(self, ticket: Ticket) -> None:
        """One that leaves by cancellation: it costs nothing."""
        self._take_out(ticket)
        self._tag(ticket.tenant)

    def leave(self, ticket: Ticket) -> None:
        """One that leaves for an engine or for the line: its tenant is charged."""
        is_next = not self.by_gain or (self.next() is ticket and self._best[1] is not ticket)
        if not self.by_gain:
            self.virtual = max(self.virtual, ticket.start or 0.0)
        if ticket.user is not None and not ticket.has_returned:
            first = self._lanes[ticket.tenant][0]
            self.users[ticket.tenant].pass_time(first.place - first.charged * self.by_gain)
        self._charge_for(ticket)
        self._take_out(ticket)
        self._tag(ticket.tenant)
        self.runs_out = not (self._count and is_next) and self.are_more()

    def pass_through(self, ticket: Ticket) -> None:
        """`add` and `leave` of one that comes while none waits."""
        self.afresh += 1
        self.start_afresh(self.virtual + (ticket.cost or ticket.tokens) / ticket.weight)

    def start_afresh(self, virtual: float) -> None:
        """None of the tier waits: all tags begin at a virtual time beyond every one of them."""
        self.virtual, self.largest = virtual, 1
        if self.finish or self._order or self._tops or self.users:
            self.users.clear()
            self.finish.clear()
            self._order.clear()
            self._tops.clear()

    def show(self, ticket: Ticket) -> None:
        """One that waits elsewhere from now on, as a bid: what waits here comes after it, and no time passes."""
        self._charge_for(ticket)
        self._take_out(ticket)
        self._tag_first(ticket.tenant)

    def give_back(self, ticket: Ticket) -> None:
        """The charge of a bid that was taken out before it was let in."""
        if not ticket.has_returned and ticket.tenant in self.finish:
            self.finish[ticket.tenant] = finish = self.finish[ticket.tenant] - ticket.charged / ticket.weight
            first = next(iter(self._lanes.get(ticket.tenant, ())), None)
            if first is not None and first.start is not None and first.start > max(self.virtual, finish):
                first.start = max(self.virtual, finish)
                self._push(first)

    def take_back(self, ticket: Ticket) -> None:
        """A bid waits here again, at its place."""
        if not ticket.has_returned and (lane := self._lanes.get(ticket.tenant)):
            first, by_turns = lane[0], self._takes_turns(ticket)
            if self._find_users(ticket.tenant).is_next(ticket) if by_turns else first.arrival > ticket.arrival:
                first.start = None
            else:
                ticket.start, first.start = None, min(first.start or 0.0, self.finish.get(ticket.tenant, 0.0))
                self._push(first)
        self.add(ticket)

    def charge(self, tenant: str, tokens: int, weight: int, user: str | None = None) -> None:
        """Growth of a tenant's lease, while others of the tier wait; of its user's, while others of the tenant do.

        Below 0: what it did not use is given back, but never beyond the virtual time.
        """
        if self._count or self.are_more():
            self._changes += 1
            finish = max(self.virtual, self.finish.get(tenant, 0.0)) + tokens / weight
            self.finish[tenant] = max(self.virtual, finish)
        if user is not None and tenant in self._lanes and (users := self.users.get(tenant)) is not None:
            users.grow(user, tokens)
        if tokens < 0 and (lane := self._lanes.get(tenant)):
            self._tag_first(tenant)
            first = lane[0]
            first.start = max(self.virtual, (first.start or 0.0) + tokens / weight)
            self._push(first)

    def charge_user(self, tenant: str, user: str | None, tokens: int) -> None:
        """Charges a user before its next ticket, which is not the first of those that wait."""
        if (users := self.users.get(tenant)) is not None:
            users.grow(user, tokens)
            users.place_again(user)
            self._tag_first(tenant)

    def pass_time(self, tenant: str, place: int) -> None:
        """The users of a tenant take turns elsewhere, too: one at that place has left."""
        if (users := self.users.get(tenant)) is not None:
            users.pass_time(place)
            self._forget_users(tenant)

    def put_behind(self, tenant: str) -> None:
        """Puts a tenant's charge before its next ticket, which is not the first of those that wait."""
        if lane := self._lanes.get(tenant):
            lane[0].start = max(lane[0].start or 0.0, self.finish.get(tenant, 0.0))
            self._push(lane[0])

    def look(self) -> None:
        """Lets all tags start afresh where none waits."""
        if not self._count and not self.are_more():
            self.afresh += 1
            self.start_afresh(max([self.virtual, *self.finish.values()]))

    def next(self, wanted: Callable[[Ticket], bool] | None = None) -> Ticket | None:
        """The next in fair order, of those that are wanted."""
        if wanted is not None:
            firsts = [*(lane[0] for lane in self._lanes.values()), *self._returned]
            return min(filter(wanted, firsts), key=lambda t: (t.start, t.arrival), default=None)
        while self._order:
            start, _, _, ticket = self._order[0]
            if ticket.start == start and self._is_first(ticket):
                return ticket
            heapq.heappop(self._order)
        return None

    def first_of_each_owner(self) -> list[Ticket]:
        """In fair order, wherever they are in their tenants' queues."""
        found: dict[str, tuple[float, LanePlace, Ticket]] = {}
        of_start = [(lane[0].start or 0.0, self._in_lane(tenant)) for tenant, lane in self._lanes.items()]
        for start, tickets in [*of_start, *((ticket.start or 0.0, [ticket]) for ticket in self._returned)]:
            for ticket in tickets:
                known = found.get(ticket.owner)
                if known is None or (start, ticket.lane_place) < known[:2]:
                    found[ticket.owner] = start, ticket.lane_place, ticket
        return [ticket for _, _, ticket in sorted(found.values(), key=lambda it: it[:2])]

    def best(self, now_us: int) -> Ticket | None:
        """Rule 9: the best by gain of all that earn something, and whose tenant is not ahead."""
        as_of, best = self._best
        if as_of != (now_us, self._changes, self.virtual):
            best, most = None, 0
            for ticket in self:
                if (gain := ticket.gain) is None:
                    continue
                earned = gain.earned_after(now_us - ticket.arrived_us)
                if earned < most or not earned or self.is_ahead(ticket):
                    continue
                if best is None or earned > most or ticket.arrival < best.arrival:
                    best, most = ticket, earned
            self._best = (now_us, self._changes, self.virtual), best
        return best

    def ahead(self, tenants: Iterable[str]) -> dict[str, float]:
        """The finish tags of those that are beyond the virtual time."""
        return {t: finish for t in sorted(tenants) if (finish := self.finish.get(t, 0.0)) > self.virtual}

    def is_ahead(self, ticket: Ticket, uncharged: float = 0.0, uncharged_of_user: int = 0) -> bool:
        """Rule 9: whether the tenant, or its user, had so much more than its part that it comes after all others.

        `uncharged`: what their tags have of bids that wait still.
        """
        ahead = (self.finish.get(ticket.tenant, 0.0) - uncharged - self.virtual) * ticket.weight
        if ticket.user is not None and (users := self.users.get(ticket.tenant)) is not None:
            ahead = max(ahead, users.ahead(ticket.user) - uncharged_of_user)
        return not ticket.has_returned and ahead > 2 * self.largest

    def _charge_for(self, ticket: Ticket) -> None:
        if ticket.has_returned:
            return
        first = self._lanes[ticket.tenant][0]
        finish = max(first.start or 0.0, self.finish.get(ticket.tenant, 0.0)) + ticket.charged / ticket.weight
        self.finish[ticket.tenant] = finish
        if len(self.finish) > self._most_tags:
            self.finish = {t: f for t, f in self.finish.items() if f > self.virtual or t in self._lanes}
            self._most_tags = 2 * len(self.finish) + 64
        if first is not ticket and (first.start is None or first.start < finish):
            first.start = finish
            self._push(first)
        if ticket.user is not None:
            self.users[ticket.tenant].charge(ticket)

    def _is_first(self, ticket: Ticket) -> bool:
        if ticket.has_returned:
            return ticket in self._returned
        lane = self._lanes.get(ticket.tenant)
        return lane is not None and lane[0] is ticket

    def _push(self, ticket: Ticket) -> None:
        assert ticket.start is not None
        if len(self._order) > 2 * (len(self._lanes) + len(self._returned)) + 64:
            self._order = [entry for entry in self._order if entry[3].start == entry[0] and self._is_first(entry[3])]
            heapq.heapify(self._order)
        self._pushes += 1
        heapq.heappush(self._order, (ticket.start, ticket.arrival, self._pushes, ticket))

    def _take_out(self, ticket: Ticket) -> None:
        self._count -= 1
        self._changes += 1
        if ticket.has_returned:
            self._returned.remove(ticket)
            return
        lane = self._lanes[ticket.tenant]
        if ticket.user is None:
            del lane[bisect_left(lane, ticket.lane_place, key=BY_PLACE)]
        else:
            self.users[ticket.tenant].remove(ticket)
        if not lane:
            del self._lanes[ticket.tenant]
            self._forget_users(ticket.tenant)

    def _forget_users(self, tenant: str) -> None:
        if (users := self.users.get(tenant)) is not None and users.is_at_rest():
            del self.users[tenant]

    def _find_users(self, tenant: str) -> UserTurns:
        from sidecar.scheduling.user_turns import UserTurns

        users = self.users.setdefault(tenant, UserTurns())
        users.lane = self._lanes.setdefault(tenant, users.lane)
        return users

    def _takes_turns(self, ticket: Ticket) -> bool:
        """True if a ticket waits among the users of its tenant.

        Where a reload has ended their turns it is of an unknown user, until none of the others waits.
        """
        if ticket.user is None and (users := self.users.get(ticket.tenant)) is not None and users.are_told_apart():
            ticket.user = ""
        return ticket.user is not None

    def _in_lane(self, tenant: str) -> Iterator[Ticket]:
        yield from self._lanes.get(tenant, ())
        if (users := self.users.get(tenant)) is not None:
            yield from users.others()

    def _tag(self, tenant: str) -> None:
        """Gives the first of a tenant its start tag; lets all tags start afresh where none waits."""
        if not self._count:
            self.look()
            return
        self._tag_first(tenant)
        if self.by_gain and (first_of_all := self.next()) is not None and first_of_all.start is not None:
            self.virtual = max(self.virtual, first_of_all.start)

    def _tag_first(self, tenant: str) -> None:
        lane = self._lanes.get(tenant)
        if not lane:
            self._tops.pop(tenant, None)
            return
        first, before = lane[0], self._tops.get(tenant)
        if first.user is not None and before is not None and before is not first and before in self:
            # Its user's turn is before that of the one that was first, whose tag it gets.
            first.start, before.start = before.start if first.start is None else first.start, None
        if first.start is None:
            virtual = self.virtual if first.hint is None else first.hint
            first.start = max(virtual, self.finish.get(tenant, 0.0))
        if before is not first:
            if first.user is not None:
                first.start = min(first.start, self.start_after(first))
            self._tops[tenant] = first
            self._push(first)


def _are_none() -> bool:
    return False


def _after_none(_: Ticket) -> float:
    return math.inf


# -- Rule 10, by gain: the best of the tickets of one tier that are not shown.

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
