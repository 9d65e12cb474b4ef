"""Views for an SDK that is ours to set up: exemplars that name the request beside its span. Imports it."""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk import metrics as sdk
from opentelemetry.sdk.metrics.view import View

from sidecar.telemetry.metrics.histograms import DURATIONS, request_id_in
from sidecar.telemetry.semconv import ADMISSION_REQUEST_ID


class _OfBuckets(sdk.AlignedHistogramBucketExemplarReservoir):
    """The last measurement of every bucket, with the id of its request beside its span's."""

    def offer(self, value: float, time_unix_nano: int, attributes: Any, context: Any) -> None:
        super().offer(value, time_unix_nano, _with_id(attributes, context), context)


class _OfScales(sdk.SimpleFixedSizeExemplarReservoir):
    """Some measurements of an exponential histogram, which an exporter may prefer, with the ids of their requests."""

    def offer(self, value: float, time_unix_nano: int, attributes: Any, context: Any) -> None:
        super().offer(value, time_unix_nano, _with_id(attributes, context), context)


def views() -> list[View]:
    """For every histogram of ours."""
    return [
        View(instrument_name=metric.name, meter_name="sidecar", exemplar_reservoir_factory=_reservoirs)
        for metric in DURATIONS
    ]


def _reservoirs(_: object) -> Any:
    return lambda **parameters: _OfBuckets(**parameters) if "boundaries" in parameters else _OfScales(**parameters)


def _with_id(attributes: Any, context: Any) -> Any:
    request_id = request_id_in(context)
    return attributes if request_id is None else {**attributes, ADMISSION_REQUEST_ID: request_id}
