"""Gives the readers of a provider of ours what is added up in `summed`, as the SDK's own records. Imports the SDK."""

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

from sidecar.telemetry.metrics.exemplars import Kept
from sidecar.telemetry.metrics.histograms import HAS_CONTEXT, TIMINGS, Timing
from sidecar.telemetry.metrics.summed import Series, Sums
from sidecar.telemetry.metrics.views import HAS_EXEMPLARS
from sidecar.telemetry.semconv import ADMISSION_REQUEST_ID
from sidecar.version import __version__

SCOPE: Final = "sidecar"
_BUCKETED: Final = (view.DefaultAggregation, view.ExplicitBucketHistogramAggregation)
_TRACE_BASED: Final = "trace_based"


class Reading:
    """What one reader is told of sums."""

    def __init__(self, sums: Sums) -> None:
        self._sums = sums
        self._told: dict[Series, tuple[Kept | None, ...]] = {}

    def added_to(self, data: export.MetricsData) -> export.MetricsData:
        """What the SDK collected, with the sums in the scope of our other metrics."""
        found = [metric for timing in TIMINGS if (metric := self._metric(timing)) is not None]
        first, *others = data.resource_metrics  # a provider has one resource
        return export.MetricsData([replace(first, scope_metrics=_added(first.scope_metrics, found)), *others])

    def _metric(self, timing: Timing) -> export.Metric | None:
        now_ns = time.time_ns()
        points = [self._point(series, now_ns) for series in self._sums.of(timing.name)]
        if not points:
            return None
        data = export.Histogram(points, export.AggregationTemporality.CUMULATIVE)
        return export.Metric(timing.name, timing.description, "s", data)

    def _point(self, series: Series, now_ns: int) -> export.HistogramDataPoint:
        total = series.total()
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
            exemplars=self._exemplars(series, total.kept),
        )

    def _exemplars(self, series: Series, kept: tuple[Kept | None, ...]) -> list[sdk.Exemplar]:
        """Those that this reader has not been told of: each is told once, as the SDK does it."""
        before = self._told.get(series, (None,) * len(kept))
        self._told[series] = kept
        return [_exemplar(now) for now, then in zip(kept, before, strict=True) if now is not None and now is not then]


class SumsReader(export.MetricReader):
    """A reader that is told of sums, too, where there are any. Whatever it received goes through `with_sums`.

    The SDK tells a reader nothing where it has collected nothing. That hides no sum: each of the door's durations comes
    with a counter, and the store's with a gauge.
    """

    _reading: Reading | None = None

    def read(self, sums: Sums) -> None:
        """Tell these too, from now on."""
        self._reading = Reading(sums)

    def with_sums(self, data: export.MetricsData) -> export.MetricsData:
        """What the SDK collected, and what is added up beside it."""
        return data if self._reading is None else self._reading.added_to(data)


class SummedExport(SumsReader, export.PeriodicExportingMetricReader):
    """Sends to an exporter every so often, as the SDK's own does, with the sums."""

    def _receive_metrics(self, metrics_data: export.MetricsData, *args: Any, **kwargs: Any) -> None:
        super()._receive_metrics(self.with_sums(metrics_data), *args, **kwargs)


def takes_sums(out: export.MetricExporter | SumsReader) -> bool:
    """Whether it wants what we add up: from the beginning on, in our buckets, with the exemplars of kept traces."""
    if not (HAS_CONTEXT and HAS_EXEMPLARS):  # else it has no exemplars
        return False
    if os.environ.get(OTEL_METRICS_EXEMPLAR_FILTER, _TRACE_BASED) != _TRACE_BASED:
        return False
    return isinstance(out, SumsReader) or (_is_cumulative(out) and _is_bucketed(out))


def _is_cumulative(exporter: export.MetricExporter) -> bool:
    # What an exporter prefers has no public name; of one that does not have this either we know nothing.
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


def _exemplar(kept: Kept) -> sdk.Exemplar:
    attributes = {} if kept.request_id is None else {ADMISSION_REQUEST_ID: kept.request_id}
    return sdk.Exemplar(attributes, kept.seconds, kept.at_ns, kept.span_id, kept.trace_id)
