"""Metrics of what enforcing would have done: names of their own, so that the real ones tell of what really happened."""

from __future__ import annotations

from sidecar.events import Observed, Verdict
from sidecar.telemetry import semconv
from sidecar.telemetry.metrics.histograms import Labeled
from sidecar.telemetry.metrics.requests import RequestMetrics


class ObservedMetrics:
    """One for each door, beside its `RequestMetrics`."""

    def __init__(self, metrics: RequestMetrics) -> None:
        self._pool = metrics.pool
        self._counted = metrics.counters.observed
        self._instruments = metrics.instruments
        self._waits: dict[tuple[str, str], tuple[Labeled, Labeled]] = {}

    def note(self, observed: Observed) -> None:
        """Counts one request, and notes how long it would have waited."""
        tier, decision = observed.tier or "", observed.verdict.value
        labels = (tier, decision, observed.code or "")
        self._counted[labels] = self._counted.get(labels, 0) + 1
        if observed.verdict is not Verdict.ADMITTED and not observed.queue_wait_us:
            return
        queue_wait, starvation = self._labeled(tier, decision)
        queue_wait.record(observed.queue_wait_us / 1e6)
        if observed.starvation_us:
            starvation.record(observed.starvation_us / 1e6)

    def _labeled(self, tier: str, decision: str) -> tuple[Labeled, Labeled]:
        found = self._waits.get((tier, decision))
        if found is None:
            labels = {
                semconv.POOL: self._pool,
                semconv.ADMISSION_TIER: tier,
                semconv.ADMISSION_DECISION: decision,
            }
            seconds = self._instruments.observed_queue_wait, self._instruments.observed_starvation
            found = self._waits[tier, decision] = (seconds[0].labeled(labels), seconds[1].labeled(labels))
        return found
