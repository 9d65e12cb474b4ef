"""Rule of a router: which engine gets a request, and what the rule knows of each engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from benchmarks.fleet_routers.prefix_blocks import BYTES_PER_TOKEN, block_hashes


@dataclass(frozen=True, eq=False)
class Request:
    """One request: the bytes of its prompt. Two of the same prompt are two."""

    prompt: bytes

    @property
    def prompt_tokens(self) -> int:
        """As the engines count them."""
        return max(1, -(-len(self.prompt) // BYTES_PER_TOKEN))

    @cached_property
    def blocks(self) -> Sequence[bytes]:
        """The hashes of its full blocks."""
        return block_hashes(self.prompt)


class Rule(ABC):
    """A rule for `engines` engines, numbered from 0. Subclasses keep what they need by request.

    The router calls `choose` when a request arrives, `first_byte` at most once, and `ended` exactly once. `requests`
    counts what each engine was sent and has not ended. `cache_tokens` is the size of an engine's prefix cache.
    """

    name: ClassVar[str]

    def __init__(self, engines: int, cache_tokens: int) -> None:
        self.requests = [0] * engines
        self.cache_tokens = cache_tokens

    @abstractmethod
    def select(self, request: Request) -> int:
        """The engine for a request that has just arrived."""

    def sent(self, request: Request, engine: int) -> None:
        """Called after `select`: the request is on its way."""
        del request, engine

    def first_byte(self, request: Request, engine: int) -> None:
        """The engine has prefilled the request."""
        del request, engine

    def finished(self, request: Request, engine: int) -> None:
        """The request has ended, in whatever way."""
        del request, engine

    def choose(self, request: Request) -> int:
        """Selects an engine and counts the request there."""
        engine = self.select(request)
        self.requests[engine] += 1
        self.sent(request, engine)
        return engine

    def ended(self, request: Request, engine: int) -> None:
        """Takes the request out of every count."""
        self.requests[engine] -= 1
        self.finished(request, engine)


def smallest(costs: Sequence[float]) -> int:
    """The number of the smallest; among equals the first."""
    return min(range(len(costs)), key=costs.__getitem__)
