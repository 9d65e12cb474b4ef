"""The counters: the plain numbers that are counted, and the metric of each."""

from __future__ import annotations

from typing import NamedTuple

from sidecar.events import Outcome
from sidecar.telemetry import semconv
from sidecar.telemetry.metrics.tenants import TenantLabels

Counted = dict[tuple[str, ...], int]
"""A number for every combination of the labels' values."""

TIER, REASON = semconv.ADMISSION_TIER, semconv.ADMISSION_REASON
OVER, UNDER = "over", "under"
_OVERTAKING = (TIER, semconv.BY, semconv.ADMISSION_RULE)


class Counters:
    """The sums of the requests to one pool. Its attributes are those that `COUNTERS` names."""

    __slots__ = (
        "abandoned", "admitted", "clamped", "downgraded", "estimate_errors", "observed", "overtaken",
        "overtaken_tokens", "preempted_engine_us", "preemptions", "refused", "settled", "tenants", "tokens_estimated",
        "tokens_used", "unguarded",
    )  # fmt: skip

    def __init__(self, tenants: TenantLabels) -> None:
        self.tenants = tenants
        self.admitted: Counted = {}
        self.refused: Counted = {}
        self.abandoned: Counted = {}
        self.settled: Counted = {}
        self.preemptions: Counted = {}
        self.preempted_engine_us: Counted = {}
        self.clamped: Counted = {}
        self.observed: Counted = {}
        self.unguarded: Counted = {}
        self.downgraded: Counted = {}
        self.overtaken: Counted = {}
        self.overtaken_tokens: Counted = {}
        self.tokens_estimated: Counted = {}
        self.tokens_used: Counted = {}
        self.estimate_errors: Counted = {}

    def know(self, tier: str) -> None:
        """Reports every series of a tier from the start: where one begins at 1, Prometheus does not see the 1."""
        preempted = self.preemptions, self.preempted_engine_us
        for counted in (self.admitted, self.tokens_estimated, self.tokens_used, *preempted):
            counted.setdefault((tier,), 0)
        for outcome in Outcome:
            self.settled.setdefault((tier, outcome.value), 0)
        for direction in (OVER, UNDER):
            self.estimate_errors.setdefault((tier, direction), 0)


class Counter(NamedTuple):
    """One metric. `counted` is the attribute of `Counters`, or of `tenants.Counts`; `labels` leaves out the pool's.

    `per_unit` of what is counted are one of the unit.
    """

    name: str
    counted: str
    labels: tuple[str, ...]
    unit: str
    description: str
    per_unit: int = 1


COUNTERS = (
    Counter(semconv.ADMITTED, "admitted", (TIER,), "{request}", "Requests that got their lease."),
    Counter(
        semconv.REFUSED,
        "refused",
        (TIER, REASON),
        "{request}",
        "Requests answered with an error instead of a lease, by its code. Without a tier where that was not known yet.",
    ),
    Counter(
        semconv.ABANDONED,
        "abandoned",
        (TIER, REASON),
        "{request}",
        "Requests abandoned before they got a lease: the client disconnected, or the server stopped.",
    ),
    Counter(
        semconv.SETTLED,
        "settled",
        (TIER, semconv.ADMISSION_OUTCOME),
        "{request}",
        "Leases that were given back, by how the request ended.",
    ),
    Counter(
        semconv.PREEMPTIONS,
        "preemptions",
        (TIER,),
        "{preemption}",
        "How often a request of the tier gave its room to a more important one, and waited again.",
    ),
    Counter(
        semconv.PREEMPTED_ENGINE_TIME,
        "preempted_engine_us",
        (TIER,),
        "s",
        "For how long the engine had worked on requests that were preempted: what it did is lost.",
        per_unit=1_000_000,
    ),
    Counter(
        semconv.CLAMPED,
        "clamped",
        (semconv.ADMISSION_CLAMPED_FROM, TIER),
        "{request}",
        "Requests that asked for a tier above their tenant's best, and got that one instead.",
    ),
    Counter(
        semconv.DOWNGRADED,
        "downgraded",
        (semconv.ADMISSION_DOWNGRADED_FROM, TIER),
        "{request}",
        "Requests that were over their tenant's limits, and went to a lower tier instead.",
    ),
    Counter(
        semconv.OVERTAKEN,
        "overtaken",
        _OVERTAKING,
        "{request}",
        "How often the first in line of a tier was overtaken by a later request of another tier, by the rule.",
    ),
    Counter(
        semconv.OVERTAKEN_TOKENS,
        "overtaken_tokens",
        _OVERTAKING,
        "{token}",
        "The same in tokens of the requests that went ahead.",
    ),
    Counter(
        semconv.OBSERVED,
        "observed",
        (TIER, semconv.ADMISSION_DECISION, REASON),
        "{request}",
        "Requests that passed in `mode: observe`, by what enforcing would have done to them.",
    ),
    Counter(
        semconv.UNGUARDED,
        "unguarded",
        (semconv.ADMISSION_ROUTE, semconv.ADMISSION_DECISION, REASON),
        "{request}",
        "Requests on paths that the policy does not guard, other than those that only read: passed, or refused.",
    ),
    Counter(semconv.TOKENS_ESTIMATED, "tokens_estimated", (TIER,), "{token}", "Tokens held for the requests admitted."),
    Counter(
        semconv.TOKENS_USED,
        "tokens_used",
        (TIER,),
        "{token}",
        "Tokens that settled requests used: the engine's count, or else an estimate.",
    ),
    Counter(
        semconv.TOKENS_ESTIMATE_ERROR,
        "estimate_errors",
        (TIER, semconv.DIRECTION),
        "{token}",
        "By how many tokens completed requests were estimated over or under what the engine counted.",
    ),
)

TENANT_COUNTERS = (
    Counter(
        semconv.TENANT_ADMITTED,
        "admitted",
        (semconv.ADMISSION_TENANT,),
        "{request}",
        "Requests that got their lease, of the largest tenants and of all others together.",
    ),
    Counter(
        semconv.TENANT_REFUSED,
        "refused",
        (semconv.ADMISSION_TENANT,),
        "{request}",
        "Requests answered with an error instead of a lease, of the largest tenants and of all others together.",
    ),
    Counter(
        semconv.TENANT_TOKENS_USED,
        "tokens_used",
        (semconv.ADMISSION_TENANT,),
        "{token}",
        "Tokens that settled requests used, of the largest tenants and of all others together.",
    ),
)
