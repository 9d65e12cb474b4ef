"""By which rule one request went ahead of another, in words that need no knowledge of the scheduler."""

from __future__ import annotations

from collections.abc import Sequence

from sidecar.events import Admitted, Classified
from sidecar.telemetry.journal import Record

TURN, FAIR_SHARE, BEHIND = "turn", "fair_share", "behind"
"""What no event says: it had come earlier; the tenants of one tier take turns; others of its own tier stood before."""


def rule_of(ahead: Record, waiter: Record) -> str:
    """The rule by which `ahead` was admitted before `waiter`: one of the scheduler's, or one of the three here."""
    classified, admitted, waiting = _tiers(ahead, waiter)
    if ahead.arrived_us <= waiter.arrived_us:
        return TURN
    if classified.tier == waiting.tier:
        return FAIR_SHARE
    return admitted.passed.get(waiting.tier, BEHIND)


def because(rule: str, ahead: Record, waiter: Record, tiers: Sequence[str]) -> str:
    """The rule as half a sentence. `tiers` are the names of the policy's, most important first."""
    classified, admitted, waiting = _tiers(ahead, waiter)
    by, tier = classified.tier, waiting.tier
    return {
        TURN: f"{by} came earlier" if by != tier else "they came earlier",
        FAIR_SHARE: f"the tenants of {tier} take turns by their share",
        BEHIND: f"others of {tier} stood before it, and had come later than {by}",
        "always_first": f"{by} always goes first",
        "reserve": f"{by} held less than its reserve",
        "reserve_turn": f"{by} held less than its reserve, and it was its turn",
        "level": _rank(by, tier, admitted.level, tiers),
        "limit": f"{tier} was at its limit",
        "passed_over": f"{tier} asked for more than the reserves of the others leave",
    }.get(rule, f"of the rule {rule}")


def aged_to(tier: str, level: int, tiers: Sequence[str]) -> str | None:
    """The tier with which a request of `tier` ranked by the time it had waited, None where that is its own."""
    return tiers[max(level, 0)] if tier in tiers and level < tiers.index(tier) else None


def _rank(by: str, tier: str, level: int, tiers: Sequence[str]) -> str:
    risen_to = aged_to(by, level, tiers)
    if tier in tiers and by in tiers and tiers.index(by) > tiers.index(tier) and risen_to is not None:
        return f"{by} had waited so long that it ranked with {risen_to}"
    return f"{by} is more important"


def _tiers(ahead: Record, waiter: Record) -> tuple[Classified, Admitted, Classified]:
    assert ahead.classified is not None
    assert ahead.admitted is not None
    assert waiter.classified is not None
    return ahead.classified, ahead.admitted, waiter.classified
