"""The record of overtaking: when each waiting ticket was first overtaken, in O(log n).

A ticket is overtaken by the first admission of a ticket that arrived after it. The latest arrival admitted so far only
grows. The moments at which it grew are kept in order, and a binary search finds the first step with a later arrival
than a ticket: its overtaking. Arrivals are sequence numbers, because equal times are ordered by submission.

The steps that no ticket needs any more are dropped. To find them all at once takes as long as many tickets wait
(`Overtaking`); `TicketOvertaking` does it in slices.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping

from sidecar.scheduling.ticket import Ticket

SPARE_STEPS = 1024
"""Steps kept beyond two per waiting ticket before the unused ones are dropped: the cost of dropping stays amortized."""


class Overtaking:
    """The steps of the latest arrival (a sequence number) admitted, each with its moment in whole microseconds."""

    def __init__(self) -> None:
        self._arrivals: list[int] = []
        self._moments: list[int] = []
        self._parted_after = 0

    def __len__(self) -> int:
        return len(self._arrivals)

    def admitted(self, arrival: int, now_us: int) -> None:
        """Notes that the ticket which arrived as number `arrival` was admitted at `now_us`.

        No ticket stands between a step and the very next arrival. So newcomers that are admitted at once, one after the
        other, stay one step: the first of them overtook all that the others overtook.
        """
        if self._arrivals and arrival == self._arrivals[-1] + 1 and arrival - 1 != self._parted_after:
            self._arrivals[-1] = arrival
        elif not self._arrivals or arrival > self._arrivals[-1]:
            self._arrivals.append(arrival)
            self._moments.append(now_us)

    def part(self, arrival: int) -> None:
        """A ticket stands now right after `arrival`, the latest one admitted: the next step is one of its own."""
        self._parted_after = arrival

    def first_after(self, arrival: int) -> int | None:
        """When the ticket that arrived as number `arrival` was first overtaken, None where it was not."""
        if not self._arrivals or arrival >= self._arrivals[-1]:  # most often: a newcomer that was admitted at once
            return None
        return self._moments[bisect_right(self._arrivals, arrival)]

    def is_long(self, waiting: int) -> bool:
        """Whether there are many more steps than the `waiting` tickets need."""
        return len(self._arrivals) > 2 * waiting + SPARE_STEPS

    def forget(self) -> None:
        """Drops every step: no ticket waits."""
        self._arrivals.clear()
        self._moments.clear()

    def forget_all_but(self, arrivals: Iterable[int]) -> None:
        """Drops the steps that no ticket of the given, ascending arrivals needs, nor any later ticket."""
        last = len(self._arrivals) - 1
        kept: list[int] = []
        index = 0
        for arrival in arrivals:
            index = bisect_right(self._arrivals, arrival, index)
            if index >= last:
                break
            if not kept or kept[-1] != index:
                kept.append(index)
        kept += [last] if last >= 0 else []
        self._arrivals = [self._arrivals[index] for index in kept]
        self._moments = [self._moments[index] for index in kept]


LOOKED_AT = 2
"""Tickets that one admission or departure looks at. A request brings one ticket to the line, so it becomes shorter.
More of them would cost more: they are old, and in none of the processor's caches."""
GONE_THROUGH = 4
"""Tickets that it looks at beside these where many that are gone stand in the line."""
SPARE_TICKETS = 64
"""Tickets that are gone, allowed in the line beyond those that wait before it is gone through."""
STEPS_AT_ONCE = 1024
"""Unneeded steps are looked for after so many new ones, and at most twice as many are dropped: the rest of the list
moves."""


