"""Estimates of output lengths: what is learned from a tenant's answers sizes that tenant's next requests.

The first of these that has 50 complete samples answers, even where it can only say that it does not know:

1. the tenant's own samples of the endpoint, model and bucket, on this replica;
2. the upper median, over at least 3 tenants that have so many samples, of each tenant's own quantile for the endpoint,
   model and bucket;
3. the same for everything on the endpoint.

A tenant whose own answers were nearly all cut short is not sized by others: that its lengths are not known is what its
samples say. Where no step answers, the old rule applies: a lease holds max_tokens.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Annotated, NamedTuple

import msgspec

from sidecar.figures import TOKENS, Over, counter, gauge
from sidecar.lengths.histogram import LONGEST, LengthHistogram, Median, Survival
from sidecar.payload.traits import EFFORTS, Traits

# -- Bucket of a request: the class that its output length is learned in, by what its client says.
#
# There are 768 buckets, whatever clients send.

_FORCED = ("required", "named")
_SIZES = (64, 256, 1024, 4096, 16_384, 65_536)
_SIZE_NAMES = ("max 64", "max 256", "max 1k", "max 4k", "max 16k", "max 64k", "max more", "")


def bucket_for(traits: Traits, most: int | None) -> str:
    """The bucket, such as `tools, effort high, max 4k`, or `plain`. `most` is the request's max_tokens, if it has one.

    The size class of `most` is the first that holds it: 64, 256, 1k, 4k, 16k, 64k, or more.
    """
    effort, tools, choice, has_format, has_stop = traits
    if effort is not None and effort not in EFFORTS:
        effort = "other"
    size = len(_SIZES) + 1 if most is None else bisect_left(_SIZES, most)
    if not tools or choice == "none":
        return _name("", effort, bool(has_format), bool(has_stop), size)
    return _name("tools forced" if choice in _FORCED else "tools", effort, bool(has_format), bool(has_stop), size)


@cache  # its arguments are classes already, never what a client wrote
def _name(tools: str, effort: str | None, has_format: bool, has_stop: bool, size: int) -> str:
    parts = [
        tools,
        "" if effort is None else f"effort {effort}",
        "format" if has_format else "",
        "stop" if has_stop else "",
        _SIZE_NAMES[size],
    ]
    return ", ".join(filter(None, parts)) or "plain"


class LengthKey(NamedTuple):
    """Key under which output lengths are learned, beside the tenant: the endpoint's path, the model, and the bucket."""

    endpoint: str
    model: str | None
    bucket: str


ENOUGH = 50
"""Complete samples from which a distribution is used: the 0.95 quantile of fewer is nearly their longest."""
KEYS_REMEMBERED = 64
"""For each tenant; its least recently learned key is forgotten. Models and buckets come from clients."""
ENDPOINTS_REMEMBERED = 16
"""For each tenant."""
TENANTS_REMEMBERED = 4096
"""Tenants come from the policy, so no client can add one. Which of them was learned from least recently is known from
half as many on: before, none is soon forgotten."""
LONGEST_NAME = 256
"""Characters of an endpoint or a model; nothing is learned for a longer one."""
MOST_TOKENS_PER_CHUNK = 64.0
CHUNK_LEARNING_RATE = 0.1
"""Weight of the newest answer's tokens per chunk."""
_ALL_UP_TO = 256
"""Samples of an endpoint up to which all are learned; of later answers every fourth is enough for newcomers."""
_EVERY_OTHER = 3
"""A mask: what concerns newcomers alone is done at every fourth answer."""


class EstimateSource(str, Enum):
    """Where an estimate comes from.

    The tenant's own samples; the median over tenants.
    """

    OWN = "own"
    TENANTS = "tenants"


# Looked up once: an enumeration's attribute costs as much as a call.
_OWN, _TENANTS = EstimateSource.OWN, EstimateSource.TENANTS


class Estimate(msgspec.Struct, frozen=True, gc=False):
    """The assumed output length of one sequence, in tokens, always more than it has generated already.

    `samples` is the number of complete samples when it was made, at most an eighth of all ago.
    `quantile` is the share of answers that are not longer.
    """

    tokens: int
    source: EstimateSource
    samples: int
    quantile: float


