"""Times in two engines: the real one, which runs everything, and the one that enforcing would leave to the pool.

The real engine is known from what passes, and `engines.speed` learns from it: first bytes of requests that came while
no more was under way than the pool has room for, and times per token by how many generate. The other engine is
computed, for the shadow requests:

- A shadow's first byte comes when its prompt has had its turn, and then as late as it does unloaded. Prompts are
  processed one after the other, at the learned time per token: chunked prefill shares one budget among all prompts,
  the oldest first.
- An engine may run less than the pool admits: a shadow then waits in the engine, and may be preempted there. As many
  run as were ever seen to generate at once: the real engine had at least as much to do.
- It generates for as long as its request did, corrected by how many generate in either engine. Where a shadow ends
  before its request has, its length is drawn from the newest ones of the same tier.
- A request's own times are kept where the load did not lengthen them. Before a line is learned, the first byte of a
  request that came to a crowded engine is taken to be the fastest that was seen. The report says so (`doubts`).

No I/O. Times are arguments, in microseconds of the pool's clock.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from sidecar.admission.intake import SizedRequest
from sidecar.engines.robust_line import TimesBySize
from sidecar.engines.speed import Concurrency, EngineSpeed, GenerationLoad, TimedCall
from sidecar.events import ShadowHolds

# -- Arrivals of one tier: whether its clients send the next request because an earlier one has ended.
#
# Such clients ("closed loop", B. Schroeder, A. Wierman, M. Harchol-Balter, "Open Versus Closed: A Cautionary Tale",
# NSDI 2006) send as often as they are answered. When enforcing, they would send more or fewer than they do while
# observing, so no dry run can know how long they would wait.
#
# An arrival *follows* where a request of the tier has ended shortly before: within `SHORTLY` of the mean time
# between arrivals. Independent arrivals follow by chance in `1 - exp(-SHORTLY)` of all cases, which is 26%. Those of
# a closed loop without a pause follow nearly always; a client that pauses for longer is not found. Only arrivals at
# a time when the pool would be full count: at other times it does not matter.

SHORTLY = 0.3
_WEIGHT = 1 / 16
"""Of a new interval in the mean: the rate is that of the last few seconds."""


class Arrivals:
    """Counts arrivals and those that follow. Times in microseconds of one clock."""

    __slots__ = ("_before_us", "_end_us", "_ended", "_mean_us", "counted", "followed")

    def __init__(self) -> None:
        self.counted = 0
        self.followed = 0
        self._before_us: int | None = None
        self._end_us = 0
        self._ended = 0
        self._mean_us = 0.0

    def arrived(self, now_us: int, *, is_crowded: bool) -> None:
        """A request has come; `is_crowded` says whether more is under way than the pool has room for."""
        if self._before_us is not None:
            between_us = now_us - self._before_us
            self._mean_us += (between_us - self._mean_us) * (_WEIGHT if self._mean_us else 1.0)
            if is_crowded:
                self.counted += 1
                if self._ended and now_us - self._end_us <= SHORTLY * self._mean_us:
                    self.followed += 1
                    self._ended -= 1  # one end lets one request go
        self._before_us = now_us

    def ended(self, now_us: int) -> None:
        """A request has ended."""
        if now_us - self._end_us > SHORTLY * self._mean_us:
            self._ended = 0
        self._ended += 1
        self._end_us = now_us


ROOM_FOR_US = 1_000_000
"""How long the pool's size is taken to be the same: it changes with a policy, or with the engine's own answer."""
UNLOADED_TIMES = 1.5
"""A first byte that comes later than so many times the slowest tenth of the unloaded ones was delayed by the load.

