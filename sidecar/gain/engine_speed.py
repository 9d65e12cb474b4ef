"""Speed of an engine, learned from the answers that pass: its time for a prompt token and for an output token.

Two fits (`relative_fit`), and what they are fitted to:

- the time from sending a request to its first token, by the uncached prompt tokens that the engine had not computed
  then: its own, and those of the requests sent before it. The slope is `prefill_ns`, s_p of the gain order;
- the time per output token of a stream, by the sequences and the tokens that ran meanwhile on average. At the load of
  the latest samples it is `token_us`, tau. Divided by the sequences that share it, it is `output_ns`, s_d.

A sample is of the engine, not of the client. The first token, and the tokens up to the 64th event, are a few KiB: they
go out at once into the buffers of the connection, however slowly the client reads. Later tokens are not looked at.

No tenant decides alone. Tenants are divided into 16 groups, each with fits of its own. The group whose
prediction is the lower median of all counts. So one tenant moves one group of 16, and with three groups or more it
cannot move the result beyond what the others measured. Between two the faster one counts: an engine can be made to look
slow by requests that wait for something else, such as a grammar. A group without samples for long is dropped.

Every method is O(1) in the requests that run; a fit is brought up to date with every eighth of its samples.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Annotated, NamedTuple
from zlib import crc32

import msgspec

from sidecar.figures import SECONDS, gauge
from sidecar.gain.relative_fit import RelativeFit, predicted

GROUPS = 16
"""Of tenants, by a hash of their names: a share of the vote for each, in bounded memory."""
LOOK_AFTER = 64
"""Events of a stream that are looked at: below 32 KiB, where the socket's buffers hold hundreds."""
FULL_AFTER, EVERY_MASK = 256, 3
"""So many samples of a group are all taken, and of later ones every fourth: it costs less, and follows soon enough."""
FEWEST_INTERVALS = 8
"""Times between tokens in a sample. Of fewer, the engine's batches of events say more than its speed."""
STALE_AFTER = 4096
"""Samples of others after which a group counts no more."""
DEFAULT_PREFILL = (20_000.0, 125.0)
"""Microseconds to a first token without a prompt, and for each token of one: 8,000 tokens a second, one GPU."""
DEFAULT_TOKEN = (10_000.0, 100.0, 0.05)
"""Microseconds of a step, for each sequence, and for each token of its context: 25 ms with 100 of 1,000 tokens each.
They are what one GPU needs for a model of 8 to 14 billion parameters, within a factor of two or three."""
DEFAULT_LOAD = (1.0, 100.0, 100_000.0)
_NEW_PART = 1 / 64
"""Of the newest sample in the mean load and in the mean error."""
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
            "Mean error of the predicted times to first tokens, in parts of the larger of both times.",
        ),
    ]
    token_error: Annotated[
        float | None,
        gauge(
            "admission.engine.prediction_error.between_tokens",
            "Mean error of the predicted times between tokens, in parts of the larger of both times.",
        ),
    ]


class Load(NamedTuple):
    """What an engine ran until now: sequences and tokens, each times the microseconds for which it did."""

    at_us: int
    sequences_us: int
    tokens_us: int


class Call(msgspec.Struct, gc=False):
    """One request at the engine. `backlog` is what the engine had to compute of prompts when it was sent, with its own.

    `tokens` are those that it holds while it runs, `predicted_us` is the predicted time to its first token.
    """

    tenant: str
    uncached: int
    sequences: int
    tokens: int
    sent_us: int
    backlog: int
    predicted_us: int
    is_prefilled: bool = False
    is_over: bool = False


