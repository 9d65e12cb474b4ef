"""Size of a lease: what a request is expected to use, when it enters the pool and while its answer streams.

A request enters with its prompt and the learned quantile of its output length (`lengths.estimator`). While it streams
the quantile is asked again about every 64 tokens, given that the answer is so long already: the lease shrinks or grows.
Requests end at different times, so all of them together need less than the sum of what each may still need: the ratio
of the two (`lengths.overlap`) is applied to what a lease holds. How much of this is trusted is the policy's `learn`,
and the engine's own preemptions take trust back (`lengths.trust`).

The output of an answer that does not stream cannot be seen: its lease keeps its size to the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import nlargest
from typing import Protocol

import msgspec

from sidecar.events import Expectation
from sidecar.lengths.estimator import (
    EngineSizesDocument,
    Estimate,
    EstimateSource,
    KnownLengths,
    LeaseSizesDocument,
    LengthEstimator,
    LengthKey,
    bucket_for,
)
from sidecar.lengths.trust import WHOLE, Overlap, Trust
from sidecar.payload.decode import Payload
from sidecar.payload.traits import Traits
from sidecar.policy.choices import Learn
from sidecar.pools.base import Lease

EVERY_TOKENS = 64
"""Tokens of each sequence after which a lease is sized anew, as soon as the answer's events are counted. A
conversation's answer has three to ten times as many."""
_MOST_ENGINES = 256
"""Engines that are remembered while they run nothing. Autoscalers give every new one a new name."""
MOST_SHOWN = 64
"""Engines in a document, as in metrics."""
MOST_LEARNED_SHOWN = 20
_SMALLEST_CHANGE_SHIFT = 6
"""A lease is not resized for less than a 64th of what it holds: each change is an operation in the store."""


_SAMPLES_PER_RUNNING = 3
"""Complete samples for each request of a key that runs, before an estimate of its own answers counts. The answers that
end first are the shortest of a batch: with a batch of 270 the first 50 say far too little, and the engine preempts."""
_MOST_KNOWN = 65_536
_MOST_PLACES = 4096
"""Kinds of requests whose places are kept. A kind has a tenant and what its clients say: such as each `max_tokens`."""
_LONGEST_NAME = 256
"""Characters of a model whose places are kept: no model has a longer name, and memory must stay small."""
# Looked up once: an enumeration's attribute costs as much as a call.
_OWN = EstimateSource.OWN

_NEVER = 2**62
_ENDED = _NEVER + 1
"""The next look of a lease that has ended."""

_Kind = tuple[str, str, str | None, Traits, int | None]
"""What finds a request's place: its tenant, path, model and traits, and its bound."""


class LeasePlace(KnownLengths):
    """The place of a kind of requests. `is_known`: its key has enough answers, whatever runs."""

    __slots__ = ("is_known",)

    def __init__(self, tenant: str, key: LengthKey, *, is_known: bool) -> None:
        super().__init__(tenant, key)
        self.is_known = is_known


class Expected(msgspec.Struct, frozen=True, gc=False):
    """Expected use of one request, in tokens. `place` is where its length is learned.

    `prompt` is that of all choices together, in `sequences` sequences, of which the answer has `shown`. `bound` is the
    most that one of them may generate, None where the client says none; the old rule takes `assumed` then. `longest` is
    the same, or what its tier admits where there is no `bound`. `estimate` is None where nothing is
    known: the lease then holds `most`, what the old rule holds. `tokens` is what it enters the pool with, at the
    overlap `ratio` of 65,536, `quantile` the share of answers that `estimate` covers. `plain` is what it is expected to
    use in all, before the overlap.
    """

    place: LeasePlace
    prompt: int
    sequences: int
    bound: int | None
    assumed: int
    longest: int
    shown: int
    estimate: Estimate | None
    most: int
    quantile: float
    tokens: int
    ratio: int
    plain: int

    def expectation(self, payload: Payload) -> Expectation:
        """The estimate as telemetry reports it. `payload` is the request's."""
        is_text = payload.prompt_bytes and not payload.prompt_tokens and not payload.unread_bytes
        bytes_per_token = payload.prompt_bytes * payload.choices / self.prompt if is_text else None
        if (estimate := self.estimate) is None:
            output, source, samples, quantile = self.most_output, "maximum", 0, 0.0
        else:
            output = estimate.tokens if self.bound is None else min(estimate.tokens, self.bound)
            source, samples, quantile = estimate.source._value_, estimate.samples, self.quantile
        return Expectation(
            output_tokens=output,
            sequences=self.sequences,
            source=source,
            samples=samples,
            quantile=quantile,
            overlap=self.ratio / WHOLE,
            most_tokens=self.most,
            prompt_tokens=self.prompt,
            bytes_per_token=bytes_per_token,
            bucket=self.place.key.bucket,
        )

    @property
    def most_output(self) -> int:
        """The most tokens of one sequence, as the old rule takes it."""
        return self.assumed if self.bound is None else self.bound

    @property
    def most_used(self) -> int:
        """The most tokens that the request can come to use: no lease holds more, and no tenant is charged for more."""
        return self.prompt + self.longest * self.sequences


