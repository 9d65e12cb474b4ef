"""Routing of the baselines: to which engine a request is sent when it comes. None of them looks at tiers or deadlines.

- `FewestRequests`: the engine with the fewest requests that are not over, the first of equals.
- `RoundRobin`: each engine in turn, as `RoundRobinPolicy` of lightseekorg/smg (the SGLang router) does.
- `LeastRequests`: the fewest, equals in turn: nginx's `least_conn`, Envoy's `LEAST_REQUEST` with all hosts as choices.
- `CacheAware`: `CacheAwarePolicy` of lightseekorg/smg with its defaults, on blocks of tokens, not on characters. Where
  the largest number of requests exceeds the smallest by more than 64 and by more than the factor 1.5, the engine with
  the fewest gets the request. Else the engine that first got the longest known prefix, where that is more than 0.3 of
  the prompt. Else the one with the fewest. Nothing is evicted: no trace here has the 67,108,864 characters for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sidecar.tools.simulate.load import Request
from sidecar.tools.step_model.kv_cache import BlockHash

CACHE_THRESHOLD = 0.3
BALANCE_ABS_THRESHOLD = 64
BALANCE_REL_THRESHOLD = 1.5


class Routing(Protocol):
    """One rule, for one run."""

    def select(self, request: Request, running: Sequence[int]) -> int:
        """The number of the engine for a request that comes; `running` are the requests that each has not ended."""


class FewestRequests:
    """See above."""

    def select(self, request: Request, running: Sequence[int]) -> int:
        """See `Routing`."""
        del request
        return running.index(min(running))


class RoundRobin:
    """See above."""

    def __init__(self) -> None:
        self._next = 0

    def select(self, request: Request, running: Sequence[int]) -> int:
        """See `Routing`."""
        del request
        engine = self._next % len(running)
        self._next = engine + 1
        return engine


class LeastRequests:
    """See above."""

    def __init__(self) -> None:
        self._next = 0

    def select(self, request: Request, running: Sequence[int]) -> int:
        """See `Routing`."""
        del request
        count = len(running)
        engine = min(range(count), key=lambda number: (running[number], (number - self._next) % count))
        self._next = (engine + 1) % count
        return engine


class CacheAware:
    """See above."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._known: dict[tuple[int, BlockHash], tuple[int, int]] = {}
        """By the number of the block before it and its hash: a block's own number, and the engine that first got it."""

    def select(self, request: Request, running: Sequence[int]) -> int:
        """See `Routing`."""
        most, least = max(running), min(running)
        engine = running.index(least)
        if most - least <= BALANCE_ABS_THRESHOLD or most <= BALANCE_REL_THRESHOLD * least:
            blocks, owner = self._match(request.blocks)
            if owner is not None and blocks * self._block_tokens > CACHE_THRESHOLD * request.prompt:
                engine = owner
        self._insert(request.blocks, engine)
        return engine

    def _match(self, blocks: Sequence[BlockHash]) -> tuple[int, int | None]:
        """How many blocks are known from the beginning, and the engine that first got the last of them."""
        node, owner = 0, None
        for count, block in enumerate(blocks):
            found = self._known.get((node, block))
            if found is None:
                return count, owner
            node, owner = found
        return len(blocks), owner

    def _insert(self, blocks: Sequence[BlockHash], engine: int) -> None:
        node = 0
        for block in blocks:
            node, _ = self._known.setdefault((node, block), (len(self._known) + 1, engine))
