"""Metrics of shared pools' stores: whether they are available, their changes, and their round trips.

OpenTelemetry knows an instrument by its name, and the SDK drops the callback of a second one. So a process has one
gauge for each provider, which looks at every pool that lives.
"""

from __future__ import annotations

import logging
from functools import cache
from weakref import ref

from opentelemetry import metrics

from sidecar.events import StoreChanged, StoreState
from sidecar.figures import Figure, Over
from sidecar.telemetry.failures import FirstFailure
from sidecar.telemetry.metrics.histograms import STORE_ROUND_TRIP, DurationHistogram
from sidecar.telemetry.semconv import POOL, STORE_STATE
from sidecar.version import __version__

logger = logging.getLogger(__name__)


AVAILABLE = Figure("admission.store.available", "1 while the shared pool's store decides, else 0.", over=Over.LEAST)
CHANGES = Figure(
    "admission.store.changes",
    "How often the store was reached, lost or back, by the state that followed.",
    over=Over.SUM,
    labels=(STORE_STATE,),
    is_counter=True,
)


class StoreMetrics:
    """One pool's store: whether it decides now (not before the first contact), every change, every call.

    `meter_provider` None means the global one; an SDK that is installed later is found. A pool that is gone is not
    reported any more. Nothing here raises: the first failure is logged, and the pool goes on.
    """

    def __init__(self, pool: str, meter_provider: metrics.MeterProvider | None = None) -> None:
        self.pool = pool
        self.is_available = False
        self._instruments: _Instruments | None = None
        self._report = FirstFailure(logger, "store metrics failed; the pool goes on")
        try:
            self._instruments = _instruments_for(meter_provider)
            self._instruments.watch(self)
        except Exception:
            self._report()

    def __call__(self, change: StoreChanged) -> None:
        """Notes a change."""
        try:
            self.is_available = change.state is StoreState.SHARED
            if self._instruments is not None:
                self._instruments.changes.add(1, {POOL: self.pool, STORE_STATE: change.state.value})
        except Exception:
            self._report()

    def round_trip(self, took_s: float) -> None:
        """Notes how long a call to the store took, answered or not."""
        try:
            if self._instruments is not None:
                self._instruments.round_trip.record(took_s, {POOL: self.pool})
        except Exception:
            self._report()


class _Instruments:
    """The instruments that all pools share."""

    def __init__(self, meter_provider: metrics.MeterProvider | None) -> None:
        # Replaced, never changed: the exporter's thread reads it.
        self._watched: tuple[ref[StoreMetrics], ...] = ()
        meter = metrics.get_meter("sidecar", __version__, meter_provider)
        self.changes = meter.create_counter(CHANGES.name, description=CHANGES.help)
        self.round_trip = DurationHistogram(STORE_ROUND_TRIP, meter_provider)
        meter.create_observable_gauge(AVAILABLE.name, [self._observe], description=AVAILABLE.help)

    def watch(self, store: StoreMetrics) -> None:
        """Look at this pool's store, for as long as it lives."""
        self._watched = (*(watched for watched in self._watched if watched() is not None), ref(store))

    def _observe(self, _: metrics.CallbackOptions) -> list[metrics.Observation]:
        # Of two middlewares on one pool, each with its own way to the store, the worse one is reported.
        available: dict[str, int] = {}
        for store in (watched() for watched in self._watched):
            if store is not None:
                available[store.pool] = min(available.get(store.pool, 1), int(store.is_available))
        return [metrics.Observation(value, {POOL: pool}) for pool, value in available.items()]


@cache
def _instruments_for(meter_provider: metrics.MeterProvider | None) -> _Instruments:
    return _Instruments(meter_provider)
