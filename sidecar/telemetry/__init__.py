"""Spans and metrics from events, through the OpenTelemetry API: nearly free without an SDK, never raising."""

from sidecar.telemetry.setup import TelemetryError, configure_from_environment
from sidecar.telemetry.spans import SpanObserver
from sidecar.telemetry.store import StoreMetrics

__all__ = ["SpanObserver", "StoreMetrics", "TelemetryError", "configure_from_environment"]
