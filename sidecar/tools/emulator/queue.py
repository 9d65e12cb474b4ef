"""Waiting queue of the engines: one heap, with each engine's own order.

No engine ages requests: a key is computed once, when a request arrives, and ties are first come, first served. The
counter that breaks ties also makes the heap's order total.
"""

from __future__ import annotations

import heapq
import itertools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeAlias

from sidecar.engines import Dynamo, Engine, Sglang, TensorRtLlm, Vllm
from sidecar.tools.emulator.batch import S


@dataclass(frozen=True, slots=True)
class Rank:
    """A request's standing as its engine read it: `value` None where the client said nothing.

    `strict` is Dynamo's strict priority, which comes before everything else.
    """

    value: float | None = None
    strict: int = 0


Key: TypeAlias = tuple[float, ...]
Order: TypeAlias = Callable[[Rank, float], Key]
"""From a request's rank and its arrival in seconds to its sort key; the smallest key is served first."""

TRTLLM_DEFAULT_PRIORITY = 0.5


def first_come(_rank: Rank, _arrival_s: float) -> Key:
    """FCFS: whatever the priority says."""
    return ()


def trtllm_order(rank: Rank, _arrival_s: float) -> Key:
    """Higher first; untagged in the middle. Arrival counts among equals only."""
    return (-(TRTLLM_DEFAULT_PRIORITY if rank.value is None else rank.value),)


def vllm_order(rank: Rank, arrival_s: float) -> Key:
    """Lower first; untagged is 0, the usual best."""
    return (rank.value or 0, arrival_s)


def sglang_order(rank: Rank, arrival_s: float) -> Key:
    """Higher first; untagged is the least important there is."""
    return (-(-sys.maxsize - 1 if rank.value is None else rank.value), arrival_s)


def sglang_inverted_order(rank: Rank, arrival_s: float) -> Key:
    """Its --schedule-low-priority-values-first: lower first; untagged is still the least important there is."""
    return (sys.maxsize if rank.value is None else rank.value, arrival_s)


def dynamo_order(rank: Rank, arrival_s: float) -> Key:
    """Strict priority, then `arrival - max(priority, 0)`: a priority of N is a head start of N seconds."""
    return (-rank.strict, arrival_s - max(rank.value or 0, 0))


ORDERS: Mapping[type[Engine], Order] = {
    TensorRtLlm: trtllm_order,
    Vllm: vllm_order,
    Sglang: sglang_order,
    Dynamo: dynamo_order,
}


@dataclass(order=True, slots=True)
class _Entry(Generic[S]):
    key: Key
    counter: int
    sequence: S | None = field(compare=False)


class WaitingQueue(Generic[S]):
    """Sequences in the order they will be served. A removed one is dropped lazily, but counts no longer at once."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._heap: list[_Entry[S]] = []
        self._entries: dict[S, _Entry[S]] = {}
        self._counter = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, sequence: S, rank: Rank, arrival_s: float) -> None:
        """Queues a sequence that arrived at `arrival_s`."""
        entry = _Entry(self._order(rank, arrival_s), next(self._counter), sequence)
        self._entries[sequence] = entry
        heapq.heappush(self._heap, entry)

    def peek(self) -> S | None:
        """The next request, None when none waits."""
        while self._heap:
            if (sequence := self._heap[0].sequence) is not None:
                return sequence
            heapq.heappop(self._heap)
        return None

    def pop(self) -> S:
        """Takes out the next request. Raises IndexError when none waits."""
        sequence = self.peek()
        if sequence is None:
            raise IndexError("no request waits")
        heapq.heappop(self._heap)
        del self._entries[sequence]
        return sequence

    def remove(self, sequence: S) -> bool:
        """A canceled request leaves at once. False where it does not wait."""
        entry = self._entries.pop(sequence, None)
        if entry is None:
            return False
        entry.sequence = None
        return True

    def worst(self) -> S | None:
        """The request that would be served last; None when none waits.

        O(n): engines do this only when their queue is full.
        """
        return max(self._entries, key=lambda sequence: self._entries[sequence], default=None)

    def outranks(self, rank: Rank, sequence: S) -> bool:
        """Whether a newcomer of this rank is strictly more important than a waiting sequence, arrival left aside."""
        return self._order(rank, 0.0)[:1] < self._entries[sequence].key[:1]