Where more was under way than the pool has room for, it need not be so many times as late.
"""
UNLOADED_MORE_US = 20_000
"""And by at least so much: the event loop of a busy process is as late."""
HARDLY_LONGER = 2.0
"""A prompt up to so many times as long has its first byte within so many times the same time."""
SAME = 0.1
"""Two times per token that differ by less are the same: medians of few samples differ by as much."""
LENGTHS_KEPT = 128
"""Newest output lengths of a tier."""


class Room(NamedTuple):
    """The size of the pool, None where it has no bound. `replicas` share it; each sees its own requests alone."""

    tokens: int | None
    requests: int | None
    replicas: int = 1


class SentRequest:
    """One request at the real engine, and what is known of it so far. Written by `EngineTimes` alone.

    `first_us` and `end_us` are None until then. `is_crowded` says that more was under way than the pool has room for
    when it was sent; `is_lost` that the engine refused it, failed, or lost its client before the first byte, so that
    its own times say nothing. `did_generate` sequences generated on average while this one did, and in the engine of
    the shadows `would_generate`. `guessed_us` is how long it was taken to generate where that was not known in time.
    """

    __slots__ = (
        "call", "did_generate", "end_us", "first_us", "guessed_us", "is_crowded", "is_lost", "is_running", "is_stream",
        "level", "most_output", "output_tokens", "shadow_since", "since", "tokens", "would_generate",
    )  # fmt: skip

    def __init__(self, asked: SizedRequest, call: TimedCall, *, is_crowded: bool) -> None:
        self.call = call
        self.level = asked.classification.level
        self.most_output = asked.payload.max_output_tokens
        self.tokens = asked.tokens
        self.is_stream = asked.payload.stream
        self.is_crowded = is_crowded
        self.since: GenerationLoad | None = None
        self.did_generate = self.would_generate = 0.0
        self.shadow_since = GenerationLoad(0, 0)
        self.output_tokens: float | None = None
        self.first_us: int | None = None
        self.end_us: int | None = None
        self.guessed_us: float | None = None
        self.is_lost = self.is_running = False

    @property
    def sent_us(self) -> int:
        """When it was sent."""
        return self.call.sent_us

    @property
    def sequences(self) -> int:
        """The sequences of its answer."""
        return self.call.sequences

    @property
    def prompt_tokens(self) -> int:
        """The tokens of its prompt."""
        return self.call.uncached


class EngineTimes:
    """The times of one process. `room` is the pool's size now, `speed` what is learned of the real engine.

    Of answers that are not streamed, `wholes` has the time by output tokens, without the known time of the prompt.
    """

    def __init__(self, room: Callable[[], Room]) -> None:
        self._read_room = room
        self._room = Room(None, None)
        self._room_until_us = -1
        self.speed = EngineSpeed()
        self.wholes = TimesBySize()
        self._lengths: dict[int, deque[tuple[float, int | None]]] = {}
        self._luck = random.Random(14)  # the same draws in every process
        self._fastest: tuple[float, TimedCall, bool] | None = None
        self._tokens = self._most_running = 0
        self._shadows = Concurrency()
        self._prompts_done_us = 0.0
        self._shadows_running = 0
        self._shadows_in_line: dict[SentRequest, asyncio.Future[None]] = {}
        self._holds: dict[int, ShadowHolds] = {}
        self._arrivals: dict[int, Arrivals] = {}
        self._period_us = 0
        self._learned: asyncio.Future[None] | None = None

    # -- the real engine

    def sent(self, asked: SizedRequest, now_us: int) -> SentRequest:
        """A request goes to the engine."""
        payload, classification = asked.payload, asked.classification
        call = self.speed.sent(
            classification.tenant.name, asked.prompt_tokens, now_us, sequences=asked.requests, streams=payload.stream
        )
        self._tokens += asked.tokens
        request = SentRequest(asked, call, is_crowded=self._is_crowded(now_us))
        arrivals = self._arrivals.setdefault(request.level, Arrivals())
        arrivals.arrived(now_us, is_crowded=request.is_crowded)
        return request

    def first_byte(self, request: SentRequest, now_us: int, *, is_served: bool) -> None:
        """The response's first byte has come; `is_served` says that its status is no error."""
        if request.first_us is not None:
            return
        request.first_us = now_us
        if not request.is_stream:
            return
        call, is_crowded = request.call, request.is_crowded
        if is_served and (self._fastest is None or now_us - call.sent_us < self._fastest[0]):
            self._fastest = float(now_us - call.sent_us), call, is_crowded
        request.since = self.speed.first_token(call, now_us, is_sample=is_served and not is_crowded)
        if self.speed.generating.now > self._most_running:
            self._most_running = self.speed.generating.now
            self._fill()

    def ended(self, request: SentRequest, now_us: int, output_tokens: int | None, *, is_complete: bool) -> None:
        """The request is over. Only from a complete response something is learned."""
        if request.end_us is not None:
            return
        request.end_us = now_us
        self._tokens -= request.tokens
        if (arrivals := self._arrivals.get(request.level)) is not None:
            arrivals.ended(now_us)
        until = self.speed.load(now_us)
        self.speed.ended(request.call, now_us)
        if request.since is not None:
            request.did_generate = until.mean_since(request.since)
        if is_complete and output_tokens is not None and request.first_us is not None:
            self._learn(request, until, output_tokens / request.sequences)

    def _learn(self, request: SentRequest, until: GenerationLoad, output_tokens: float) -> None:
        request.output_tokens = output_tokens
        lengths = self._lengths.setdefault(request.level, deque(maxlen=LENGTHS_KEPT))
        lengths.append((output_tokens, request.most_output))
        if request.since is not None:
            self.speed.tokens_came(request.call, request.since, until, output_tokens - 1)
        elif not request.is_crowded:
            self.wholes.learn(output_tokens, until.at_us - request.sent_us - self._prompt_us(request))
        if request.guessed_us is not None:
            holds = self._holds_for(request)
            holds.guessed_and_known += 1
            holds.guessed_s += request.guessed_us / 1e6
            holds.known_s += (self._own_generating_us(request) if request.is_stream else self._typical(request)) / 1e6
        if self._learned is not None:
            self._learned.set_result(None)
            self._learned = None

    def _is_crowded(self, now_us: int) -> bool:
        """True if more is under way than the pool has room for. The other replicas are taken to have as much each."""
        if now_us >= self._room_until_us:
            self._room, self._room_until_us = self._read_room(), now_us + ROOM_FOR_US
        tokens, requests, replicas = self._room
        return (tokens is not None and self._tokens * replicas > tokens) or (
            requests is not None and self.speed.running * replicas > requests
        )

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
        """Starts shadows in line, as far as the engine is known to run so many."""
        while self._shadows_in_line:
            request = next(iter(self._shadows_in_line))
            most, running = self._most_running, self._shadows_running
            if most and running and running + request.sequences > most:
                return
            self.run_now(request)

    def prompt_begins_us(self, request: SentRequest, granted_us: int) -> float:
        """When the prompt of a shadow that is granted now has its turn."""
        begins_us = max(float(granted_us), self._prompts_done_us)
        if self.speed.first.line is None:
            return granted_us
        self._prompts_done_us = begins_us + self._prompt_us(request) * self._room.replicas
        return begins_us

    def unloaded_until_us(self, request: SentRequest) -> float | None:
        """The latest first byte of the request itself that the load did not delay; None where that is not known."""
        typical_us = self._typical(request)
        if not typical_us:
            return None
        line = self.speed.first.line if request.is_stream else self.wholes.line
        late = 1.0 if line is None else line.late
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
        request.shadow_since = GenerationLoad(now_us, self._shadows.until(now_us))

    def generated(self, request: SentRequest, now_us: int) -> None:
        """It ends: so many did on average."""
        if now_us > request.shadow_since.at_us:
            request.would_generate = GenerationLoad(now_us, self._shadows.until(now_us)).mean_since(
                request.shadow_since
            )
        self._shadows.change(-request.sequences, now_us)

    def generating_us(self, request: SentRequest) -> float | None:
        """How long the shadow generates: corrected from the request's own time, or else guessed. None: not known."""
        if not request.is_stream:
            return 0.0
        if request.end_us is not None and request.first_us is not None and not request.is_lost:
            return self._own_generating_us(request)
        per_token_us = self.speed.token.at(request.would_generate)
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
        """True if a request that generates does so more slowly than its shadow, as more generate beside it."""
        if request.since is None or request.end_us is not None or not request.would_generate:
            return False
        return self._stretch(request.would_generate, self.speed.load(now_us).mean_since(request.since)) < 1

    def _stretch(self, would: float, did: float) -> float:
        """The factor that corrects a time among `did` sequences to one among `would`."""
        here, there = self.speed.token.at(did), self.speed.token.at(would)
        if not would or not here or not there or abs(there / here - 1) < SAME:
            return 1.0
        return there / here

    def _own_generating_us(self, request: SentRequest) -> float:
        if request.first_us is None or request.end_us is None:
            return 0.0
        factor = self._stretch(request.would_generate, request.did_generate)
        return (request.end_us - request.first_us) * factor

    def _prompt_us(self, request: SentRequest) -> float:
        """The time that the engine computes the prompt itself, as far as it is known."""
        line = self.speed.first.line
        return line.slope_us * request.prompt_tokens if line is not None and line.is_slope_seen else 0.0

    def _typical(self, request: SentRequest) -> float:
        """The typical time to the first byte, which is the whole time without a stream; 0 where it is not known."""
        line, prompt = self.speed.first.line, request.prompt_tokens
        if request.is_stream:
            if line is not None:
                return line.at(prompt)
            if not request.is_crowded or self._fastest is None:
                return 0.0
            # Its own first byte was delayed by the load. The fastest that was seen is nearer, until more is learned.
            fastest_us, call, _ = self._fastest
            return fastest_us * max(1.0, prompt / max(1.0, call.backlog))
        output_tokens = self._output(request)
        if output_tokens is None:
            return 0.0
        if self.wholes.line is not None:
            return self.wholes.line.at(output_tokens) + self._prompt_us(request)
        per_token_us = self.speed.token.at(self._shadows.now + request.sequences)
        return 0.0 if line is None or per_token_us is None else line.at(prompt) + output_tokens * per_token_us

    def _output(self, request: SentRequest) -> float | None:
        """The output tokens of each sequence: known, or drawn once, where one such was seen."""
        if request.output_tokens is None:
            own = self._lengths.get(request.level, ())
            for lengths in (own, *self._lengths.values()):
                if drawn := self._as_long(lengths, request.most_output):
                    request.output_tokens = self._luck.choice(drawn)
                    break
        return request.output_tokens

    @staticmethod
    def _as_long(lengths: Iterable[tuple[float, int | None]], most: int | None) -> list[float]:
        """Lengths that were seen: as shares of the maximum where the client set one, else in tokens."""
        if most:
            return [most * min(1.0, length / its_most) for length, its_most in lengths if its_most]
        return [length for length, its_most in lengths if not its_most]

    # -- what the report says of it

    def held(self, request: SentRequest, *, is_guessed: bool, is_left: bool) -> None:
        """A shadow has ended: what its time was taken from is counted."""
        holds = self._holds_for(request)
        holds.shadows += 1
        holds.guessed += is_guessed
        holds.left += is_left
        holds.lost += request.is_lost and not is_left
        is_known = self._knows_first_byte(request) if request.is_stream else self._typical(request) > 0
        did, would = request.did_generate, request.would_generate
        is_stretched = would > 0 and did > 1.5 * would and not self._knows_times_at(would)
        holds.unlearned += (request.is_crowded and not is_known) or is_stretched

    def _knows_first_byte(self, request: SentRequest) -> bool:
        """True if it was learned how long a prompt takes unloaded, or seen of one that is hardly shorter."""
        if self.speed.first.line is not None or self._fastest is None:
            return self.speed.first.line is not None
        _, call, is_crowded = self._fastest
        return not is_crowded and request.prompt_tokens <= HARDLY_LONGER * call.backlog

    def _knows_times_at(self, generating: float) -> bool:
        """True if about so few were ever seen to generate."""
        chosen = self.speed.token.chosen
        return chosen is not None and chosen.points[0][0] <= 2 * generating

    def note_slo(self, request: SentRequest, *, is_missed: bool, is_shadow: bool) -> None:
        """A request of a guarded tier met its SLO or missed it, or its shadow did."""
        holds = self._holds_for(request)
        name = ("would_meet", "would_miss")[is_missed] if is_shadow else ("met", "missed")[is_missed]
        setattr(holds, name, getattr(holds, name) + 1)

    def begin_period(self, now_us: int) -> None:
        """The counts begin anew, with the requests that come from now on; what was learned stays."""
        self._holds, self._arrivals, self._period_us = {}, {}, now_us

    def counted(self) -> Mapping[int, ShadowHolds]:
        """The counts of this period, by level."""
        for level, arrivals in self._arrivals.items():
            holds = self._holds.setdefault(level, ShadowHolds())
            holds.arrivals, holds.followed = arrivals.counted, arrivals.followed
        return self._holds

    def _holds_for(self, request: SentRequest) -> ShadowHolds:
        if request.sent_us < self._period_us:
            return ShadowHolds()  # of an earlier period: not counted
        return self._holds.setdefault(request.level, ShadowHolds())
