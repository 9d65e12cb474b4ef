"""Capacity of the one engine behind a pool, or of each of several: written, or read from it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated

from pydantic import field_validator, model_validator

from sidecar.policy import fields as of
from sidecar.policy.choices import CapacitySource
from sidecar.policy.declared import declared, key

DEFAULT_FRACTION = "95%"
"""Engines keep some blocks for themselves, and an estimate may be a little low."""
DEFAULT_WAITING = 2
"""Few, because the engine serves them before the next request. With none, a slot that comes free stays empty for the
way to the middleware and back; with two, vLLM on the CPU kept its throughput (benchmarks/real_engines.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
@declared
class Capacity:
    """The capacity of the engine. One of the two is enough; a request must fit in both.

    With `from: engine` what is not written is read from the engine every second.
    """

    read_from: Annotated[CapacitySource, of.Choice(CapacitySource, "source of a capacity")] | None = key(
        None, "`engine`: read what is not written here.", "engine", name="from"
    )
    tokens: of.EngineAmount | None = key(None, "Tokens that the KV cache holds.", "400k")
    requests: of.EngineAmount | None = key(None, "Requests in the running batch.", 160)
    fraction: of.Share = key(
        DEFAULT_FRACTION, "With `from: engine`: the part of the tokens read that the pool may fill.", "90%"
    )
    waiting: of.Count = key(
        DEFAULT_WAITING,
        "With `from: engine`: requests that may wait inside the engine.",
        8,
    )

    learn: of.LearnChoice = key(
        # One answer in twenty outgrows what its lease held at first, and the lease then grows.
        "cautious",
        "The output that a lease holds: as answers like it had, or with `off` its `max_tokens`. `full` holds "
        "less, and counts that requests end at different times. With `engines`, write it in their common "
        "`capacity`.",
        "full",
    )

    @field_validator("fraction")
    @classmethod
    def _fraction_leaves_room(cls, fraction: Fraction) -> Fraction:
        if fraction == 0:
            raise ValueError('"0%" leaves room for nothing; write a larger share')
        return fraction

    @model_validator(mode="wrap")
    @classmethod
    def _only_the_engine_has_a_fraction(cls, written: object, read: Callable[[object], Capacity]) -> Capacity:
        capacity = read(written)
        unread = {"fraction", "waiting"} & set(written) if isinstance(written, dict) else ()
        if unread and not capacity.is_read:
            raise ValueError(f"{min(unread)} is only read with from: engine; add that, or remove it")
        return capacity

    @model_validator(mode="after")
    def _has_a_bound(self) -> Capacity:
        if self.tokens is None and self.requests is None and not self.is_read:
            raise ValueError("bounds nothing; write tokens, requests or both, such as {tokens: 400k, requests: 160}")
        return self

    @property
    def is_read(self) -> bool:
        """True if what is not written is read from the engine."""
        return self.read_from is not None

    def size(self, kv_tokens: int | None, max_running: int | None) -> tuple[int | None, int | None]:
        """The (tokens, requests) of an engine that reports so much; None for what is not bounded, or not known."""
        tokens, requests = self.tokens, self.requests
        if self.is_read and tokens is None and kv_tokens is not None:
            tokens = math.floor(self.fraction * kv_tokens)
        if self.is_read and requests is None and max_running is not None:
            requests = max_running + self.waiting  # not a part of them: whatever does not run at once is lost
        return tokens, requests

    def __str__(self) -> str:
        sizes = (("tokens", self.tokens), ("requests", self.requests))
        return (
            "from the engine" if self.is_read else " and ".join(f"{n:,} {kind}" for kind, n in sizes if n is not None)
        )
