"""The scenarios in `scenarios/`, and the policy of one, as its file writes it."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

from oracle import Policy

from sidecar.policy.rules import Shares


def scenarios_of(name: str) -> list[dict[str, Any]]:
    return json.loads((Path(__file__).parent / "scenarios" / f"{name}.json").read_text())


SCENARIOS = scenarios_of("lessons") + scenarios_of("random")
OF_FLEETS = scenarios_of("fleet")
"""Those of several engines, worked out by hand."""


def policy_of(scenario: dict[str, Any]) -> Policy:
    """Without `capacity` the pool is that of its engines."""
    names = [tier["name"] for tier in scenario["tiers"]]
    aging, capacity = scenario["aging"], scenario.get("capacity", {})
    return Policy(
        capacity=(capacity.get("tokens"), capacity.get("requests")),
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
