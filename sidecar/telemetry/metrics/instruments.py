"""The OpenTelemetry instruments: the counters of requests, and the figures of documents that pools are sampled in.

Every provider has one set of instruments, which all pools of the process share.

OpenTelemetry knows an instrument by its name, and the SDK drops the callback of a second one: so there is one of each,
and it looks at every pool. All reading happens in an exporter's thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple
from weakref import ref

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation

from sidecar.events import Outcome, StoreChanged
from sidecar.figures import SECONDS, TOKENS, Counted, Figure, Over, Reading, counted, readings
from sidecar.telemetry import semconv
from sidecar.telemetry.metrics import histograms
from sidecar.telemetry.metrics.histograms import STORE_ROUND_TRIP, DurationHistogram
from sidecar.telemetry.metrics.tenants import TenantCounts, TenantHoldings, TenantLabels
from sidecar.telemetry.providers import FirstFailure
from sidecar.telemetry.semconv import POOL, STORE_STATE
from sidecar.version import __version__

logger = logging.getLogger(__name__)

FRESH_S = 0.02
"""One reading asks for every gauge in turn, within milliseconds: for so long a sample serves them all."""

Observations = Iterable[Observation]

TIER, REASON = semconv.ADMISSION_TIER, semconv.ADMISSION_REASON
OVER, UNDER = "over", "under"
SLO_OUTCOMES = ("met", "ttft", "tpot", "refused", "abandoned")
_OVERTAKING = (TIER, semconv.BY, semconv.ADMISSION_RULE)


@dataclass(eq=False)
class Counters:
    """The sums of the requests to one pool: each field is a metric, with the labels by which it counts."""

    tenants: TenantLabels
    admitted: Counted = counted("admission.admitted", "Requests that got their lease.", (TIER,))
    refused: Counted = counted(
        "admission.refused",
        "Requests answered with an error, by its code. Without a tier where that was not known yet.",
        (TIER, REASON),
    )
    abandoned: Counted = counted(
        "admission.abandoned",
        "Requests that ended in the queue: the client disconnected, or the server stopped.",
        (TIER, REASON),
    )
    settled: Counted = counted(
        "admission.settled", "Leases that ended, by the outcome of the request.", (TIER, semconv.ADMISSION_OUTCOME)
    )
    failed: Counted = counted(
        "admission.failed",
        "Admitted requests that failed: engine_unreachable, engine_timeout, or an exception.",
        (TIER, semconv.ERROR_TYPE),
    )
    preemptions: Counted = counted(
        "admission.preemptions", "Preemptions of the tier's requests, which waited again.", (TIER,), "{preemption}"
    )
    preempted_engine_us: Counted = counted(
        "admission.preempted.engine_time",
        "The engine's time for requests that were preempted, which is lost.",
        (TIER,),
        SECONDS,
        per_unit=1_000_000,
    )
    clamped: Counted = counted(
        "admission.clamped",
        "Requests that asked for a tier above their tenant's best.",
        (semconv.ADMISSION_CLAMPED_FROM, TIER),
    )
    observed: Counted = counted(
        "admission.observed",
        "Requests that passed in `mode: observe`, by what enforcing would have done to them.",
        (TIER, semconv.ADMISSION_DECISION, REASON),
    )
    unguarded: Counted = counted(
        "admission.unguarded",
        "Requests on paths that the policy does not guard, reading left out.",
        (semconv.ADMISSION_ROUTE, semconv.ADMISSION_DECISION, REASON),
    )
    downgraded: Counted = counted(
        "admission.downgraded",
        "Requests over their tenant's limits that got a lower tier.",
        (semconv.ADMISSION_DOWNGRADED_FROM, TIER),
    )
    risen: Counted = counted(
        "admission.risen", "How often a request with a deadline rose to the tier, as it came near.", (TIER,)
    )
    overtaken: Counted = counted(
        "admission.overtaken",
        "How often the first of a tier was overtaken by a later request of another, by the rule.",
        _OVERTAKING,
    )
    overtaken_tokens: Counted = counted(
        "admission.overtaken.tokens", "The same in tokens of the requests that went ahead.", _OVERTAKING, TOKENS
    )
    tokens_estimated: Counted = counted(
        "admission.tokens.estimated", "Tokens held for the requests admitted.", (TIER,), TOKENS
    )
    tokens_used: Counted = counted(
        "admission.tokens.used",
        "Tokens that settled requests used: the engine's count, or else an estimate.",
        (TIER,),
        TOKENS,
    )
    estimate_errors: Counted = counted(
        "admission.tokens.estimate_error",
        "Tokens by which completed requests were estimated over or under the engine's count.",
        (TIER, semconv.DIRECTION),
        TOKENS,
    )
    growths: Counted = counted(
        "admission.lease.growths",
        "How often a lease grew while its answer streamed, because it became longer than expected.",
        (TIER,),
        "{growth}",
    )
    gain_earned: Counted = counted(
        semconv.GAIN_EARNED,
        "Output tokens that were forwarded before their deadlines, each by the weight of its tier.",
        (TIER,),
        TOKENS,
    )
    gain_attainable: Counted = counted(
        semconv.GAIN_ATTAINABLE,
        "All output tokens of the requests that were offered, each by the weight of its tier.",
        (TIER,),
        TOKENS,
    )
    slo_requests: Counted = counted(
        "admission.slo.requests",
        "Offered requests of tiers with an objective, by whether they met it.",
        (TIER, semconv.ADMISSION_SLO),
    )

    def know(self, tier: str) -> None:
        """Reports every series of a tier from the start: where one begins at 1, Prometheus does not see the 1."""
        preempted = self.preemptions, self.preempted_engine_us
        for counts in (self.admitted, self.tokens_estimated, self.tokens_used, self.growths, *preempted):
            counts[tier,] += 0
        for outcome in Outcome:
            self.settled[tier, outcome.value] += 0
        for direction in (OVER, UNDER):
            self.estimate_errors[tier, direction] += 0

    def know_objective(self, tier: str) -> None:
        """Begins the series that a tier has if its service gain is measured."""
        self.gain_earned[tier,] += 0
        self.gain_attainable[tier,] += 0
        for outcome in SLO_OUTCOMES:
            self.slo_requests[tier, outcome] += 0


TENANT_TOKENS_HELD = Figure(
    "admission.tenant.tokens_held",
    "Tokens held by leases of this process.",
    TOKENS,
    Over.SUM,
    (semconv.ADMISSION_TENANT,),
)

PoolSample = Sequence[tuple[Mapping[str, str], object]]
"""Documents of a pool that have figures, each with the labels of its series but the pool's."""
Sample = Callable[[], PoolSample | None]
"""Takes a sample of a pool, or None where that is not possible now. Called in any thread."""
Read = Callable[[CallbackOptions], Observations]


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
        self._meter, self._kinds = meter, set[type]()
        for reading in readings(Counters):
            self._create(reading.figure, partial(self._read_counters, reading))
        for reading in readings(TenantCounts):
            self._create(reading.figure, partial(self._counted_of_tenants, reading))
        self._create(TENANT_TOKENS_HELD, self._read_tenants)

    def counters(self, pool: str, tenants_shown: int) -> Counters:
        """Counters of the pool of this name: two middlewares on it in one process both add to them."""
        counters = self._counters.get(pool)
        if counters is None:
            counters = Counters(TenantLabels(tenants_shown))
            self._counters = {**self._counters, pool: counters}
        return counters

    def watch(self, gauged: PoolMetrics) -> None:
        """Looks at this pool. Of two of one name the later is reported."""
        self._gauged = (*(watched for watched in self._gauged if watched() is not None), ref(gauged))
        for kind in gauged.kinds:
            if kind not in self._kinds:
                self._kinds.add(kind)
                for reading in readings(kind):
                    self._create(reading.figure, partial(self._read, kind, reading))

    def watch_tenants(self, pool: str, holdings: TenantHoldings) -> None:
        """Reports one middleware's holdings for as long as they live; of two middlewares on one pool, their sum."""
        self._held = (*(watched for watched in self._held if watched[1]() is not None), (pool, ref(holdings)))

    def _create(self, figure: Figure, read: Read) -> None:
        meter = self._meter
        create = meter.create_observable_counter if figure.is_counter else meter.create_observable_gauge
        create(figure.name, [read], figure.unit, figure.help)

    # -- counters

    def _read_counters(self, reading: Reading, _: CallbackOptions) -> Observations:
        for pool, counters in self._counters.items():
            for value, labels in reading.series(counters):
                yield Observation(value, {semconv.POOL: pool, **labels})

    def _counted_of_tenants(self, reading: Reading, _: CallbackOptions) -> Observations:
        for pool, counters in self._counters.items():
            for tenant, counts in counters.tenants.series().items():
                for value, labels in reading.series(counts):
                    yield Observation(value, {semconv.POOL: pool, semconv.ADMISSION_TENANT: tenant, **labels})

    # -- gauges

    def _take_samples(self) -> Mapping[str, PoolSample]:
        now_s = time.monotonic()
        if now_s - self._sampled_at_s > FRESH_S:
            found = {gauged.pool: self._sample(gauged) for gauged in (watched() for watched in self._gauged) if gauged}
            self._samples = {pool: sample for pool, sample in found.items() if sample is not None}
            self._sampled_at_s = time.monotonic()
        return self._samples

    def _sample(self, gauged: PoolMetrics) -> PoolSample | None:
        try:
            return gauged.sample()
        except Exception:
            if not self._reported:  # else every reading of the metrics would say so
                self._reported = True
                logger.exception(
                    "pool %s cannot be sampled; its gauges are left out, without further logs", gauged.pool
                )
            return None

    def _read(self, kind: type, reading: Reading, _: CallbackOptions) -> Observations:
        for pool, sample in self._take_samples().items():
            for labels, document in sample:
                if type(document) is kind:
                    for value, own in reading.series(document):
                        yield Observation(value, {semconv.POOL: pool, **labels, **own})

    def _read_tenants(self, _: CallbackOptions) -> Observations:
        for pool, counters in self._counters.items():
            by_name = dict.fromkeys(counters.tenants.series(), 0)
            for holdings in (watched() for held_in, watched in self._held if held_in == pool):
                if holdings is not None:
                    for tenant, holding in holdings.held().items():
                        name = counters.tenants.name_for(tenant)
                        by_name[name] = by_name.get(name, 0) + holding.tokens_held
            for name, tokens in by_name.items():
                yield Observation(tokens, {semconv.POOL: pool, semconv.ADMISSION_TENANT: name})


