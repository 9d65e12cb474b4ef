"""The record of overtaking: when each waiting ticket was first overtaken, in O(log n).

A ticket is overtaken by the first admission of a ticket that arrived after it. The latest arrival admitted so far only
grows. The moments at which it grew are kept in order, and a binary search finds the first step with a later arrival
than a ticket: its overtaking. Arrivals are sequence numbers, because equal times are ordered by submission.
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
        self._is_parted = False

    def __len__(self) -> int:
        return len(self._arrivals)

    def admitted(self, arrival: int, now_us: int) -> None:
        """Notes that the ticket which arrived as number `arrival` was admitted at `now_us`.

        No ticket stands between a step and the very next arrival. So newcomers that are admitted at once, one after the
        other, stay one step: the first of them overtook all that the others overtook.
        """
        if self._arrivals and arrival == self._arrivals[-1] + 1 and not self._is_parted:
            self._arrivals[-1] = arrival
        elif not self._arrivals or arrival > self._arrivals[-1]:
            self._arrivals.append(arrival)
            self._moments.append(now_us)
            self._is_parted = False

    def part(self) -> None:
        """A ticket stands now right after the latest arrival admitted: the next step is one of its own."""
        self._is_parted = True

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
