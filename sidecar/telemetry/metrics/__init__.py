"""Metrics of requests and of pools, made through the OpenTelemetry API: nearly free without an SDK, never raising."""

from sidecar.telemetry.metrics.observed import ObservedMetrics
from sidecar.telemetry.metrics.pools import PoolMetrics
from sidecar.telemetry.metrics.requests import RequestMetrics
from sidecar.telemetry.metrics.samples import PoolSample, TierSample
from sidecar.telemetry.metrics.unguarded import UnguardedMetrics

__all__ = ["ObservedMetrics", "PoolMetrics", "PoolSample", "RequestMetrics", "TierSample", "UnguardedMetrics"]
