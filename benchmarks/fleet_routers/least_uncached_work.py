"""Least uncached work: the fewest blocks to prefill and to hold, after what the engine's prefix cache has.

Source: `DefaultWorkerSelector::worker_logit` in `lib/kv-router/src/scheduling/selector.rs` of ai-dynamo/dynamo, with
its defaults (overlap_score_credit 1, prefill_load_scale 1, decode_active_request_weight 0, router_temperature 0):

    cost = (prompt tokens in prefill there + this prompt's that are not cached there) / block size
           + blocks that its active requests would hold with this one, shared ones counted once

The smallest cost wins. Dynamo counts a prompt as in prefill until its first token. Among equals the engine with the
fewest requests is taken, where Dynamo takes any.
"""

from __future__ import annotations

from collections import Counter

from benchmarks.fleet_routers.prefix_blocks import BLOCK_TOKENS, PrefixBlocks
from benchmarks.fleet_routers.rule import Request, Rule


class LeastUncachedWork(Rule):
    """Dynamo's cost."""

    name = "least-uncached-work"

    def __init__(self, engines: int, cache_tokens: int) -> None:
        super().__init__(engines, cache_tokens)
        self.cached = [PrefixBlocks(cache_tokens) for _ in range(engines)]
        self.prefill_tokens = [0] * engines
        self.active = [Counter[bytes]() for _ in range(engines)]
        self._uncached: dict[Request, int] = {}

    def cost(self, request: Request, engine: int) -> float:
        """In blocks."""
        prefill = self.prefill_tokens[engine] + self._uncached_tokens(request, engine)
        fresh = sum(one not in self.active[engine] for one in request.blocks)
        return prefill / BLOCK_TOKENS + len(self.active[engine]) + fresh

    def select(self, request: Request) -> int:
        """See `Rule`."""
        return min(
            range(len(self.requests)), key=lambda engine: (self.cost(request, engine), self.requests[engine], engine)
        )

    def sent(self, request: Request, engine: int) -> None:
        """See `Rule`."""
        uncached = self._uncached_tokens(request, engine)
        self._uncached[request] = uncached
        self.prefill_tokens[engine] += uncached
        self.active[engine].update(request.blocks)
        self.cached[engine].add(request.blocks)

    def first_byte(self, request: Request, engine: int) -> None:
        """See `Rule`."""
        self.prefill_tokens[engine] -= self._uncached.pop(request, 0)

    def finished(self, request: Request, engine: int) -> None:
        """See `Rule`."""
        self.first_byte(request, engine)
        active = self.active[engine]
        for one in request.blocks:
            active[one] -= 1
            if not active[one]:
                del active[one]

    def _uncached_tokens(self, request: Request, engine: int) -> int:
        tokens = request.prompt_tokens
        return tokens - self.cached[engine].hit_tokens(request.blocks, tokens)
