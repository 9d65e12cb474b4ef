"""An SDK of a test's own, and what it reads."""

from collections.abc import Mapping
from typing import Any

from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from sidecar.telemetry.metrics import RequestMetrics
from sidecar.telemetry.metrics.views import views


class Measuring:
    """`read` gives every metric's points by the values of its labels, in the order of the labels' names."""

    def __init__(self) -> None:
        self.reader = InMemoryMetricReader()
        self.provider = MeterProvider([self.reader], shutdown_on_exit=False, views=views())

    def requests(self, pool: str = "default", **settings: Any) -> RequestMetrics:
        return RequestMetrics(pool, meter_provider=self.provider, **settings)

    def metrics(self) -> Mapping[str, Any]:
        """What the SDK has, by name."""
        data = self.reader.get_metrics_data()
        found = [
            metric
            for resource in (data.resource_metrics if data else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
        ]
        assert len({metric.name for metric in found}) == len(found)
        return {metric.name: metric for metric in found}

    def points(self, name: str) -> Mapping[tuple[str, ...], Any]:
        """The points of a metric, none where there is no such metric."""
        metric = self.metrics().get(name)
        points = [] if metric is None else metric.data.data_points
        by_labels = {tuple(point.attributes[key] for key in sorted(point.attributes)): point for point in points}
        assert len(by_labels) == len(points)
        return by_labels

    def values(self, name: str) -> Mapping[tuple[str, ...], float]:
        """The values of a counter or a gauge."""
        return {labels: point.value for labels, point in self.points(name).items()}

    def sums(self, name: str) -> Mapping[tuple[str, ...], tuple[int, float]]:
        """Count and sum of a histogram."""
        return {labels: (point.count, round(point.sum, 6)) for labels, point in self.points(name).items()}


class BrokenProvider(NoOpMeterProvider):
    """One of an SDK that does not work."""

    def get_meter(self, *arguments, **named):
        raise RuntimeError("no meter today")
