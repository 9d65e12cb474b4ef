"""The running engine: one task that steps the batch in real time, and the requests in it.

The task lives only while there is work, so an idle engine costs nothing and needs no start. Everything but that task's
sleep is synchronous: a request that is submitted or aborted changes the state at once.
"""

from __future__ import annotations

import asyncio
import itertools
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from sidecar.tools.emulator.config import EmulatorConfig
from sidecar.tools.emulator.dialects.base import Dialect
from sidecar.tools.emulator.generation import Choice, Generation, Served
from sidecar.tools.emulator.request import EngineRequest
from sidecar.tools.emulator.scheduler import Output, Rank, RunningBatch, Step, WaitingQueue

LOG_LENGTH = 100_000  # served requests remembered: an hour of the demo, some 20 MB
ITERATIONS_LENGTH = 1_000  # TensorRT-LLM's own iter_stats_max_iterations

QUEUE_TIME_BOUNDS_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)  # vLLM's


@dataclass(frozen=True, slots=True)
class Load:
    """The engine's gauges at one moment. `kv_tokens_held` is reserved, not yet written, KV included."""

    running: int
    waiting: int
    kv_tokens_held: int


class EmulatedEngine:
    """The state that every endpoint shares. Needs a running event loop only to submit.

    `finished`, `aborted` and `refused` count requests, `peak` the most that were in it at once; `running` and `waiting`
    count sequences.
    """

    def __init__(self, config: EmulatorConfig, dialect: Dialect) -> None:
        self.config = config
        self.dialect = dialect
        self.batch: RunningBatch[Choice] = RunningBatch(config.steps)
        self.queue: WaitingQueue[Choice] = WaitingQueue(dialect.queue_order)
        self.finished = 0
        self.aborted = 0
        self.refused = 0
        self.peak = 0
        self.generated_tokens = 0
        self.queue_time_s = Histogram(QUEUE_TIME_BOUNDS_S)
        self.log: deque[Served] = deque(maxlen=LOG_LENGTH)
        self.iterations: deque[tuple[int, Load]] = deque(maxlen=ITERATIONS_LENGTH)
        self.load_at_last_finish = Load(0, 0, 0)
        self._open: dict[Generation, None] = {}
        self._numbers = itertools.count(1)
        self._steps = itertools.count(1)
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<EmulatedEngine {self.config.engine.name}: {self.running} running, {self.waiting} waiting>"

    @property
    def running(self) -> int:
        """Sequences in the batch."""
        return len(self.batch)

    @property
    def waiting(self) -> int:
        """Sequences in the waiting queue."""
        return len(self.queue)

    @property
    def load(self) -> Load:
        """The gauges now."""
        return Load(self.running, self.waiting, self.batch.kv_tokens_held)

    def waiting_by_priority(self) -> Counter[float | None]:
        """Requests that have no slot yet, by the priority that the engine read."""
        return Counter(generation.rank.value for generation in self._open if generation.admitted_s is None)

    def running_by_priority(self) -> Counter[float | None]:
        """Requests that have a slot, by the priority that the engine read."""
        return Counter(generation.rank.value for generation in self._open if generation.admitted_s is not None)

    def submit(self, ask: EngineRequest, rank: Rank) -> Generation:
        """Queues a request. Raises Refusal where it can never fit or the queue is full."""
        loop = asyncio.get_running_loop()
        output_tokens = self._output_tokens(ask)
        request_id = f"{next(self._numbers):08d}"
        generation = Generation(
            request_id,
            ask,
            rank,
            output_tokens=output_tokens,
            arrival_s=loop.time(),
            tokens_per_chunk=self.config.tokens_per_chunk,
        )
        if not self._make_room(generation):
            return self._turn_away(generation)
        self._open[generation] = None
        self.peak = max(self.peak, len(self._open))
        for choice in generation.choices:
            self.queue.push(choice, rank, generation.arrival_s)
        if self._task is None:
            self._task = loop.create_task(self._run())
        return generation

    def abort(self, generation: Generation) -> None:
        """The client left: its slots and its place in the queue are free at once. Nothing for one that is over."""
        if not generation.over:
            self.aborted += 1
            self._drop(generation)
            generation.end()

    def abort_late(self, generation: Generation) -> None:
        """The client left: the same as `abort`, as late as this engine notices. Later calls change nothing."""
        if generation.over or generation.is_deserted:
            return
        generation.desert()
        if self.config.abort_latency_s:
            asyncio.get_running_loop().call_later(self.config.abort_latency_s, self.abort, generation)
        else:
            self.abort(generation)

    async def stop(self) -> None:
        """Aborts what is left and ends the task."""
        for generation in list(self._open):
            self.abort(generation)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def _output_tokens(self, ask: EngineRequest) -> int:
        """The request's maximum, or the configured default as far as the context goes."""
        most = min(self.config.context_tokens, self.config.steps.kv_tokens or self.config.context_tokens)
        prompt_tokens = max(ask.prompts)
        wanted = ask.output_tokens
        if wanted is None:
            wanted = max(1, min(self.config.output_tokens, most - prompt_tokens))
        if prompt_tokens + wanted > most:
            raise self.dialect.too_long(ask.api, prompt_tokens + wanted, most)
        return wanted

    def _make_room(self, newcomer: Generation) -> bool:
        """Whether the newcomer may queue, after the engine that does so threw out who is worse."""
        most, api = self.config.max_queued, newcomer.ask.api
        length = self.dialect.queue_length(api, self.waiting, self.running)
        if most is None or length is None or length + len(newcomer.choices) <= most:
            return True
        worst = self.queue.worst() if self.dialect.displaces else None
        if worst is None or not self.queue.outranks(newcomer.rank, worst):
            return False
        self.refused += 1
        self._drop(worst.generation)
        worst.generation.end(self.dialect.displaced(worst.generation.ask.api))
        return True

    def _turn_away(self, newcomer: Generation) -> Generation:
        self.refused += 1
        refusal = self.dialect.queue_full(newcomer.ask.api)
        if not (newcomer.ask.stream and self.dialect.refuses_inside_streams):
            raise refusal
        newcomer.end(refusal)
        return newcomer

    def _drop(self, generation: Generation) -> None:
        for choice in generation.choices:
            _ = self.queue.remove(choice) or self.batch.remove(choice)
        self._close(generation, aborted=True)

    def _close(self, generation: Generation, *, aborted: bool) -> None:
        del self._open[generation]
        now_s = asyncio.get_running_loop().time()
        self.log.append(
            Served(
                request_id=generation.request_id,
                priority=generation.rank.value,
                arrival_s=generation.arrival_s,
                admitted_s=generation.admitted_s,
                first_token_s=generation.first_token_s,
                end_s=now_s,
                aborted=aborted,
            )
        )

    async def _run(self) -> None:
        """Steps while there is work. A step's end is due when it is due: time lost to a busy loop is not lost twice."""
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while len(self.batch) or len(self.queue):
            step = self.batch.begin(self.queue)
            self._admitted(step, loop.time())
            due_s = max(due_s + step.duration_s, loop.time())
            await asyncio.sleep(due_s - loop.time())
            self._deliver(self.batch.end(), loop.time())
        self._task = None

    def _admitted(self, step: Step[Choice], now_s: float) -> None:
        for choice in step.admitted:
            if choice.generation.admitted_s is None:
                choice.generation.admitted_s = now_s
            self.queue_time_s.observe(now_s - choice.generation.arrival_s)
        self.iterations.append((next(self._steps), self.load))

    def _deliver(self, output: Output[Choice], now_s: float) -> None:
        self.generated_tokens += len(output.emitted)
        for choice in output.emitted:
            generation = choice.generation
            if generation.first_token_s is None:
                generation.first_token_s = now_s
            generation.emit(choice)
        for choice in output.finished:
            choice.generation.remaining -= 1
            if choice.generation.remaining == 0:
                self.finished += 1
                self._close(choice.generation, aborted=False)
                choice.generation.end()
        if output.finished:
            self.load_at_last_finish = self.load


class Histogram:
    """Observations in constant memory. `bounds` rise; +Inf is implied."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.sum = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    @property
    def count(self) -> int:
        """How many observations there were."""
        return sum(self._counts)

    def observe(self, value: float) -> None:
        """Adds one observation."""
        self.sum += value
        self._counts[bisect_left(self.bounds, value)] += 1

    def buckets(self) -> Iterator[tuple[str, int]]:
        """Each bound as Prometheus writes it, with the count at or below it."""
        names = [*map(str, self.bounds), "+Inf"]
        return zip(names, accumulate(self._counts), strict=True)
