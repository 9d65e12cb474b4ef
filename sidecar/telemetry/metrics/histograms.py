"""Histograms of durations, whose exemplars name the request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from opentelemetry.context import Context, create_key
from opentelemetry.metrics import MeterProvider, get_meter
from opentelemetry.trace import INVALID_SPAN, NonRecordingSpan

from sidecar.telemetry.request_record import RequestRecord
from sidecar.telemetry.semconv import ADMISSION_DECISION, ADMISSION_TIER
from sidecar.telemetry.spans.links import SPAN_KEY
from sidecar.version import __version__

WAITS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600)
ROUND_TRIPS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)

_REQUEST_ID: Final = create_key("admission-request-id")
_NO_EXEMPLAR: Final = Context({SPAN_KEY: INVALID_SPAN})
"""Not the current context: the span of an app may be current, which is not the request's."""


class DurationMetric(NamedTuple):
    """One histogram of seconds. `labels` leaves out the pool's."""

    name: str
    buckets: tuple[float, ...]
    description: str
    labels: tuple[str, ...] = ()


QUEUE_WAIT: Final = DurationMetric(
    "admission.queue_wait",
    WAITS,
    "From a request's arrival to its lease, or to the end of its wait without one.",
    (ADMISSION_TIER, ADMISSION_DECISION),
)
STARVATION: Final = DurationMetric(
    "admission.starvation",
    WAITS,
    "From when a later request first went ahead to the end of the wait, of those that starved.",
    (ADMISSION_TIER, ADMISSION_DECISION),
)
TIME_TO_FIRST_TOKEN: Final = DurationMetric(
    "admission.time_to_first_token",
    WAITS,
    "From a request's arrival to the first byte of its streamed answer.",
    (ADMISSION_TIER,),
)
OBSERVED_QUEUE_WAIT: Final = DurationMetric(
    "admission.observed.queue_wait",
    WAITS,
    "How long a request that passed would have waited.",
    (ADMISSION_TIER, ADMISSION_DECISION),
)
OBSERVED_STARVATION: Final = DurationMetric(
    "admission.observed.starvation",
    WAITS,
    "How long it would have starved.",
    (ADMISSION_TIER, ADMISSION_DECISION),
)
STORE_ROUND_TRIP: Final = DurationMetric(
    "admission.store.round_trip", ROUND_TRIPS, "One call to the shared pool's store."
)

DURATIONS: Final = (
    QUEUE_WAIT, STARVATION, TIME_TO_FIRST_TOKEN, OBSERVED_QUEUE_WAIT, OBSERVED_STARVATION, STORE_ROUND_TRIP
)  # fmt: skip


class DurationHistogram:
    """A histogram. `meter_provider` None is the global one."""

    def __init__(self, metric: DurationMetric, meter_provider: MeterProvider | None) -> None:
        meter = get_meter("sidecar", __version__, meter_provider)
        self._histogram = meter.create_histogram(
            metric.name, "s", metric.description, explicit_bucket_boundaries_advisory=metric.buckets
        )

    def record(self, seconds: float, labels: Mapping[str, str], request: RequestRecord | None = None) -> None:
        """Notes one duration. The request is its exemplar where the request's trace is recorded."""
        self._histogram.record(seconds, labels, exemplar_context(request))


def exemplar_context(request: RequestRecord | None) -> Context:
    """A context with a recorded request's `admission` span and its id: the SDK makes exemplars from it."""
    if request is None or request.trace is None or not request.trace.trace_flags.sampled:
        return _NO_EXEMPLAR
    return Context({SPAN_KEY: NonRecordingSpan(request.trace), _REQUEST_ID: request.request_id})


def request_id_in(context: Context) -> str | None:
    """The id that `exemplar_context` wrote."""
    request_id = context.get(_REQUEST_ID)
    return request_id if isinstance(request_id, str) else None
