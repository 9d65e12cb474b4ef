"""Spans, metrics and logs from events, through the OpenTelemetry API: nearly free without an SDK, never raising."""

from sidecar.telemetry.dispatch import EventDispatcher
from sidecar.telemetry.metrics.store import StoreMetrics
from sidecar.telemetry.setup import TelemetryError, configure_from_environment
from sidecar.telemetry.spans.tracer import RequestTracer

__all__ = ["EventDispatcher", "RequestTracer", "StoreMetrics", "TelemetryError", "configure_from_environment"]
