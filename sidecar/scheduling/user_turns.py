"""Rule 2 within one tenant: its users take turns in its queue, by self-clocked fair queueing (Golestani 1994).

The order is by finish, not by start: the virtual time then passes with all that leaves, so that no number of new users
keeps out who has been served before. Nothing is remembered of users who are not ahead and of whom nothing waits.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from sidecar.scheduling.amounts import UNBOUNDED
from sidecar.scheduling.tickets import BY_ARRIVAL, BY_PLACE, Ticket

MOST_AHEAD = 256
"""Of so many users it is remembered that they are ahead, and of those that wait."""


class UserTurns:
    """The users of one tenant in its queue of one tier. `lane` has the first ticket of each, by its place.

    The others wait here, by arrival.
    """

    def __init__(self) -> None:
        self.lane: list[Ticket] = []
        self._virtual = 0
        self._finish: dict[str | None, int] = {}
        self._firsts: dict[str | None, Ticket] = {}
        self._others: dict[str | None, list[Ticket]] = {}

    def __contains__(self, ticket: Ticket) -> bool:
        others = self._others.get(ticket.user, ())
        at = bisect_left(others, ticket.arrival, key=BY_ARRIVAL)
        return self._firsts.get(ticket.user) is ticket or (at < len(others) and others[at] is ticket)

    def others(self) -> Iterator[Ticket]:
        """Tickets that are not the first of their user."""
        for others in self._others.values():
            yield from others

    def add(self, ticket: Ticket) -> None:
        """One that waits from now on."""
        first = self._firsts.get(ticket.user)
        if first is None:
            self._put_first(ticket)
            return
        later = max(first, ticket, key=BY_ARRIVAL)
        if later is first:
            self._leave_lane(first)
            self._put_first(ticket)
        later.place = UNBOUNDED
        insort(self._others.setdefault(ticket.user, []), later, key=BY_ARRIVAL)

    def remove(self, ticket: Ticket) -> None:
        """One that waits no more. Its user's next is placed, if it was the first."""
        others = self._others.get(ticket.user, [])
        if self._firsts[ticket.user] is not ticket:
            del others[bisect_left(others, ticket.arrival, key=BY_ARRIVAL)]
        else:
            self._leave_lane(ticket)
            del self._firsts[ticket.user]
            if others:
                self._put_first(others.pop(0))
        if not others:
            self._others.pop(ticket.user, None)

    def charge(self, ticket: Ticket) -> None:
        """Charges its user for one that leaves, or is shown; the user's first is placed after that."""
        first = self._firsts[ticket.user]
        finish = max(first.place - first.charged, self._finish.get(ticket.user, 0)) + ticket.charged
        self._set_finish(ticket.user, finish)
        if first is not ticket:
            ticket.place = finish
            self.place_again(ticket.user)

    def grow(self, user: str | None, tokens: int) -> None:
        """Growth of a user's lease. Less than nothing where a charge is given back: its first comes so much earlier."""
        virtual = self._virtual
        self._set_finish(user, max(virtual, max(virtual, self._finish.get(user, 0)) + tokens))
        if tokens < 0 and (first := self._firsts.get(user)) is not None:
            self._leave_lane(first)
            first.place = min(first.place, max(virtual + first.charged, first.place + tokens))
            insort(self.lane, first, key=BY_PLACE)

    def place_again(self, user: str | None) -> None:
        """Places the user's first anew: it has been charged before that one."""
        if (first := self._firsts.get(user)) is not None:
            self._leave_lane(first)
            self._put_first(first)

    def charged(self, ticket: Ticket) -> int:
        """The charge of one that is shown: it goes as far back as the virtual time."""
        return min(ticket.charged, ticket.place - self._virtual)

    def is_next(self, ticket: Ticket) -> bool:
        """True if a ticket would be the first of all, if it came now."""
        first = self._firsts.get(ticket.user)
        if first is not None and first.arrival < ticket.arrival:
            return False
        place = max(self._virtual, self._finish.get(ticket.user, 0)) + ticket.charged
        return all((place, *ticket.arrival) < other.lane_place for other in self.lane[:2] if other is not first)

    def pass_time(self, to: int) -> None:
        """Time passes: one that is placed from now on comes after `to`."""
        self._virtual = max(self._virtual, to)

    def is_at_rest(self) -> bool:
        """True if nothing waits, and no user is ahead."""
        return not self.lane and all(finish <= self._virtual for finish in self._finish.values())

    def are_told_apart(self) -> bool:
        """True if one of them waits or is ahead."""
        return bool(self._firsts) or any(finish > self._virtual for finish in self._finish.values())

    def ahead(self, user: str | None) -> int:
        """How far a user is ahead of the virtual time."""
        return self._finish.get(user, 0) - self._virtual

    def _set_finish(self, user: str | None, finish: int) -> None:
        self._finish.pop(user, None)
        if finish > self._virtual:
            self._finish[user] = finish
        if len(self._finish) > MOST_AHEAD:
            self._finish = {u: f for u, f in self._finish.items() if f > self._virtual}
        if len(self._finish) > MOST_AHEAD:
            self._finish = {u: f for u, f in self._finish.items() if u in self._firsts}

    def _put_first(self, ticket: Ticket) -> None:
        ticket.place = max(self._virtual, self._finish.get(ticket.user, 0)) + ticket.charged
        self._firsts[ticket.user] = ticket
        insort(self.lane, ticket, key=BY_PLACE)

    def _leave_lane(self, ticket: Ticket) -> None:
        del self.lane[bisect_left(self.lane, ticket.lane_place, key=BY_PLACE)]
