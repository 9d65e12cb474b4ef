"""A pool as it stands, as plain records: what the gauges tell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TierSample:
    """One tier. None is unbounded, or not promised; the waits are those of this process, 0 where nobody waits."""

    tier: str
    queued_requests: int = 0
    queued_tokens: int = 0
    oldest_wait_s: float = 0.0
    longest_starvation_s: float = 0.0
    held_tokens: int = 0
    held_requests: int = 0
    reserve_tokens: int | None = None
    reserve_requests: int | None = None
    limit_tokens: int | None = None
    limit_requests: int | None = None
    borrowed_tokens: int = 0
    lent_tokens: int = 0
    slo_ttft_s: float | None = None
    slo_queue_wait_s: float | None = None
    slo_starvation_s: float | None = None


@dataclass(frozen=True, slots=True)
class PoolSample:
    """The whole pool. `replicas`, and how many policy `generations` they run, are None where it is not shared.

    `policies_rejected` counts since the process began. `aborting` is what this process holds for requests that have
    ended.
    """

    tiers: Sequence[TierSample]
    generation: str
    capacity_tokens: int | None = None
    capacity_requests: int | None = None
    replicas: int | None = None
    policies_rejected: int = 0
    generations: int | None = None
    aborting_requests: int = 0
    aborting_tokens: int = 0


Sample = Callable[[], PoolSample | None]
"""Takes a sample of a pool, or None where that is not possible now. Called in any thread."""
