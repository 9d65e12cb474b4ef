"""Waiting queue of an engine: one heap, in the order of each request's place. Each engine orders by keys of its own.

No engine ages requests: a place is computed once, when a request arrives, and ties are first come, first served.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Generic, Protocol, TypeAlias, TypeVar

from sidecar.engines import Dynamo, Engine, Sglang, TensorRtLlm, Vllm
from sidecar.tools.step_model.kv_cache import BlockHash, Holding

# -- One request in an engine: its prompt, its output, and how far it is.

Key: TypeAlias = tuple[float, ...]


class Job:
    """One request, which engines change. An `output` of 0 is a pooling request: done with its prompt, without a token.

    `blocks` has the hashes of the prompt's full blocks, where the engine caches prefixes; `cached_tokens` of it were
    found when the request first ran. `place` is its place in the engine's order, which it keeps. `prefilled` tokens are
    computed or found, of which `computing` are in the step that runs. After `preemptions` its first `recomputed` output
    tokens are computed like a prompt.

    `stretches` are the engine's steps, as ranges, at whose ends it got a token; `started_us` is when it first ran.
    `base`, `emitted` and `epoch` are the engine's: see `StepEngine.length`.
    """

    __slots__ = (
        "base", "blocks", "cached_tokens", "computing", "emitted", "epoch", "holding", "is_decoding", "output", "place",
        "preemptions", "prefilled", "prompt", "recomputed", "started_us", "stretches",
    )  # fmt: skip

    def __init__(self, prompt: int, output: int, blocks: Sequence[BlockHash] = ()) -> None:
        self.prompt = prompt
        self.output = output
        self.blocks = blocks
        self.place: tuple[Key, int] = ((), 0)
        self.emitted = self.base = self.epoch = self.prefilled = self.computing = self.recomputed = self.preemptions = 0
        self.cached_tokens = 0
        self.is_decoding = False
        self.holding: Holding | None = None
        self.started_us: int | None = None
        self.stretches: list[tuple[int, int]] = []

    @property
    def tokens(self) -> int:
        """Tokens of prompt and output."""
        return self.prompt + self.output

    @property
    def prefill_tokens(self) -> int:
        """Tokens to compute before the next output token: the prompt, and after a preemption the output so far."""
        return self.prompt + self.recomputed

    def computed_blocks(self) -> Sequence[BlockHash]:
        """The hashes of the full blocks of the prompt, and of the output where it is known."""
        return self.blocks

    def preempt(self) -> int:
        """Everything that was computed is lost. Returns how many tokens more are to be computed than before."""
        before = self.prefill_tokens - self.prefilled
        self.preemptions += 1
        self.recomputed, self.prefilled, self.computing = self.emitted, 0, 0
        return self.prefill_tokens - before


J = TypeVar("J", bound=Job)


class JobQueue(Protocol[J]):
    """The requests that wait in an engine."""

    def __len__(self) -> int: ...

    def push(self, job: J) -> None:
        """A request comes, or comes back after a preemption to the place that it had."""

    def peek(self) -> J:
        """The next one. Raises IndexError where none waits."""

    def pop(self) -> J:
        """Takes the next one out."""

    def remove(self, job: J) -> bool:
        """Takes one out. False where it does not wait."""


class KeyQueue(Generic[J]):
    """Requests in the order of their places. One that was removed counts no longer, and is dropped when it is next."""

    def __init__(self) -> None:
        self._heap: list[tuple[Key, int, J]] = []
        self._waiting: set[J] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, job: J) -> None:
        """See `JobQueue`."""
        self._waiting.add(job)
        heappush(self._heap, (*job.place, job))

    def peek(self) -> J:
        """See `JobQueue`."""
        while self._heap[0][2] not in self._waiting:
            heappop(self._heap)
        return self._heap[0][2]

    def pop(self) -> J:
        """See `JobQueue`."""
        job = self.peek()
        heappop(self._heap)
        self._waiting.remove(job)
        return job

    def remove(self, job: J) -> bool:
        """See `JobQueue`."""
        if job not in self._waiting:
            return False
        self._waiting.remove(job)
        return True

    def worst(self) -> J | None:
        """The request that would be served last; None when none waits.

        O(n): engines do this only when their queue is full.
        """
        return max(self._waiting, key=lambda job: job.place, default=None)


@dataclass(frozen=True, slots=True)
class Rank:
    """A request's standing as its engine read it: `value` None where the client gave none.

    `strict` is Dynamo's strict priority, which comes before everything else.
    """

    value: float | None = None
    strict: int = 0


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
