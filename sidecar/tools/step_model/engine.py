"""Engine in virtual time: continuous batching, without I/O, clock or asyncio. It jumps over steps that are all alike.

An engine runs one forward pass at a time over everything it has admitted. In a step
(0) each sequence past its prefill takes the room of its next token, oldest first. Where there is none, the last of the
running sequences by the queue's order is preempted: its KV is free, it waits at its old place in the queue, and later
its prompt and what it had generated are computed again. A step that preempts admits nothing;
(1) free slots are filled from the waiting queue, strictly from its head: a head that does not fit the KV cache blocks
the rest. It leaves the queue only where the step has prompt tokens left to compute for it, so that prompts wait in the
order of the queue;
(2) sequences that are still in prefill share a budget of prompt tokens, oldest first (chunked prefill); a prompt's last
token yields the sequence's first output token at the end of that same step;
(3) every sequence past its prefill yields one token at the end of the step.
These are the rules of vLLM's scheduler (`v1/core/sched/scheduler.py`: `schedule`, `_preempt_request`, and
`while self.waiting and token_budget > 0`).

A decoding sequence is not touched at each step: its tokens are counted by the engine's steps. A plan is one step, or as
many equal ones as there are until a sequence ends, a length is reached that someone asked for, or the KV cache could be
full. A request that comes meanwhile cuts the plan at the end of the step that runs. Times are whole microseconds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain
from typing import Generic

from sidecar.tools.step_model.kv_cache import KvCache
from sidecar.tools.step_model.model import EngineModel
from sidecar.tools.step_model.queue import J, JobQueue


@dataclass(frozen=True, slots=True)
class PlanStart(Generic[J]):
    """Start of a plan. `admitted` left the queue now. For the preempted, `lost_tokens` are computed once more."""

    admitted: list[J]
    prefill_tokens: int
    lost_tokens: int


@dataclass(frozen=True, slots=True)
class PlanEnd(Generic[J]):
    """Result of a plan. `emitted` have a new token, for `first` it is the first one.

    `resumed` generate again after a preemption: lengths that were asked for before are forgotten. `reached` have a
    length that was asked for, `finished` ended, and `removed` were to leave.
    """

    first: list[J]
    resumed: list[J]
    reached: list[J]
    finished: list[J]
    removed: list[J]
    emitted: list[J]
    prefill_tokens: int


class StepEngine(Generic[J]):
    """One engine. `ends_us` are the ends of its `steps`; `due_us` is that of its plan, None while it is idle.

    `busy_us` is how long it computed, `held_token_us` the tokens in its KV cache times how long they were there.
    `preemptions` counts those of all steps, `last_preemptions` those of the last plan.

    With `preempts` KV is taken when it is written, see (0). Without it prompt and output are reserved together when a
    request is admitted (TensorRT-LLM's GUARANTEED_NO_EVICT), so nothing that runs is ever evicted. With `admits_ahead`
    a request leaves the queue as soon as it has a slot and room, before a step has prompt tokens for it. Without
    `jumps` each plan is one step.
    """

    def __init__(
        self,
        model: EngineModel,
        queue: JobQueue[J],
        cache: KvCache | None = None,
        *,
        preempts: bool = True,
        admits_ahead: bool = False,
        jumps: bool = True,
    ) -> None:
        self.model = model
        self.queue = queue
        self.cache = cache or KvCache(model.kv_tokens, model.block_tokens, caches_prefixes=True)
        self.ends_us: list[int] = []
        self.steps = 0
        self.due_us: int | None = None
        self.preemptions = self.last_preemptions = self.busy_us = self.held_token_us = 0
        self._preempts, self._admits_ahead, self._jumps = preempts, admits_ahead, jumps
        self._prefilling: deque[J] = deque()
        self._decoding: dict[J, None] = {}
        # Decoding requests by the step, modulo a block, that begins a block of theirs.
        self._begins: list[dict[J, None]] = [{} for _ in range(self.cache.block_tokens)]
        self._due: list[tuple[int, int, int, bool, J]] = []
        self._pushed = 0
        self._plan = (0, 0, 0)  # its start, the time of a step, and the steps
        self._leaving: list[J] = []

    def __len__(self) -> int:
        return len(self.queue) + self.running

    @property
    def running(self) -> int:
        """How many requests are in its batch."""
        return len(self._prefilling) + len(self._decoding)

    def length(self, job: J) -> int:
        """The tokens that a request has generated at the end of the last plan."""
        return min(job.output, job.emitted + (self.steps - job.base if job.is_decoding else 0))

    def duration_us(self, start: PlanStart[J]) -> int:
        """The time of the step that begins."""
        return self.model.duration_us(self.running, start.prefill_tokens)

    def push(self, job: J, now_us: int) -> None:
        """A request comes; it runs at the next step at the earliest."""
        self.queue.push(job)
        if self.queue.peek() is job:
            self._cut(now_us)

    def remove(self, job: J, now_us: int) -> None:
        """A request without a token is to leave. It does at the end of the step that runs: see `PlanEnd.removed`.

        Where it has its first token by then, it stays: it came too late.
        """
        self._leaving.append(job)
        self._cut(now_us)

    def drop(self, job: J) -> bool:
        """Frees a request's slot and KV, or its place in the queue, at once. False where it is not here."""
        if job.holding is None:
            return self.queue.remove(job)
        self._release(job)
        return True

    def report_at(self, job: J, generated: int) -> None:
        """`advance` returns the request once it has generated so many tokens, unless it has ended."""
        if job.is_decoding and generated < job.output:
            self._push(job, generated, is_end=False)

    def begin(self, now_us: int) -> PlanStart[J]:
        """Begins a plan, where there is something to run."""
        before, lost_tokens = self.preemptions, self._make_room() if self._preempts else 0
        self.last_preemptions = self.preemptions - before
        admitted = [] if self.last_preemptions else self._admit(now_us)
        start = PlanStart(admitted, self._prefill(), lost_tokens)
        if self.running:
            duration_us = self.duration_us(start)
            steps = 1 if start.prefill_tokens or self.last_preemptions or not self._jumps else self._equal_steps()
            self._plan = now_us, duration_us, steps
            self.due_us = now_us + duration_us * steps
        return start

    def advance(self) -> PlanEnd[J]:
        """Ends the plan, at `due_us`."""
        start_us, duration_us, steps = self._plan
        for step in range(1, steps if self._preempts else 1):
            self._grow(self.steps + step)
        self.busy_us += duration_us * steps
        self.held_token_us += self.cache.held_tokens * duration_us * steps
        self.ends_us.extend(range(start_us + duration_us, start_us + duration_us * steps + 1, duration_us))
        before, self.steps = self.steps, self.steps + steps
        self.due_us = None
        first, resumed, prefill_tokens = self._prefilled(before)
        found = PlanEnd(first, resumed, [], [], [], [job for job in self._decoding if job.output], prefill_tokens)
        while self._due and self._due[0][0] <= self.steps:
            _, _, epoch, is_end, job = heappop(self._due)
            if epoch == job.epoch:
                (found.finished if is_end else found.reached).append(job)
        for job in found.finished:
            self._release(job)
        self._leave(found)
        return found

    def leave_idle(self) -> PlanEnd[J]:
        """Removes what is to be removed while nothing runs."""
        found: PlanEnd[J] = PlanEnd([], [], [], [], [], [], 0)
        self._leave(found)
        return found

    def _leave(self, found: PlanEnd[J]) -> None:
        found.removed.extend(job for job in self._leaving if not self.length(job) and self.drop(job))
        self._leaving = []

    def _cut(self, now_us: int) -> None:
        start_us, duration_us, steps = self._plan
        if self.due_us is not None:
            done = max(1, -(-(now_us - start_us) // duration_us))
            if done < steps:
                self._plan = start_us, duration_us, done
                self.due_us = start_us + duration_us * done

    def _equal_steps(self) -> int:
        while self._due[0][2] != self._due[0][4].epoch:
            heappop(self._due)
        until = self._due[0][0] - self.steps
        free = self.cache.free_blocks
        if not self._preempts or len(self._decoding) * (until // self.cache.block_tokens + 1) <= free:
            return until
        for step in range(1, until):
            free -= len(self._begins[(self.steps + step) % self.cache.block_tokens])
            if free < 0:
                return step
        return until

    def _grow(self, step: int) -> None:
        for job in self._begins[step % self.cache.block_tokens]:
            assert job.holding is not None
            self.cache.grow(job.holding, job.prompt + job.emitted + step - job.base)

    def _make_room(self) -> int:
        """Takes the blocks of the next tokens. Returns the tokens that were lost of those who were preempted for it.

        It ends: the first of the running requests by the queue's order is preempted only when it runs alone, and alone
        it fits.
        """
        beginning = self._begins[self.steps % self.cache.block_tokens]
        if len(beginning) <= self.cache.free_blocks:
            self._grow(self.steps)
            return 0
        lost_tokens = 0
        for job in list(beginning):
            tokens = job.prompt + job.emitted + self.steps - job.base
            while job.holding is not None and not self.cache.grow(job.holding, tokens):
                last = max(chain(self._prefilling, self._decoding), key=lambda one: one.place)
                self._release(last)
                lost_tokens += last.preempt()
                self.preemptions += 1
                self.queue.push(last)
        return lost_tokens

    def _admit(self, now_us: int) -> list[J]:
        admitted: list[J] = []
        left = self.model.chunk_tokens - sum(job.prefill_tokens - job.prefilled for job in self._prefilling)
        while len(self.queue) and self.running < self.model.max_sequences:
            if left <= 0 and not self._admits_ahead:
                break
            job = self.queue.peek()
            tokens = job.prefill_tokens if self._preempts else job.tokens
            holding = self.cache.reserve(tokens, job.blocks, job.prompt)
            if holding is None:
                break
            self.queue.pop()
            job.holding = holding
            job.prefilled = holding.cached_tokens
            left -= job.prefill_tokens - job.prefilled
            if job.started_us is None:
                job.started_us, job.cached_tokens = now_us, holding.cached_tokens
            self._prefilling.append(job)
            admitted.append(job)
        return admitted

    def _prefill(self) -> int:
        left = self.model.chunk_tokens
        for job in self._prefilling:
            if not left:
                break
            job.computing = min(left, job.prefill_tokens - job.prefilled)
            job.prefilled += job.computing
            left -= job.computing
        return self.model.chunk_tokens - left

    def _prefilled(self, step: int) -> tuple[list[J], list[J], int]:
        """The step's prompt tokens are in the cache now, where other prompts can hit them.

        A prompt that is computed gets a token at the end of the same step. Returns those for which it is the first,
        those that were computed again, and the tokens.
        """
        first: list[J] = []
        resumed: list[J] = []
        computed = 0
        while self._prefilling and (job := self._prefilling[0]).computing:
            assert job.holding is not None
            computed, job.computing = computed + job.computing, 0
            self.cache.publish(job.holding, job.blocks, job.prefilled)
            if job.prefilled < job.prefill_tokens:
                break
            self._prefilling.popleft()
            self._decode(job, step)
            if job.output:
                (resumed if job.emitted else first).append(job)
        return first, resumed, computed

    def _decode(self, job: J, step: int) -> None:
        job.is_decoding, job.base = True, step
        job.epoch += 1
        self._decoding[job] = None
        self._begins[self._phase(job)][job] = None
        self._push(job, job.output, is_end=True)

    def _phase(self, job: J) -> int:
        return (job.base + 1 - job.prompt - job.emitted) % self.cache.block_tokens

    def _push(self, job: J, generated: int, *, is_end: bool) -> None:
        self._pushed += 1
        heappush(self._due, (job.base + generated - job.emitted, self._pushed, job.epoch, is_end, job))

    def _release(self, job: J) -> None:
        """Takes a request out of the batch, and frees its blocks. What it computed of them stays to be found."""
        assert job.holding is not None
        if job.is_decoding:
            del self._begins[self._phase(job)][job]
            del self._decoding[job]
            job.stretches.append((job.base, self.steps))
            job.emitted = self.length(job)
            job.is_decoding = False
        else:
            self._prefilling.remove(job)
        if self.cache.caches_prefixes:
            # The KV of the newest output token is not written: the next step would compute it.
            written = job.prefilled - job.computing + max(job.emitted - job.recomputed - 1, 0)
            self.cache.publish(job.holding, job.computed_blocks(), written)
        self.cache.release(job.holding)
        job.holding = None
        job.epoch += 1
