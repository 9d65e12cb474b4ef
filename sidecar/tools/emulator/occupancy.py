"""Occupancy of the emulated engine: what it was sent and has not finished, and the most that this ever was.

A benchmark reads it afterwards to prove that no engine was ever above its capacity, whatever the sidecar believes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Occupancy:
    """`requests` that were sent and are not over, running or waiting, and the `tokens` of their prompts and outputs.

    `unprefilled_tokens` of those prompts are neither computed nor found in the prefix cache. A waiting prompt counts
    what it would find if it ran now. The fields that begin with `most_` are what each was at most.
    """

    requests: int = 0
    tokens: int = 0
    unprefilled_tokens: int = 0
    most_requests: int = 0
    most_tokens: int = 0
    most_unprefilled_tokens: int = 0

    def add(self, *, requests: int = 0, tokens: int = 0, unprefilled_tokens: int = 0) -> None:
        """Adds, or takes away what is negative."""
        self.requests += requests
        self.tokens += tokens
        self.unprefilled_tokens += unprefilled_tokens
        self.most_requests = max(self.most_requests, self.requests)
        self.most_tokens = max(self.most_tokens, self.tokens)
        self.most_unprefilled_tokens = max(self.most_unprefilled_tokens, self.unprefilled_tokens)
