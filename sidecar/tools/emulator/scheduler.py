"""Scheduler of the emulated engine: its step model and its waiting queue, without I/O, clock or asyncio.

Continuous batching is one loop. An engine runs one forward pass at a time over everything it has admitted. In a step
(1) free slots are filled from the waiting queue, in the queue's order and strictly from its head: a head that does not
fit the KV cache blocks the rest of the queue, as in vLLM and TensorRT-LLM;
(2) sequences that are still in prefill share a budget of prompt tokens, oldest first (chunked prefill); a prompt's last
token yields the sequence's first output token at the end of that same step;
(3) every sequence past its prefill yields one token at the end of the step.

A step takes `step_s + step_s_per_seq * running + step_s_per_prefill_token * prompt tokens` seconds. KV is reserved for
prompt and output together when a sequence is admitted (TensorRT-LLM's GUARANTEED_NO_EVICT), so nothing that runs is
ever evicted. A step has two halves, `begin` and `end`, `duration_s` apart: a sequence may be removed in between.
A simulator calls both and adds `duration_s` to its own time; the emulator sleeps.

With `preempts` KV is taken when it is written, as in vLLM and SGLang. A step then begins with (0): each sequence past
its prefill takes the room of its next token, oldest first. Where there is none, the last of the running sequences by
the queue's order is preempted. Its KV is free, it waits at its old place in the queue, and later its prompt and what it
had generated are computed again. A step that preempts admits nothing. These are the rules of vLLM's scheduler
(`v1/core/sched/scheduler.py`: `schedule`, `_preempt_request`).

The queue is one heap, with each engine's own order. No engine ages requests: a key is computed once, when a request
arrives, and ties are first come, first served. The counter that breaks ties also makes the heap's order total.
"""

from __future__ import annotations

import heapq
import itertools
import math
import sys
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Blocks
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from sidecar.engines import Dynamo, Engine, Sglang, TensorRtLlm, Vllm
from sidecar.tools.emulator.kv_cache import BlockHash, Holding, KvCache

Key: TypeAlias = tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """How fast and how wide the engine is. The defaults are a small model on one GPU: 20 ms a step, 8 sequences.

    `kv_tokens` None: KV is never the limit. `speed` 0.25 makes every step four times as long. Raises ValueError for
    figures no engine could run with.
    """

    max_num_seqs: int = 8
    prefill_tokens_per_step: int = 512
    kv_tokens: int | None = None
    step_s: float = 0.020
    step_s_per_seq: float = 0.0
    step_s_per_prefill_token: float = 0.0
    speed: float = 1.0

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1 or self.prefill_tokens_per_step < 1:
            raise ValueError("max_num_seqs and prefill_tokens_per_step must be at least 1")
        if self.kv_tokens is not None and self.kv_tokens < 1:
            raise ValueError("kv_tokens must be at least 1, or None for no limit")
        if min(self.step_s, self.step_s_per_seq, self.step_s_per_prefill_token) < 0:
            raise ValueError("step times must not be negative")
        if not 0 < self.speed < math.inf:
            raise ValueError("speed must be above 0; 1 is as the step times say")

    def duration_s(self, running: int, prefill_tokens: int) -> float:
        """Seconds of a step with so many sequences and prompt tokens."""
        ideal_s = self.step_s + self.step_s_per_seq * running + self.step_s_per_prefill_token * prefill_tokens
        return ideal_s / self.speed


