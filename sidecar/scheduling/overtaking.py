"""When a waiting ticket was first overtaken, in O(log n) and without touching the tickets that wait.

A ticket is overtaken by the first admission of a ticket that arrived after it. The latest arrival admitted so far only
grows, so the moments at which it grew, kept in order, answer for every ticket by binary search: its overtaking is the
first step whose arrival is later than its own. Arrivals are the tickets' sequence numbers, because equal times go by
order of submission.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

SPARE_STEPS = 1024
"""Steps kept beyond two per waiting ticket before the unused ones are dropped: the cost of dropping stays amortized."""


class Overtaking:
    """The steps of the latest arrival (a sequence number) admitted, each with its moment in whole microseconds."""

    def __init__(self) -> None:
        self._arrivals: list[int] = []
        self._moments: list[int] = []

    def __len__(self) -> int:
        return len(self._arrivals)

    def admitted(self, arrival: int, now_us: int) -> None:
        """Notes that the ticket which arrived as number `arrival` was admitted at `now_us`.

        Nobody stands between a step and the very next arrival, so newcomers that go straight in one after the other
        stay one step: whoever they overtook was overtaken by the first of them.
        """
        if self._arrivals and arrival == self._arrivals[-1] + 1:
            self._arrivals[-1] = arrival
        elif not self._arrivals or arrival > self._arrivals[-1]:
            self._arrivals.append(arrival)
            self._moments.append(now_us)

    def first_after(self, arrival: int) -> int | None:
        """When the ticket that arrived as number `arrival` was first overtaken, None where it was not."""
        if not self._arrivals or arrival >= self._arrivals[-1]:  # most often: a newcomer that went straight in
            return None
        return self._moments[bisect_right(self._arrivals, arrival)]

    def is_long(self, waiting: int) -> bool:
        """Whether there are many more steps than the `waiting` tickets can ask for."""
        return len(self._arrivals) > 2 * waiting + SPARE_STEPS

    def forget(self) -> None:
        """Drops every step: nobody waits, so nobody can ask."""
        self._arrivals.clear()
        self._moments.clear()

    def forget_all_but(self, arrivals: Iterable[int]) -> None:
        """Drops the steps that no ticket of the given arrivals, which ascend, nor any later one, can ask for."""
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
