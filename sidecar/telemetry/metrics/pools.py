"""One pool's gauges: what it holds, who waits, what it may hold."""

from __future__ import annotations

import logging

from opentelemetry.metrics import MeterProvider

from sidecar.telemetry.metrics.instruments import Gauged, instruments_of
from sidecar.telemetry.metrics.samples import Sample

logger = logging.getLogger(__name__)


class PoolMetrics:
    """Has a pool told by the gauges for as long as this lives. Costs nothing until somebody reads them.

    `sample` is called in the thread that reads the metrics. `meter_provider` None means the global one. Nothing here
    raises.
    """

    def __init__(self, pool: str, sample: Sample, meter_provider: MeterProvider | None = None) -> None:
        self._gauged = Gauged(pool, sample)
        try:
            instruments_of(meter_provider).watch(self._gauged)
        except Exception:
            logger.exception("the metrics of pool %s failed; the pool goes on without", pool)
