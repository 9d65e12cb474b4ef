"""The gauges: samples of a pool as plain records, and the metric of each value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sidecar.telemetry import semconv


@dataclass(frozen=True, slots=True)
class TierSample:
    """One tier. None is unbounded, or not promised; the waits are those of this process, 0 where none waits."""

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


REQUESTS, TOKENS, SECONDS = "{request}", "{token}", "s"


class TierGauge(NamedTuple):
    """One metric with a value for every tier; None where it has none."""

    name: str
    unit: str
    description: str
    value: Callable[[TierSample], float | None]


class PoolGauge(NamedTuple):
    """One metric with a value for the pool."""

    name: str
    unit: str
    description: str
    value: Callable[[PoolSample], float | None]


TIER_GAUGES = (
    TierGauge(semconv.QUEUE_REQUESTS, REQUESTS, "Requests that wait.", lambda tier: tier.queued_requests),
    TierGauge(semconv.QUEUE_TOKENS, TOKENS, "Tokens of the requests that wait.", lambda tier: tier.queued_tokens),
    TierGauge(
        semconv.QUEUE_OLDEST_WAIT,
        SECONDS,
        "How long the oldest request that waits in this process has waited.",
        lambda tier: tier.oldest_wait_s,
    ),
    TierGauge(
        semconv.QUEUE_LONGEST_STARVATION,
        SECONDS,
        "How long ago the oldest request that waits in this process was first overtaken by a later one.",
        lambda tier: tier.longest_starvation_s,
    ),
    TierGauge(semconv.HELD_TOKENS, TOKENS, "Tokens held by leases.", lambda tier: tier.held_tokens),
    TierGauge(semconv.HELD_REQUESTS, REQUESTS, "Requests held by leases.", lambda tier: tier.held_requests),
    TierGauge(semconv.RESERVE_TOKENS, TOKENS, "Tokens reserved for the tier.", lambda tier: tier.reserve_tokens),
    TierGauge(
        semconv.RESERVE_REQUESTS, REQUESTS, "Requests reserved for the tier.", lambda tier: tier.reserve_requests
    ),
    TierGauge(semconv.LIMIT_TOKENS, TOKENS, "The most tokens the tier may hold.", lambda tier: tier.limit_tokens),
    TierGauge(
        semconv.LIMIT_REQUESTS, REQUESTS, "The most requests the tier may hold.", lambda tier: tier.limit_requests
    ),
    TierGauge(
        semconv.BORROWED_TOKENS,
        TOKENS,
        "Tokens held above the tier's reserve, out of what other tiers have reserved.",
        lambda tier: tier.borrowed_tokens,
    ),
    TierGauge(
        semconv.LENT_TOKENS,
        TOKENS,
        "Tokens of the tier's reserve that other tiers hold.",
        lambda tier: tier.lent_tokens,
    ),
    TierGauge(
        semconv.SLO_TTFT, SECONDS, "The time to first token that the policy promises.", lambda tier: tier.slo_ttft_s
    ),
    TierGauge(
        semconv.SLO_QUEUE_WAIT, SECONDS, "The queue wait that the policy promises.", lambda tier: tier.slo_queue_wait_s
    ),
    TierGauge(
        semconv.SLO_STARVATION,
        SECONDS,
        "The longest starvation that the policy promises.",
        lambda tier: tier.slo_starvation_s,
    ),
)

POOL_GAUGES = (
    PoolGauge(semconv.CAPACITY_TOKENS, TOKENS, "Tokens that the pool has.", lambda pool: pool.capacity_tokens),
    PoolGauge(
        semconv.CAPACITY_REQUESTS, REQUESTS, "Requests that the pool has room for.", lambda pool: pool.capacity_requests
    ),
    PoolGauge(
        semconv.ABORTING_REQUESTS,
        REQUESTS,
        "Requests held by leases of this process whose requests have ended before their answer, until the engine has "
        "aborted them.",
        lambda pool: pool.aborting_requests,
    ),
    PoolGauge(semconv.ABORTING_TOKENS, TOKENS, "Tokens held by these leases.", lambda pool: pool.aborting_tokens),
    PoolGauge(semconv.REPLICAS, "{replica}", "Processes that share the pool.", lambda pool: pool.replicas),
    PoolGauge(
        semconv.GENERATIONS,
        "{policy}",
        "Different policies that the pool's processes run: more than 1 in a roll-out, or where one stands still.",
        lambda pool: pool.generations,
    ),
)