class TicketOvertaking(Overtaking):
    """The same for the tickets of a scheduler, in O(log n) a call at most, whatever waits.

    The tickets stand in a line, in order of arrival. After each admission and departure a few at its front are looked
    at. One that was overtaken gets the moment written on it (`Ticket.overtaken_us`), and leaves the line: it needs no
    step any more. So the steps before the first ticket of the line are needed by none.
    """

    def __init__(self) -> None:
        super().__init__()
        self._longest = STEPS_AT_ONCE  # steps; beyond them some are looked for that no ticket needs
        self._line: deque[Ticket] = deque()  # those that went through it last are in `_passed`, before all others
        self._passed: deque[Ticket] = deque()
        self._handed_back: dict[str, Ticket] = {}  # in order of `overtaken_after`
        self.came = self._line.append

    def __len__(self) -> int:
        """Everything that is remembered: steps, and tickets."""
        return super().__len__() + len(self._line) + len(self._passed) + len(self._handed_back)

    def forget(self) -> None:
        """See `Overtaking.forget`."""
        super().forget()
        self._longest = STEPS_AT_ONCE
        self._line.clear()
        self._passed.clear()
        self._handed_back.clear()

    def hand_back(self, ticket: Ticket) -> None:
        """A lease that no one had overtaken waits again: only steps after its `overtaken_after` count for it."""
        self._handed_back.pop(ticket.id, None)
        self._handed_back[ticket.id] = ticket
        self.part(ticket.overtaken_after)

    def look(self, left: Ticket, waiting: Mapping[str, Ticket]) -> None:
        """Looks at some of the tickets, now that one has `left` those that are `waiting`."""
        if not waiting:
            self.forget()
            return
        line, arrivals = self._line, self._arrivals
        if line and line[-1] is left:
            line.pop()
        if arrivals:
            latest = arrivals[-1]
            line = self._passed or line
            if line and (line[0].sequence < latest or line[0].id not in waiting):
                self._note_overtaken(latest, waiting)
            if self._handed_back:
                self._note_handed_back(left, latest)
            if len(arrivals) > self._longest:
                self._drop_steps()
        if len(self._line) + len(self._passed) > 2 * len(waiting) + SPARE_TICKETS:
            self._go_through(waiting)

    def _note_overtaken(self, latest: int, waiting: Mapping[str, Ticket]) -> None:
        for _ in range(LOOKED_AT):
            line = self._passed or self._line
            if not line:
                return
            ticket = line[0]
            if _stands(ticket, waiting):
                if ticket.sequence >= latest:
                    return
                ticket.overtaken_us = self._moments[bisect_right(self._arrivals, ticket.sequence)]
            line.popleft()

    def _note_handed_back(self, left: Ticket, latest: int) -> None:
        self._handed_back.pop(left.id, None)
        for _ in range(LOOKED_AT):
            ticket = next(iter(self._handed_back.values()), None)
            if ticket is None or ticket.overtaken_after >= latest:
                return
            del self._handed_back[ticket.id]
            ticket.overtaken_us = self.first_after(ticket.overtaken_after)

    def _drop_steps(self) -> None:
        """The latest step stays: the next one is compared with it."""
        line, arrivals = self._passed or self._line, self._arrivals
        needed = line[0].sequence if line else arrivals[-1]
        if self._handed_back:
            needed = min(needed, next(iter(self._handed_back.values())).overtaken_after)
        unneeded = min(bisect_right(arrivals, needed), len(arrivals) - 1, 2 * STEPS_AT_ONCE)
        del arrivals[:unneeded], self._moments[:unneeded]
        self._longest = len(arrivals) + STEPS_AT_ONCE

    def _go_through(self, waiting: Mapping[str, Ticket]) -> None:
        """Takes tickets that are gone out of the line, some of those that were not gone through yet."""
        line, passed = self._line, self._passed
        for _ in range(min(GONE_THROUGH, len(line))):
            ticket = line.popleft()
            if _stands(ticket, waiting):
                passed.append(ticket)
        if not line:
            self._line, self._passed = passed, line
            self.came = passed.append


def _stands(ticket: Ticket, waiting: Mapping[str, Ticket]) -> bool:
    """Whether a ticket of the line needs a step, now or later."""
    return ticket.overtaken_us is None and not ticket.overtaken_after and waiting.get(ticket.id) is ticket
