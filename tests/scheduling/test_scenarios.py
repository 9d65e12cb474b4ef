"""Every scenario of the specification, step by step: each pool must give exactly these answers."""

import json
from pathlib import Path

import pytest
from scenario_policy import policy_of

from sidecar.scheduling import Admission, Scheduler

SCENARIOS = [
    scenario
    for name in ("lessons", "random")
    for scenario in json.loads((Path(__file__).parent / "scenarios" / f"{name}.json").read_text())
]


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
    scheduler = Scheduler(policy_of(scenario).rules())
    for number, step in enumerate(scenario["steps"]):
        answers = [as_recorded(admission, scheduler) for admission in play(scheduler, step)]
        assert step["admitted"] == answers, f"step {number}: {step}; {scenario['lesson']}"