class Sequence:
    """One prompt and its output. `output_tokens` 0 is a pooling request: done when its prefill is, without a token.

    `blocks` has the hashes of the prompt's full token blocks, where the engine caches prefixes. `cached_tokens` of the
    prompt were found there when it was admitted: they count as prefilled. `computing` tokens of `prefilled` are in the
    step that runs now. `place` is its place in the waiting queue, which it keeps while it runs. After `preemptions` its
    first `recomputed` output tokens are computed like a prompt.
    """

    __slots__ = (
        "blocks", "cached_tokens", "computing", "emitted", "holding", "output_tokens", "place", "preemptions",
        "prefilled", "prompt_tokens", "recomputed",
    )  # fmt: skip

    def __init__(self, prompt_tokens: int, output_tokens: int, blocks: Blocks[BlockHash] = ()) -> None:
        if prompt_tokens < 1 or output_tokens < 0:
            raise ValueError("a sequence has at least one prompt token and no negative output")
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.blocks = blocks
        self.cached_tokens = 0
        self.prefilled = 0
        self.computing = 0
        self.emitted = 0
        self.holding: Holding | None = None
        self.place: tuple[Key, int] = ((), 0)
        self.preemptions = 0
        self.recomputed = 0

    @property
    def prefill_tokens(self) -> int:
        """Tokens that are computed before the next output token: the prompt, and after a preemption the output."""
        return self.prompt_tokens + self.recomputed

    @property
    def found_tokens(self) -> int:
        """Tokens that were found in the prefix cache when it was admitted; 0 while it waits."""
        return 0 if self.holding is None else self.holding.cached_tokens

    def preempt(self) -> int:
        """Everything that was computed is lost. Returns how many tokens more are to be computed than before."""
        before = self.prefill_tokens - self.prefilled
        self.preemptions += 1
        self.recomputed, self.prefilled = self.emitted, 0
        return self.prefill_tokens - before

    @property
    def computed_tokens(self) -> int:
        """Tokens whose KV is written. That of the newest output token is not: the next step computes it."""
        return self.prefilled - self.computing + max(self.emitted - self.recomputed - 1, 0)

    def computed_blocks(self) -> Blocks[BlockHash]:
        """The hashes of the full blocks of the prompt, and of the output where it is known."""
        return self.blocks

    @property
    def tokens(self) -> int:
        """KV-cache tokens that the sequence holds while it runs."""
        return self.prompt_tokens + self.output_tokens


S = TypeVar("S", bound=Sequence)


@dataclass(frozen=True, slots=True)
class Step(Generic[S]):
    """Start of a step. `admitted` left the queue now; `end` is due after `duration_s` seconds.

    `preempted` are in the queue again, and the engine has to compute `lost_tokens` once more for that.
    """

    admitted: list[S]
    prefill_tokens: int
    duration_s: float
    preempted: Blocks[S] = ()
    lost_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Output(Generic[S]):
    """Result of a step: `prefill_tokens` were computed, one token for each of `emitted`; `finished` left the batch."""

    emitted: list[S]
    finished: list[S]
    prefill_tokens: int = 0


