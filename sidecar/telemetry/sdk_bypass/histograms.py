"""Durations that are added up by us where the metrics' provider is ours. Imports no SDK, and is read in any thread.

OpenTelemetry's SDK (1.45) has no instrument that is bound to its labels: for every measurement it cleans, copies and
hashes them again. Measured in one run on one core, CPython 3.11: 9.4 us a duration by the SDK, 0.5 us here; with an
exemplar 14 us and 1.9 us; each with the processor's caches swept before, 66 to 250 us and 20 to 30. Each reader gets
the sums as the SDK's own records (see `readers`): an exporter cannot tell which of the two counted.

Every series has a lock, for the length of some additions or of one copy. Two middlewares in two event loops may share a
pool, so that a series may have two writers; `+=` is no single step of two threads even under the interpreter's lock,
and a reader may come between the copy of the counts and that of their sum. So a duration is only appended, which is a
single step; `MOST_PENDING` of them are added up in one go, or as many as there are when someone reads.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Final, NamedTuple

from opentelemetry import metrics

from sidecar.telemetry.request_record import RequestRecord, TraceIds

MOST_PENDING: Final = 64
"""Durations of a series that are added up together."""


class DurationExemplar(NamedTuple):
    """A duration of a request whose trace is recorded, and where to look that up. `at_ns` is Unix time."""

    seconds: float
    at_ns: int
    trace: TraceIds
    request_id: str


class Total(NamedTuple):
    """A series at one moment. `exemplars` has the last exemplar of each bucket, or None."""

    counts: tuple[int, ...]
    sum_s: float
    min_s: float
    max_s: float
    exemplars: tuple[DurationExemplar | None, ...]


class Series:
    """One histogram under one set of labels. `bounds` are the upper ends of its buckets, in seconds."""

    __slots__ = (
        "_counts", "_exemplars", "_lock", "_max_s", "_min_s", "_pending", "_sum_s", "bounds", "labels", "since_ns"
    )  # fmt: skip

    def __init__(self, bounds: Sequence[float], labels: Mapping[str, str]) -> None:
        self.bounds = tuple(bounds)
        self.labels = dict(labels)
        self.since_ns = time.time_ns()
        self._lock = Lock()
        self._pending: deque[float] = deque()
        self._counts = [0] * (len(self.bounds) + 1)
        self._sum_s = 0.0
        self._min_s = math.inf
        self._max_s = -math.inf
        self._exemplars: list[DurationExemplar | None] = [None] * len(self._counts)

    def add(self, seconds: float, sampled: RequestRecord | None) -> None:
        """Counts one duration; it is finite and not negative. A request whose trace is recorded is its exemplar."""
        pending = self._pending
        if sampled is not None and sampled.trace is not None:
            exemplar = DurationExemplar(seconds, time.time_ns(), sampled.trace, sampled.request_id)
            with self._lock:
                pending.append(seconds)
                self._add_up()
                self._exemplars[bisect_left(self.bounds, seconds)] = exemplar
            return
        pending.append(seconds)
        if len(pending) >= MOST_PENDING:
            with self._lock:
                self._add_up()

    def _add_up(self) -> None:
        """Adds up what is pending. The lock is held; meanwhile more may be appended, which waits for the next time."""
        pending, counts, bounds = self._pending, self._counts, self.bounds
        sum_s, min_s, max_s = self._sum_s, self._min_s, self._max_s
        for _ in range(len(pending)):
            seconds = pending.popleft()
            counts[bisect_left(bounds, seconds)] += 1
            sum_s += seconds
            if seconds < min_s:  # noqa: PLR1730  with calls of min and max all this takes half as long again
                min_s = seconds
            if seconds > max_s:  # noqa: PLR1730
                max_s = seconds
        self._sum_s, self._min_s, self._max_s = sum_s, min_s, max_s

    def total(self) -> Total:
        """The sums, all of one moment."""
        with self._lock:
            self._add_up()
            return Total(tuple(self._counts), self._sum_s, self._min_s, self._max_s, tuple(self._exemplars))


class Sums:
    """Every series of one provider, by the name of its metric. They stay: a count is never taken back."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._series: dict[str, dict[frozenset[tuple[str, str]], Series]] = {}

    def series(self, name: str, bounds: Sequence[float], labels: Mapping[str, str]) -> Series:
        """The one of these labels: equal labels share one series."""
        key = frozenset(labels.items())
        with self._lock:
            of_metric = self._series.setdefault(name, {})
            if key not in of_metric:
                of_metric[key] = Series(bounds, labels)
            return of_metric[key]

    def of(self, name: str) -> Sequence[Series]:
        """Those of one metric."""
        with self._lock:
            return list(self._series.get(name, {}).values())


_SUMS: dict[metrics.MeterProvider, Sums] = {}


def add_up_for(provider: metrics.MeterProvider) -> Sums:
    """Adds durations up here from now on, for a provider of ours whose readers read the sums."""
    return _SUMS.setdefault(provider, Sums())


def sums_of(provider: metrics.MeterProvider | None) -> Sums | None:
    """The provider's; None of the provider is the global one, as it is now. None is returned where it is not ours."""
    return _SUMS.get(metrics.get_meter_provider() if provider is None else provider)
