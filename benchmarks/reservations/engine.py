"""An engine in virtual time: continuous batching over a KV cache of blocks, with preemption by recomputation.

The scheduler is vLLM's, reduced to what matters here: each step every running sequence generates a token; a sequence
that begins a new block takes one; where none is free the newest running sequence is preempted, which frees its blocks
and puts it first in the queue, to be computed again from its prompt and what it had generated; sequences enter in order
while their blocks are free.

The time of a step is a roofline: the larger of the time to read the weights and the KV cache in use, and the time of
its floating-point operations, plus a constant. It is a model, not a measurement; `Hardware` has its figures. Steps in
which no sequence begins or ends cost constant time here, so a trace is played in seconds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

BLOCK = 16
"""Tokens of a block: vLLM's default."""
PREFILL_TOKENS = 8192
"""Tokens that one step computes at most: vLLM's default max_num_batched_tokens of its server on an H100."""


@dataclass(frozen=True)
class Hardware:
    """What the time of a step depends on. Bytes, bytes a second, operations a second, seconds.

    The defaults are Qwen3-235B-A22B in FP8 on four H100 SXM: 235 GB of weights, which a batch of a hundred reads whole,
    22 billion active parameters, 94 layers with 4 KV heads of 128 in 16 bits. Data sheet: 3.35 TB/s and 1,979 TFLOP/s
    (FP8, dense) each; 80% and 50% of it are reached. 90% of the memory, less the weights and 2 GB of activations each,
    leave 64 GB: 330,000 tokens, or 660,000 with the KV cache in FP8.
    """

    kv_tokens: int = 330_000
    kv_bytes: int = 2 * 94 * 4 * 128 * 2
    weight_bytes: float = 235e9
    bytes_per_s: float = 0.8 * 4 * 3.35e12
    operations_per_token: float = 2 * 22e9
    operations_per_s: float = 0.5 * 4 * 1979e12
    step_s: float = 0.001

    def step_time_s(self, kv_used: int, tokens: int) -> float:
        """The time of a step that computes so many tokens with so many in the KV cache."""
        read_s = (self.weight_bytes + kv_used * self.kv_bytes) / self.bytes_per_s
        return self.step_s + max(read_s, tokens * self.operations_per_token / self.operations_per_s)


SMALL_KV = Hardware(660_000, kv_bytes=94 * 2 * 4 * 128)
"""The same with the KV cache in FP8: prompts of 12,000 tokens, and up to 126,000, need it."""


class Sequence:
    """One request in the engine. `generated` is what it had when it began to decode, at the decode step `since`."""

    __slots__ = (
        "cached", "epoch", "generated", "is_decoding", "is_prefilled", "output", "preemptions", "prompt", "since",
    )  # fmt: skip

    def __init__(self, prompt: int, output: int) -> None:
        self.prompt = prompt
        self.output = output
        self.generated = self.since = self.epoch = self.cached = self.preemptions = 0
        self.is_decoding = self.is_prefilled = False


class Step(NamedTuple):
    """What a step brought: sequences that ended, and those that have generated as much as someone waits for."""

    finished: list[Sequence]
    reached: list[Sequence]


