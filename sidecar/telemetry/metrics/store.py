"""Metrics of shared pools' stores beside what a sample says of them: their changes, and their round trips."""

from __future__ import annotations

import logging
from functools import cache
from typing import NamedTuple

from opentelemetry import metrics

from sidecar.events import StoreChanged
from sidecar.figures import Figure, Over
from sidecar.telemetry.failures import FirstFailure
from sidecar.telemetry.metrics.histograms import STORE_ROUND_TRIP, DurationHistogram
from sidecar.telemetry.semconv import POOL, STORE_STATE
from sidecar.version import __version__

logger = logging.getLogger(__name__)

CHANGES = Figure(
    "admission.store.changes",
    "How often the store was reached, lost or back, by the state that followed.",
    over=Over.SUM,
    labels=(STORE_STATE,),
    is_counter=True,
)


class StoreMetrics:
    """One pool's store: every change, every call.

    `meter_provider` None means the global one; an SDK that is installed later is found. Nothing here raises: the first
    failure is logged, and the pool goes on.
    """

    def __init__(self, pool: str, meter_provider: metrics.MeterProvider | None = None) -> None:
        self._pool = pool
        self._meter_provider = meter_provider
        self._report = FirstFailure(logger, "store metrics failed; the pool goes on")

    def __call__(self, change: StoreChanged) -> None:
        """Notes a change."""
        try:
            instruments = _instruments_for(self._meter_provider)
            instruments.changes.add(1, {POOL: self._pool, STORE_STATE: change.state.value})
        except Exception:
            self._report()

    def round_trip(self, took_s: float) -> None:
        """Notes how long a call to the store took, answered or not."""
        try:
            _instruments_for(self._meter_provider).round_trip.record(took_s, {POOL: self._pool})
        except Exception:
            self._report()


class _Instruments(NamedTuple):
    """The instruments that all pools share."""

    changes: metrics.Counter
    round_trip: DurationHistogram


@cache
def _instruments_for(meter_provider: metrics.MeterProvider | None) -> _Instruments:
    meter = metrics.get_meter("sidecar", __version__, meter_provider)
    changes = meter.create_counter(CHANGES.name, description=CHANGES.help)
    return _Instruments(changes, DurationHistogram(STORE_ROUND_TRIP, meter_provider))
