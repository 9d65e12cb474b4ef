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
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from sidecar.cluster.sampler import FIGURES
from sidecar.figures import Over
from sidecar.telemetry import semconv
from sidecar.telemetry.metrics.store import AVAILABLE

OPEN_METRICS = "application/openmetrics-text; version=1.0.0"
"""Asked of the workers: the older format has no exemplars."""


def _in_prometheus(name: str) -> str:
    return name.replace(".", "_")


def _gauges(over: Over) -> frozenset[str]:
    return frozenset(_in_prometheus(it.name) for it in FIGURES if it.over is over and not it.is_counter)


_STORE_AVAILABLE, _POOL = _in_prometheus(AVAILABLE.name), _in_prometheus(semconv.POOL)
OWN, WORST, PARTS = _gauges(Over.SUM), _gauges(Over.LEAST), _gauges(Over.POOL)
SEEN = frozenset(_in_prometheus(it.name) for it in FIGURES if it.over is Over.ONCE)
"""Counters of what every process sees: of the engine, the pool, the policy's files. A unit's suffix may follow."""


class Series(NamedTuple):
    """One series: its family's name, its own, and its labels."""

    family: str
    name: str
    labels: tuple[tuple[str, str], ...]


class WorkersMetrics:
    """The sum. It remembers each process's last metrics: those of one that is silent still count.

    `_seen` is how far each process is in the counts that all see, on top of what was counted before it came.
    """

    def __init__(self) -> None:
        self._latest: dict[int, dict[Series, Sample]] = {}
        self._counted: dict[Series, float] = defaultdict(float)
        self._seen: dict[int, dict[Series, float]] = defaultdict(dict)
        self._families: dict[str, Metric] = {}

    def note(self, answers: Mapping[int, str], running: Sequence[int | None]) -> None:
        """The processes with these ids have answered, in the format `OPEN_METRICS`; no others are `running`."""
        counted = dict(self._counted)
        for pid, text in answers.items():
            before, self._latest[pid] = self._latest.get(pid, {}), self._read(text)
            for series, sample in self._latest[pid].items():
                if not self._is_counted(series):
                    continue
                more = sample.value - (before[series].value if series in before else 0.0)
                if any(series.family.startswith(name) for name in SEEN):  # not all see it before the same scrape
                    own = self._seen[pid]
                    own[series] = own.get(series, counted.get(series, 0.0)) + more
                    self._counted[series] = max(self._counted[series], own[series])
                else:
                    self._counted[series] += more
        for of_each in (self._latest, self._seen):
            for pid in [pid for pid in of_each if pid not in running]:
                del of_each[pid]

    def text(self, accept: str | None, *, serving: int, restarts: int) -> tuple[bytes, str]:
        """All metrics, in the format that the Accept header asks for, and its content type."""
        found: dict[Series, list[Sample]] = {series: [] for series in self._counted}
        for latest in self._latest.values():
            for series, sample in latest.items():
                found.setdefault(series, []).append(sample)
        families = {name: Metric(name, one.documentation, one.type, one.unit) for name, one in self._families.items()}
        for series, samples in found.items():
            value = self._counted[series] if self._is_counted(series) else self._merged(series, samples)
            exemplars = [sample.exemplar for sample in samples if sample.exemplar]
            newest = max(exemplars, key=lambda exemplar: float(exemplar.timestamp or 0), default=None)
            families[series.family].samples.append(Sample(series.name, dict(series.labels), value, None, newest))
        own = (
            GaugeMetricFamily("admission_workers", "Workers that serve.", serving),
            CounterMetricFamily("admission_worker_restarts", "How often a worker was started again.", restarts),
        )
        encode, content_type = choose_encoder(accept or "")
        return encode(_Given([*families.values(), *own])), content_type

    def _read(self, text: str) -> dict[Series, Sample]:
        found = {}
        for family in text_string_to_metric_families(text):  # type: ignore[no-untyped-call]
            self._families[family.name] = family
            for sample in family.samples:
                found[Series(family.name, sample.name, tuple(sorted(sample.labels.items())))] = sample
        return found

    def _merged(self, series: Series, samples: Sequence[Sample]) -> float:
        """A gauge."""
        values = [sample.value for sample in samples]
        if series.family in WORST:
            return min(values)
        if series.family in OWN or (series.family in PARTS and self._is_lost(dict(series.labels).get(_POOL, ""))):
            return sum(values)
        return max(values)

    def _is_lost(self, pool: str) -> bool:
        """True if all processes admit to this pool without its store."""
        available = Series(_STORE_AVAILABLE, _STORE_AVAILABLE, ((_POOL, pool),))
        return all(available in samples and samples[available].value == 0 for samples in self._latest.values())

    def _is_counted(self, series: Series) -> bool:
        return self._families[series.family].type in ("counter", "histogram")


class _Given(Collector):
    """The metrics that prometheus_client writes."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
