"""Metrics of requests and of pools, made through the OpenTelemetry API: nearly free without an SDK, never raising."""

from sidecar.telemetry.metrics.instruments import PoolMetrics, PoolSample
from sidecar.telemetry.metrics.requests import RequestMetrics

__all__ = ["PoolMetrics", "PoolSample", "RequestMetrics"]
