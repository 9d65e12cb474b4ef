"""Schema of a capacity: of the one engine behind a pool, or of each of several."""

from __future__ import annotations

from fractions import Fraction

from pydantic import Field, field_validator, model_validator

from sidecar.policy import fields as of
from sidecar.policy.file_model import FileModel, key

DEFAULT_FRACTION = "95%"
"""Engines keep some blocks for themselves, and an estimate may be a little low."""
DEFAULT_WAITING = 2
"""Few, because the engine serves them before the next request. With none, a slot that comes free stays empty for the
way to the middleware and back; with two, vLLM on the CPU kept its throughput (benchmarks/real_engines.py)."""


class Capacity(FileModel):
    """The capacity of the engine. One of the two is enough; a request must fit in both.

    With `from: engine` whatever is not written is read from the engine, again and again: it follows changes, and keeps
    the last good value where it can be read no more.
    """

    read_from: of.CapacitySourceChoice | None = Field(
        None, alias="from", description="`engine`: read from it what is not written here.", examples=["engine"]
    )
    tokens: of.PositiveCount | None = key(None, "Tokens that the KV cache holds.", "400k")
    requests: of.PositiveCount | None = key(None, "Requests in the running batch.", 160)
    fraction: of.Share = key(
        DEFAULT_FRACTION, "With `from: engine`: the part of the tokens read that the pool may fill.", "90%"
    )
    waiting: of.Count = key(
        DEFAULT_WAITING,
        "With `from: engine`: requests that may wait inside the engine, so that it never runs dry. While "
        "more wait there, no request is admitted.",
        8,
    )

    learn: of.LearnChoice = key(
        # One answer in twenty outgrows what its lease held at first, and the lease then grows.
        "cautious",
        "Whether a lease holds the output that answers like it had, or with `off` its `max_tokens`. `full` holds less, "
        "and counts that requests end at different times. One value a pool: with `engines`, write it in their common "
        "`capacity`.",
        "full",
    )

    @field_validator("fraction")
    @classmethod
    def _fraction_leaves_room(cls, fraction: Fraction) -> Fraction:
        if fraction == 0:
            raise ValueError('"0%" leaves room for nothing; write a larger share')
        return fraction

    @model_validator(mode="after")
    def _only_the_engine_has_a_fraction(self) -> Capacity:
        unread = {"fraction", "waiting"} & self.model_fields_set
        if self.read_from is None and unread:
            raise ValueError(f"{min(unread)} is only read with from: engine; add that, or remove it")
        return self

    @model_validator(mode="after")
    def _has_a_bound(self) -> Capacity:
        if self.tokens is None and self.requests is None and self.read_from is None:
            raise ValueError("bounds nothing; write tokens, requests or both, such as {tokens: 400k, requests: 160}")
        return self