@dataclass(frozen=True, slots=True)
class LearnedLengths:
    """Lengths learned of one tenant and key on this replica, for people. All lengths are tokens of one sequence.

    `samples` are the complete answers, `censored` those that were cut short. `estimate` is their quantile `quantile`.
    `median` and `estimate` are None where the samples do not say. From `ENOUGH` samples on they are used.
    """

    tenant: str
    endpoint: str
    model: str | None
    bucket: str
    samples: int
    censored: int
    median: int | None
    estimate: int | None
    quantile: float
    tokens_per_chunk: float


class KnownLengths:
    """One tenant and key. Keep it between questions and answers: what was learned there is looked up only once.

    It may be kept for as long as one likes. What is forgotten meanwhile takes no memory, and is looked up again.
    """

    __slots__ = ("key", "learned", "tenant")

    def __init__(self, tenant: str, key: LengthKey) -> None:
        self.tenant = tenant
        self.key = key
        self.learned = _NOTHING


class LengthEstimator:
    """Estimates and learns output lengths. One per process; not thread-safe; no clock."""

    def __init__(self) -> None:
        self._turn = 0
        self._is_crowded = False
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        self._medians: dict[LengthKey | str, Median] = {}

    def estimate(self, tenant: str, key: LengthKey, quantile: float, generated: int = 0) -> Estimate | None:
        """See `estimate_at`."""
        return self.estimate_at(KnownLengths(tenant, key), quantile, generated)

    def estimate_at(self, place: KnownLengths, quantile: float, generated: int = 0) -> Estimate | None:
        """The output length to assume of a sequence that has `generated` tokens already; None: nothing is known.

        The caller bounds it by max_tokens.
        """
        learned = place.learned
        if learned.endpoint is None:
            learned = self._look_up(place)
        kept = learned.kept
        if generated or quantile not in kept or learned.samples + learned.censored >= learned.stale_from:
            return self._make(place, quantile, generated)
        return kept[quantile]

    def _look_up(self, place: KnownLengths) -> _Learned:
        known = self._tenants.get(place.tenant)
        place.learned = learned = _NOTHING if known is None else known.keys.get(place.key, _NOTHING)
        return learned

    def _make(self, place: KnownLengths, quantile: float, generated: int) -> Estimate | None:
        """The estimate. That of a whole length is kept: every new request asks for one."""
        learned = place.learned
        if learned.samples < ENOUGH:
            return self._shared(place, learned, quantile, generated)
        tokens = learned.length(quantile, generated)
        found = None if tokens is None else Estimate(tokens, _OWN, learned.samples, quantile)
        if not generated:
            learned.kept[quantile] = found
        return found

    def _shared(self, place: KnownLengths, own: LengthHistogram, quantile: float, generated: int) -> Estimate | None:
        key = place.key
        if own.censored >= ENOUGH:
            return None
        for subject in (key, key.endpoint):
            median = self._medians.get(subject)
            if median is not None and median.is_full:
                tokens, samples = median.quantile(quantile, generated)
                return None if tokens is None else Estimate(tokens, _TENANTS, samples, quantile)
        return None

    def tokens_per_chunk(self, tenant: str, key: LengthKey) -> float:
        """See `tokens_per_chunk_at`."""
        return self.tokens_per_chunk_at(KnownLengths(tenant, key))

    def tokens_per_chunk_at(self, place: KnownLengths) -> float:
        """Output tokens in one chunk of a stream, 1.0 to 64.0, as learned so far; 1.0 where nothing is known."""
        learned = place.learned
        if learned.endpoint is None:
            learned = self._look_up(place)
        return learned.tokens_per_chunk

    def learn(
        self,
        tenant: str,
        key: LengthKey,
        length: int,
        chunks: int | None = None,
        *,
        is_censored: bool,
    ) -> None:
        """See `learn_at`. A negative length is none."""
        if length >= 0:
            self.learn_at(KnownLengths(tenant, key), length, is_censored, chunks)

    def learn_at(self, place: KnownLengths, length: int, is_censored: bool, chunks: int | None = None) -> None:
        """Learns the output length of one sequence, in tokens.

        `is_censored` says that max_tokens or a disconnect cut it short. `chunks` is the number of its chunks where the
        answer was a stream and `length` is the engine's own count.
        """
        learned = place.learned
        endpoint = learned.endpoint
        if endpoint is None:
            if not _is_plausible(place.key):
                return
            learned, endpoint = self._new_places(place)
        self._turn = learned.turn = endpoint.turn = turn = self._turn + 1
        if self._is_crowded:
            self._tenants.move_to_end(place.tenant)
        learned.add(length, is_censored)
        if chunks and length:  # a length that no float holds would raise
            learned.note_chunks(min(length, LONGEST + 1), chunks)
        if learned.is_new:
            self._tell_of_new(place, endpoint, length, is_censored)
        elif not turn & _EVERY_OTHER:
            endpoint.add(length, is_censored)
            self._tell_medians(place.key)

    def _tell_of_new(self, place: KnownLengths, endpoint: _EndpointLengths, length: int, is_censored: bool) -> None:
        """An answer of a key or an endpoint that has few: it may decide whether they size other tenants' requests."""
        learned, tenant, key = place.learned, place.tenant, place.key
        is_turn = not self._turn & _EVERY_OTHER
        if learned.samples <= ENOUGH:
            self._vote(tenant, key, learned if learned.samples >= ENOUGH else None)
        if is_turn or endpoint.samples < _ALL_UP_TO:
            endpoint.add(length, is_censored)
            if endpoint.samples <= ENOUGH:
                self._vote(tenant, key.endpoint, endpoint if endpoint.samples == ENOUGH else None)
        if is_turn:
            self._tell_medians(key)
        learned.is_new = learned.samples <= ENOUGH or endpoint.samples < _ALL_UP_TO

    def _tell_medians(self, key: LengthKey) -> None:
        """Newcomers are sized by what many tenants learn."""
        medians = self._medians
        if key in medians:
            medians[key].learned(_EVERY_OTHER + 1)
        if key.endpoint in medians:
            medians[key.endpoint].learned(_EVERY_OTHER + 1)

    def _new_places(self, place: KnownLengths) -> tuple[_Learned, _EndpointLengths]:
        """Where a sample belongs, as far as there is no such place yet. Forgets what is one too many then."""
        tenant, key = place.tenant, place.key
        known = self._tenants.get(tenant)
        if known is None:
            known = self._tenants[tenant] = _Tenant()
            self._is_crowded = len(self._tenants) > TENANTS_REMEMBERED // 2
        place.learned = learned = known.keys.get(key) or _Learned()
        endpoint = known.endpoints.get(key.endpoint)
        if endpoint is None:
            endpoint = known.endpoints[key.endpoint] = _EndpointLengths()
        if learned.endpoint is None:
            learned.endpoint, learned.is_new = endpoint, True
        learned.turn = endpoint.turn = self._turn + 1  # the newest of all, as it is about to be learned from
        if key not in known.keys:
            known.keys[key] = learned
        self._forget_oldest(tenant, known)
        return learned, endpoint

    def _forget_oldest(self, tenant: str, known: _Tenant) -> None:
        """Forgets what was learned least recently, where a new place is one too many."""
        keys, endpoints = known.keys, known.endpoints
        if len(keys) > KEYS_REMEMBERED:
            key = min(keys, key=lambda key: keys[key].turn)
            keys.pop(key).forget()
            self._vote(tenant, key, None)
        if len(endpoints) > ENDPOINTS_REMEMBERED:
            endpoint = min(endpoints, key=lambda endpoint: endpoints[endpoint].turn)
            del endpoints[endpoint]
            for key, learned in keys.items():
                if key.endpoint == endpoint:
                    learned.endpoint = None
            self._vote(tenant, endpoint, None)
        if len(self._tenants) > TENANTS_REMEMBERED:
            self._forget_tenant()

    def _vote(self, tenant: str, subject: LengthKey | str, evidence: LengthHistogram | None) -> None:
        median = self._medians.get(subject)
        if evidence is not None:
            if median is None:
                median = self._medians[subject] = Median()
            median.put(tenant, evidence)
        elif median is not None:
            median.remove(tenant)
            if not len(median):
                del self._medians[subject]

    def _forget_tenant(self) -> None:
        tenant, known = self._tenants.popitem(last=False)
        for key, learned in known.keys.items():
            learned.forget()
            self._vote(tenant, key, None)
        for endpoint in known.endpoints:
            self._vote(tenant, endpoint, None)

    def most_learned(self, most: int, quantile: float) -> list[LearnedLengths]:
        """The `most` entries that this replica learned from most answers, with their quantile."""
        every = ((tenant, key, one) for tenant, known in self._tenants.items() for key, one in known.keys.items())
        return [
            LearnedLengths(
                tenant,
                *key,
                one.samples,
                one.censored,
                one.quantile(0.5),
                one.quantile(quantile),
                quantile,
                round(one.tokens_per_chunk, 2),
            )
            for tenant, key, one in heapq.nlargest(most, every, key=lambda found: found[2].samples)
        ]