class EngineSpeed:
    """The speed of one engine, and what this process has running there. Times are microseconds of one clock.

    `first_error` and `token_error` are mean errors of the predictions: the difference in parts of the larger one of
    predicted and actual time, so 0 to 1. None while the stated defaults predict. `tokens_per_event` is how many tokens
    an event of its streams has, as far as it counts them.
    """

    def __init__(self, replicas: int = 1) -> None:
        self._replicas = replicas
        self.running = self.running_tokens = self.unprefilled = 0
        self.first_error: float | None = None
        self.token_error: float | None = None
        self.tokens_per_event = 1.0
        self._at_us = self._sequences_us = self._tokens_us = 0
        self._unseen: deque[tuple[int, int]] = deque()
        self._prefill = GroupedFit(DEFAULT_PREFILL, (1.0, 1000.0))
        self._token = GroupedFit(DEFAULT_TOKEN, DEFAULT_LOAD)
        self._coefficients: Coefficients | None = None

    def share(self, replicas: int) -> None:
        """So many processes use the engine, about equally: it runs what this one sees so many times."""
        if replicas != self._replicas:
            self._replicas, self._coefficients = replicas, None

    @property
    def samples(self) -> tuple[int, int]:
        """The samples of first tokens, and of times between tokens."""
        return self._prefill.samples, self._token.samples

    @property
    def coefficients(self) -> Coefficients:
        """What is learned, or the stated defaults."""
        found = self._coefficients
        if found is None:
            first_us, prompt_us = self._prefill.coefficients
            token_us = self._token.expected_us
            output_us = token_us / max(1.0, self._token.mean[1] * self._replicas)
            is_known = self._prefill.is_known and self._token.is_known
            found = self._coefficients = Coefficients(
                round(prompt_us * 1000), round(output_us * 1000), round(token_us), round(first_us), is_known
            )
        return found

    def document(self, name: str | None) -> EngineSpeedDocument:
        """What is in force, under the engine's name."""
        found, (firsts, tokens) = self.coefficients, self.samples
        speed = found.prefill_ns, found.output_ns, found.token_us, found.first_us, found.is_known
        first_error, token_error = self.first_error, self.token_error
        return EngineSpeedDocument(
            name,
            *speed,
            firsts,
            tokens,
            None if first_error is None else round(first_error, 4),
            None if token_error is None else round(token_error, 4),
        )

    def token_us(self) -> int:
        """The time between two tokens of an answer that is predicted for the load of this moment."""
        return round(self._token.predict((1.0, float(max(1, self.running)), float(self.running_tokens))))

    def sent(
        self, tenant: str, uncached: int, tokens: int, now_us: int, *, sequences: int = 1, streams: bool = True
    ) -> Call:
        """A request was sent to the engine. Call `first_token` and `ended` for it.

        When the prompt of an answer that does not stream is computed cannot be seen: it counts for its predicted time.
        """
        self._advance(now_us)
        backlog = self.unprefilled + uncached
        predicted_us = round(self._prefill.predict((1.0, float(backlog))))
        self.unprefilled = backlog
        self.running += sequences
        self.running_tokens += tokens
        if not streams:
            self._unseen.append((now_us + predicted_us, uncached))
        return Call(tenant, uncached, sequences, tokens, now_us, backlog, predicted_us, not streams)

    def first_token(self, call: Call, now_us: int, *, is_sample: bool = True) -> Load:
        """The first token of a stream came. Returns the load so far, for `tokens_came`."""
        self._advance(now_us)
        if not call.is_prefilled:
            call.is_prefilled = True
            self.unprefilled -= call.uncached
            if is_sample and now_us > call.sent_us:
                took_us = now_us - call.sent_us
                if self._prefill.is_known:
                    self.first_error = _mean_error(self.first_error, call.predicted_us, took_us)
                if self._prefill.learn(call.tenant, (1.0, float(call.backlog)), float(took_us)):
                    self._coefficients = None
        return self.load(now_us)

    def load(self, now_us: int) -> Load:
        """What the engine ran until now."""
        self._advance(now_us)
        return Load(now_us, self._sequences_us, self._tokens_us)

    def tokens_came(self, call: Call, since: Load, until: Load, intervals: float) -> None:
        """So many tokens of one sequence came between two moments, after the first one."""
        took_us = until.at_us - since.at_us
        if took_us <= 0 or intervals < FEWEST_INTERVALS:
            return
        sequences = (until.sequences_us - since.sequences_us) / took_us
        tokens = (until.tokens_us - since.tokens_us) / took_us
        features, token_us = (1.0, sequences, tokens), took_us / intervals
        if self._token.is_known:
            self.token_error = _mean_error(self.token_error, self._token.predict(features), token_us)
        if self._token.learn(call.tenant, features, token_us):
            self._coefficients = None

    def counted(self, tokens: int, events: int) -> None:
        """The engine counted so many tokens in a stream of so many events."""
        now = min(MOST_TOKENS_PER_EVENT, max(1.0, tokens / events))
        self.tokens_per_event += (now - self.tokens_per_event) * _NEW_RATIO

    def ended(self, call: Call, now_us: int) -> None:
        """A request has left the engine, however it did. Harmless when repeated."""
        if call.is_over:
            return
        self._advance(now_us)
        call.is_over = True
        self.running -= call.sequences
        self.running_tokens -= call.tokens
        if not call.is_prefilled:
            call.is_prefilled = True
            self.unprefilled -= call.uncached

    def _advance(self, now_us: int) -> None:
        """Adds up what ran since the last call. A clock that goes back adds nothing."""
        passed_us = now_us - self._at_us
        if passed_us > 0:
            self._sequences_us += self.running * passed_us
            self._tokens_us += self.running_tokens * passed_us
            self._at_us = now_us
        while self._unseen and self._unseen[0][0] <= now_us:
            self.unprefilled -= self._unseen.popleft()[1]