class AnswerProgress(Protocol):
    """An answer as it passes: its events so far, and the engine's own count of its output, where it reports one.

    See `usage.UsageReader`.
    """

    chunks: int
    large_tokens: int
    output_tokens: int | None
    later_tokens: int | None

    @property
    def later_chunks(self) -> int:
        """The chunks since the engine's count, 0 where that is the last."""


class EngineSizes:
    """The leases of this process at one engine, and the trust in it.

    `admitted` counts all that there were, `admitted_by_all` those of all replicas, about. The overlap has the leases
    where the trust uses it.
    """

    def __init__(self, learn: Learn, now_us: Callable[[], int], name: str | None) -> None:
        self.name = name
        self.overlap = Overlap()
        self.trust = Trust(learn, now_us())
        self.admitted = self.admitted_by_all = self.growths = 0
        self.leases: dict[int, LeaseSize] = {}
        self.preemptions: int | None = None
        self.read_us = now_us()
        self._counted = 0

    @property
    def running(self) -> int:
        """The leases at this engine."""
        return len(self.leases)

    @property
    def held_tokens(self) -> int:
        """Tokens that they hold in the pool."""
        return sum(lease.held for lease in self.leases.values())

    def count_admitted(self, replicas: int) -> None:
        """Each of the replicas has admitted about as many as this one: all of them caused the engine's preemptions."""
        self.admitted_by_all += (self.admitted - self._counted) * replicas
        self._counted = self.admitted

    def document(self) -> EngineSizesDocument:
        """Document of the quantile in force, and of what its leases hold."""
        used = sum(lease.used_tokens for lease in self.leases.values())
        expected = sum(lease.expected_tokens for lease in self.leases.values())
        trust = self.trust
        return EngineSizesDocument(
            self.name,
            trust.quantile,
            self.ratio / WHOLE,
            trust.reason,
            trust.is_raised,
            self.running,
            self.held_tokens,
            expected,
            used,
            self.growths,
            self.preemptions,
        )

    @property
    def ratio(self) -> int:
        """The overlap in force, of 65,536."""
        return self.overlap.ratio if self.trust.uses_overlap else WHOLE

    def counted(self, tokens: int) -> int:
        """Count in the pool for a lease that needs `tokens`: a whole number, at least 1."""
        return self.overlap.counted(tokens) if self.trust.uses_overlap else max(1, tokens)


