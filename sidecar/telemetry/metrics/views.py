"""Views for an SDK that is ours to set up: exemplars that name the request beside its span, and buckets. Imports it.

The buckets are only for an API that cannot set them itself.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

from opentelemetry.sdk import metrics as sdk
from opentelemetry.sdk.metrics.view import ExplicitBucketHistogramAggregation, View

from sidecar.telemetry.metrics.histograms import DURATIONS, HAS_BUCKETS, request_id_in
from sidecar.telemetry.semconv import ADMISSION_REQUEST_ID

HAS_EXEMPLARS = "exemplar_reservoir_factory" in signature(View.__init__).parameters


def views() -> list[View]:
    """For every histogram of ours."""
    return [
        View(instrument_name=metric.name, meter_name="sidecar", **_buckets(metric.buckets), **_exemplars())
        for metric in DURATIONS
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
        """Aggregation for some measurements of an exponential histogram, which an exporter may prefer."""

        def offer(self, value: float, time_unix_nano: int, attributes: Any, context: Any) -> None:
            super().offer(value, time_unix_nano, _with_id(attributes, context), context)

    def reservoir(**parameters: Any) -> sdk.ExemplarReservoir:
        return OfBuckets(**parameters) if "boundaries" in parameters else OfScales(**parameters)

    return {"exemplar_reservoir_factory": lambda _: reservoir}


def _with_id(attributes: Any, context: Any) -> Any:
    request_id = request_id_in(context)
    return attributes if request_id is None else {**attributes, ADMISSION_REQUEST_ID: request_id}