class Engine:
    """`prefills` says whether it computes prompts itself. Otherwise they come computed, from prefill engines.

    `now_s`, `preemptions`, `generated` tokens, `steps`, and `used_token_s` (tokens in the KV cache times seconds) add
    up over the run.
    """

    def __init__(self, hardware: Hardware, *, prefills: bool = False) -> None:
        self.now_s = self.used_token_s = 0.0
        self.preemptions = self.generated = self.steps = self.used_tokens = 0
        self._hardware = hardware
        self._prefills = prefills
        self._free = hardware.kv_tokens // BLOCK
        self._running: dict[Sequence, None] = {}  # in order of entry
        self._decoding = 0
        self._prefilling: list[Sequence] = []
        self._queue: deque[Sequence] = deque()
        self._decode_steps = 0
        self._begins_block = [0] * BLOCK  # decoding sequences by the decode steps, modulo 16, that begin a block
        self._due: list[tuple[int, int, int, bool, Sequence]] = []
        self._pushed = 0

    def add(self, sequence: Sequence) -> None:
        """A request arrives."""
        sequence.is_prefilled = not self._prefills
        self._queue.append(sequence)

    def length(self, sequence: Sequence) -> int:
        """The tokens that a sequence has generated."""
        since = self._decode_steps - sequence.since if sequence.is_decoding else 0
        return sequence.generated + since

    def report_at(self, sequence: Sequence, generated: int) -> None:
        """`step` returns the sequence once it has generated so many tokens, unless it is over by then."""
        if sequence.is_decoding and generated < sequence.output:
            self._push(sequence, generated, is_end=False)

    def step(self) -> Step:
        """Computes one step."""
        self._take_blocks()
        prefilled, computed = self._admit()
        taken_s = self._hardware.step_time_s(self.used_tokens, self._decoding + computed)
        self.now_s += taken_s
        self.used_token_s += self.used_tokens * taken_s
        self.generated += self._decoding
        self.used_tokens += self._decoding
        self.steps += 1
        self._decode_steps += 1
        for sequence in prefilled:
            self._decode(sequence)
        return self._reached(prefilled)

    def _reached(self, prefilled: list[Sequence]) -> Step:
        """What is due. Sequences that begin to decode are reported, so that the caller may ask for more."""
        found = Step([], [*prefilled])
        while self._due and self._due[0][0] <= self._decode_steps:
            _, _, epoch, is_end, sequence = heappop(self._due)
            if epoch == sequence.epoch:
                (found.finished if is_end else found.reached).append(sequence)
        for sequence in found.finished:
            self._release(sequence)
        return found

    def _push(self, sequence: Sequence, generated: int, *, is_end: bool) -> None:
        self._pushed += 1
        at = sequence.since + generated - sequence.generated
        heappush(self._due, (at, self._pushed, sequence.epoch, is_end, sequence))

    def _take_blocks(self) -> None:
        while self._free < self._begins_block[self._decode_steps % BLOCK]:
            self._preempt()
        self._free -= self._begins_block[self._decode_steps % BLOCK]

    def _preempt(self) -> None:
        sequence = next(reversed(self._running))
        self.preemptions += 1
        sequence.preemptions += 1
        self._release(sequence)
        sequence.is_prefilled = False
        self._queue.appendleft(sequence)

    def _admit(self) -> tuple[list[Sequence], int]:
        """Computes prompts while there is room: the sequences that decode from now on, and the tokens computed."""
        done: list[Sequence] = []
        left = PREFILL_TOKENS - self._decoding
        computed = 0
        while self._prefilling or self._queue:
            sequence = self._prefilling[0] if self._prefilling else self._queue[0]
            missing = sequence.prompt + sequence.generated - sequence.cached
            comes_computed = sequence.is_prefilled
            taken = missing if comes_computed else min(missing, left)
            blocks = -(-(sequence.cached + taken) // BLOCK) - -(-sequence.cached // BLOCK)
            if taken < 1 or blocks > self._free:
                break
            self._free -= blocks
            self.used_tokens += taken
            sequence.cached += taken
            if not self._prefilling:
                self._running[self._queue.popleft()] = None
                self._prefilling.append(sequence)
            if not comes_computed:
                left -= taken
                computed += taken
            if taken == missing:
                done.append(self._prefilling.pop())
        return done, computed

    def _decode(self, sequence: Sequence) -> None:
        sequence.is_decoding, sequence.since = True, self._decode_steps
        sequence.epoch += 1
        self._decoding += 1
        self._begins_block[self._block_step(sequence)] += 1
        self._push(sequence, sequence.output, is_end=True)

    def _block_step(self, sequence: Sequence) -> int:
        return (sequence.since - sequence.prompt - sequence.generated) % BLOCK

    def _release(self, sequence: Sequence) -> None:
        """Takes a sequence out of the batch and frees its blocks."""
        held = sequence.cached
        if sequence.is_decoding:
            self._begins_block[self._block_step(sequence)] -= 1
            self._decoding -= 1
            length = self.length(sequence)
            held, sequence.generated = sequence.prompt + length, length
            sequence.is_decoding = False
        else:
            self._prefilling.remove(sequence)
        self._free += -(-held // BLOCK)
        self.used_tokens -= held
        sequence.cached = 0
        sequence.epoch += 1
        del self._running[sequence]