class GroupedFit:
    """One fit for each group of tenants. `mean` are the mean features of late, which `expected_us` is predicted for."""

    def __init__(self, defaults: Sequence[float], mean: Sequence[float]) -> None:
        self.samples = 0
        self.coefficients: tuple[float, ...] = tuple(defaults)
        self.is_known = False
        self.mean = tuple(mean)
        self._defaults = tuple(defaults)
        self._groups: dict[int, RelativeFit] = {}
        self._turns: dict[int, int] = {}

    @property
    def expected_us(self) -> float:
        """The time at the mean features."""
        return self.predict(self.mean)

    def predict(self, features: Sequence[float]) -> float:
        """The time at these features."""
        return predicted(self.coefficients, features)

    def learn(self, tenant: str, features: Sequence[float], took_us: float) -> bool:
        """Takes a sample of a tenant. Whether the predictions have changed."""
        turn = self.samples = self.samples + 1
        group = group_of(tenant)
        fit = self._groups.get(group)
        if fit is None:
            fit = self._groups[group] = RelativeFit(self._defaults)
            self._turns[group] = turn
        if fit.samples >= FULL_AFTER and turn & EVERY_MASK:
            return False
        before = fit.coefficients
        fit.learn(features, took_us)
        self._turns[group] = turn
        part = max(_NEW_PART, 1 / turn)
        pairs = zip(self.mean, features, strict=True)
        self.mean = tuple(old + (min(new, 2 * old + 1) - old) * part for old, new in pairs)  # no sample is all of it
        if fit.coefficients is before:
            return False
        self._choose()
        return True

    def _choose(self) -> None:
        """The lower median of the groups that know enough counts. Groups that say nothing any more are dropped."""
        for group in [group for group, turn in self._turns.items() if self.samples - turn > STALE_AFTER]:
            del self._groups[group], self._turns[group]
        known = sorted((fit.predict(self.mean), fit.coefficients) for fit in self._groups.values() if fit.is_known)
        if known:
            self.is_known = True
            self.coefficients = known[(len(known) - 1) // 2][1]


class EngineSpeeds:
    """The speeds of a process's engines, by name; None is the one engine of a pool that names none.

    Autoscalers give every new engine a new name: of more than 256 the one that was made first is forgotten.
    """

    def __init__(self) -> None:
        self.engines: dict[str | None, EngineSpeed] = {}
        self._replicas = 1

    def share(self, replicas: int) -> None:
        """So many processes share the pool, and so its engines."""
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


def group_of(tenant: str) -> int:
    """The group that a tenant's samples belong to: the same in every process."""
    return crc32(tenant.encode("utf-8", "surrogatepass")) % GROUPS


def _mean_error(mean: float | None, predicted_us: float, took_us: float) -> float:
    error = abs(predicted_us - took_us) / max(predicted_us, took_us, 1)
    return error if mean is None else mean + (error - mean) * _NEW_PART


DEFAULTS = EngineSpeed().coefficients
"""What is assumed of an engine that has not answered yet."""