def _is_plausible(key: LengthKey) -> bool:
    """No model and no endpoint has a name so long; memory must stay small."""
    return len(key.endpoint) <= LONGEST_NAME and (key.model is None or len(key.model) <= LONGEST_NAME)


class _EndpointLengths(LengthHistogram):
    """The lengths of all of a tenant's answers on one endpoint, and the turn at which one was learned last."""

    __slots__ = ("turn",)

    def __init__(self) -> None:
        super().__init__()
        self.turn = 0


class _Learned(LengthHistogram):
    """Lengths learned for one tenant and key.

    `endpoint` has its endpoint's lengths, None where that or the key is forgotten: places look it up again then. `turn`
    is that of its last answer. `is_new`: every answer concerns other tenants, and not only every fourth. `kept` are the
    estimates of whole lengths, by quantile, as the table says.
    """

    __slots__ = ("endpoint", "is_new", "kept", "tokens_per_chunk", "turn")

    def __init__(self) -> None:
        super().__init__()
        self.endpoint: _EndpointLengths | None = None
        self.tokens_per_chunk = 1.0
        self.turn = 0
        self.is_new = True
        self.kept: dict[float, Estimate | None] = {}

    def note_chunks(self, length: int, chunks: int) -> None:
        seen = min(MOST_TOKENS_PER_CHUNK, max(1.0, length / chunks))
        self.tokens_per_chunk += CHUNK_LEARNING_RATE * (seen - self.tokens_per_chunk)

    def forget(self) -> None:
        """Frees its memory, even while a place still refers to it."""
        self.endpoint = None
        self.kept.clear()
        self.clear()

    def _tabulate(self) -> Survival:
        self.kept.clear()
        return super()._tabulate()


