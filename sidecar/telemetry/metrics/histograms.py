"""Histograms of seconds, through whichever OpenTelemetry API the process has.

Older APIs know neither buckets for an instrument (before 1.30) nor a measurement's context, which exemplars come from
(before 1.28). An SDK of ours gets the buckets another way then (`views`); one of the host's has its own. Where it is
ours, durations are added up in `summed`, and the API's histogram is left alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from inspect import signature
from typing import Final, NamedTuple

from opentelemetry.context import Context
from opentelemetry.metrics import Histogram, Meter, MeterProvider, get_meter

from sidecar.telemetry import semconv
from sidecar.telemetry.metrics.summed import Series, sums_of
from sidecar.version import __version__

HAS_BUCKETS: Final = "explicit_bucket_boundaries_advisory" in signature(Meter.create_histogram).parameters
HAS_CONTEXT: Final = "context" in signature(Histogram.record).parameters

WAITS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600)
ROUND_TRIPS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Timing(NamedTuple):
    """One histogram of seconds."""

    name: str
    buckets: tuple[float, ...]
    description: str


QUEUE_WAIT: Final = Timing(
    semconv.QUEUE_WAIT, WAITS, "From a request's arrival to its lease, or to the end of its wait without one."
)
STARVATION: Final = Timing(
    semconv.STARVATION,
    WAITS,
    "From when a later request first went ahead to the end of the wait, of those that starved.",
)
TIME_TO_FIRST_TOKEN: Final = Timing(
    semconv.TIME_TO_FIRST_TOKEN, WAITS, "From a request's arrival to the first byte of its streamed answer."
)
OBSERVED_QUEUE_WAIT: Final = Timing(
    semconv.OBSERVED_QUEUE_WAIT, WAITS, "How long a request that passed would have waited if it had been held."
)
OBSERVED_STARVATION: Final = Timing(
    semconv.OBSERVED_STARVATION, WAITS, "How long of that it would have starved, of those that would have."
)
STORE_ROUND_TRIP: Final = Timing(semconv.STORE_ROUND_TRIP, ROUND_TRIPS, "One call to the shared pool's store.")

TIMINGS: Final = (
    QUEUE_WAIT, STARVATION, TIME_TO_FIRST_TOKEN, OBSERVED_QUEUE_WAIT, OBSERVED_STARVATION, STORE_ROUND_TRIP
)  # fmt: skip


class Seconds:
    """A histogram that can be recorded to whatever the API's age. `meter_provider` None is the global one."""

    __slots__ = ("_histogram", "_meter_provider", "_timing")

    def __init__(self, timing: Timing, meter_provider: MeterProvider | None) -> None:
        self._timing = timing
        self._meter_provider = meter_provider
        self._histogram = _histogram(get_meter("sidecar", __version__, meter_provider), timing)

    def labeled(self, labels: Mapping[str, str]) -> Labeled:
        """What durations with these labels are recorded to. Made once and held on to: that is what makes it quick."""
        return Labeled(self, labels)

    def series(self, labels: Mapping[str, str]) -> Series | None:
        """Where durations are added up; None where the provider is not ours, or not there yet."""
        sums = sums_of(self._meter_provider)
        return None if sums is None else sums.series(self._timing.name, self._timing.buckets, labels)

    def record(self, seconds: float, labels: Mapping[str, str], context: Context | None) -> None:
        """Leaves one duration to OpenTelemetry. In a provider whose sums are ours, it is not counted."""
        if HAS_CONTEXT:
            self._histogram.record(seconds, labels, context)
        else:
            self._histogram.record(seconds, labels)


class Labeled:
    """A histogram under its labels."""

    __slots__ = ("_labels", "_seconds", "_series")

    def __init__(self, seconds: Seconds, labels: Mapping[str, str]) -> None:
        self._seconds = seconds
        self._labels = labels
        self._series: Series | None = None

    def record(self, seconds: float, context: Context | None = None) -> None:
        """Notes one duration. An exemplar of it leads to the span in `context`."""
        series = self._series
        if series is None:
            series = self._series = self._seconds.series(self._labels)
        if series is not None and 0 <= seconds < math.inf:
            series.add(seconds, context)
        else:  # or what makes no sense: the SDK says so in its log
            self._seconds.record(seconds, self._labels, context)


def _histogram(meter: Meter, timing: Timing) -> Histogram:
    if not HAS_BUCKETS:
        return meter.create_histogram(timing.name, "s", timing.description)
    buckets = list(timing.buckets)
    return meter.create_histogram(timing.name, "s", timing.description, explicit_bucket_boundaries_advisory=buckets)
