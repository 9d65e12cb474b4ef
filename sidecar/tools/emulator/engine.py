"""The running engine: one task that drives the step model in real time, and the requests in it.

The task lives only while there is work, so an idle engine costs nothing and needs no start. Everything but that task's
sleep is synchronous: a request that is submitted or aborted changes the state at once.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from sidecar.tools.emulator.config import EmulatorConfig
from sidecar.tools.emulator.dialects.base import Dialect
from sidecar.tools.emulator.generation import GeneratedChoice, Generation, ServedGeneration
from sidecar.tools.emulator.prompt_blocks import PromptChain
from sidecar.tools.emulator.request import EngineRequest
from sidecar.tools.step_model.engine import PlanEnd, PlanStart, StepEngine
from sidecar.tools.step_model.queue import KeyQueue, Rank

# -- Occupancy of the emulated engine: what it was sent and has not finished, and the most that this ever was.
#
# A benchmark reads it afterwards to prove that no engine was ever above its capacity, whatever the sidecar believes.


@dataclass(slots=True)
class Occupancy:
    """`requests` that were sent and are not over, running or waiting, and the `tokens` of their prompts and outputs.

    `unprefilled_tokens` of those prompts are neither computed nor found in the prefix cache. A waiting prompt counts
    what it would find if it ran now. The fields that begin with `most_` are what each was at most.
    """

    requests: int = 0
    tokens: int = 0
    unprefilled_tokens: int = 0
    most_requests: int = 0
    most_tokens: int = 0
    most_unprefilled_tokens: int = 0

    def add(self, *, requests: int = 0, tokens: int = 0, unprefilled_tokens: int = 0) -> None:
        """Adds, or takes away what is negative."""
        self.requests += requests
        self.tokens += tokens
        self.unprefilled_tokens += unprefilled_tokens
        self.most_requests = max(self.most_requests, self.requests)
        self.most_tokens = max(self.most_tokens, self.tokens)
        self.most_unprefilled_tokens = max(self.most_unprefilled_tokens, self.unprefilled_tokens)


LOG_LENGTH = 100_000  # served requests remembered: an hour of the demo, some 20 MB


@dataclass(frozen=True, slots=True)
class EmulatedLoad:
    """The engine's gauges at one moment. `kv_tokens_held` is reserved, not yet written, KV included.

    `paused` is how many sequences the last step preempted.
    """

    running: int
    waiting: int
    kv_tokens_held: int
    paused: int = 0


class EmulatedEngine:
    """The state that every endpoint shares. Needs a running event loop only to submit.

    `finished`, `aborted` and `refused` count requests; `running` and `waiting` count sequences. `is_stopping` after
    SIGTERM. `computed_s` is the time of all steps by the model, `lost_s` what they took longer because the machine was
    busy: an engine that lost much is not as its model describes it.
    """

    def __init__(self, config: EmulatorConfig, dialect: Dialect) -> None:
        self.config = config
        self.dialect = dialect
        self.queue: KeyQueue[GeneratedChoice] = KeyQueue()
        self.core: StepEngine[GeneratedChoice] = StepEngine(
            config.steps, self.queue, config.kv_cache(), preempts=config.preempts, admits_ahead=True, jumps=False
        )
        self.finished = 0
        self.aborted = 0
        self.refused = 0
        self.occupancy = Occupancy()
        self.most_running = self.most_kv_tokens_held = 0
        self.generated_tokens = 0
        self.computed_s = self.lost_s = 0.0
        self.is_stopping = False
        self.log: deque[ServedGeneration] = deque(maxlen=LOG_LENGTH)
        self.load_at_last_finish = EmulatedLoad(0, 0, 0)
        self._open: dict[Generation, None] = {}
        self._emptied = asyncio.Event()
        self._numbers = itertools.count(1)
        self._places = itertools.count()
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<EmulatedEngine {self.config.engine.name}: {self.running} running, {self.waiting} waiting>"

    @property
    def running(self) -> int:
        """Sequences in the batch."""
        return self.core.running

    @property
    def waiting(self) -> int:
        """Sequences in the waiting queue."""
        return len(self.queue)

    @property
    def waiting_prompt_tokens(self) -> int:
        """Prompt tokens of the requests that have no slot yet, found in the prefix cache or not."""
        return sum(generation.ask.prompt_tokens for generation in self._open if generation.admitted_s is None)

    @property
    def load(self) -> EmulatedLoad:
        """The gauges now."""
        return EmulatedLoad(self.running, self.waiting, self.core.cache.held_tokens, self.core.last_preemptions)

    @property
    def peak(self) -> int:
        """The most requests that were in it at once."""
        return self.occupancy.most_requests

    def submit(self, ask: EngineRequest, rank: Rank, chains: Sequence[PromptChain] = ()) -> Generation:
        """Queues a request. `chains` are its prompts' token blocks, where the engine caches prefixes.

        Raises EngineRefusal where it can never fit, the queue is full or the engine stops.
        """
        if self.is_stopping and (refusal := self.dialect.stopping(ask.api)):
            raise refusal
        loop = asyncio.get_running_loop()
        output_tokens = self._output_tokens(ask)
        request_id = f"{next(self._numbers):08d}"
        generation = Generation(
            request_id,
            ask,
            rank,
            self.dialect,
            chains,
            output_tokens=output_tokens,
            arrival_s=loop.time(),
            tokens_per_chunk=self.config.tokens_per_chunk,
        )
        if not self._make_room(generation):
            return self._turn_away(generation)
        self._open[generation] = None
        self._count_in(generation)
        for choice in generation.choices:
            choice.place = self.dialect.queue_order(rank, generation.arrival_s), next(self._places)
            self.queue.push(choice)
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

    def cut_all(self) -> None:
        """Ends every request as vLLM's default shutdown does: with what there is, and without an error."""
        for generation in list(self._open):
            self.aborted += 1
            self._drop(generation)
            generation.cut()

    def fail_all(self) -> None:
        """Ends every request with an error."""
        for generation in list(self._open):
            self.aborted += 1
            self._drop(generation)
            generation.end(self.dialect.stopped(generation.ask.api))

    async def idle(self) -> None:
        """Waits until no request is left."""
        while self._open:
            self._emptied.clear()
            await self._emptied.wait()

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
        most = min(self.config.context_tokens, self.config.kv_capacity_tokens)
        prompt_tokens = max(ask.prompts)
        wanted = ask.output_tokens
        if wanted is None:
            wanted = max(1, min(self.config.output_tokens, most - prompt_tokens))
        if prompt_tokens + wanted > most:
            raise self.dialect.too_long(ask.api, prompt_tokens + wanted, most)
        return wanted

    def _make_room(self, newcomer: Generation) -> bool:
        """True if the newcomer may queue, after the engine that does so threw out who is worse."""
        most, api = self.config.max_queued, newcomer.ask.api
        length = self.dialect.queue_length(api, self.waiting, self.running)
        if most is None or length is None or length + len(newcomer.choices) <= most:
            return True
        worst = self.queue.worst() if self.dialect.displaces else None
        if worst is None or not self._outranks(newcomer, worst.generation):
            return False
        self.refused += 1
        self._drop(worst.generation)
        worst.generation.end(self.dialect.displaced(worst.generation.ask.api))
        return True

    def _outranks(self, newcomer: Generation, waiting: Generation) -> bool:
        """True if a newcomer is strictly more important than a waiting request, arrival left aside."""
        order = self.dialect.queue_order
        return order(newcomer.rank, 0.0)[:1] < order(waiting.rank, 0.0)[:1]

    def _turn_away(self, newcomer: Generation) -> Generation:
        self.refused += 1
        refusal = self.dialect.queue_full(newcomer.ask.api)
        if not (newcomer.ask.stream and self.dialect.refuses_inside_streams):
            raise refusal
        newcomer.end(refusal)
        return newcomer

    def _count_in(self, generation: Generation) -> None:
        cache = self.core.cache
        for choice in generation.choices:
            choice.expected_hit = cache.hit_length(choice.blocks, choice.prompt)
        self.occupancy.add(
            requests=1,
            tokens=sum(choice.tokens for choice in generation.choices),
            unprefilled_tokens=sum(choice.unprefilled_tokens for choice in generation.choices),
        )

    def _drop(self, generation: Generation) -> None:
        for choice in generation.choices:
            unprefilled_tokens = choice.unprefilled_tokens
            if self.core.drop(choice):
                self.occupancy.add(tokens=-choice.tokens, unprefilled_tokens=-unprefilled_tokens)
        self._close(generation, aborted=True)

    def _close(self, generation: Generation, *, aborted: bool) -> None:
        del self._open[generation]
        self.occupancy.add(requests=-1)
        if not self._open:
            self._emptied.set()
        now_s = asyncio.get_running_loop().time()
        self.log.append(
            ServedGeneration(
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
        while len(self.core):
            step = self.core.begin(0)
            self._admitted(step, loop.time())
            duration_s = (self.core.due_us or 0) / 1e6 / self.config.speed
            due_s += duration_s
            self.computed_s += duration_s
            late_s = loop.time() - due_s
            if late_s > 0:  # the machine was too slow for this step
                self.lost_s += late_s
                due_s += late_s
            await asyncio.sleep(due_s - loop.time())
            self._deliver(self.core.advance(), loop.time())
            self.core.ends_us.clear()
        self._task = None

    def _admitted(self, step: PlanStart[GeneratedChoice], now_s: float) -> None:
        self.occupancy.add(unprefilled_tokens=step.lost_tokens)
        for choice in step.admitted:
            if choice.generation.admitted_s is None:
                choice.generation.admitted_s = now_s
            self.occupancy.add(unprefilled_tokens=choice.expected_hit - choice.found_tokens)
        self.most_running = max(self.most_running, self.running)
        self.most_kv_tokens_held = max(self.most_kv_tokens_held, self.core.cache.held_tokens)

    def _deliver(self, output: PlanEnd[GeneratedChoice], now_s: float) -> None:
        self.generated_tokens += len(output.emitted)
        self.occupancy.add(unprefilled_tokens=-output.prefill_tokens)
        for choice in output.emitted:
            generation = choice.generation
            choice.generated += 1
            if generation.first_token_s is None:
                generation.first_token_s = now_s
            generation.emit(choice)
        for choice in output.finished:
            self.occupancy.add(tokens=-choice.tokens)
            choice.generation.remaining -= 1
            if choice.generation.remaining == 0:
                self._finish(choice.generation)
        if output.finished:
            self.load_at_last_finish = self.load

    def _finish(self, generation: Generation) -> None:
        self.finished += 1
        self._close(generation, aborted=False)
        generation.end()
