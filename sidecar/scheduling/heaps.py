"""Heaps whose dead entries are swept out in slices. The heaps are lists, as `heapq` has them.

An entry that counts no more stays in its heap until it surfaces. Where many do, a sweep goes through the heap from its
end to its begin, a few entries at a time. The heap is a heap between two slices. Entries move meanwhile, so a sweep may
miss some: at most one for each entry that is pushed while it lasts. The next sweep finds those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

SWEPT_AT_ONCE = 16
"""Entries that one slice looks at. One operation leaves at most two dead ones, so eight times as many are looked at."""


class Sweep:
    """The sweeps of one heap, one after the other."""

    __slots__ = ("_place",)

    def __init__(self) -> None:
        self._place = 0

    def some(self, heap: list[T], counts: Callable[[T], bool]) -> None:
        """Looks at the next entries, and takes out those that count no more."""
        place = min(self._place or len(heap), len(heap))
        for _ in range(min(SWEPT_AT_ONCE, place)):
            place -= 1
            if not counts(heap[place]):
                take_out(heap, place)
        self._place = place


def take_out(heap: list[Any], place: int) -> None:
    """Takes the entry at one place out of a heap, in O(log n)."""
    last = heap.pop()
    if place == len(heap):
        return
    while place and last < heap[(place - 1) >> 1]:
        heap[place] = heap[(place - 1) >> 1]
        place = (place - 1) >> 1
    while (child := 2 * place + 1) < len(heap):
        if child + 1 < len(heap) and heap[child + 1] < heap[child]:
            child += 1
        if not heap[child] < last:
            break
        heap[place] = heap[child]
        place = child
    heap[place] = last
