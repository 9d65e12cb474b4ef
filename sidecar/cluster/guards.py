"""Requests of guarded tiers that met their SLO in the last minutes, by what a pool counts since its process began."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from sidecar.cluster.document import TierShare

_LATELY_S, _EVERY_S = 300.0, 5.0


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
