"""Count of requests on paths that the policy does not guard, by route."""

from __future__ import annotations

from sidecar.events import UnguardedRequest
from sidecar.telemetry.metrics.requests import RequestMetrics

PASSED, REFUSED = "passed", "refused"


class UnguardedMetrics:
    """One for each middleware, beside its `RequestMetrics`."""

    def __init__(self, metrics: RequestMetrics) -> None:
        self._counted = metrics.counters.unguarded

    def note(self, request: UnguardedRequest) -> None:
        """Counts one request. One that passed in `mode: observe` has the code with which enforcing would refuse it."""
        labels = (request.route, REFUSED if request.is_refused else PASSED, request.code or "")
        self._counted[labels] = self._counted.get(labels, 0) + 1