class RunningBatch(Generic[S]):
    """The running sequences: the state that steps advance. Not thread-safe, never awaits.

    `preemptions` counts those of all steps, `last_preemptions` those of the last step.
    """

    def __init__(self, model: StepModel, kv_cache: KvCache | None = None, *, preempts: bool = False) -> None:
        self.model = model
        self.preempts = preempts
        self.preemptions = self.last_preemptions = 0
        self.kv_cache = kv_cache or KvCache(model.kv_tokens)
        self._prefilling: deque[S] = deque()
        # A dictionary is an ordered set here: a disconnect removes one sequence of many in constant time.
        self._decoding: dict[S, None] = {}

    def __len__(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def kv_tokens_held(self) -> int:
        """KV-cache tokens that the running sequences hold."""
        return self.kv_cache.held_tokens

    def begin(self, queue: WaitingQueue[S]) -> Step[S]:
        """Admits what fits and spends the prefill budget. Call `end` once before the next `begin`."""
        preempted, lost_tokens = self._make_room(queue) if self.preempts else ([], 0)
        admitted = [] if preempted else self._admit(queue)
        running = len(self)
        prefill_tokens = self._prefill()
        duration_s = self.model.duration_s(running, prefill_tokens)
        return Step(admitted, prefill_tokens, duration_s, preempted, lost_tokens)

    def end(self) -> Output[S]:
        """Hands out the step's tokens and drops what is finished."""
        prefill_tokens = self._computed()
        while self._prefilling and self._prefilling[0].prefilled == self._prefilling[0].prefill_tokens:
            self._decoding[self._prefilling.popleft()] = None
        emitted: list[S] = []
        finished: list[S] = []
        for sequence in self._decoding:
            if sequence.emitted < sequence.output_tokens:
                sequence.emitted += 1
                emitted.append(sequence)
            if sequence.emitted == sequence.output_tokens:
                finished.append(sequence)
        for sequence in finished:
            del self._decoding[sequence]
            self._release(sequence)
        return Output(emitted, finished, prefill_tokens)

    def remove(self, sequence: S) -> bool:
        """Frees an aborted sequence's slot and KV at once. False where it does not run."""
        if sequence in self._decoding:
            del self._decoding[sequence]
        elif sequence in self._prefilling:
            self._prefilling.remove(sequence)
        else:
            return False
        self._release(sequence)
        return True

    def _make_room(self, queue: WaitingQueue[S]) -> tuple[list[S], int]:
        """Takes the room of the next tokens. Returns the sequences that were preempted for it, and their lost tokens.

        It ends: the first of the running sequences by the queue's order is preempted only when it runs alone, and alone
        it fits.
        """
        preempted: list[S] = []
        lost_tokens = 0
        for sequence in list(self._decoding):
            while sequence.holding is not None:  # else it was preempted for one before it
                if self.kv_cache.grow(sequence.holding, sequence.prompt_tokens + sequence.emitted):
                    break
                victim = max(itertools.chain(self._prefilling, self._decoding), key=lambda running: running.place)
                self.remove(victim)
                lost_tokens += victim.preempt()
                queue.put_back(victim)
                preempted.append(victim)
        self.preemptions += len(preempted)
        self.last_preemptions = len(preempted)
        return preempted, lost_tokens

    def _admit(self, queue: WaitingQueue[S]) -> list[S]:
        admitted: list[S] = []
        while len(self) < self.model.max_num_seqs:
            head = queue.peek()
            if head is None:
                break
            tokens = head.prefill_tokens if self.preempts else head.tokens
            holding = self.kv_cache.reserve(tokens, head.blocks, head.prompt_tokens)
            if holding is None:
                break
            queue.pop()
            head.holding = holding
            head.prefilled = holding.cached_tokens
            if not head.preemptions:  # a client is told of the first time only
                head.cached_tokens = holding.cached_tokens
            self._prefilling.append(head)
            admitted.append(head)
        return admitted

    def _prefill(self) -> int:
        budget = self.model.prefill_tokens_per_step
        for sequence in self._prefilling:
            if budget == 0:
                break
            tokens = min(budget, sequence.prefill_tokens - sequence.prefilled)
            sequence.prefilled += tokens
            sequence.computing = tokens
            budget -= tokens
        return self.model.prefill_tokens_per_step - budget

    def _computed(self) -> int:
        """The step's prompt tokens are in the cache now, where other prompts can hit them."""
        prefill_tokens = 0
        for sequence in self._prefilling:
            if not sequence.computing:
                break
            prefill_tokens += sequence.computing
            sequence.computing = 0
            if sequence.holding is not None:
                self.kv_cache.publish(sequence.holding, sequence.blocks, sequence.prefilled)
        return prefill_tokens

    def _release(self, sequence: S) -> None:
        holding, sequence.holding = sequence.holding, None
        if holding is None:
            return
        if self.kv_cache.caches_prefixes:
            self.kv_cache.publish(holding, sequence.computed_blocks(), sequence.computed_tokens)
        self.kv_cache.release(holding)


@dataclass(frozen=True, slots=True)
class Rank:
    """A request's standing as its engine read it: `value` None where the client said nothing.

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
        sequence.place = self._order(rank, arrival_s), next(self._counter)
        self.put_back(sequence)

    def put_back(self, sequence: S) -> None:
        """Queues a sequence that was pushed before, at the place that it had then."""
        entry = _Entry(*sequence.place, sequence)
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
