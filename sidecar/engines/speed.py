"""How fast an engine is: its time to a first token, and its time per token. One model, for everyone who asks.

    time to a first token = first_us + prefill_us * (prompt tokens to compute: its own, and those sent before it)
    time per token        = by the sequences that generate meanwhile

Both are learned from what passes, or from a probe (`robust_line` has the fit). What the engine has to do is known here:
what was sent and has not ended, which prompts have no first token yet, and how many sequences generate. The confidence
is `late` of a line, the number of samples, and the mean error of the predictions.

Readers: the order by gain (s_p, s_d and tau), the dry run (what a request takes in an engine that runs less), placement
(when the prompt of an answer that does not stream is computed), and the probe of `sidecar doctor`.

A sample is of the engine, not of the client. The first token, and the tokens up to the 64th event, are a few KiB: they
go out at once into the buffers of the connection, however slowly the client reads. Later tokens are not looked at.

No tenant decides alone. Tenants are divided into 16 groups, each with times of its own. The group whose
prediction is the lower median of all counts. So one tenant moves one group of 16, and with three groups or more it
cannot move the result beyond what the others measured. Between two the faster one counts: an engine can be made to look
slow by requests that wait for something else, such as a grammar. A group without samples for long is dropped.

No I/O and no clock. Every method is O(1) in the requests that run.
"""

from __future__ import annotations

from collections import deque
from typing import Annotated, NamedTuple
from zlib import crc32

import msgspec

from sidecar.engines.robust_line import Line, TimesBySize
from sidecar.figures import SECONDS, gauge

GROUPS = 16
"""Of tenants, by a hash of their names: a share of the vote for each, in bounded memory."""
LOOK_AFTER = 64
"""Events of a stream that are looked at: below 32 KiB, where the socket's buffers hold hundreds."""
FULL_AFTER = 256
"""So many samples of a group are all taken, and of later ones about every fourth: it costs less, and follows soon."""
FEWEST_INTERVALS = 8
"""Times between tokens in a sample. Of fewer, the engine's batches of events say more than its speed."""
STALE_AFTER = 4096
"""Samples of others after which a group counts no more."""
DEFAULT_FIRST = Line(20_000.0, 125.0)
"""Until it is known, by prompt tokens: 8,000 of them a second, one GPU."""
DEFAULT_TOKEN = Line(10_000.0, 150.0)
"""A step, and each sequence of some 1,000 tokens in it. They are what one GPU needs for a model of 8 to 14 billion
parameters, within a factor of two or three."""
DEFAULT_PROMPT, DEFAULT_SEQUENCES = 1000.0, 100.0
"""The usual sizes, until they are known."""
_NEW_PART = 1 / 64
"""Of the newest sample in the mean size and in the mean error."""
_NEW_RATIO = 1 / 16
MOST_TOKENS_PER_EVENT = 64.0
_MOST_ENGINES = 256


