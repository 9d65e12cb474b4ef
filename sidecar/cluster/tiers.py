"""Tiers of a pool as documents: what each holds, and what it has waiting in one process and in all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sidecar.cluster.document import OldestWaiter, Promised, TierGuard, TierShare, TierWaits
from sidecar.cluster.report import ReplicaReport
from sidecar.engines.view import Amount
from sidecar.events import StoreState
from sidecar.policy.model import Policy
from sidecar.policy.tier import ServiceObjectives
from sidecar.pools import Grant


def is_alone(state: Mapping[str, Any]) -> bool:
    """True if a pool's state is this replica's alone: the pool is shared, and its store does not decide."""
    return "store" in state and state["store"]["state"] != StoreState.SHARED.value


def tier_shares(policy: Policy, state: Mapping[str, Any]) -> Sequence[TierShare]:
    """Room of the pool that each tier holds and may hold; `state` is the pool's."""
    return [
        TierShare(
            tier.name,
            held=Amount(**of["held"]),
            reserve=Amount(**of["reserve"]),
            limit=Amount(**of["limit"]),
            borrowed_tokens=of.get("borrowed", 0),
            lent_tokens=of.get("lent", 0),
            slo=_promised(tier.slo),
            guard=TierGuard(**of["guard"]) if "guard" in of else None,
        )
        for tier, of in zip(policy.tiers, state["tiers"], strict=True)
    ]


def _promised(slo: ServiceObjectives) -> Promised:
    hold = None if slo.hold is None else float(slo.hold)
    return Promised(slo.ttft_s, slo.queue_wait_s, slo.starvation_s, slo.tpot_s, hold)


def tier_waits(state: Mapping[str, Any], oldest: Sequence[Grant | None], replica: str = "") -> Sequence[TierWaits]:
    """Requests of each tier that wait in this process, `replica`."""
    return [
        TierWaits(tier["tier"], Amount(**tier["queued"]), _oldest_waiter(grant, replica))
        for tier, grant in zip(state["tiers"], oldest, strict=True)
    ]


def _oldest_waiter(grant: Grant | None, replica: str) -> OldestWaiter | None:
    if grant is None:
        return None
    return OldestWaiter(grant.queue_wait_us / 1e6, grant.starvation_us / 1e6, dict(grant.served_ahead), replica)


def sum_waits(tier: str, reports: Iterable[ReplicaReport]) -> TierWaits:
    """Requests of a tier that wait in all replicas, and the one that has waited longest."""
    found = [waits for report in reports for waits in report.tiers if waits.tier == tier]
    longest = max(found, key=lambda waits: waits.oldest.wait_s if waits.oldest is not None else -1.0, default=None)
    return TierWaits(
        tier,
        Amount(sum(it.queued.tokens or 0 for it in found), sum(it.queued.requests or 0 for it in found)),
        None if longest is None else longest.oldest,
        longest is not None and longest.is_at_limit,
    )
