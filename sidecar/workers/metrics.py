"""The workers' metrics as those of one process, in Prometheus' format.

Counters and histograms are added up, those of ended processes included, so that no sum falls when a worker is started
again. Where each counts what all see, it is counted once. A gauge of what a process holds or has waiting is added up,
too. A gauge of the pool says the same in every worker, and is shown once; while the store is lost for all of them, each
has the gauges of its part, and those are added up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from prometheus_client.core import Exemplar, Metric, Sample
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from sidecar.telemetry import semconv

OPEN_METRICS = "application/openmetrics-text; version=1.0.0"
"""Asked of the workers: the older format has no exemplars."""
WORKERS, RESTARTS = "admission_workers", "admission_worker_restarts"


def _named(names: Iterable[str]) -> frozenset[str]:
    return frozenset(name.replace(".", "_") for name in names)


_STORE_AVAILABLE = semconv.STORE_AVAILABLE.replace(".", "_")
_POOL = semconv.POOL.replace(".", "_")
OWN = _named(
    (
        semconv.QUEUE_REQUESTS,
        semconv.QUEUE_TOKENS,
        semconv.ABORTING_REQUESTS,
        semconv.ABORTING_TOKENS,
        semconv.TENANT_TOKENS_HELD,
        semconv.ENGINE_IN_FLIGHT,
        semconv.LEASE_HELD_TOKENS,
        semconv.LEASE_EXPECTED_TOKENS,
        semconv.LEASE_USED_TOKENS,
    )
)
"""Gauges of what one process holds or has waiting: their sum is that of all."""
WORST = _named((semconv.STORE_AVAILABLE, semconv.ENGINE_UP))
"""1 where all is well: one worker for which it is not must show."""
PARTS = _named(
    (
        semconv.HELD_TOKENS,
        semconv.HELD_REQUESTS,
        semconv.RESERVE_TOKENS,
        semconv.RESERVE_REQUESTS,
        semconv.LIMIT_TOKENS,
        semconv.LIMIT_REQUESTS,
        semconv.BORROWED_TOKENS,
        semconv.LENT_TOKENS,
        semconv.CAPACITY_TOKENS,
        semconv.CAPACITY_REQUESTS,
    )
)
"""Gauges of the pool, which are a process's part of it while the store is lost."""

SEEN = _named((semconv.ENGINE_PREEMPTIONS, semconv.NO_ENGINE_FITS, semconv.POLICY_REJECTED))
"""Counters of what every process sees: of the engine, the pool, the policy's files. A unit's suffix may follow."""

Labels = tuple[tuple[str, str], ...]


class Series(NamedTuple):
    """One series of a process: its family's name, its own, and its labels."""

    family: str
    name: str
    labels: Labels


class Scraped(NamedTuple):
    """The metrics of one process at one time."""

    families: Mapping[str, Metric]
    values: Mapping[Series, float]
    exemplars: Mapping[Series, Exemplar]

    def is_lost(self, pool: str) -> bool:
        """Whether the process admits to this pool without its store."""
        return self.values.get(Series(_STORE_AVAILABLE, _STORE_AVAILABLE, ((_POOL, pool),))) == 0


def scraped(text: str) -> Scraped:
    """The metrics in a worker's answer, which is in the format `OPEN_METRICS`."""
    families, values, exemplars = {}, {}, {}
    for family in text_string_to_metric_families(text):  # type: ignore[no-untyped-call]
        families[family.name] = family
        for sample in family.samples:
            series = Series(family.name, sample.name, tuple(sorted(sample.labels.items())))
            values[series] = sample.value
            if sample.exemplar is not None:
                exemplars[series] = sample.exemplar
    return Scraped(families, values, exemplars)


class WorkersMetrics:
    """The sum. It remembers each process's last metrics: those of one that has ended, or is silent, still count."""

    def __init__(self) -> None:
        self._latest: dict[int, Scraped] = {}
        self._ended: dict[Series, float] = {}
        self._seen: dict[Series, float] = {}
        self._families: dict[str, Metric] = {}

    def note(self, answers: Mapping[int, Scraped]) -> None:
        """The processes with these ids have answered."""
        most: dict[Series, float] = {}
        for pid, found in answers.items():
            before = self._latest.get(pid)
            self._families.update(found.families)
            for series in filter(_is_seen, found.values):
                more = found.values[series] - (before.values.get(series, 0.0) if before else 0.0)
                most[series] = max(most.get(series, 0.0), more)
            self._latest[pid] = found
        for series, more in most.items():
            self._seen[series] = self._seen.get(series, 0.0) + more

    def end_but(self, running: Sequence[int]) -> None:
        """Of the other processes only what they counted is left."""
        for pid in [pid for pid in self._latest if pid not in running]:
            for series, value in self._latest.pop(pid).values.items():
                if self._is_counted(series):
                    self._ended[series] = self._ended.get(series, 0.0) + value

    def text(self, accept: str | None, own: Iterable[Metric]) -> tuple[bytes, str]:
        """All metrics and the supervisor's `own`, in the format that the Accept header asks for, and its type."""
        values: dict[Series, float] = dict(self._ended)
        by_series: dict[Series, list[Scraped]] = {}
        for one in self._latest.values():
            for series in one.values:
                by_series.setdefault(series, []).append(one)
        for series, ones in by_series.items():
            values[series] = self._merged(series, ones) + values.get(series, 0.0)
        values.update(self._seen)
        families = {name: _bare(family) for name, family in self._families.items()}
        for series, value in values.items():
            sample = Sample(series.name, dict(series.labels), value, None, self._exemplar(series))
            families[series.family].samples.append(sample)
        encode, content_type = choose_encoder(accept or "")
        return encode(_Given([*families.values(), *own])), content_type

    def _merged(self, series: Series, ones: Sequence[Scraped]) -> float:
        values = [one.values[series] for one in ones]
        if series.family in WORST:
            return min(values)
        if self._is_counted(series) or series.family in OWN:
            return sum(values)
        if series.family in PARTS:
            pool = dict(series.labels).get(_POOL, "")
            whole = [one.values[series] for one in ones if not one.is_lost(pool)]
            return max(whole) if whole else sum(values)
        return max(values)

    def _is_counted(self, series: Series) -> bool:
        return self._families[series.family].type in ("counter", "histogram")

    def _exemplar(self, series: Series) -> Exemplar | None:
        """The newest."""
        found = [one.exemplars[series] for one in self._latest.values() if series in one.exemplars]
        return max(found, key=lambda exemplar: float(exemplar.timestamp or 0), default=None)


def _is_seen(series: Series) -> bool:
    return any(series.family.startswith(name) for name in SEEN)


def gauge(name: str, help_: str, value: float) -> Metric:
    """A metric of the supervisor's own."""
    metric = Metric(name, help_, "gauge")
    metric.samples.append(Sample(name, {}, value))
    return metric


def counter(name: str, help_: str, value: float) -> Metric:
    """A counter of the supervisor's own. `name` is without its suffix."""
    metric = Metric(name, help_, "counter")
    metric.samples.append(Sample(f"{name}_total", {}, value))
    return metric


class _Given(Collector):
    """The metrics that prometheus_client writes."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Any:
        return self._families


def _bare(family: Metric) -> Metric:
    return Metric(family.name, family.documentation, family.type, family.unit)
