"""Readers of a provider of ours, which get the sums of `histograms` as the SDK's own records. Imports the SDK."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from opentelemetry.sdk import metrics as sdk
from opentelemetry.sdk.environment_variables import OTEL_METRICS_EXEMPLAR_FILTER
from opentelemetry.sdk.metrics import export, view
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from sidecar.telemetry import sdk_bypass
from sidecar.telemetry.metrics.histograms import DURATIONS, HAS_CONTEXT, DurationMetric
from sidecar.telemetry.metrics.views import HAS_EXEMPLARS
from sidecar.telemetry.sdk_bypass.histograms import DurationExemplar, Series, Sums
from sidecar.telemetry.semconv import ADMISSION_REQUEST_ID, SCOPE
from sidecar.version import __version__

_BUCKETED: Final = (view.DefaultAggregation, view.ExplicitBucketHistogramAggregation)
_TRACE_BASED: Final = "trace_based"


class SumsReader(export.MetricReader):
    """A reader that gets sums as well, where there are any. All metrics that it receives go through `with_sums`.

    The SDK sends a reader nothing where it has collected nothing. That hides no sum: each duration of the middleware
    comes with a counter, and the store's with a gauge.
    """

    _sums: Sums | None = None

    def read(self, sums: Sums) -> None:
        """Reads these too, from now on."""
        self._sums = sums
        self._read_exemplars: dict[Series, tuple[DurationExemplar | None, ...]] = {}

    def with_sums(self, data: export.MetricsData) -> export.MetricsData:
        """The SDK's metrics, with the sums in the scope of our other metrics."""
        if self._sums is None:
            return data
        found = [metric for duration in DURATIONS if (metric := self._metric(self._sums, duration)) is not None]
        first, *others = data.resource_metrics  # a provider has one resource
        return export.MetricsData([replace(first, scope_metrics=_added(first.scope_metrics, found)), *others])

    def _metric(self, sums: Sums, duration: DurationMetric) -> export.Metric | None:
        now_ns = time.time_ns()
        points = [self._point(series, now_ns) for series in sums.of(duration.name)]
        if not points:
            return None
        data = export.Histogram(points, export.AggregationTemporality.CUMULATIVE)
        return export.Metric(duration.name, duration.description, "s", data)

    def _point(self, series: Series, now_ns: int) -> export.HistogramDataPoint:
        total = series.total()
        # Each exemplar is read once, as from the SDK.
        before = self._read_exemplars.get(series, (None,) * len(total.exemplars))
        self._read_exemplars[series] = total.exemplars
        pairs = zip(total.exemplars, before, strict=True)
        return export.HistogramDataPoint(
            attributes=series.labels,
            start_time_unix_nano=series.since_ns,
            time_unix_nano=now_ns,
            count=sum(total.counts),
            sum=total.sum_s,
            bucket_counts=total.counts,
            explicit_bounds=series.bounds,
            min=total.min_s,
            max=total.max_s,
            exemplars=[_exemplar(now) for now, then in pairs if now is not None and now is not then],
        )


class SummedExport(SumsReader, export.PeriodicExportingMetricReader):
    """The SDK's reader for an exporter, with the sums."""

    def _receive_metrics(self, metrics_data: export.MetricsData, *args: Any, **kwargs: Any) -> None:
        super()._receive_metrics(self.with_sums(metrics_data), *args, **kwargs)


def takes_sums(out: export.MetricExporter | SumsReader) -> bool:
    """Whether it wants what we add up: from the beginning on, in our buckets, with the exemplars of recorded traces."""
    if not (sdk_bypass.is_enabled() and HAS_CONTEXT and HAS_EXEMPLARS):  # else it has no exemplars
        return False
    if os.environ.get(OTEL_METRICS_EXEMPLAR_FILTER, _TRACE_BASED) != _TRACE_BASED:
        return False
    return isinstance(out, SumsReader) or (_is_cumulative(out) and _is_bucketed(out))


def _is_cumulative(exporter: export.MetricExporter) -> bool:
    # The preferences of an exporter have no public name. Where the name is missing they are unknown: no sums then.
    preferred = getattr(exporter, "_preferred_temporality", {sdk.Histogram: None}) or {}
    cumulative = export.AggregationTemporality.CUMULATIVE
    return preferred.get(sdk.Histogram, cumulative) is cumulative


def _is_bucketed(exporter: export.MetricExporter) -> bool:
    preferred = getattr(exporter, "_preferred_aggregation", {sdk.Histogram: None}) or {}
    return isinstance(preferred.get(sdk.Histogram, view.DefaultAggregation()), _BUCKETED)


def _added(scopes: Sequence[export.ScopeMetrics], found: list[export.Metric]) -> list[export.ScopeMetrics]:
    if found and not any(each.scope.name == SCOPE for each in scopes):
        scopes = [*scopes, export.ScopeMetrics(InstrumentationScope(SCOPE, __version__), [], "")]
    return [replace(each, metrics=[*each.metrics, *found]) if each.scope.name == SCOPE else each for each in scopes]


def _exemplar(kept: DurationExemplar) -> sdk.Exemplar:
    attributes = {ADMISSION_REQUEST_ID: kept.request_id}
    return sdk.Exemplar(attributes, kept.seconds, kept.at_ns, kept.trace.span_id, kept.trace.trace_id)
