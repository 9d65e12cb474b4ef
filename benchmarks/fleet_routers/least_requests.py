"""Least requests: the engine with the fewest requests in flight.

Source: nginx's `least_conn` and Envoy's `LEAST_REQUEST` with all hosts as choices. Among equals they go round, so that
an idle fleet is used evenly.
"""

from __future__ import annotations

from benchmarks.fleet_routers.rule import Request, Rule


class LeastRequests(Rule):
    """The smallest count; equals in turn."""

    name = "least-requests"

    def __init__(self, engines: int, cache_tokens: int) -> None:
        super().__init__(engines, cache_tokens)
        self._next = 0

    def select(self, request: Request) -> int:
        """See `Rule`."""
        del request
        count = len(self.requests)
        engine = min(range(count), key=lambda number: (self.requests[number], (number - self._next) % count))
        self._next = (engine + 1) % count
        return engine
