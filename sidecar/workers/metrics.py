"""The workers' metrics as those of one process, in Prometheus' format.

Counters and histograms are added up, those of ended processes included, so that no sum falls when a worker is started
again. Where each counts what all see, it is counted once. A gauge of what a process holds or has waiting is added up,
too. A gauge of the pool says the same in every worker, and is shown once; while the store is lost for all of them, each
has the gauges of its part, and those are added up.

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
from sidecar.telemetry import semconv

OPEN_METRICS = "application/openmetrics-text; version=1.0.0"
"""Asked of the workers: the older format has no exemplars."""


def _in_prometheus(name: str) -> str:
    return name.replace(".", "_")


_STORE_AVAILABLE, _POOL = _in_prometheus("admission.store.available"), _in_prometheus(semconv.POOL)
_OVER = {_in_prometheus(it.name): it.over for it in FIGURES}


class Series(NamedTuple):
    """One series: its family's name, its own, and its labels."""

    family: str
    name: str
    labels: tuple[tuple[str, str], ...]


class WorkersMetrics(Collector):
    """The sum. It remembers each process's last metrics: those of one that is silent still count.

    `_ended` is what ended processes counted. `_once` are the counts that all see, each counted once, and `_bases` what
    those were when each process came.
    """

    def __init__(self) -> None:
        self._latest: dict[int, dict[Series, Sample]] = {}
        self._ended: dict[Series, float] = defaultdict(float)
        self._once: dict[Series, float] = defaultdict(float)
        self._bases: dict[int, Mapping[Series, float]] = {}
        self._families: dict[str, Metric] = {}
        self._own: Sequence[Metric] = ()

    def note(self, answers: Mapping[int, str], running: Sequence[int | None], *, serving: int, restarts: int) -> None:
        """The processes with these ids have answered, in the format `OPEN_METRICS`; no others are `running`."""
        so_far = dict(self._once)
        for pid, text in answers.items():
            self._latest[pid], base = self._read(text), self._bases.setdefault(pid, so_far)
            for series, sample in self._latest[pid].items():
                if self._over(series) is Over.ONCE:  # not all see it before the same scrape
                    self._once[series] = max(self._once[series], base.get(series, 0.0) + sample.value)
        for pid in [pid for pid in self._latest if pid not in running]:
            del self._bases[pid]
            for series, sample in self._latest.pop(pid).items():
                if self._is_counted(series):
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
        if over is Over.ONCE:
            return self._once[series]
        if over is Over.LEAST:
            return min(values)
        if over is Over.SUM or (over is Over.POOL and self._is_lost(dict(series.labels).get(_POOL, ""))):
            return sum(values, self._ended.get(series, 0.0))
        return max(values)

    def _over(self, series: Series) -> Over | None:
        """How the values of the processes become one."""
        family = self._families[series.family]
        of_figure = _OVER.get(family.name.removesuffix(f"_{family.unit}"))
        return Over.SUM if of_figure is None and self._is_counted(series) else of_figure

    def _is_lost(self, pool: str) -> bool:
        """True if all processes admit to this pool without its store."""
        available = Series(_STORE_AVAILABLE, _STORE_AVAILABLE, ((_POOL, pool),))
        return all(available in samples and samples[available].value == 0 for samples in self._latest.values())

    def _is_counted(self, series: Series) -> bool:
        return self._families[series.family].type in ("counter", "histogram")
