"""Spans from events, through the OpenTelemetry API: nearly free without an SDK, and never raising into a request."""

from sidecar.telemetry.setup import TelemetryError, configure_from_environment
from sidecar.telemetry.spans import SpanObserver

__all__ = ["SpanObserver", "TelemetryError", "configure_from_environment"]