@cache
def instruments_for(meter_provider: metrics.MeterProvider | None) -> Instruments:
    """The provider's; None is the global one, and an SDK that is installed later is found."""
    return Instruments(meter_provider)


class PoolMetrics:
    """Has the gauges report a pool for as long as this lives. Costs nothing until they are read.

    `sample` is called in the thread that reads the metrics; `kinds` are those of its documents. `meter_provider` None
    means the global one. Nothing here raises.
    """

    def __init__(
        self, pool: str, sample: Sample, kinds: Sequence[type], meter_provider: MeterProvider | None = None
    ) -> None:
        self.pool, self.sample, self.kinds = pool, sample, kinds
        try:
            instruments_for(meter_provider).watch(self)
        except Exception:
            logger.exception("the metrics of pool %s failed; the pool goes on without", pool)


# -- Metrics of shared pools' stores beside what a sample says of them: their changes, and their round trips.

CHANGES = Figure(
    "admission.store.changes",
    "How often the store was reached, lost or back, by the state that followed.",
    over=Over.SUM,
    labels=(STORE_STATE,),
    is_counter=True,
)


class StoreMetrics:
    """One pool's store: every change, every call.

    `meter_provider` None means the global one; an SDK that is installed later is found. Nothing here raises: the first
    failure is logged, and the pool goes on.
    """

    def __init__(self, pool: str, meter_provider: metrics.MeterProvider | None = None) -> None:
        self._pool = pool
        self._meter_provider = meter_provider
        self._report = FirstFailure(logger, "store metrics failed; the pool goes on")

    def __call__(self, change: StoreChanged) -> None:
        """Notes a change."""
        try:
            instruments = _instruments_for(self._meter_provider)
            instruments.changes.add(1, {POOL: self._pool, STORE_STATE: change.state.value})
        except Exception:
            self._report()

    def round_trip(self, took_s: float) -> None:
        """Notes how long a call to the store took, answered or not."""
        try:
            _instruments_for(self._meter_provider).round_trip.record(took_s, {POOL: self._pool})
        except Exception:
            self._report()


class _Instruments(NamedTuple):
    """The instruments that all pools share."""

    changes: metrics.Counter
    round_trip: DurationHistogram


@cache
def _instruments_for(meter_provider: metrics.MeterProvider | None) -> _Instruments:
    meter = metrics.get_meter("sidecar", __version__, meter_provider)
    changes = meter.create_counter(CHANGES.name, description=CHANGES.help)
    return _Instruments(changes, DurationHistogram(STORE_ROUND_TRIP, meter_provider))
