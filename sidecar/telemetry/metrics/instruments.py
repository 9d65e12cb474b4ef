"""The OpenTelemetry instruments, one set for each provider, which all pools of the process share.

OpenTelemetry knows an instrument by its name, and the SDK drops the callback of a second one: so there is one of each,
and it looks at every pool. All reading happens in an exporter's thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from functools import cache, partial
from weakref import ref

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation

from sidecar.telemetry import semconv
from sidecar.telemetry.metrics import histograms
from sidecar.telemetry.metrics.counters import COUNTERS, TENANT_COUNTERS, Counter, Counters
from sidecar.telemetry.metrics.gauges import POOL_GAUGES, TIER_GAUGES, PoolGauge, PoolSample, Sample, TierGauge
from sidecar.telemetry.metrics.histograms import DurationHistogram
from sidecar.telemetry.metrics.tenants import TenantHoldings, TenantLabels
from sidecar.version import __version__

logger = logging.getLogger(__name__)

FRESH_S = 0.02
"""One reading asks for every gauge in turn, within milliseconds: for so long a sample serves them all."""

Observations = Iterable[Observation]


class WatchedPool:
    """A pool that the gauges look at for as long as this lives."""

    def __init__(self, pool: str, sample: Sample) -> None:
        self.pool = pool
        self.sample = sample


class WatchedTenants:
    """A middleware whose tenants' holdings are reported for as long as this lives."""

    def __init__(self, pool: str, holdings: TenantHoldings) -> None:
        self.pool = pool
        self.holdings = holdings


class Instruments:
    """Every instrument but those of the store."""

    def __init__(self, meter_provider: metrics.MeterProvider | None) -> None:
        meter = metrics.get_meter("sidecar", __version__, meter_provider)
        # Replaced, never changed: an exporter's thread reads them.
        self._counters: Mapping[str, Counters] = {}
        self._gauged: tuple[ref[WatchedPool], ...] = ()
        self._held: tuple[ref[WatchedTenants], ...] = ()
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
        self._create_gauges(meter)

    def counters(self, pool: str, tenants_shown: int) -> Counters:
        """Those of the pool of this name: two middlewares on it in one process both add to them."""
        counters = self._counters.get(pool)
        if counters is None:
            counters = Counters(TenantLabels(tenants_shown))
            self._counters = {**self._counters, pool: counters}
        return counters

    def watch(self, gauged: WatchedPool) -> None:
        """Looks at this pool. Of two of one name the later is reported."""
        self._gauged = (*(watched for watched in self._gauged if watched() is not None), ref(gauged))

    def watch_tenants(self, held: WatchedTenants) -> None:
        """Reports the holdings of this middleware's tenants; of two middlewares on one pool, their sum."""
        self._held = (*(watched for watched in self._held if watched() is not None), ref(held))

    def _create_gauges(self, meter: metrics.Meter) -> None:
        observe = meter.create_observable_gauge
        for tier_gauge in TIER_GAUGES:
            read = partial(self._read_tiers, tier_gauge)
            observe(tier_gauge.name, [read], tier_gauge.unit, tier_gauge.description)
        for gauge in POOL_GAUGES:
            observe(gauge.name, [partial(self._read_pools, gauge)], gauge.unit, gauge.description)
        observe(
            semconv.POLICY_INFO, [self._read_policies], description="1, labeled with the digest of the policy in force."
        )
        observe(
            semconv.TENANT_TOKENS_HELD,
            [self._read_tenants],
            "{token}",
            "Tokens held by leases of this process, of the largest tenants and of all others together.",
        )
        meter.create_observable_counter(
            semconv.POLICY_REJECTED,
            [self._read_rejected],
            "{policy}",
            "Changed policies that could not be used; the one before stayed in force.",
        )

    # -- counters

    def _counted(self, counter: Counter, _: CallbackOptions) -> Observations:
        for pool, counters in self._counters.items():
            counted = getattr(counters, counter.counted)
            for values, number in list(counted.items()):
                value = number if counter.per_unit == 1 else number / counter.per_unit
                yield Observation(value, {semconv.POOL: pool, **dict(zip(counter.labels, values, strict=True))})

    def _counted_of_tenants(self, counter: Counter, _: CallbackOptions) -> Observations:
        for pool, counters in self._counters.items():
            for tenant, counts in counters.tenants.series().items():
                labels = {semconv.POOL: pool, semconv.ADMISSION_TENANT: tenant}
                yield Observation(getattr(counts, counter.counted), labels)

    # -- gauges

    def _sampled(self) -> Mapping[str, PoolSample]:
        now_s = time.monotonic()
        if now_s - self._sampled_at_s > FRESH_S:
            taken = {gauged.pool: self._taken(gauged) for gauged in (watched() for watched in self._gauged) if gauged}
            self._samples = {pool: sample for pool, sample in taken.items() if sample is not None}
            self._sampled_at_s = time.monotonic()
        return self._samples

    def _taken(self, gauged: WatchedPool) -> PoolSample | None:
        try:
            return gauged.sample()
        except Exception:
            if not self._reported:  # else every reading of the metrics would say so
                self._reported = True
                logger.exception(
                    "pool %s cannot be sampled; its gauges are left out, without further logs", gauged.pool
                )
            return None

    def _read_tiers(self, gauge: TierGauge, _: CallbackOptions) -> Observations:
        for pool, sample in self._sampled().items():
            for tier in sample.tiers:
                value = gauge.value(tier)
                if value is not None:
                    yield Observation(value, {semconv.POOL: pool, semconv.ADMISSION_TIER: tier.tier})

    def _read_pools(self, gauge: PoolGauge, _: CallbackOptions) -> Observations:
        for pool, sample in self._sampled().items():
            value = gauge.value(sample)
            if value is not None:
                yield Observation(value, {semconv.POOL: pool})

    def _read_policies(self, _: CallbackOptions) -> Observations:
        for pool, sample in self._sampled().items():
            yield Observation(1, {semconv.POOL: pool, semconv.GENERATION: sample.generation})

    def _read_rejected(self, _: CallbackOptions) -> Observations:
        for pool, sample in self._sampled().items():
            yield Observation(sample.policies_rejected, {semconv.POOL: pool})

    def _read_tenants(self, _: CallbackOptions) -> Observations:
        for pool, counters in self._counters.items():
            by_name = dict.fromkeys(counters.tenants.series(), 0)
            for middleware in (watched() for watched in self._held):
                if middleware is not None and middleware.pool == pool:
                    for tenant, holding in middleware.holdings.held().items():
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
        self._gauged = WatchedPool(pool, sample)
        try:
            instruments_of(meter_provider).watch(self._gauged)
        except Exception:
            logger.exception("the metrics of pool %s failed; the pool goes on without", pool)
