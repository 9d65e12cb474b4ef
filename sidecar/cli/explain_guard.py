"""Explanation of rule 10 for a request's tier: whose SLO keeps it from filling the pool, and whom its own keeps."""

from __future__ import annotations

from typing import Any

from sidecar.durations import policy_duration
from sidecar.policy.model import Policy
from sidecar.pools import Pool
from sidecar.scheduling.guard import first_state

Found = dict[str, Any]


def guards(policy: Policy, pool: Pool, level: int) -> Found | None:
    """The guarded tiers that are more important, and the tier itself where it is one, as JSON types.

    None where there are none. The shares are those of a pool that has seen no request yet.
    """
    always_first = policy.rules.tiers[level].always_first
    found = []
    for guard in pool.guards():
        of = policy.level_for(guard.tier)
        if of is not None and (of == level or (of < level and not always_first)):
            slo = policy.tiers[of].slo
            found.append(
                {
                    "tier": guard.tier,
                    "is_own": of == level,
                    "share": _first_share(policy, of),
                    "ttft_s": slo.ttft_s,
                    "tpot_s": slo.tpot_s,
                    "hold": float(policy.tiers[of].hold),
                }
            )
    if not found:
        return None
    has_reserve = policy.tiers[level].reserve > 0
    return {"tiers": found, "has_reserve": has_reserve}


def _first_share(policy: Policy, level: int) -> float:
    """The share at which a guard begins: a tenth of the pool, or the floors of the less important tiers."""
    below = [tier for tier in policy.tiers[level + 1 :] if not tier.always_first]
    fair = policy.fair if policy.rules.is_by_gain else 1
    return first_state(float(sum(tier.reserve for tier in below) * fair)).share


def guard_lines(found: Found) -> list[str]:
    """The guards in lines for people."""
    lines = []
    for guard in found["tiers"]:
        promise = (
            f"{100 * guard['hold']:.4g}% of {guard['tier']} within {policy_duration(guard['ttft_s'])} to the first "
            f"token and {policy_duration(guard['tpot_s'])} between tokens"
        )
        if guard["is_own"]:
            lines.append(f"   its own tier is held to its SLO: {promise}")
            lines.append(
                f"   beyond their reserves, less important tiers may fill the pool to {guard['share']:.0%} at first; "
                f"that share moves with the SLO of {guard['tier']}"
            )
        else:
            beyond = "beyond its reserve" if found["has_reserve"] else "it has no reserve, so"
            lines.append(
                f"   {beyond} it may fill the pool to {guard['share']:.0%} at first, or run alone of such work"
            )
            lines.append(f"   that share moves with the SLO of {guard['tier']}: {promise}")
    return lines
