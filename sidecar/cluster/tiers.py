"""Tiers of a pool as documents: what each holds, what it has waiting in one process and in all, and what guarded ones
met lately.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sidecar.cluster.document import OldestWaiter, Promised, TierGuard, TierShare, TierWaits
from sidecar.cluster.report import ReplicaReport
from sidecar.engines.view import Amount
from sidecar.events import StoreState
from sidecar.policy.model import Policy
from sidecar.policy.tier import ServiceObjectives
from sidecar.pools import Grant

_LATELY_S, _EVERY_S = 300.0, 5.0


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


class GuardHistory:
    """The counts of each guarded tier as they were in the last five minutes, one for each five seconds."""

    def __init__(self) -> None:
        self._kept: dict[str, deque[tuple[float, int, int]]] = {}

    def note(self, shares: Sequence[TierShare], at_s: float) -> None:
        """The tiers as they are now."""
        guards = {share.tier: share.guard for share in shares if share.guard is not None}
        self._kept = {tier: self._kept.get(tier, deque()) for tier in guards}
        for tier, guard in guards.items():
            kept = self._kept[tier]
            if not kept or at_s - kept[-1][0] >= _EVERY_S:
                kept.append((at_s, guard.requests["met"], guard.requests["missed"]))
            while len(kept) > 1 and at_s - kept[1][0] >= _LATELY_S:
                kept.popleft()

    def lately(self, share: TierShare) -> tuple[int, int]:
        """Requests of a guarded tier that met its SLO and that missed it, in the last five minutes."""
        assert share.guard is not None
        kept = self._kept.get(share.tier)
        _, met, missed = kept[0] if kept else (0.0, 0, 0)
        return share.guard.requests["met"] - met, share.guard.requests["missed"] - missed
