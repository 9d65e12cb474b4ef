"""Spans and metrics from events, through the OpenTelemetry API: nearly free without an SDK, never raising."""

from sidecar.telemetry.setup import TelemetryError, configure_from_environment
from sidecar.telemetry.spans.observer import SpanObserver
from sidecar.telemetry.store import StoreMetrics
from sidecar.telemetry.telemetry import Telemetry

__all__ = ["SpanObserver", "StoreMetrics", "Telemetry", "TelemetryError", "configure_from_environment"]
