"""What our instruments need of an SDK that is ours to set up. Imports it.

Exemplars that name the request beside its span, and buckets where the API cannot say them.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

from opentelemetry.sdk import metrics as sdk
from opentelemetry.sdk.metrics.view import DropAggregation, ExplicitBucketHistogramAggregation, View

from sidecar.telemetry.metrics.exemplars import request_id_of
from sidecar.telemetry.metrics.histograms import HAS_BUCKETS, TIMINGS
from sidecar.telemetry.semconv import ADMISSION_REQUEST_ID

HAS_EXEMPLARS = "exemplar_reservoir_factory" in signature(View.__init__).parameters


def views() -> list[View]:
    """For every histogram of ours."""
    return [
        View(instrument_name=timing.name, meter_name="sidecar", **_buckets(timing.buckets), **_exemplars())
        for timing in TIMINGS
    ]


def views_without_histograms() -> list[View]:
    """For a provider whose durations are added up by ourselves: that the SDK tells none of them, too."""
    return [
        View(instrument_name=timing.name, meter_name="sidecar", aggregation=DropAggregation()) for timing in TIMINGS
    ]


def _buckets(buckets: tuple[float, ...]) -> dict[str, Any]:
    return {} if HAS_BUCKETS else {"aggregation": ExplicitBucketHistogramAggregation(buckets)}


def _exemplars() -> dict[str, Any]:
    if not HAS_EXEMPLARS:  # before 1.28
        return {}

    class OfBuckets(sdk.AlignedHistogramBucketExemplarReservoir):
        """The last measurement of every bucket, with the id of its request beside its span's."""

        def offer(self, value: float, time_unix_nano: int, attributes: Any, context: Any) -> None:
            super().offer(value, time_unix_nano, _with_id(attributes, context), context)

    class OfScales(sdk.SimpleFixedSizeExemplarReservoir):
        """The same for some measurements of an exponential histogram, which an exporter may prefer."""

        def offer(self, value: float, time_unix_nano: int, attributes: Any, context: Any) -> None:
            super().offer(value, time_unix_nano, _with_id(attributes, context), context)

    def reservoir(**parameters: Any) -> sdk.ExemplarReservoir:
        return OfBuckets(**parameters) if "boundaries" in parameters else OfScales(**parameters)

    return {"exemplar_reservoir_factory": lambda _: reservoir}


def _with_id(attributes: Any, context: Any) -> Any:
    request_id = request_id_of(context)
    return attributes if request_id is None else {**attributes, ADMISSION_REQUEST_ID: request_id}
