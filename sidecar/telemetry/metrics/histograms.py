"""Histograms of seconds, through whichever OpenTelemetry API the process has.

Older APIs know neither buckets for an instrument (before 1.30) nor a measurement's context, which exemplars come from
(before 1.28). An SDK of ours gets the buckets another way then (`views`); one of the host's has its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Final, NamedTuple

from opentelemetry.context import Context
from opentelemetry.metrics import Histogram, Meter

from sidecar.telemetry import semconv

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
STORE_ROUND_TRIP: Final = Timing(semconv.STORE_ROUND_TRIP, ROUND_TRIPS, "One call to the shared pool's store.")

TIMINGS: Final = (QUEUE_WAIT, STARVATION, TIME_TO_FIRST_TOKEN, STORE_ROUND_TRIP)


class Seconds:
    """A histogram that can be recorded to whatever the API's age."""

    __slots__ = ("_histogram",)

    def __init__(self, meter: Meter, timing: Timing) -> None:
        self._histogram: Histogram = (
            meter.create_histogram(
                timing.name, "s", timing.description, explicit_bucket_boundaries_advisory=list(timing.buckets)
            )
            if HAS_BUCKETS
            else meter.create_histogram(timing.name, "s", timing.description)
        )

    def record(self, seconds: float, labels: Mapping[str, str], context: Context | None = None) -> None:
        """Notes one duration. An exemplar of it leads to the span in `context`."""
        if HAS_CONTEXT:
            self._histogram.record(seconds, labels, context)
        else:
            self._histogram.record(seconds, labels)
