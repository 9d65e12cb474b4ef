"""The engines of a pool: as its owner offers them, and as the pool reports them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from sidecar.policy.rules import UNLIMITED

WEIGHT_PERCENT = 200
"""The weight of a predicted hit where the caller names none: 2. A policy's default is 3.
Below 1 affinity is lost to load, far above it one engine takes everything.
"""
NORMAL_SPEED = 1_000


class EngineOffer(NamedTuple):
    """The facts about one engine that its pool is given; whole numbers. `id` is `name#incarnation`.

    `prefill` is the most un-prefilled prompt tokens that it may have, UNLIMITED where that is not bounded. `speed` is
    in thousandths: 1000 is 1.0. An engine that does not take new work (it drains, is suspect, or is gone) keeps what it
    holds. An engine that has been there since `since_us` starts slowly where `ramp_us` is not 0.
    """

    id: str
    tokens: int
    requests: int
    prefill: int = UNLIMITED
    speed: int = NORMAL_SPEED
    takes_new: bool = True
    ramp_us: int = 0
    since_us: int = 0


class EngineFigures(NamedTuple):
    """One engine's ledger, for people. Without slow start the effective amounts are those of the offer.

    `claims` counts those that stand in line for it.
    """

    id: str
    takes_new: bool
    is_capped: bool
    tokens: int
    requests: int
    prefill: int
    effective_tokens: int
    effective_requests: int
    effective_prefill: int
    held_tokens: int
    held_requests: int
    unprefilled_tokens: int
    claims: int


class PoolSize(NamedTuple):
    """The size of the pool, None where a dimension is unbounded."""

    tokens: int | None
    requests: int | None
    prefill: int | None


def name_and_incarnation(engine: str) -> tuple[str, int]:
    """The parts of an engine's id, by which engines are in order."""
    name, _, incarnation = engine.rpartition("#")
    return name, int(incarnation)


def sum_figures(figures: Collection[int]) -> int | None:
    """The sum of several engines in one dimension, None where one of them is unbounded."""
    return None if UNLIMITED in figures else sum(figures)


def sum_offers(offers: Sequence[EngineOffer]) -> PoolSize:
    """The whole capacity of several engines."""
    return PoolSize(
        *map(sum_figures, zip((0, 0, 0), *((it.tokens, it.requests, it.prefill) for it in offers), strict=True))
    )