_NOTHING = _Learned()
"""What was learned where nothing was. It is never changed."""


class _Tenant:
    """Lengths learned from one tenant: by key, and by endpoint."""

    __slots__ = ("endpoints", "keys")

    def __init__(self) -> None:
        self.keys: dict[LengthKey, _Learned] = {}
        self.endpoints: dict[str, _EndpointLengths] = {}


# -- Documents of the leases whose sizes are learned: for pages, metrics and `/state`.


class EngineSizesDocument(msgspec.Struct, frozen=True):
    """The leases of one process at one engine, for people and metrics. `engine` is None where the pool has one engine.

    `quantile`, `overlap` and `reason` are what is in force. Its `running` leases hold `held_tokens` in the pool. They
    are expected to use `expected_tokens`, as a plain sum, and use `used_tokens` now, as far as that is known: the
    output of an answer that does not stream is not. `growths` counts how often one of its leases grew. `preemptions`
    counts the engine's own since the first reading, None where it does not say.
    """

    engine: str | None
    quantile: Annotated[
        float,
        gauge("admission.lease.quantile", "Part of answers that are no longer than what a lease holds for them."),
    ]
    overlap: Annotated[
        float, gauge("admission.lease.overlap", "Part of what requests need that is counted, as they end apart.")
    ]
    reason: str
    is_raised: Annotated[
        bool,
        gauge(
            "admission.lease.quantile_raised",
            "1 while the engine's preemptions keep the quantile above that of the policy's `learn`, else 0.",
        ),
    ]
    running: int
    held_tokens: Annotated[
        int,
        gauge("admission.lease.held.tokens", "Tokens that the running leases of this process hold.", TOKENS, Over.SUM),
    ]
    expected_tokens: Annotated[
        int,
        gauge(
            "admission.lease.expected.tokens",
            "Tokens that the requests of these leases are expected to use.",
            TOKENS,
            Over.SUM,
        ),
    ]
    used_tokens: Annotated[
        int,
        gauge(
            "admission.lease.used.tokens",
            "Tokens that these leases use now.",
            TOKENS,
            Over.SUM,
        ),
    ]
    growths: int = 0
    preemptions: Annotated[
        int | None,
        counter(
            "admission.engine.preemptions",
            "The engine's preemptions for lack of KV cache, since this process first read them.",
            "{preemption}",
            Over.MOST,
        ),
    ] = None


class LeaseSizesDocument(msgspec.Struct, frozen=True):
    """The leases of one process at all engines, and what was learned most often: the admin port's `/state` has it."""

    learn: str
    engines: list[EngineSizesDocument] = []
    learned: list[LearnedLengths] = []
