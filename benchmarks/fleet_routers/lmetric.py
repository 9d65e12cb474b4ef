"""LMetric: the fewest uncached tokens of this prompt, times the requests that the engine would have with it.

Source: `lmetric-scorer`, `Scorer.cost` in `pkg/epp/framework/plugins/scheduling/scorer/lmetric/lmetric.go` of
llm-d/llm-d-router: `uncached tokens * (requests in flight + 1)`; uncached are the whole blocks that did not match. The
smallest cost has the highest score, and the highest score wins. A prompt that is cached to its last block costs nothing
anywhere it is: among equals the engine with the fewest requests is taken, where llm-d takes any.
"""

from __future__ import annotations

from benchmarks.fleet_routers.prefix_blocks import BLOCK_TOKENS, PrefixBlocks
from benchmarks.fleet_routers.rule import Request, Rule


class LMetric(Rule):
    """llm-d's multiplication."""

    name = "lmetric"

    def __init__(self, engines: int, cache_tokens: int) -> None:
        super().__init__(engines, cache_tokens)
        self.cached = [PrefixBlocks(cache_tokens) for _ in range(engines)]

    def select(self, request: Request) -> int:
        """See `Rule`."""
        hashes = request.blocks

        def cost(engine: int) -> tuple[int, int, int]:
            uncached = (len(hashes) - self.cached[engine].hit_blocks(hashes)) * BLOCK_TOKENS
            return uncached * (self.requests[engine] + 1), self.requests[engine], engine

        return min(range(len(self.requests)), key=cost)

    def sent(self, request: Request, engine: int) -> None:
        """See `Rule`."""
        self.cached[engine].add(request.blocks)
