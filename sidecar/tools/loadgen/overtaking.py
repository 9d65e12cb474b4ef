"""The record of overtaking: when each request was first overtaken, in O(log n).

A request is overtaken by the first one that came later and went first. The latest arrival that went so far only grows.
The moments at which it grew are kept in order, and a binary search finds the first step with a later arrival than a
request: its overtaking. Arrivals are sequence numbers.
"""

from __future__ import annotations

from bisect import bisect_right


class Overtaking:
    """The steps of the latest arrival (a sequence number) that went, each with its moment in whole microseconds."""

    def __init__(self) -> None:
        self._arrivals: list[int] = []
        self._moments: list[int] = []

    def went(self, arrival: int, now_us: int) -> None:
        """The request that arrived as number `arrival` went at `now_us`."""
        if not self._arrivals or arrival > self._arrivals[-1]:
            self._arrivals.append(arrival)
            self._moments.append(now_us)

    def first_after(self, arrival: int) -> int | None:
        """When the request that arrived as number `arrival` was first overtaken, None where it was not."""
        if not self._arrivals or arrival >= self._arrivals[-1]:
            return None
        return self._moments[bisect_right(self._arrivals, arrival)]