class LeaseSizes:
    """The sizes of a process's leases in one pool. Not thread-safe; every method returns at once.

    `learns` says whether requests are sized by what is learned. `now_us` is the pool's clock, `replicas` how many
    processes share the pool. `estimator` may be shared with other pools of the process. Where it `has_many_engines`,
    call `forget_idle` when one of them runs nothing any more.
    """

    def __init__(
        self,
        learn: Learn,
        now_us: Callable[[], int],
        estimator: LengthEstimator,
        replicas: Callable[[], int] = lambda: 1,
    ) -> None:
        self.mode = learn
        self.learns = learn is not Learn.OFF
        self.estimator = estimator
        self._now_us = now_us
        self._replicas = replicas
        self._base = Trust(learn, now_us())
        self._at_base: tuple[float, int] | None = None
        self._engines: dict[str | None, EngineSizes] = {}
        self.has_many_engines = False
        self._places: dict[_Kind, LeasePlace] = {}
        self._unknown: dict[tuple[str, LengthKey], int] = {}
        self._known = set[tuple[str, LengthKey]]()
        self._trust_changed()

    def change_learn(self, learn: Learn) -> None:
        """The policy has another `learn`. What was learned stays; leases under way change at their next 64 tokens."""
        self.mode, self.learns = learn, learn is not Learn.OFF
        self._base.change_mode(learn)
        for engine in self._engines.values():
            engine.trust.change_mode(learn)
        self._trust_changed()

    def _trust_changed(self) -> None:
        """Notes the quantile where the base is in force at every engine, and no overlap: no request asks them then."""
        is_raised = any(engine.trust.is_raised for engine in self._engines.values())
        is_at_base = self.mode is Learn.CAUTIOUS and not is_raised
        self._at_base = (self._base.quantile, WHOLE) if is_at_base else None

    def preempted(self, engine: str | None, total: int, now_us: int) -> None:
        """An engine, by its name, says how many requests it has preempted since it started."""
        found = self._engine(engine)
        found.preemptions, found.read_us = total, now_us
        found.count_admitted(self._replicas())
        found.trust.preempted(total, now_us, found.admitted_by_all)

    def expect(  # noqa: PLR0917  # names, or an object with them, would cost a fifth of all of this
        self,
        tenant: str,
        path: str,
        payload: Payload,
        prompt_tokens: int,
        most: int,
        assumed: int,
        bound: int | None,
        limit: int,
    ) -> Expected | None:
        """The size of a request that enters the pool. None where nothing is generated. Not with `learn: off`.

        See `Expected`. `limit` is the most that one request of its tier may hold: it counts where there is no `bound`.
        """
        if assumed < 1:
            return None
        kind = tenant, path, payload.model, payload.traits, bound
        place = self._places.get(kind) or self._place(kind)
        quantile, ratio = self._at_base or self._entry()
        estimate = self.estimate(place, quantile)
        sequences = shown = 1
        prompt = prompt_tokens
        if payload.choices != 1 or payload.prompts != 1:
            sequences, shown = payload.sequences, payload.shown_sequences
            prompt *= payload.choices
        # Without a maximum the old rule's figure is no bound. No estimate makes a request too large for its tier.
        longest = max(assumed, (limit - prompt) // sequences) if bound is None else bound
        if estimate is None:
            plain = prompt + sequences * (assumed if bound is None else bound)
            tokens = most
        else:
            output = estimate.tokens
            if output > longest:  # noqa: PLR1730  # `min` is one call more
                output = longest
            tokens = plain = prompt + sequences * output
        if ratio < WHOLE:
            tokens = -(-tokens * ratio // WHOLE)
        return Expected(
            place, prompt, sequences, bound, assumed, longest, shown, estimate, most, quantile, tokens or 1,
            ratio, plain,
        )  # fmt: skip

    def _place(self, kind: _Kind) -> LeasePlace:
        """The place of a kind of requests that was not seen lately."""
        tenant, path, model, traits, bound = kind
        key = LengthKey(path, model, bucket_for(traits, bound))
        place = LeasePlace(tenant, key, is_known=(tenant, key) in self._known)
        if model is None or len(model) <= _LONGEST_NAME:
            if len(self._places) >= _MOST_PLACES:
                self._places.clear()
            self._places[kind] = place
        return place

    def estimate(self, place: LeasePlace, quantile: float, generated: int = 0) -> Estimate | None:
        """The estimator's answer, unless all it has are the first answers of a batch that still runs."""
        found = self.estimator.estimate_at(place, quantile, generated)
        return found if place.is_known or found is None else self._counting(found, place)

    def _counting(self, found: Estimate, asked: LeasePlace) -> Estimate | None:
        """The estimate of a key that is not known yet, where it counts."""
        place = asked.tenant, asked.key
        if place in self._known:
            asked.is_known = True
            return found
        if found.source is not _OWN:
            return found
        if asked.learned.samples < _SAMPLES_PER_RUNNING * self._unknown.get(place, 0):
            return None  # the first answers of a batch
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
            self._places.clear()
        self._known.add(place)
        asked.is_known = True
        return found

    def began(self, expected: Expected) -> bool:
        """One more request runs. Whether it is counted, which is so while its key is not known: then call `ended`."""
        place = expected.place.tenant, expected.place.key
        if place in self._known:
            return False
        self._unknown[place] = self._unknown.get(place, 0) + 1
        return True

    def ended(self, expected: Expected) -> None:
        """A request that was counted runs no more."""
        place = expected.place.tenant, expected.place.key
        running = self._unknown.pop(place) - 1
        if running:
            self._unknown[place] = running

    def begin(self, expected: Expected, lease: Lease, answer: AnswerProgress, streams: bool) -> LeaseSize:
        """A request that was expected to use so much was admitted. `answer` is read as it passes."""
        grant = lease.grant
        name = None if grant is None or grant.engine is None else grant.engine.partition("#")[0]
        engine = self._engines.get(name) or self._engine(name)
        held, plain = lease.ask.tokens, expected.plain
        size = LeaseSize(self, engine, expected, lease, answer, held, expected.prompt, plain)
        engine.admitted += 1
        engine.leases[lease.id] = size
        if not expected.place.is_known:
            size.is_counted = self.began(expected)
        if held != plain or engine.trust.uses_overlap:
            size.resize(0, expected.estimate)
        if streams:
            size.follow(self.estimator.tokens_per_chunk_at(expected.place))
        return size

    def learn(self, expected: Expected, answer: AnswerProgress, is_complete: bool) -> None:
        """An answer is over. It is longer than what was seen where it is not complete, or as long as it may be."""
        reported, chunks = answer.output_tokens, answer.chunks
        if reported is None:
            if not chunks:
                return  # an answer that says nothing of its length
            length = self.generated(expected, answer)
        else:
            length = reported // expected.shown
        longest, is_censored = expected.longest, not is_complete
        if length >= longest:
            length, is_censored = longest, is_censored or expected.bound is not None
        if length or not is_censored:
            counted = None
            if chunks and reported is not None and not answer.later_chunks:
                counted = (chunks - answer.large_tokens) // expected.shown
            self.estimator.learn_at(expected.place, length, is_censored, counted)

    def generated(self, expected: Expected, answer: AnswerProgress) -> int:
        """Tokens of each sequence so far: the engine's count, and the events since by the tokens that one has."""
        tokens, later = answer.output_tokens, answer.later_tokens
        chunks = answer.chunks if tokens is None else answer.later_chunks
        if chunks and later is None:
            events = max(0, chunks - answer.large_tokens)
            later = max(chunks, int(events * self.estimator.tokens_per_chunk_at(expected.place)))
        # Some APIs send more events than tokens, and engines may say any number. No answer is longer than its maximum.
        return min(((tokens or 0) + (later or 0)) // expected.shown, expected.longest)

    def engines(self) -> Iterator[EngineSizes]:
        """Every engine, also one that runs nothing now."""
        yield from self._engines.values()

    def documents(self) -> list[EngineSizesDocument]:
        """Documents of the engines, by name; empty where nothing is learned. Of many, those that run most."""
        if not self.learns:
            return []
        self._look()
        shown = nlargest(MOST_SHOWN, self._engines.values(), key=lambda engine: engine.running)
        return [engine.document() for engine in sorted(shown, key=lambda engine: engine.name or "")]

    def document(self) -> LeaseSizesDocument:
        """Document of what is in force and what was learned, in bounded size."""
        if not self.learns:
            return LeaseSizesDocument(self.mode.value)
        quantile, _ = self._entry()
        learned = self.estimator.most_learned(MOST_LEARNED_SHOWN, quantile)
        return LeaseSizesDocument(self.mode.value, self.documents(), learned)

    def _look(self) -> None:
        """An engine that is gone says no more that it does not preempt: it has no trust to lose."""
        now_us = self._now_us()
        for engine in list(self._engines.values()):
            if engine.trust.is_raised:
                engine.trust.look(now_us)

    def _engine(self, name: str | None) -> EngineSizes:
        found = self._engines.get(name)
        if found is None:
            if len(self._engines) >= _MOST_ENGINES:
                self.forget_idle()
            found = self._engines[name] = EngineSizes(self.mode, self._now_us, name)
            found.trust.on_change.append(self._trust_changed)
            self.has_many_engines = len(self._engines) > _MOST_ENGINES
        return found

    def forget_idle(self) -> None:
        """Forgets the engine of those that run nothing that has not been read for longest."""
        idle = (engine for engine in self._engines.values() if not engine.leases)
        oldest = min(idle, key=lambda engine: engine.read_us, default=None)
        if oldest is not None:
            del self._engines[oldest.name]
            self.has_many_engines = len(self._engines) > _MOST_ENGINES
            self._trust_changed()

    def _entry(self) -> tuple[float, int]:
        """The quantile and the overlap for a request whose engine is not known yet: the most careful of each."""
        quantile, ratio = self._base.quantile, 0
        for engine in self._engines.values():
            if engine.leases:
                trust = engine.trust
                quantile = max(quantile, trust.quantile)
                if ratio < WHOLE:
                    ratio = max(ratio, engine.overlap.ratio) if trust.uses_overlap else WHOLE
        return quantile, ratio or WHOLE


class LeaseSize(msgspec.Struct, eq=False):
    """The size of one lease, from its admission to its end. `next_look` counts the events of its answer.

    Call `answer_read` whenever the answer's events were counted, and `ended` when the request leaves its engine,
    however it does. `held` is what the lease holds, `growths` how often it grew. `used_tokens` and `expected_tokens`
    are what it uses now, as far as that is known, and what it is expected to use at most. `is_counted`: see
    `LeaseSizes.began`.
    """

    _sizes: LeaseSizes
    _engine: EngineSizes
    _expected: Expected
    _lease: Lease
    _answer: AnswerProgress
    held: int
    used_tokens: int
    expected_tokens: int
    next_look: int = _NEVER
    growths: int = 0
    is_counted: bool = False
    _per_chunk: float = 1.0
    _overlaps: bool = False

    def follow(self, tokens_per_chunk: float) -> None:
        """The answer streams, with so many tokens in an event."""
        self._per_chunk = tokens_per_chunk
        self.next_look = self._chunks(EVERY_TOKENS)

    def answer_read(self) -> None:
        """The events of the answer were counted: looks where so many have come."""
        if self._answer.chunks >= self.next_look:
            self.look()

    def look(self) -> None:
        """Sizes the lease anew, given what its answer has by now."""
        expected, sizes = self._expected, self._sizes
        generated = sizes.generated(expected, self._answer)
        quantile = self._engine.trust.quantile
        estimate = sizes.estimate(expected.place, quantile, generated)
        self.next_look = self._answer.chunks + self._chunks(EVERY_TOKENS)
        self.resize(generated, estimate)

    def ended(self, used_tokens: int = 0) -> None:
        """The request has left its engine, and has used so many tokens. Harmless when repeated.

        Call it before the lease is settled: its tenant pays for what it used above what it was charged for. An engine
        may say any number: no request uses more than the most that it may.
        """
        if self.next_look == _ENDED:
            return
        engine, lease = self._engine, self._lease
        # What is counted is never more than what is used. To ask for it also brings the overlap up to date.
        if used_tokens > lease.paid_tokens or engine.trust.uses_overlap:
            self._charge(engine.counted(min(used_tokens, self._expected.most_used)))
        self.next_look = _ENDED
        leases = engine.leases
        del leases[lease.id]
        if self._overlaps:
            engine.overlap.remove(lease.id)
        if self.is_counted:
            self._sizes.ended(self._expected)
        if not leases and self._sizes.has_many_engines:
            self._sizes.forget_idle()

    def resize(self, generated: int, estimate: Estimate | None) -> None:
        """Sets what the lease holds, with so many tokens of each sequence generated already."""
        expected, engine = self._expected, self._engine
        if estimate is not None:
            output = estimate.tokens
        elif expected.estimate is not None and generated:
            # Longer than every answer that was seen: as much again may come. The maximum may be a thousand times what
            # is used, and the pool would admit no one beside it.
            output = max(2 * generated, expected.estimate.tokens)
        else:
            output = expected.most_output
        output = min(output, expected.longest)
        sequences, held = expected.sequences, self.held
        rest = output - generated if output > generated else 0
        self.used_tokens = used = expected.prompt + generated * sequences
        self.expected_tokens = tokens = used + rest * sequences
        if engine.trust.uses_overlap:
            self._overlaps = True
            engine.overlap.put(self._lease.id, used, rest, sequences)
            tokens = engine.counted(tokens)
        if abs(tokens - held) <= held >> _SMALLEST_CHANGE_SHIFT:
            return
        if tokens > held:
            self.growths += 1
            engine.growths += 1
            self._charge(tokens)
        if self._lease.resize(tokens):
            self.held = tokens

    def _charge(self, tokens: int) -> None:
        """Charges the tenant, in its tier's fair queue, for all that is above what it was charged for."""
        if (more := tokens - self._lease.paid_tokens) > 0:
            self._lease.charge_tenant(more)

    def _chunks(self, tokens: int) -> int:
        """The events that bring so many tokens of each sequence."""
        return max(1, int(tokens * self._expected.shown / self._per_chunk))
