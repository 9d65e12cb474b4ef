"""Times in two engines: the real one, which runs everything, and the one that enforcing would leave to the pool.

The real engine is known from what passes: what was sent and has not ended, which prompts have no first byte yet, and
how many streams generate. `service_time` learns from it. The other engine is computed, for the shadow requests:

- A shadow's first byte comes when its prompt has had its turn, and then as late as it does unloaded. Prompts are
  processed one after the other, at the learned time per token: chunked prefill shares one budget among all prompts,
  the oldest first.
- An engine may run less than the pool admits: a shadow then waits in the engine, and may be preempted there. As many
  run as were ever seen to generate at once: the real engine had at least as much to do.
- It generates for as long as its request did, corrected by how many generate in either engine.
- A request's own times are kept where the load did not lengthen them. Before a line is learned, the first byte of a
  request that came to a crowded engine is taken to be the fastest that was seen. The report says so (`doubts`).

No I/O. Times are arguments, in microseconds of the pool's clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import NamedTuple

from sidecar.admission.dry_run.arrivals import Arrivals
from sidecar.admission.dry_run.service_time import MOST_MODELS, UNLOADED_MORE_US, UNLOADED_TIMES, ModelTimes
from sidecar.admission.intake import SizedRequest
from sidecar.events import ShadowHolds

ROOM_FOR_US = 1_000_000
"""How long the pool's size is taken to be the same: it changes with a policy, or with the engine's own answer."""


class Room(NamedTuple):
    """The size of the pool, None where it has no bound. `replicas` share it; each sees its own requests alone."""

    tokens: int | None
    requests: int | None
    replicas: int = 1


class SentRequest:
    """One request at the real engine, and what is known of it so far. Written by `EngineTimes` alone.

    `first_us` and `end_us` are None until then. `is_crowded` says that more was under way than the pool has room for
    when it was sent; `is_lost` that the engine refused it, failed, or lost its client before the first byte, so that
    its own times say nothing. `guessed_us` is how long it was taken to generate where that was not known in time.
    """

    __slots__ = (
        "end_us", "first_us", "generated_us", "guessed_us", "is_crowded", "is_lost", "is_running", "is_stream", "level",
        "model", "most_output", "output_tokens", "prompt_tokens", "queued_prompt", "sent_us", "sequences",
        "shadow_sum_us", "shadow_us", "tokens", "would_generate",
    )  # fmt: skip

    def __init__(
        self,
        level: int,
        model: ModelTimes,
        *,
        prompt_tokens: int,
        most_output: int | None,
        sequences: int,
        tokens: int,
        is_stream: bool,
        sent_us: int,
    ) -> None:
        self.level = level
        self.model = model
        self.prompt_tokens = prompt_tokens
        self.most_output = most_output
        self.sequences = sequences
        self.tokens = tokens
        self.is_stream = is_stream
        self.sent_us = sent_us
        self.queued_prompt = 0.0
        self.generated_us = 0.0
        self.would_generate = self.shadow_sum_us = 0.0
        self.shadow_us = 0
        self.output_tokens: float | None = None
        self.first_us: int | None = None
        self.end_us: int | None = None
        self.guessed_us: float | None = None
        self.is_crowded = self.is_lost = self.is_running = False

    def generating_meanwhile(self) -> float:
        """How many sequences generated on average while this one did."""
        if self.first_us is None or self.end_us is None:
            return 0.0
        return self.generated_us / max(1, self.end_us - self.first_us)


class _Generating:
    """How many sequences generate at once, and the sum of that over time, in microseconds."""

    __slots__ = ("_since_us", "now", "sum_us")

    def __init__(self) -> None:
        self.now = self._since_us = 0
        self.sum_us = 0.0

    def change(self, more: int, now_us: int) -> None:
        """So many more, or fewer, from now on."""
        self.sum_us += self.now * (now_us - self._since_us)
        self.now += more
        self._since_us = now_us


class EngineTimes:
    """The times of one process. `room` is the pool's size now."""

    def __init__(self, room: Callable[[], Room]) -> None:
        self._read_room = room
        self._room = Room(None, None)
        self._room_until_us = -1
        self.models: dict[str, ModelTimes] = {}
        self._tokens = self._requests = 0
        self._without_first_byte: dict[SentRequest, None] = {}
        self._prompts_waiting = 0
        self._real, self._shadows = _Generating(), _Generating()
        self._prompts_done_us = 0.0
        self._wholes = self._most_running = 0
        self._shadows_running = 0
        self._shadows_in_line: dict[SentRequest, asyncio.Future[None]] = {}
        self._holds: dict[int, ShadowHolds] = {}
        self._arrivals: dict[int, Arrivals] = {}
        self._period_us = 0
        self._learned: asyncio.Future[None] | None = None

    # -- the real engine

    def sent(self, asked: SizedRequest, now_us: int) -> SentRequest:
        """A request goes to the engine."""
        payload, level = asked.payload, asked.classification.level
        request = SentRequest(
            level,
            self._model(payload.model or ""),
            prompt_tokens=asked.prompt_tokens,
            most_output=payload.max_output_tokens,
            sequences=asked.requests,
            tokens=asked.tokens,
            is_stream=payload.stream,
            sent_us=now_us,
        )
        self._requests += request.sequences
        self._tokens += request.tokens
        request.is_crowded = self._is_crowded(now_us)
        arrivals = self._arrivals.get(level)
        if arrivals is None:
            arrivals = self._arrivals[level] = Arrivals()
        arrivals.arrived(now_us, is_crowded=request.is_crowded)
        if request.is_stream:
            # On average half of the first prompt in line is done.
            first = next(iter(self._without_first_byte), None)
            half = 0.0 if first is None else first.prompt_tokens / 2
            request.queued_prompt = request.prompt_tokens + self._prompts_waiting - half
            self._without_first_byte[request] = None
            self._prompts_waiting += request.prompt_tokens
        else:
            self._wholes += request.sequences
        return request

    def first_byte(self, request: SentRequest, now_us: int, *, is_served: bool) -> None:
        """The response's first byte has come; `is_served` says that its status is no error."""
        if request.first_us is not None:
            return
        request.first_us = now_us
        self._prompt_done(request)
        if not request.is_stream:
            return
        if is_served:
            delay_us = now_us - request.sent_us
            request.model.saw_first_byte(request.queued_prompt, delay_us, is_crowded=request.is_crowded)
        if is_served and not request.is_crowded:
            is_alone = request.queued_prompt == request.prompt_tokens
            request.model.learn_first_byte(request.queued_prompt, now_us - request.sent_us, is_alone=is_alone)
        self._count_generating(request.sequences, now_us)
        request.generated_us = -self._real.sum_us

    def ended(self, request: SentRequest, now_us: int, output_tokens: int | None, *, is_complete: bool) -> None:
        """The request is over. Only from a complete response something is learned."""
        if request.end_us is not None:
            return
        request.end_us = now_us
        self._requests -= request.sequences
        self._tokens -= request.tokens
        self._prompt_done(request)
        if (arrivals := self._arrivals.get(request.level)) is not None:
            arrivals.ended(now_us)
        if request.is_stream and request.first_us is not None:
            self._count_generating(-request.sequences, now_us)
            request.generated_us += self._real.sum_us
        elif not request.is_stream:
            self._wholes -= request.sequences
        if is_complete and output_tokens is not None and request.first_us is not None:
            self._learn(request, output_tokens / request.sequences)

    def _learn(self, request: SentRequest, output_tokens: float) -> None:
        if request.first_us is None or request.end_us is None:
            return
        request.output_tokens = output_tokens
        model = request.model
        most = request.most_output
        model.lengths_of(request.level).learn(round(output_tokens), most)
        if not request.is_stream:
            if not request.is_crowded:
                model.wholes.learn(request.prompt_tokens, output_tokens, request.end_us - request.sent_us)
        elif output_tokens >= 2:
            per_token_us = (request.end_us - request.first_us) / (output_tokens - 1)
            model.tokens.learn(request.generating_meanwhile(), per_token_us)
        if request.guessed_us is not None:
            holds = self._holds_of(request)
            holds.guessed_and_known += 1
            holds.guessed_s += request.guessed_us / 1e6
            holds.known_s += (self._own_generating_us(request) if request.is_stream else self._typical(request)) / 1e6
        if self._learned is not None:
            self._learned.set_result(None)
            self._learned = None

    def _prompt_done(self, request: SentRequest) -> None:
        if request in self._without_first_byte:
            del self._without_first_byte[request]
            self._prompts_waiting -= request.prompt_tokens

    def _count_generating(self, more: int, now_us: int) -> None:
        self._real.change(more, now_us)
        if self._real.now + self._wholes > self._most_running:
            self._most_running = self._real.now + self._wholes
            self._fill()

    def _is_crowded(self, now_us: int) -> bool:
        """Whether more is under way than the pool has room for. The other replicas are taken to have as much each."""
        if now_us >= self._room_until_us:
            self._room, self._room_until_us = self._read_room(), now_us + ROOM_FOR_US
        tokens, requests, replicas = self._room
        return (tokens is not None and self._tokens * replicas > tokens) or (
            requests is not None and self._requests * replicas > requests
        )

    def _model(self, name: str) -> ModelTimes:
        model = self.models.get(name)
        if model is None:
            model = self.models.setdefault(name if len(self.models) < MOST_MODELS else "", ModelTimes())
        return model

    # -- the engine that the pool would leave

    def enter(self, request: SentRequest) -> asyncio.Future[None]:
        """A shadow enters the engine, and runs there when this is done. It ends with `leave`."""
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._shadows_in_line[request] = place
        self._fill()
        return place

    def run_now(self, request: SentRequest) -> None:
        """It runs although others seem to fill the engine: its request has begun there."""
        if (place := self._shadows_in_line.pop(request, None)) is not None:
            request.is_running = True
            self._shadows_running += request.sequences
            place.set_result(None)

    def leave(self, request: SentRequest) -> None:
        """It has left the engine, or the line before it."""
        self._shadows_in_line.pop(request, None)
        if request.is_running:
            request.is_running = False
            self._shadows_running -= request.sequences
        self._fill()

    def _fill(self) -> None:
        """Those in line run, as far as the engine is known to run so many."""
        while self._shadows_in_line:
            request = next(iter(self._shadows_in_line))
            most, running = self._most_running, self._shadows_running
            if most and running and running + request.sequences > most:
                return
            self.run_now(request)

    def prompt_begins_us(self, request: SentRequest, granted_us: int) -> float:
        """When the prompt of a shadow that is granted now has its turn."""
        line = request.model.first_byte
        if line is None:
            return granted_us
        begins_us = max(float(granted_us), self._prompts_done_us)
        self._prompts_done_us = begins_us + line.per_token_us * request.prompt_tokens * self._room.replicas
        return begins_us

    def unloaded_until_us(self, request: SentRequest) -> float | None:
        """The latest first byte of the request itself that the load did not delay; None where that is not known."""
        typical_us = self._typical(request)
        if not typical_us:
            return None
        line = request.model.first_byte
        late = request.model.wholes.late if not request.is_stream else 1.0 if line is None else line.late
        times = 1.0 if request.is_crowded else UNLOADED_TIMES
        return request.sent_us + times * late * typical_us + UNLOADED_MORE_US

    def first_byte_us(self, request: SentRequest, granted_us: int, begins_us: float) -> float | None:
        """When the shadow's first byte goes out; None where nothing is known of it."""
        own_us = None if request.first_us is None or request.is_lost else request.first_us - request.sent_us
        latest_us = self.unloaded_until_us(request)
        if own_us is not None and (latest_us is None or request.sent_us + own_us <= latest_us):
            if begins_us <= granted_us or latest_us is None:
                return granted_us + own_us
        else:
            own_us = None
        typical_us = self._typical(request)
        return max(granted_us + (own_us or 0), begins_us + typical_us) if typical_us else None

    def generates(self, request: SentRequest, now_us: int) -> None:
        """A shadow begins to generate: as many beside it are expected as do now."""
        self._shadows.change(request.sequences, now_us)
        request.would_generate = self._shadows.now
        request.shadow_us, request.shadow_sum_us = now_us, self._shadows.sum_us

    def generated(self, request: SentRequest, now_us: int) -> None:
        """It ends: so many did on average."""
        self._shadows.change(-request.sequences, now_us)
        if now_us > request.shadow_us:
            request.would_generate = (self._shadows.sum_us - request.shadow_sum_us) / (now_us - request.shadow_us)

    def generating_us(self, request: SentRequest) -> float | None:
        """How long the shadow generates: corrected from the request's own time, or else guessed. None: not known."""
        if not request.is_stream:
            return 0.0
        if request.end_us is not None and request.first_us is not None and not request.is_lost:
            return self._own_generating_us(request)
        per_token_us = request.model.tokens.at(request.would_generate)
        output_tokens = self._output(request)
        if per_token_us is None or output_tokens is None:
            return None
        return max(0.0, output_tokens - 1) * per_token_us

    def learned(self) -> asyncio.Future[None]:
        """Is done when a response has ended of which something was learned. Shared: do not cancel it."""
        if self._learned is None:
            self._learned = asyncio.get_running_loop().create_future()
        return self._learned

    def guessed(self, request: SentRequest, generating_us: float) -> None:
        """A shadow generates for a time that was drawn."""
        request.guessed_us = generating_us if request.is_stream else self._typical(request)

    def is_stretched(self, request: SentRequest, now_us: int) -> bool:
        """Whether a request that generates does so more slowly than its shadow, as more generate beside it."""
        if request.first_us is None or request.end_us is not None or not request.would_generate:
            return False
        self._count_generating(0, now_us)
        did = (request.generated_us + self._real.sum_us) / max(1, now_us - request.first_us)
        return request.model.tokens.stretch(request.would_generate, did) < 1

    def _own_generating_us(self, request: SentRequest) -> float:
        if request.first_us is None or request.end_us is None:
            return 0.0
        did, would = request.generating_meanwhile(), request.would_generate
        factor = request.model.tokens.stretch(would, did) if would else 1.0
        return (request.end_us - request.first_us) * factor

    def _typical(self, request: SentRequest) -> float:
        """The typical time to the first byte, which is the whole time without a stream; 0 where it is not known."""
        model, prompt = request.model, request.prompt_tokens
        line = model.first_byte
        if request.is_stream:
            if line is not None:
                return line.at(prompt)
            # Its own first byte was delayed by the load. The fastest that was seen is nearer, until more is learned.
            return model.fastest_us(prompt) if request.is_crowded else 0.0
        output_tokens = self._output(request)
        if output_tokens is None:
            return 0.0
        whole_us = model.wholes.at(prompt, output_tokens)
        if whole_us is not None:
            return whole_us
        per_token_us = model.tokens.at(self._shadows.now + request.sequences)
        return 0.0 if line is None or per_token_us is None else line.at(prompt) + output_tokens * per_token_us

    def _output(self, request: SentRequest) -> float | None:
        """The output tokens of each sequence: known, or drawn once."""
        if request.output_tokens is None:
            request.output_tokens = request.model.drawn_length(request.level, request.most_output)
        return request.output_tokens

    # -- what the report says of it

    def held(self, request: SentRequest, *, is_guessed: bool, is_left: bool) -> None:
        """A shadow has ended: what its time was taken from is counted."""
        holds = self._holds_of(request)
        holds.shadows += 1
        holds.guessed += is_guessed
        holds.left += is_left
        holds.lost += request.is_lost and not is_left
        model, prompt = request.model, request.prompt_tokens
        is_known = model.knows_first_byte(prompt) if request.is_stream else self._typical(request) > 0
        did = request.generating_meanwhile()
        would = request.would_generate
        is_stretched = would > 0 and did > 1.5 * would and not request.model.tokens.knows(would)
        holds.unlearned += (request.is_crowded and not is_known) or is_stretched

    def begin_period(self, now_us: int) -> None:
        """The counts begin anew, with the requests that come from now on; what was learned stays."""
        self._holds, self._arrivals, self._period_us = {}, {}, now_us

    def counted(self) -> Mapping[int, ShadowHolds]:
        """The counts of this period, by level."""
        for level, arrivals in self._arrivals.items():
            holds = self._holds.setdefault(level, ShadowHolds())
            holds.arrivals, holds.followed = arrivals.counted, arrivals.followed
        return self._holds

    def _holds_of(self, request: SentRequest) -> ShadowHolds:
        if request.sent_us < self._period_us:
            return ShadowHolds()  # of an earlier period: not counted
        holds = self._holds.get(request.level)
        if holds is None:
            holds = self._holds[request.level] = ShadowHolds()
        return holds
