"""The scenarios of one engine by level, and the rules of one, as its file writes it."""

from __future__ import annotations

from fractions import Fraction

from sidecar.policy.rules import PoolRules, Shares, pool_rules
from tests.scheduling.programs import Program, scenarios

SCENARIOS = [it for it in scenarios() if it["name"].startswith(("lessons", "random"))]


def rules_of(scenario: Program) -> PoolRules:
    names = [tier["name"] for tier in scenario["tiers"]]
    aging, capacity = scenario["aging"], scenario["capacity"]
    return pool_rules(
        tokens=capacity.get("tokens"),
        requests=capacity.get("requests"),
        tiers=tuple(
            Shares(
                name=tier["name"],
                reserve=Fraction(str(tier.get("reserve", 0))),
                lend=Fraction(str(tier.get("lend", 1))),
                limit=Fraction(str(tier.get("limit", 1))),
                always_first=bool(tier.get("always_first")),
            )
            for tier in scenario["tiers"]
        ),
        promote_after_us=aging and int(aging["promote_after_s"] * 1_000_000),
        ceiling=names.index(aging["ceiling"]) if aging else 0,
    )
