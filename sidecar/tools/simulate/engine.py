"""Engine in virtual time: the step model of `sidecar emulate`, which jumps over steps in which nothing changes.

The rules are those of `emulator.scheduler.RunningBatch` with `preempts`, but for one: a request leaves the queue only
where the step has prompt tokens left to compute for it, as in vLLM (`while self.waiting and token_budget > 0` in
`v1/core/sched/scheduler.py`), so that prompts wait in the order of the queue. With `admits_ahead` it leaves as soon as
it has a place and room, as in the emulator, and a test holds both to the same steps.

What differs is the cost. A decoding sequence is not touched at each step: its tokens are counted by the engine's steps.
A plan is one step, or as many equal ones as there are until a sequence ends, a length is reached that someone asked
for, or the KV cache could be full. A request that comes meanwhile cuts the plan at the end of the step that runs.

Times are whole microseconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import chain
from typing import NamedTuple, Protocol

from sidecar.tools.emulator.kv_cache import BlockHash, Holding, KvCache
from sidecar.tools.simulate.engine_model import EngineModel

Key = tuple[float, ...]


class Job:
    """One request in an engine. `place` is its place in the engine's order, which it keeps.

    `stretches` are the engine's steps, as ranges, at whose ends it got a token; `started_us` is when it first ran.
    """

    __slots__ = (
        "base", "blocks", "emitted", "epoch", "holding", "is_decoding", "output", "place", "preemptions", "prefilled",
        "prompt", "recomputed", "started_us", "stretches",
    )  # fmt: skip

    def __init__(self, prompt: int, output: int, blocks: Sequence[BlockHash] = ()) -> None:
        self.prompt = prompt
        self.output = output
        self.blocks = blocks
        self.place: tuple[Key, int] = ((), 0)
        self.emitted = self.base = self.epoch = self.prefilled = self.recomputed = self.preemptions = 0
        self.is_decoding = False
        self.holding: Holding | None = None
        self.started_us: int | None = None
        self.stretches: list[tuple[int, int]] = []

    @property
    def prefill_tokens(self) -> int:
        """Tokens to compute before the next output token."""
        return self.prompt + self.recomputed


class JobQueue(Protocol):
    """The requests that wait in an engine."""

    def __len__(self) -> int: ...

    def push(self, job: Job) -> None:
        """A request comes, or comes back after a preemption to the place that it had."""

    def peek(self) -> Job:
        """The next one. Raises IndexError where none waits."""

    def pop(self) -> Job:
        """Takes the next one out."""

    def remove(self, job: Job) -> bool:
        """Takes one out. False where it does not wait."""


class KeyQueue:
    """Requests in the order of their places."""

    def __init__(self) -> None:
        self._heap: list[tuple[Key, int, Job]] = []
        self._waiting: set[Job] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, job: Job) -> None:
        """See `JobQueue`."""
        self._waiting.add(job)
        heappush(self._heap, (*job.place, job))

    def peek(self) -> Job:
        """See `JobQueue`."""
        while self._heap[0][2] not in self._waiting:
            heappop(self._heap)
        return self._heap[0][2]

    def pop(self) -> Job:
        """See `JobQueue`."""
        job = self.peek()
        heappop(self._heap)
        self._waiting.remove(job)
        return job

    def remove(self, job: Job) -> bool:
        """See `JobQueue`. Its entry goes when it is the first."""
        if job not in self._waiting:
            return False
        self._waiting.remove(job)
        return True


class Reached(NamedTuple):
    """What a plan brought: first tokens, lengths that were asked for, ends, and requests that were removed."""

    first: list[Job]
    reached: list[Job]
    finished: list[Job]
    removed: list[Job]


class SimulatedEngine:
    """One engine. `ends_us[n]` is the end of its step n; `due_us` that of its plan, None while it is idle.

    With `admits_ahead` the emulator's rule holds: see the module. `busy_us` is how long it computed, `held_token_us`
    the tokens in its KV cache times how long they were there.
    """

    def __init__(self, model: EngineModel, queue: JobQueue, *, admits_ahead: bool = False) -> None:
        self.model = model
        self.queue = queue
        self.cache = KvCache(model.kv_tokens, model.block_tokens, caches_prefixes=True)
        self._admits_ahead = admits_ahead
        self.ends_us: list[int] = []
        self.due_us: int | None = None
        self.preemptions = self.busy_us = self.held_token_us = 0
        self._prefilling: deque[Job] = deque()
        self._decoding: dict[Job, None] = {}
        # Decoding requests by the step, modulo a block, that begins a block of theirs.
        self._begins: list[dict[Job, None]] = [{} for _ in range(model.block_tokens)]
        self._due: list[tuple[int, int, int, bool, Job]] = []
        self._pushed = 0
        self._plan = (0, 0, 0)  # its start, the time of a step, and the steps
        self._computed: list[Job] = []
        self._leaving: list[Job] = []

    def __len__(self) -> int:
        return len(self.queue) + len(self._prefilling) + len(self._decoding)

    def running(self) -> Sequence[Job]:
        """The requests in its batch."""
        return [*self._prefilling, *self._decoding]

    def length(self, job: Job) -> int:
        """The tokens that a request has generated at the end of the last plan."""
        return job.emitted + (len(self.ends_us) - job.base if job.is_decoding else 0)

    def push(self, job: Job, now_us: int) -> None:
        """A request comes; it runs at the next step at the earliest."""
        self.queue.push(job)
        if self.queue.peek() is job:
            self._cut(now_us)

    def remove(self, job: Job, now_us: int) -> None:
        """A request without a token is to leave. It does at the end of the step that runs: see `Reached.removed`.

        Where it has its first token by then, it stays: it came too late.
        """
        self._leaving.append(job)
        self._cut(now_us)

    def report_at(self, job: Job, generated: int) -> None:
        """`advance` returns the request once it has generated so many tokens, unless it has ended."""
        if job.is_decoding and generated < job.output:
            self._push(job, generated, is_end=False)

    def begin(self, now_us: int) -> None:
        """Begins a plan, where there is something to run."""
        had_no_room = self._make_room()
        if not had_no_room:
            self._admit(now_us)
        prefill_tokens = self._prefill()
        running = len(self._prefilling) + len(self._decoding)
        if not running:
            return
        duration_us = self.model.duration_us(running, prefill_tokens)
        steps = 1 if prefill_tokens or had_no_room else self._equal_steps()
        self._plan = now_us, duration_us, steps
        self.due_us = now_us + duration_us * steps

    def advance(self) -> Reached:
        """Ends the plan, at `due_us`."""
        start_us, duration_us, steps = self._plan
        for step in range(1, steps):
            self._grow(len(self.ends_us) + step)
        before = len(self.ends_us)
        self.busy_us += duration_us * steps
        self.held_token_us += self.cache.held_tokens * duration_us * steps
        self.ends_us.extend(range(start_us + duration_us, start_us + duration_us * steps + 1, duration_us))
        self.due_us = None
        first = self._prefilled(before)
        found = Reached(first, [], [], [])
        while self._due and self._due[0][0] <= len(self.ends_us):
            _, _, epoch, is_end, job = heappop(self._due)
            if epoch == job.epoch:
                (found.finished if is_end else found.reached).append(job)
        for job in found.finished:
            self._release(job)
        self._leave(found)
        return found

    def leave_idle(self) -> Reached:
        """Removes what is to be removed while nothing runs."""
        found = Reached([], [], [], [])
        self._leave(found)
        return found

    def _leave(self, found: Reached) -> None:
        for job in self._leaving:
            if self.length(job):
                continue
            if job.holding is not None:
                self._release(job)
                found.removed.append(job)
            elif self.queue.remove(job):
                found.removed.append(job)
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
        until = self._due[0][0] - len(self.ends_us)
        running, free = len(self._decoding), self.cache.free_blocks
        if running * (until // self.model.block_tokens + 1) <= free:
            return until
        for step in range(1, until):
            free -= len(self._begins[(len(self.ends_us) + step) % self.model.block_tokens])
            if free < 0:
                return step
        return until

    def _grow(self, step: int) -> None:
        for job in self._begins[step % self.model.block_tokens]:
            assert job.holding is not None
            self.cache.grow(job.holding, job.prompt + job.emitted + step - job.base)

    def _make_room(self) -> bool:
        """Takes the blocks of the next tokens. True where requests were preempted for them."""
        step = len(self.ends_us)
        beginning = self._begins[step % self.model.block_tokens]
        if len(beginning) <= self.cache.free_blocks:
            self._grow(step)
            return False
        for job in list(beginning):
            tokens = job.prompt + job.emitted + step - job.base
            while job.holding is not None and not self.cache.grow(job.holding, tokens):
                self._preempt(max(chain(self._prefilling, self._decoding), key=lambda one: one.place))
        return True

    def _preempt(self, job: Job) -> None:
        self._release(job)
        job.preemptions += 1
        self.preemptions += 1
        job.recomputed, job.prefilled = job.emitted, 0
        self.queue.push(job)

    def _admit(self, now_us: int) -> None:
        left = self.model.chunk_tokens - sum(job.prefill_tokens - job.prefilled for job in self._prefilling)
        while len(self.queue) and len(self._prefilling) + len(self._decoding) < self.model.max_sequences:
            if left <= 0 and not self._admits_ahead:
                break
            job = self.queue.peek()
            holding = self.cache.reserve(job.prefill_tokens, job.blocks, job.prompt)
            if holding is None:
                break
            self.queue.pop()
            job.holding = holding
            job.prefilled = holding.cached_tokens
            left -= job.prefill_tokens - job.prefilled
            if job.started_us is None:
                job.started_us = now_us
            self._prefilling.append(job)

    def _prefill(self) -> int:
        left = self.model.chunk_tokens
        self._computed = []
        for job in self._prefilling:
            if not left:
                break
            tokens = min(left, job.prefill_tokens - job.prefilled)
            job.prefilled += tokens
            left -= tokens
            self._computed.append(job)
        return self.model.chunk_tokens - left

    def _prefilled(self, step: int) -> list[Job]:
        """Prompts that are computed: each gets its first token at the end of the same step."""
        first = []
        for job in self._computed:
            assert job.holding is not None
            if job.blocks:
                self.cache.publish(job.holding, job.blocks, job.prefilled)
            if job.prefilled == job.prefill_tokens:
                self._prefilling.popleft()
                self._decode(job, step)
                if not job.emitted:
                    first.append(job)
        self._computed = []
        return first

    def _decode(self, job: Job, step: int) -> None:
        job.is_decoding, job.base = True, step
        job.epoch += 1
        self._decoding[job] = None
        self._begins[self._phase(job)][job] = None
        self._push(job, job.output, is_end=True)

    def _phase(self, job: Job) -> int:
        return (job.base + 1 - job.prompt - job.emitted) % self.model.block_tokens

    def _push(self, job: Job, generated: int, *, is_end: bool) -> None:
        self._pushed += 1
        heappush(self._due, (job.base + generated - job.emitted, self._pushed, job.epoch, is_end, job))

    def _release(self, job: Job) -> None:
        """Takes a request out of the batch, and frees its blocks."""
        assert job.holding is not None
        if job.is_decoding:
            del self._begins[self._phase(job)][job]
            del self._decoding[job]
            job.stretches.append((job.base, len(self.ends_us)))
            job.emitted = self.length(job)
            job.is_decoding = False
        else:
            self._prefilling.remove(job)
        self.cache.release(job.holding)
        job.holding = None
        job.epoch += 1
