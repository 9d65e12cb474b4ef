"""The metrics page in Prometheus' own format, with exemplars. Imports the SDK and prometheus_client.

OpenTelemetry's own exporter (opentelemetry-exporter-prometheus, 0.66b2) writes no exemplars: its `_convert_buckets`
makes pairs of a bucket and its count, where prometheus_client takes a third member. Support is being asked for in
https://github.com/open-telemetry/opentelemetry-python/pull/4178; a test of ours fails when it is there, and this module
can go. Names follow https://opentelemetry.io/docs/specs/otel/compatibility/prometheus_and_openmetrics/ but for two
things: neither `target_info` nor `otel_scope_*` labels are written, as one process has one of each.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from threading import Lock
from typing import Any, Final

from opentelemetry.sdk.metrics import export
from prometheus_client.core import Exemplar, Metric, Sample, Timestamp
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from sidecar.telemetry.semconv import ADMISSION_REQUEST_ID

MOST_EXEMPLAR_CHARACTERS: Final = 128
"""Of all its labels' names and values together; OpenMetrics allows no more, and Prometheus drops such an exemplar."""

_UNITS: Final = {"s": "seconds", "ms": "milliseconds", "By": "bytes", "1": "ratio"}
_UNFIT: Final = re.compile(r"[^a-zA-Z0-9_:]")

Labels = dict[str, str]


class PrometheusReader(export.MetricReader):
    """Collects when it is asked for the text. In any thread, but that of the event loop that the pools live in."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = Lock()
        self._data: export.MetricsData | None = None
        self._exemplars: dict[tuple[str, ...], Exemplar] = {}

    def text(self, accept: str | None) -> tuple[bytes, str]:
        """All metrics, in the format that the Accept header asks for, and its content type."""
        found: dict[str, Metric] = {}
        with self._lock:
            self.collect()
            data, self._data = self._data, None
            for metric in _metrics(data):
                self._add(found, metric)
        encode, content_type = choose_encoder(accept or "")
        return encode(_Collected(list(found.values()))), content_type

    def shutdown(self, *_: Any, **__: Any) -> None:
        """See `MetricReader.shutdown`: nothing is left to be sent."""

    def _receive_metrics(self, metrics_data: export.MetricsData, *_: Any, **__: Any) -> None:
        self._data = metrics_data

    def _add(self, found: dict[str, Metric], metric: export.Metric) -> None:
        kind = _kind(metric.data)
        if kind is None:
            return
        family = Metric(_UNFIT.sub("_", metric.name), metric.description or metric.name, kind, _unit(metric.unit))
        family = found.setdefault(family.name, family)
        if family.type != kind:
            return  # two instruments of one name: the first one's series alone make sense
        for point in metric.data.data_points:
            labels = {_UNFIT.sub("_", name): str(value) for name, value in (point.attributes or {}).items()}
            if isinstance(point, export.HistogramDataPoint):
                family.samples += self._histogram(family.name, labels, point)
            elif isinstance(point, export.NumberDataPoint):
                name = f"{family.name}_total" if kind == "counter" else family.name
                family.samples.append(Sample(name, labels, point.value))

    def _histogram(self, name: str, labels: Labels, point: export.HistogramDataPoint) -> Iterable[Sample]:
        bounds = [*map(_written, point.explicit_bounds), "+Inf"]
        self._note_exemplars(name, labels, bounds, point)
        for bound, count in zip(bounds, accumulate(point.bucket_counts), strict=True):
            exemplar = self._exemplars.get(_key(name, labels, bound))
            yield Sample(f"{name}_bucket", {**labels, "le": bound}, count, None, exemplar)
        yield Sample(f"{name}_count", labels, point.count)
        yield Sample(f"{name}_sum", labels, point.sum)

    def _note_exemplars(
        self, name: str, labels: Labels, bounds: Sequence[str], point: export.HistogramDataPoint
    ) -> None:
        """The SDK gives each exemplar once; later scrapes must see it as well, until there is a newer one."""
        for exemplar in point.exemplars:
            place = bisect_left(point.explicit_bounds, exemplar.value)
            at = Timestamp(*divmod(exemplar.time_unix_nano, 1_000_000_000))
            self._exemplars[_key(name, labels, bounds[place])] = Exemplar(
                _exemplar_labels(exemplar), exemplar.value, at
            )


class _Collected(Collector):
    """The metrics that prometheus_client writes."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def _metrics(data: export.MetricsData | None) -> Iterable[export.Metric]:
    for resource in () if data is None else data.resource_metrics:
        for scope in resource.scope_metrics:
            yield from scope.metrics


def _kind(data: object) -> str | None:
    """Prometheus' word for it; None for what it has no text for."""
    if isinstance(data, export.Sum):
        return "counter" if data.is_monotonic else "gauge"
    if isinstance(data, export.Gauge):
        return "gauge"
    return "histogram" if isinstance(data, export.Histogram) else None


def _written(bound: float) -> str:
    return str(floatToGoString(bound))  # type: ignore[no-untyped-call]  # of prometheus_client, which has no type for it


def _unit(unit: str | None) -> str:
    """As a suffix; what is in braces is a remark."""
    bare = re.sub(r"\{[^}]*\}", "", unit or "")
    return _UNITS.get(bare, _UNFIT.sub("_", bare))


def _key(name: str, labels: Labels, bound: str) -> tuple[str, ...]:
    return (name, bound, *labels.values())


def _exemplar_labels(exemplar: Any) -> Labels:
    labels: Labels = {}
    if exemplar.trace_id is not None:
        labels = {"trace_id": f"{exemplar.trace_id:032x}", "span_id": f"{exemplar.span_id:016x}"}
    request_id = (exemplar.filtered_attributes or {}).get(ADMISSION_REQUEST_ID)
    if request_id is not None:
        with_id = {**labels, "request_id": str(request_id)}
        if sum(len(name) + len(value) for name, value in with_id.items()) <= MOST_EXEMPLAR_CHARACTERS:
            return with_id
    return labels
