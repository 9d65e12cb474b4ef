"""The workers' metrics as those of one process, in Prometheus' format.

Counters and histograms are added up, those of ended processes included, so that no sum falls when a worker is started
again. A gauge of what a process holds or has waiting is added up, too. Of what all report the same, such as the pool,
the largest is shown, as over replicas on ports of their own.

The multiprocess mode of prometheus_client (0.26) would not do: it adds up that library's own instruments alone, which
ours are not, and has no exemplars.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, Sample
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from sidecar.cluster.sampler import FIGURES
from sidecar.figures import Over

OPEN_METRICS = "application/openmetrics-text; version=1.0.0"
"""Asked of the workers: the older format has no exemplars."""


def _in_prometheus(name: str) -> str:
    return name.replace(".", "_")


_OVER = {_in_prometheus(it.name): it.over for it in FIGURES}


class Series(NamedTuple):
    """One series: its family's name, its own, and its labels."""

    family: str
    name: str
    labels: tuple[tuple[str, str], ...]


class WorkersMetrics(Collector):
    """The sum. It remembers each process's last metrics: those of one that is silent still count. `_ended` is what
    ended processes counted.
    """

    def __init__(self) -> None:
        self._latest: dict[int, dict[Series, Sample]] = {}
        self._ended: dict[Series, float] = defaultdict(float)
        self._families: dict[str, Metric] = {}
        self._own: Sequence[Metric] = ()

    def note(self, answers: Mapping[int, str], running: Sequence[int | None], *, serving: int, restarts: int) -> None:
        """The processes with these ids have answered, in the format `OPEN_METRICS`; no others are `running`."""
        self._latest.update({pid: self._read(text) for pid, text in answers.items()})
        for pid in [pid for pid in self._latest if pid not in running]:
            for series, sample in self._latest.pop(pid).items():
                if self._over(series) is Over.SUM and self._is_counted(series):
                    self._ended[series] += sample.value
        self._own = (
            GaugeMetricFamily("admission_workers", "Workers that serve.", serving),
            CounterMetricFamily("admission_worker_restarts", "How often a worker was started again.", restarts),
        )

    def collect(self) -> Iterable[Metric]:
        """All metrics."""
        found: dict[Series, list[Sample]] = {series: [] for series in self._ended}
        for latest in self._latest.values():
            for series, sample in latest.items():
                found.setdefault(series, []).append(sample)
        families = {name: Metric(name, one.documentation, one.type, one.unit) for name, one in self._families.items()}
        for series, samples in found.items():
            value = self._merged(series, [sample.value for sample in samples])
            exemplars = [sample.exemplar for sample in samples if sample.exemplar]
            newest = max(exemplars, key=lambda exemplar: float(exemplar.timestamp or 0), default=None)
            families[series.family].samples.append(Sample(series.name, dict(series.labels), value, None, newest))
        return [*families.values(), *self._own]

    def _read(self, text: str) -> dict[Series, Sample]:
        found = {}
        for family in text_string_to_metric_families(text):  # type: ignore[no-untyped-call]
            self._families[family.name] = family
            for sample in family.samples:
                found[Series(family.name, sample.name, tuple(sorted(sample.labels.items())))] = sample
        return found

    def _merged(self, series: Series, values: Sequence[float]) -> float:
        over = self._over(series)
        if over is Over.SUM:
            return sum(values, self._ended.get(series, 0.0))
        return min(values) if over is Over.LEAST else max(values)

    def _over(self, series: Series) -> Over | None:
        """How the values of the processes become one."""
        family = self._families[series.family]
        of_figure = _OVER.get(family.name.removesuffix(f"_{family.unit}"))
        return Over.SUM if of_figure is None and self._is_counted(series) else of_figure

    def _is_counted(self, series: Series) -> bool:
        return self._families[series.family].type in ("counter", "histogram")