class Coefficients(msgspec.Struct, frozen=True, gc=False):
    """An engine's speed in whole numbers. `is_known` is false where a part of it is a stated default.

    `prefill_ns` is its time for an uncached prompt token (s_p), `output_ns` its time for an output token (s_d), as one
    of all that run. `token_us` is the time between two tokens of an answer (tau), `first_us` the time to a first token
    beside that for prompts.
    """

    prefill_ns: int
    output_ns: int
    token_us: int
    first_us: int
    is_known: bool = False

    def cost_us(self, prompt_tokens: int, output_tokens: int) -> int:
        """The engine's time for a request, in microseconds, at least 1."""
        return max(1, (self.prefill_ns * prompt_tokens + self.output_ns * output_tokens) // 1000)

    def prefill_us(self, prompt_tokens: int) -> int:
        """The time to the first token, in microseconds, with so many tokens of prompts to compute before it."""
        return self.first_us + self.prefill_ns * prompt_tokens // 1000


class EngineSpeedDocument(msgspec.Struct, frozen=True):
    """The speed of an engine for people and metrics. `engine` is None where the pool has one engine.

    The whole numbers are those of `Coefficients`. The errors are mean parts of the larger of predicted and actual time,
    None while the stated defaults predict, and the samples count since the process began.
    """

    engine: str | None
    prefill_ns: Annotated[
        int,
        gauge(
            "admission.engine.time.prefill_token",
            "The engine's time for an uncached token of a prompt.",
            SECONDS,
            per_unit=10**9,
        ),
    ]
    output_ns: Annotated[
        int,
        gauge(
            "admission.engine.time.output_token",
            "The engine's time for an output token, as one of all that run.",
            SECONDS,
            per_unit=10**9,
        ),
    ]
    token_us: Annotated[
        int,
        gauge(
            "admission.engine.time.between_tokens",
            "The time between two tokens of an answer, at the present load.",
            SECONDS,
            per_unit=10**6,
        ),
    ]
    first_us: int
    is_known: bool
    first_samples: int
    token_samples: int
    first_error: Annotated[
        float | None,
        gauge(
            "admission.engine.prediction_error.first_token",
            "Mean error of predicted times to first tokens, in parts of the larger time.",
        ),
    ]
    token_error: Annotated[
        float | None,
        gauge(
            "admission.engine.prediction_error.between_tokens",
            "Mean error of predicted times between tokens, in parts of the larger time.",
        ),
    ]


class GenerationLoad(NamedTuple):
    """Sequences that generated until now, times the microseconds for which they did."""

    at_us: int
    generating_us: int

    def mean_since(self, since: GenerationLoad) -> float:
        """How many sequences generated on average since an earlier moment."""
        return (self.generating_us - since.generating_us) / max(1, self.at_us - since.at_us)


class TimedCall(msgspec.Struct, gc=False, eq=False):
    """One request at the engine. `backlog` is what the engine had to compute of prompts when it was sent, with its own.

    `predicted_us` is the predicted time to its first token.
    """

    tenant: str
    uncached: int
    sequences: int
    sent_us: int
    backlog: float
    predicted_us: int
    is_prefilled: bool = False
    is_over: bool = False


class VotedTimes:
    """Times by size, for each group of tenants. `chosen` is the group that counts, None before the first sample.

    `mean` is the mean size of late, at which groups are compared. `error` is the mean error of the predictions: the
    difference in parts of the larger one of predicted and actual time, so 0 to 1; None while the default predicts.
    """

    __slots__ = ("_groups", "_turns", "chosen", "default", "error", "mean", "samples")

    def __init__(self, default: Line, mean: float) -> None:
        self.samples = 0
        self.mean = mean
        self.default = default
        self.error: float | None = None
        self.chosen: TimesBySize | None = None
        self._groups: dict[int, TimesBySize] = {}
        self._turns: dict[int, int] = {}

    @property
    def line(self) -> Line | None:
        """Learned line; None until there are enough samples."""
        return None if self.chosen is None else self.chosen.line

    @property
    def line_or_default(self) -> Line:
        """Learned line, or the stated default."""
        return self.line or self.default

    def at(self, size: float) -> float | None:
        """The typical time of a size: that of the nearest sizes that were seen. None before the first sample."""
        return None if self.chosen is None else self.chosen.at(size)

    def missed(self, predicted_us: float, took_us: float) -> None:
        """Notes what became of a prediction."""
        if self.line is not None:
            error, mean = abs(predicted_us - took_us) / max(predicted_us, took_us, 1), self.error
            self.error = error if mean is None else mean + (error - mean) * _NEW_PART

    def learn(self, tenant: str, size: float, took_us: float) -> bool:
        """Takes a sample of a tenant. Whether the predictions may have changed."""
        turn = self.samples = self.samples + 1
        group = group_for(tenant)
        times = self._groups.get(group)
        if times is None:
            times = self._groups[group] = TimesBySize(self.default)
            self._turns[group] = turn
        if times.samples >= FULL_AFTER and (turn * 0x9E3779B1) & 0xC0000000:  # not each fourth: a load may alternate
            return False
        is_fitted = times.learn(size, took_us)
        self._turns[group] = turn
        part = max(_NEW_PART, 1 / turn)
        self.mean += (min(size, 2 * self.mean + 1) - self.mean) * part  # no sample is all of it
        if is_fitted:
            self._choose()
        return is_fitted

    def _choose(self) -> None:
        """The lower median of the groups that know enough counts. Groups that say nothing any more are dropped."""
        for group in [group for group, turn in self._turns.items() if self.samples - turn > STALE_AFTER]:
            del self._groups[group], self._turns[group]
        known = [times for times in self._groups.values() if times.line is not None]
        ordered = sorted(known or self._groups.values(), key=lambda times: times.at(self.mean) or 0.0)
        self.chosen = ordered[(len(ordered) - 1) // 2]


class Concurrency:
    """How many sequences do something at once, and the sum of that over time."""

    __slots__ = ("_since_us", "_sum_us", "now")

    def __init__(self) -> None:
        self.now = self._since_us = self._sum_us = 0

    def change(self, more: int, now_us: int) -> None:
        """Adds sequences from now on; removes some where `more` is negative."""
        self._sum_us = self.until(now_us)
        self._since_us = max(self._since_us, now_us)
        self.now += more

    def until(self, now_us: int) -> int:
        """Sequences times microseconds until now. A clock that goes back adds nothing."""
        return self._sum_us + self.now * max(0, now_us - self._since_us)


class EngineSpeed:
    """The speed of one engine, and what this process has running there. Times are microseconds of one clock.

    `running` sequences were sent and have not ended; of these `generating` are past their first token. `unprefilled`
    tokens of prompts are still to compute. `tokens_per_event` is how many tokens an event of its streams has, as far as
    it counts them.
    """

    def __init__(self, replicas: int = 1) -> None:
        self._replicas = replicas
        self.running = self.unprefilled = 0
        self.generating = Concurrency()
        self.tokens_per_event = 1.0
        self._in_line: dict[TimedCall, None] = {}
        self._first_since_us = 0
        self._unseen: deque[tuple[int, TimedCall]] = deque()
        self.first = VotedTimes(DEFAULT_FIRST, DEFAULT_PROMPT)
        self.token = VotedTimes(DEFAULT_TOKEN, DEFAULT_SEQUENCES)
        self._coefficients: Coefficients | None = None

    def share(self, replicas: int) -> None:
        """Sets how many processes use the engine, about equally: it runs so many times what this one sees."""
        if replicas != self._replicas:
            self._replicas, self._coefficients = replicas, None

    @property
    def coefficients(self) -> Coefficients:
        """Learned coefficients, or the stated defaults."""
        found = self._coefficients
        if found is None:
            first, token = self.first, self.token
            seen_us = None if token.line is None else token.at(token.mean)
            token_us = seen_us or token.default.at(token.mean)
            output_us = token_us / max(1.0, token.mean * self._replicas)
            line, is_known = first.line_or_default, first.line is not None and seen_us is not None
            found = self._coefficients = Coefficients(
                max(1, round(line.slope_us * 1000)),
                max(1, round(output_us * 1000)),
                round(token_us),
                round(line.base_us),
                is_known,
            )
        return found

    def document(self, name: str | None) -> EngineSpeedDocument:
        """Document of the coefficients in force, under the engine's name."""
        found, first, token = self.coefficients, self.first, self.token
        return EngineSpeedDocument(
            name,
            found.prefill_ns,
            found.output_ns,
            found.token_us,
            found.first_us,
            found.is_known,
            first.samples,
            token.samples,
            None if first.error is None else round(first.error, 4),
            None if token.error is None else round(token.error, 4),
        )

    def computing_us(self, prompt_tokens: int) -> float | None:
        """The time in which an idle engine computes a prompt, beside what it needs for any. None where it is unknown.

        The prompts' own times are learned under load, too. What others cost there is mostly the same for each prompt.
        """
        line = self.first.line
        return None if line is None or not line.is_slope_seen else line.slope_us * prompt_tokens

    def sent(self, tenant: str, uncached: int, now_us: int, *, sequences: int = 1, streams: bool = True) -> TimedCall:
        """A request was sent to the engine. Call `first_token` and `ended` for it.

        When the prompt of an answer that does not stream is computed cannot be seen: it counts for its predicted time.
        """
        self._advance(now_us)
        backlog = self.unprefilled - self._computed(now_us) + uncached
        self.unprefilled += uncached
        self.running += sequences
        call = TimedCall(tenant, uncached, sequences, now_us, backlog, round(self.first.line_or_default.at(backlog)))
        if not self._in_line:
            self._first_since_us = now_us
        self._in_line[call] = None
        if not streams:
            self._unseen.append((now_us + call.predicted_us, call))
        return call

    def first_token(self, call: TimedCall, now_us: int, *, is_sample: bool = True) -> GenerationLoad:
        """The first token of a stream came. Returns the load so far, for `tokens_came`."""
        self._advance(now_us)
        if not call.is_prefilled:
            self._prefilled(call, now_us)
            took_us = now_us - call.sent_us
            if is_sample and took_us > 0:
                self.first.missed(call.predicted_us, took_us)
                if self.first.learn(call.tenant, call.backlog, took_us):
                    self._coefficients = None
        return GenerationLoad(now_us, self.generating.until(now_us))

    def load(self, now_us: int) -> GenerationLoad:
        """Load of generation until now."""
        self._advance(now_us)
        return GenerationLoad(now_us, self.generating.until(now_us))

    def tokens_came(self, call: TimedCall, since: GenerationLoad, until: GenerationLoad, intervals: float) -> None:
        """Notes the tokens of one sequence that came between two moments, after the first one."""
        took_us = until.at_us - since.at_us
        if took_us <= 0 or intervals < FEWEST_INTERVALS:
            return
        sequences, token_us = until.mean_since(since), took_us / intervals
        self.token.missed(self.token.at(sequences) or 0.0, token_us)
        if self.token.learn(call.tenant, sequences, token_us):
            self._coefficients = None

    def counted(self, tokens: int, events: int) -> None:
        """The engine counted so many tokens in a stream of so many events."""
        now = min(MOST_TOKENS_PER_EVENT, max(1.0, tokens / events))
        self.tokens_per_event += (now - self.tokens_per_event) * _NEW_RATIO

    def ended(self, call: TimedCall, now_us: int) -> None:
        """A request has left the engine, however it did. Harmless when repeated."""
        if call.is_over:
            return
        self._advance(now_us)
        if not call.is_prefilled:
            self._prefilled(call, now_us)
        call.is_over = True
        self.running -= call.sequences
        self.generating.change(-call.sequences, now_us)

    def _computed(self, now_us: int) -> float:
        """The tokens of the first prompt in line that should be computed: half of it, while its speed is not known."""
        if not self._in_line:
            return 0.0
        tokens, line = next(iter(self._in_line)).uncached, self.first.line
        if line is None or not line.slope_us:
            return tokens / 2
        return min(tokens, max(0, now_us - self._first_since_us) / line.slope_us)

    def _prefilled(self, call: TimedCall, now_us: int) -> None:
        """The prompt is computed, and the answer begins."""
        call.is_prefilled = True
        if call is next(iter(self._in_line)):
            self._first_since_us = now_us
        del self._in_line[call]
        self.unprefilled -= call.uncached
        self.generating.change(call.sequences, now_us)

    def _advance(self, now_us: int) -> None:
        """Prompts of answers that do not stream are computed when it was predicted."""
        while self._unseen and self._unseen[0][0] <= now_us:
            at_us, call = self._unseen.popleft()
            if not call.is_prefilled:
                self._prefilled(call, at_us)


class EngineSpeeds:
    """The speeds of a process's engines, by name; None is the one engine of a pool that names none.

    Autoscalers give every new engine a new name: of more than 256 the one that was made first is forgotten.
    """

    def __init__(self) -> None:
        self.engines: dict[str | None, EngineSpeed] = {}
        self._replicas = 1

    def share(self, replicas: int) -> None:
        """Sets how many processes share the pool, and so its engines."""
        self._replicas = replicas
        for engine in self.engines.values():
            engine.share(replicas)

    def engine(self, name: str | None) -> EngineSpeed:
        """The speed of an engine. A new one has the stated defaults."""
        found = self.engines.get(name)
        if found is None:
            found = self.engines[name] = EngineSpeed(self._replicas)
            if len(self.engines) > _MOST_ENGINES:
                del self.engines[next(iter(self.engines))]
        return found

    def typical(self) -> Coefficients:
        """The coefficients of the engine in the middle by its time for an output token: of those that are known, where
        there are any. For a request whose engine is not chosen yet. Costs O(engines).
        """
        if len(self.engines) == 1:
            return next(iter(self.engines.values())).coefficients
        found = [engine.coefficients for engine in self.engines.values()]
        found = [it for it in found if it.is_known] or found or [DEFAULTS]
        return sorted(found, key=lambda it: it.output_ns)[(len(found) - 1) // 2]


def group_for(tenant: str) -> int:
    """The group that a tenant's samples belong to: the same in every process."""
    return crc32(tenant.encode("utf-8", "surrogatepass")) % GROUPS


DEFAULTS = EngineSpeed().coefficients
"""What is assumed of an engine that has not answered yet."""
