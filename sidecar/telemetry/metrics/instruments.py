"""The OpenTelemetry instruments: the counters and gauges with the plain figures that each of them reports.

Every provider has one set of instruments, which all pools of the process share.

OpenTelemetry knows an instrument by its name, and the SDK drops the callback of a second one: so there is one of each,
and it looks at every pool. All reading happens in an exporter's thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import NamedTuple
from weakref import ref

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation

from sidecar.events import Outcome
from sidecar.telemetry import semconv
from sidecar.telemetry.metrics import histograms
from sidecar.telemetry.metrics.counts import Counted, nothing_counted
from sidecar.telemetry.metrics.engine_speeds import (
    ENGINE_SPEED_GAUGES,
    EngineSpeedSample,
)
from sidecar.telemetry.metrics.engines import (
    ENGINE_COUNTERS,
    ENGINE_GAUGES,
    MOST_SHOWN,
    EngineSample,
    engine_values,
    state_values,
)
from sidecar.telemetry.metrics.histograms import DurationHistogram
from sidecar.telemetry.metrics.lease_sizes import (
    ENGINE_PREEMPTIONS,
    LEASE_SIZE_GAUGES,
    LeaseSizeSample,
)
from sidecar.telemetry.metrics.tenants import TenantHoldings, TenantLabels
from sidecar.version import __version__

logger = logging.getLogger(__name__)

FRESH_S = 0.02
"""One reading asks for every gauge in turn, within milliseconds: for so long a sample serves them all."""

Observations = Iterable[Observation]

REQUESTS, TOKENS, SECONDS = "{request}", "{token}", "s"

TIER, REASON = semconv.ADMISSION_TIER, semconv.ADMISSION_REASON
OVER, UNDER = "over", "under"
SLO_OUTCOMES = ("met", "ttft", "tpot", "refused", "abandoned")
_OVERTAKING = (TIER, semconv.BY, semconv.ADMISSION_RULE)


@dataclass(eq=False)
class Counters:
    """The sums of the requests to one pool. Its attributes are those that `COUNTERS` names."""

    tenants: TenantLabels
    admitted: Counted = field(default_factory=nothing_counted)
    refused: Counted = field(default_factory=nothing_counted)
    abandoned: Counted = field(default_factory=nothing_counted)
    settled: Counted = field(default_factory=nothing_counted)
    failed: Counted = field(default_factory=nothing_counted)
    preemptions: Counted = field(default_factory=nothing_counted)
    preempted_engine_us: Counted = field(default_factory=nothing_counted)
    clamped: Counted = field(default_factory=nothing_counted)
    observed: Counted = field(default_factory=nothing_counted)
    unguarded: Counted = field(default_factory=nothing_counted)
    downgraded: Counted = field(default_factory=nothing_counted)
    overtaken: Counted = field(default_factory=nothing_counted)
    overtaken_tokens: Counted = field(default_factory=nothing_counted)
    tokens_estimated: Counted = field(default_factory=nothing_counted)
    tokens_used: Counted = field(default_factory=nothing_counted)
    estimate_errors: Counted = field(default_factory=nothing_counted)
    growths: Counted = field(default_factory=nothing_counted)
    gain_earned: Counted = field(default_factory=nothing_counted)
    gain_attainable: Counted = field(default_factory=nothing_counted)
    slo_requests: Counted = field(default_factory=nothing_counted)

    def know(self, tier: str) -> None:
        """Reports every series of a tier from the start: where one begins at 1, Prometheus does not see the 1."""
        preempted = self.preemptions, self.preempted_engine_us
        for counted in (self.admitted, self.tokens_estimated, self.tokens_used, self.growths, *preempted):
            counted[tier,] += 0
        for outcome in Outcome:
            self.settled[tier, outcome.value] += 0
        for direction in (OVER, UNDER):
            self.estimate_errors[tier, direction] += 0

    def know_objective(self, tier: str) -> None:
        """The same of the series that a tier has if its service gain is measured."""
        self.gain_earned[tier,] += 0
        self.gain_attainable[tier,] += 0
        for outcome in SLO_OUTCOMES:
            self.slo_requests[tier, outcome] += 0


class Counter(NamedTuple):
    """One metric. `counted` is the attribute of `Counters`, or of `TenantCounts`; `labels` leaves out the pool's.

    `per_unit` of what is counted are one of the unit.
    """

    name: str
    counted: str
    labels: tuple[str, ...]
    description: str
    unit: str = REQUESTS
    per_unit: int = 1


COUNTERS = (
    Counter(semconv.ADMITTED, "admitted", (TIER,), "Requests that got their lease."),
    Counter(
        semconv.REFUSED,
        "refused",
        (TIER, REASON),
        "Requests answered with an error instead of a lease, by its code. Without a tier where that was not known yet.",
    ),
    Counter(
        semconv.ABANDONED,
        "abandoned",
        (TIER, REASON),
        "Requests abandoned before they got a lease: the client disconnected, or the server stopped.",
    ),
    Counter(
        semconv.SETTLED,
        "settled",
        (TIER, semconv.ADMISSION_OUTCOME),
        "Leases that were given back, by how the request ended.",
    ),
    Counter(
        semconv.FAILED,
        "failed",
        (TIER, semconv.ERROR_TYPE),
        "Admitted requests that failed, by what failed them: engine_unreachable, engine_timeout, or an exception.",
    ),
    Counter(
        semconv.PREEMPTIONS,
        "preemptions",
        (TIER,),
        "How often a request of the tier gave its room to a more important one, and waited again.",
        "{preemption}",
    ),
    Counter(
        semconv.PREEMPTED_ENGINE_TIME,
        "preempted_engine_us",
        (TIER,),
        "For how long the engine had worked on requests that were preempted: what it did is lost.",
        SECONDS,
        per_unit=1_000_000,
    ),
    Counter(
        semconv.CLAMPED,
        "clamped",
        (semconv.ADMISSION_CLAMPED_FROM, TIER),
        "Requests that asked for a tier above their tenant's best, and got that one instead.",
    ),
    Counter(
        semconv.DOWNGRADED,
        "downgraded",
        (semconv.ADMISSION_DOWNGRADED_FROM, TIER),
        "Requests that were over their tenant's limits, and went to a lower tier instead.",
    ),
    Counter(
        semconv.OVERTAKEN,
        "overtaken",
        _OVERTAKING,
        "How often the first in line of a tier was overtaken by a later request of another tier, by the rule.",
    ),
    Counter(
        semconv.OVERTAKEN_TOKENS,
        "overtaken_tokens",
        _OVERTAKING,
        "The same in tokens of the requests that went ahead.",
        TOKENS,
    ),
    Counter(
        semconv.OBSERVED,
        "observed",
        (TIER, semconv.ADMISSION_DECISION, REASON),
        "Requests that passed in `mode: observe`, by what enforcing would have done to them.",
    ),
    Counter(
        semconv.UNGUARDED,
        "unguarded",
        (semconv.ADMISSION_ROUTE, semconv.ADMISSION_DECISION, REASON),
        "Requests on paths that the policy does not guard, other than those that only read: passed, or refused.",
    ),
    Counter(semconv.TOKENS_ESTIMATED, "tokens_estimated", (TIER,), "Tokens held for the requests admitted.", TOKENS),
    Counter(
        semconv.TOKENS_USED,
        "tokens_used",
        (TIER,),
        "Tokens that settled requests used: the engine's count, or else an estimate.",
        TOKENS,
    ),
    Counter(
        semconv.TOKENS_ESTIMATE_ERROR,
        "estimate_errors",
        (TIER, semconv.DIRECTION),
        "By how many tokens completed requests were estimated over or under what the engine counted.",
        TOKENS,
    ),
    Counter(
        semconv.LEASE_GROWTHS,
        "growths",
        (TIER,),
        "How often a lease grew while its answer streamed, because it became longer than expected.",
        "{growth}",
    ),
    Counter(
        semconv.GAIN_EARNED,
        "gain_earned",
        (TIER,),
        "Output tokens that were forwarded before their deadlines, each by the weight of its tier.",
        TOKENS,
    ),
    Counter(
        semconv.GAIN_ATTAINABLE,
        "gain_attainable",
        (TIER,),
        "All output tokens of the requests that were offered, each by the weight of its tier.",
        TOKENS,
    ),
    Counter(
        semconv.SLO_REQUESTS,
        "slo_requests",
        (TIER, semconv.ADMISSION_SLO),
        "Offered requests of tiers with an objective, by whether they met it.",
    ),
)

TENANT_COUNTERS = (
    Counter(
        semconv.TENANT_ADMITTED,
        "admitted",
        (semconv.ADMISSION_TENANT,),
        "Requests that got their lease, of the largest tenants and of all others together.",
    ),
    Counter(
        semconv.TENANT_REFUSED,
        "refused",
        (semconv.ADMISSION_TENANT,),
        "Requests answered with an error instead of a lease, of the largest tenants and of all others together.",
    ),
    Counter(
        semconv.TENANT_TOKENS_USED,
        "tokens_used",
        (semconv.ADMISSION_TENANT,),
        "Tokens that settled requests used, of the largest tenants and of all others together.",
        TOKENS,
    ),
)


@dataclass(frozen=True, slots=True)
class TierSample:
    """One tier. None is unbounded, or not promised; the waits are those of this process, 0 where none waits."""

    tier: str
    queued_requests: int = 0
    queued_tokens: int = 0
    oldest_wait_s: float = 0.0
    longest_starvation_s: float = 0.0
    held_tokens: int = 0
    held_requests: int = 0
    reserve_tokens: int | None = None
    reserve_requests: int | None = None
    limit_tokens: int | None = None
    limit_requests: int | None = None
    borrowed_tokens: int = 0
    lent_tokens: int = 0
    slo_ttft_s: float | None = None
    slo_queue_wait_s: float | None = None
    slo_starvation_s: float | None = None


@dataclass(frozen=True, slots=True)
class PoolSample:
    """The whole pool. `replicas`, and how many policy `generations` they run, are None where it is not shared.

    `policies_rejected` counts since the process began. `passing` is 1 in `mode: pass`. `aborting` is what this process
    holds for requests that have ended. `loop_blocked_s` sums up since the process began.
    `engine_up` is 1 where this process can use the engine, 0 where it cannot, None where that is not looked at.
    `engines` are those of a pool of several; `no_engine_fits_s` sums up since the process began for how long a request
    fitted such a pool and waited for an engine, None where that is not counted. `lease_sizes` are there where output
    lengths are learned, `engine_speeds` where service gain is measured.
    """

    tiers: Sequence[TierSample]
    generation: str
    capacity_tokens: int | None = None
    capacity_requests: int | None = None
    replicas: int | None = None
    policies_rejected: int = 0
    passing: int = 0
    loop_blocked_s: float = 0.0
    generations: int | None = None
    aborting_requests: int = 0
    aborting_tokens: int = 0
    engine_up: int | None = None
    engines: Sequence[EngineSample] = ()
    no_engine_fits_s: float | None = None
    lease_sizes: Sequence[LeaseSizeSample] = ()
    engine_speeds: Sequence[EngineSpeedSample] = ()


Sample = Callable[[], PoolSample | None]
"""Takes a sample of a pool, or None where that is not possible now. Called in any thread."""


class Gauge(NamedTuple):
    """One metric. `value` is the attribute of `TierSample` or `PoolSample` that it reports, unless that is None."""

    name: str
    value: str
    description: str
    unit: str = REQUESTS


TIER_GAUGES = (
    Gauge(semconv.QUEUE_REQUESTS, "queued_requests", "Requests that wait in this process."),
    Gauge(semconv.QUEUE_TOKENS, "queued_tokens", "Tokens of the requests that wait in this process.", TOKENS),
    Gauge(
        semconv.QUEUE_OLDEST_WAIT,
        "oldest_wait_s",
        "How long the oldest request that waits in this process has waited.",
        SECONDS,
    ),
    Gauge(
        semconv.QUEUE_LONGEST_STARVATION,
        "longest_starvation_s",
        "How long ago the oldest request that waits in this process was first overtaken by a later one.",
        SECONDS,
    ),
    Gauge(semconv.HELD_TOKENS, "held_tokens", "Tokens held by leases.", TOKENS),
    Gauge(semconv.HELD_REQUESTS, "held_requests", "Requests held by leases."),
    Gauge(semconv.RESERVE_TOKENS, "reserve_tokens", "Tokens reserved for the tier.", TOKENS),
    Gauge(semconv.RESERVE_REQUESTS, "reserve_requests", "Requests reserved for the tier."),
    Gauge(semconv.LIMIT_TOKENS, "limit_tokens", "The most tokens the tier may hold.", TOKENS),
    Gauge(semconv.LIMIT_REQUESTS, "limit_requests", "The most requests the tier may hold."),
    Gauge(
        semconv.BORROWED_TOKENS,
        "borrowed_tokens",
        "Tokens held above the tier's reserve, out of what other tiers have reserved.",
        TOKENS,
    ),
    Gauge(semconv.LENT_TOKENS, "lent_tokens", "Tokens of the tier's reserve that other tiers hold.", TOKENS),
    Gauge(semconv.SLO_TTFT, "slo_ttft_s", "The time to first token that the policy promises.", SECONDS),
    Gauge(semconv.SLO_QUEUE_WAIT, "slo_queue_wait_s", "The queue wait that the policy promises.", SECONDS),
    Gauge(semconv.SLO_STARVATION, "slo_starvation_s", "The longest starvation that the policy promises.", SECONDS),
)

POOL_GAUGES = (
    Gauge(semconv.CAPACITY_TOKENS, "capacity_tokens", "Tokens that the pool has.", TOKENS),
    Gauge(semconv.CAPACITY_REQUESTS, "capacity_requests", "Requests that the pool has room for."),
    Gauge(
        semconv.ABORTING_REQUESTS,
        "aborting_requests",
        "Requests held by leases of this process whose requests have ended before their answer, until the engine has "
        "aborted them.",
    ),
    Gauge(semconv.ABORTING_TOKENS, "aborting_tokens", "Tokens held by these leases.", TOKENS),
    Gauge(semconv.REPLICAS, "replicas", "Processes that share the pool.", "{replica}"),
    Gauge(
        semconv.GENERATIONS,
        "generations",
        "Different policies that the pool's processes run: more than 1 in a roll-out, or where one stands still.",
        "{policy}",
    ),
    Gauge(semconv.PASSING, "passing", "1 while every request passes untouched (mode: pass), else 0.", ""),
    Gauge(semconv.ENGINE_UP, "engine_up", "1 while the engine that the policy names answers, else 0.", ""),
)
POLICY_REJECTED = Gauge(
    semconv.POLICY_REJECTED,
    "policies_rejected",
    "Changed policies that could not be used; the one before stayed in force.",
    "{policy}",
)

NO_ENGINE_FITS = Gauge(
    semconv.NO_ENGINE_FITS,
    "no_engine_fits_s",
    "For how long a request waited that fitted the pool, because no engine that it wanted took it.",
    SECONDS,
)
LOOP_BLOCKED = Gauge(
    semconv.LOOP_BLOCKED, "loop_blocked_s", "For how long the event loop stood still under requests.", SECONDS
)


class Instruments:
    """Every instrument but those of the store."""

    def __init__(self, meter_provider: metrics.MeterProvider | None) -> None:
        meter = metrics.get_meter("sidecar", __version__, meter_provider)
        # Replaced, never changed: an exporter's thread reads them.
        self._counters: Mapping[str, Counters] = {}
        self._gauged: tuple[ref[PoolMetrics], ...] = ()
        self._held: tuple[tuple[str, ref[TenantHoldings]], ...] = ()
        self._samples: Mapping[str, PoolSample] = {}
        self._sampled_at_s = float("-inf")
        self._reported = False
        self.queue_wait = DurationHistogram(histograms.QUEUE_WAIT, meter_provider)
        self.starvation = DurationHistogram(histograms.STARVATION, meter_provider)
        self.time_to_first_token = DurationHistogram(histograms.TIME_TO_FIRST_TOKEN, meter_provider)
        self.observed_queue_wait = DurationHistogram(histograms.OBSERVED_QUEUE_WAIT, meter_provider)
        self.observed_starvation = DurationHistogram(histograms.OBSERVED_STARVATION, meter_provider)
        for counters, read in ((COUNTERS, self._counted), (TENANT_COUNTERS, self._counted_of_tenants)):
            for counter in counters:
                meter.create_observable_counter(
                    counter.name, [partial(read, counter)], counter.unit, counter.description
                )
        meter.create_observable_counter(
            semconv.OUTPUT_ANSWERS,
            [self._counted_answers],
            "{answer}",
            "Complete answers of a learned length, by their length in parts of what was expected: up to so much.",
        )
        self._create_gauges(meter)

    def counters(self, pool: str, tenants_shown: int) -> Counters:
        """Those of the pool of this name: two middlewares on it in one process both add to them."""
        counters = self._counters.get(pool)
        if counters is None:
            counters = Counters(TenantLabels(tenants_shown))
            self._counters = {**self._counters, pool: counters}
        return counters

    def watch(self, gauged: PoolMetrics) -> None:
        """Looks at this pool. Of two of one name the later is reported."""
        self._gauged = (*(watched for watched in self._gauged if watched() is not None), ref(gauged))

    def watch_tenants(self, pool: str, holdings: TenantHoldings) -> None:
        """Reports one middleware's holdings for as long as they live; of two middlewares on one pool, their sum."""
        self._held = (*(watched for watched in self._held if watched[1]() is not None), (pool, ref(holdings)))

    def _create_gauges(self, meter: metrics.Meter) -> None:
        observe = meter.create_observable_gauge
        for gauges, read in ((TIER_GAUGES, self._read_tiers), (POOL_GAUGES, self._read_pools)):
            for gauge in gauges:
                observe(gauge.name, [partial(read, gauge)], gauge.unit, gauge.description)
        observe(
            semconv.POLICY_INFO, [self._read_policies], description="1, labeled with the digest of the policy in force."
        )
        observe(
            semconv.TENANT_TOKENS_HELD,
            [self._read_tenants],
            "{token}",
            "Tokens held by leases of this process, of the largest tenants and of all others together.",
        )
        for gauge in (POLICY_REJECTED, NO_ENGINE_FITS, LOOP_BLOCKED):
            reading = [partial(self._read_pools, gauge)]
            meter.create_observable_counter(gauge.name, reading, gauge.unit, gauge.description)
        self._create_engine_metrics(meter)
        for size in LEASE_SIZE_GAUGES:
            observe(size.name, [partial(self._read_by_engine, "lease_sizes", size.value)], size.unit, size.description)
        for speed in ENGINE_SPEED_GAUGES:
            observe(
                speed.name, [partial(self._read_by_engine, "engine_speeds", speed.value)], speed.unit, speed.description
            )
        preemptions = ENGINE_PREEMPTIONS
        read_preemptions = [partial(self._read_by_engine, "lease_sizes", preemptions.value)]
        meter.create_observable_counter(preemptions.name, read_preemptions, preemptions.unit, preemptions.description)

    def _create_engine_metrics(self, meter: metrics.Meter) -> None:
        said = "1 for the state that the engine is in, as this process sees it, and 0 for each other."
        meter.create_observable_gauge(
            semconv.ENGINE_STATE, [partial(self._read_engines, state_values)], description=said
        )
        for metric in ENGINE_GAUGES:
            reading = [partial(self._read_engines, partial(engine_values, metric))]
            meter.create_observable_gauge(metric.name, reading, metric.unit, metric.description)
        for metric in ENGINE_COUNTERS:
            reading = [partial(self._read_engines, partial(engine_values, metric))]
            meter.create_observable_counter(metric.name, reading, metric.unit, metric.description)

    # -- counters

    def _counted(self, counter: Counter, _: CallbackOptions) -> Observations:
        for pool, counters in self._counters.items():
            counted = getattr(counters, counter.counted)
            for values, count in list(counted.items()):
                value = count if counter.per_unit == 1 else count / counter.per_unit
                yield Observation(value, {semconv.POOL: pool, **dict(zip(counter.labels, values, strict=True))})

    def _counted_of_tenants(self, counter: Counter, _: CallbackOptions) -> Observations:
        for pool, counters in self._counters.items():
            for tenant, counts in counters.tenants.series().items():
                labels = {semconv.POOL: pool, semconv.ADMISSION_TENANT: tenant}
                yield Observation(getattr(counts, counter.counted), labels)

    def _counted_answers(self, _: CallbackOptions) -> Observations:
        for pool, counters in self._counters.items():
            for tenant, counts in counters.tenants.series().items():
                for (tier, ratio), answers in list(counts.answers.items()):
                    labels = {semconv.POOL: pool, TIER: tier, semconv.ADMISSION_TENANT: tenant}
                    yield Observation(answers, {**labels, semconv.OUTPUT_RATIO: ratio})

    # -- gauges

    def _sampled(self) -> Mapping[str, PoolSample]:
        now_s = time.monotonic()
        if now_s - self._sampled_at_s > FRESH_S:
            taken = {gauged.pool: self._taken(gauged) for gauged in (watched() for watched in self._gauged) if gauged}
            self._samples = {pool: sample for pool, sample in taken.items() if sample is not None}
            self._sampled_at_s = time.monotonic()
        return self._samples

    def _taken(self, gauged: PoolMetrics) -> PoolSample | None:
        try:
            return gauged.sample()
        except Exception:
            if not self._reported:  # else every reading of the metrics would say so
                self._reported = True
                logger.exception(
                    "pool %s cannot be sampled; its gauges are left out, without further logs", gauged.pool
                )
            return None

    def _read_tiers(self, gauge: Gauge, _: CallbackOptions) -> Observations:
        for pool, sample in self._sampled().items():
            for tier in sample.tiers:
                value = getattr(tier, gauge.value)
                if value is not None:
                    yield Observation(value, {semconv.POOL: pool, semconv.ADMISSION_TIER: tier.tier})

    def _read_pools(self, gauge: Gauge, _: CallbackOptions) -> Observations:
        for pool, sample in self._sampled().items():
            value = getattr(sample, gauge.value)
            if value is not None:
                yield Observation(value, {semconv.POOL: pool})

    def _read_engines(
        self, values: Callable[[EngineSample], Sequence[tuple[int, dict[str, str]]]], _: CallbackOptions
    ) -> Observations:
        for pool, sample in self._sampled().items():
            for engine in sample.engines[:MOST_SHOWN]:
                for value, labels in values(engine):
                    yield Observation(value, {semconv.POOL: pool, **labels})

    def _read_by_engine(self, samples: str, attribute: str, _: CallbackOptions) -> Observations:
        """An attribute of those samples that are of one engine each: of a pool of one without a label of its own."""
        for pool, sample in self._sampled().items():
            for of_engine in getattr(sample, samples)[:MOST_SHOWN]:
                value = getattr(of_engine, attribute)
                labels = {} if of_engine.engine is None else {semconv.ADMISSION_ENGINE: of_engine.engine}
                if value is not None:
                    yield Observation(value, {semconv.POOL: pool, **labels})

    def _read_policies(self, _: CallbackOptions) -> Observations:
        for pool, sample in self._sampled().items():
            yield Observation(1, {semconv.POOL: pool, semconv.GENERATION: sample.generation})

    def _read_tenants(self, _: CallbackOptions) -> Observations:
        for pool, counters in self._counters.items():
            by_name = dict.fromkeys(counters.tenants.series(), 0)
            for holdings in (watched() for held_in, watched in self._held if held_in == pool):
                if holdings is not None:
                    for tenant, holding in holdings.held().items():
                        name = counters.tenants.name_of(tenant)
                        by_name[name] = by_name.get(name, 0) + holding.tokens_held
            for name, tokens in by_name.items():
                yield Observation(tokens, {semconv.POOL: pool, semconv.ADMISSION_TENANT: name})


@cache
def instruments_of(meter_provider: metrics.MeterProvider | None) -> Instruments:
    """The provider's; None is the global one, and an SDK that is installed later is found."""
    return Instruments(meter_provider)


class PoolMetrics:
    """Has the gauges report a pool for as long as this lives. Costs nothing until they are read.

    `sample` is called in the thread that reads the metrics. `meter_provider` None means the global one. Nothing here
    raises.
    """

    def __init__(self, pool: str, sample: Sample, meter_provider: MeterProvider | None = None) -> None:
        self.pool, self.sample = pool, sample
        try:
            instruments_of(meter_provider).watch(self)
        except Exception:
            logger.exception("the metrics of pool %s failed; the pool goes on without", pool)
