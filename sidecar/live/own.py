"""This process's own part of the overview: read from its pool, its journal and its tenants when somebody asks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sidecar.live.records import OldestWaiter, RefusalView, TenantView
from sidecar.live.report import MOST_MESSAGE, MOST_REFUSALS, MOST_TENANTS, Report, TierReport
from sidecar.policy.policy import Policy
from sidecar.pools import Grant, Pool
from sidecar.telemetry.holdings import Holding
from sidecar.telemetry.journal import Record
from sidecar.telemetry.recent import Bucket, Recent
from sidecar.telemetry.tallies import Standing


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the overview gets its figures. All are called in the event loop, at most a few times a second.

    `policy` is the one in force. `tenants` are those that hold or wait for something in this process; `refusals` the
    last requests that were refused, at most so many, newest first; `notices` what whoever is on call should know;
    `observed` what enforcing would have done, of at most so many tenants.
    """

    policy: Callable[[], Policy]
    pool: Pool
    recent: Recent
    tenants: Callable[[], Mapping[str, Holding]]
    refusals: Callable[[int], Sequence[Record]]
    notices: Callable[[], Sequence[str]]
    observed: Callable[[int], Standing | None] = lambda _: None


def own_report(sources: Sources, state: Mapping[str, Any], replica: str, host: str, at_s: float) -> Report:
    """What this process has to say at `at_s`; `state` is its pool's. Notes in `recent` how long the oldest waits."""
    own = state["store"]["own"] if "store" in state else state
    tiers = [
        _tier(sources.recent, tier.name, grant, replica, at_s)
        for tier, grant in zip(sources.policy().tiers, sources.pool.oldest(), strict=True)
    ]
    tenants = [TenantView(name, *holding) for name, holding in sources.tenants().items()]
    tenants.sort(key=lambda one: (-one.tokens_held, -one.waiting, one.tenant))
    refusals = [_refusal(record, replica) for record in sources.refusals(MOST_REFUSALS)]
    counts, generation = (own["leases"], own["waiting"]), sources.policy().generation
    observed = sources.observed(MOST_TENANTS)
    return Report(replica, host, at_s, *counts, tiers, tenants[:MOST_TENANTS], refusals, generation, observed)


def _tier(recent: Recent, name: str, grant: Grant | None, replica: str, at_s: float) -> TierReport:
    oldest = None
    if grant is not None:
        waited_s, starved_s = grant.queue_wait_us / 1e6, grant.starvation_us / 1e6
        oldest = OldestWaiter(waited_s, starved_s, dict(grant.served_ahead), replica)
        recent.waits(name, at_s, waited_s, starved_s)
    read = recent.read(name, at_s)
    return TierReport(name, oldest, [bucket for bucket in read.buckets if _has_any(bucket)], read.overtaken_by)


def _has_any(bucket: Bucket) -> bool:
    return bool(bucket.admitted or bucket.refused or bucket.wait_max_s or bucket.ttft_max_s or bucket.preempted)


def _refusal(record: Record, replica: str) -> RefusalView:
    refused, classified = record.refused, record.classified
    assert refused is not None
    return RefusalView(
        at_s=record.wall_s(refused.at_us),
        tier=None if classified is None else classified.tier,
        tenant=None if classified is None else classified.tenant,
        code=refused.code,
        status=refused.status,
        message=refused.message[:MOST_MESSAGE],
        request_id=record.request_id,
        waited_s=refused.queue_wait_us / 1e6,
        replica=replica,
        preempted=len(record.lost),
    )
