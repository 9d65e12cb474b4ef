"""Round robin: each engine in turn, whatever it has to do.

Source: `RoundRobinPolicy` in `model_gateway/src/policies/round_robin.rs` of lightseekorg/smg.
"""

from __future__ import annotations

from benchmarks.fleet_routers.rule import Request, Rule


class RoundRobin(Rule):
    """A counter, modulo the engines."""

    name = "round-robin"

    def __init__(self, engines: int, cache_tokens: int) -> None:
        super().__init__(engines, cache_tokens)
        self._next = 0

    def select(self, request: Request) -> int:
        """See `Rule`."""
        del request
        self._next += 1
        return (self._next - 1) % len(self.requests)
