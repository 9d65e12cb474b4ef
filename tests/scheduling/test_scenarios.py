"""Every scenario of the specification, step by step: each pool must give exactly these answers."""

import json
from fractions import Fraction
from pathlib import Path

import pytest

from sidecar.policy.rules import PoolRules, Shares, pool_rules
from sidecar.scheduling import Admission, Scheduler

SCENARIOS = [
    scenario
    for name in ("lessons", "random")
    for scenario in json.loads((Path(__file__).parent / "scenarios" / f"{name}.json").read_text())
]


def rules_of(scenario: dict) -> PoolRules:
    names = [tier["name"] for tier in scenario["tiers"]]
    aging = scenario["aging"]
    return pool_rules(
        tokens=scenario["capacity"].get("tokens"),
        requests=scenario["capacity"].get("requests"),
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


def play(scheduler: Scheduler, step: dict) -> list[Admission]:
    now_us = int(step["at"] * 1_000_000)
    tiers = [tier.name for tier in scheduler.rules.tiers]
    match step["do"]:
        case "submit":
            scheduler.submit(
                step["id"],
                tier=tiers.index(step["tier"]),
                tokens=step["tokens"],
                requests=step.get("requests", 1),
                tenant=step.get("tenant", ""),
                weight=step.get("weight", 1),
                now_us=now_us,
            )
        case "settle":
            scheduler.settle(step["id"], now_us)
        case "cancel":
            scheduler.cancel(step["id"], now_us)
        case "resize":
            scheduler.resize(step["id"], step["tokens"])
        case "hold_back":
            scheduler.hold_back(int(step["until"] * 1_000_000))
    return scheduler.dispatch(now_us)


def as_recorded(admission: Admission, scheduler: Scheduler) -> dict:
    names = [tier.name for tier in scheduler.rules.tiers]
    return {
        "id": admission.ticket.id,
        "wait_s": admission.wait.queue_wait_us / 1_000_000,
        "starvation_s": admission.wait.starvation_us / 1_000_000,
        "served_ahead": {name: n for name, n in zip(names, admission.wait.served_ahead, strict=True) if n},
    }


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario["name"])
def test_scheduler_gives_exactly_the_recorded_answers(scenario):
    scheduler = Scheduler(rules_of(scenario))
    for number, step in enumerate(scenario["steps"]):
        answers = [as_recorded(admission, scheduler) for admission in play(scheduler, step)]
        assert step["admitted"] == answers, f"step {number}: {step}; {scenario['lesson']}"
