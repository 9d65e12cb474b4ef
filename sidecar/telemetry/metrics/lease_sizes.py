"""The metrics of the sizes of leases, where output lengths are learned. They are those of one process.

In a pool of several engines each has its series, labeled with its name, of 64 engines at most. In a pool of one there
is no such label. While the policy says `learn: off` no series exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sidecar.telemetry import semconv


@dataclass(frozen=True, slots=True)
class LeaseSizeSample:
    """The leases of this process at one engine. `engine` is None in a pool of one engine.

    `preemptions` is None until the engine has said how many there were.
    """

    engine: str | None
    held_tokens: int
    expected_tokens: int
    used_tokens: int
    overlap: float
    quantile: float
    is_raised: int
    preemptions: int | None = None


class LeaseSizeMetric(NamedTuple):
    """One metric. `value` is the attribute of `LeaseSizeSample` that it reports, unless that is None."""

    name: str
    value: str
    description: str
    unit: str


LEASE_SIZE_GAUGES = (
    LeaseSizeMetric(
        semconv.LEASE_HELD_TOKENS, "held_tokens", "Tokens that the running leases of this process hold.", "{token}"
    ),
    LeaseSizeMetric(
        semconv.LEASE_EXPECTED_TOKENS,
        "expected_tokens",
        "Tokens that the requests of these leases are expected to use at their ends, as a plain sum.",
        "{token}",
    ),
    LeaseSizeMetric(
        semconv.LEASE_USED_TOKENS,
        "used_tokens",
        "Tokens that these requests use now: their prompts, and the output that streams.",
        "{token}",
    ),
    LeaseSizeMetric(
        semconv.LEASE_OVERLAP, "overlap", "Part of what requests need that is counted, as they end apart.", ""
    ),
    LeaseSizeMetric(
        semconv.LEASE_QUANTILE, "quantile", "Part of answers that are no longer than what a lease holds for them.", ""
    ),
    LeaseSizeMetric(
        semconv.LEASE_QUANTILE_RAISED,
        "is_raised",
        "1 while the engine's preemptions keep the quantile above that of the policy's `learn`, else 0.",
        "",
    ),
)

ENGINE_PREEMPTIONS = LeaseSizeMetric(
    semconv.ENGINE_PREEMPTIONS,
    "preemptions",
    "How often the engine preempted a running request for lack of KV cache, since this process first read it.",
    "{preemption}",
)
