"""Whether the store of a shared pool is there, as metrics. Installed through the OpenTelemetry API alone."""

from __future__ import annotations

from collections.abc import Iterable

from opentelemetry import metrics

from sidecar.events import StoreChanged, StoreState
from sidecar.telemetry.semconv import STORE_AVAILABLE, STORE_CHANGES, STORE_STATE
from sidecar.version import __version__


class StoreMetrics:
    """A gauge that is 1 while the store decides and 0 while it is lost, and a counter of the changes, by state."""

    def __init__(self) -> None:
        meter = metrics.get_meter("sidecar", __version__)
        self._is_available = 0
        meter.create_observable_gauge(
            STORE_AVAILABLE, [self._observe], description="1 while the shared pool's store decides, 0 while it is lost."
        )
        self._changes = meter.create_counter(
            STORE_CHANGES, description="How often the store was lost or came back, by the state that followed."
        )

    def __call__(self, change: StoreChanged) -> None:
        """Notes a change."""
        self._is_available = int(change.state is StoreState.SHARED)
        self._changes.add(1, {STORE_STATE: change.state.value})

    def _observe(self, _: metrics.CallbackOptions) -> Iterable[metrics.Observation]:
        yield metrics.Observation(self._is_available)
