"""Every hand-checked scenario of several engines, step by step, on the oracle; and what plays them on others."""

from fleet_oracle import FleetOracle
from scenario_policy import OF_FLEETS, policy_of

from sidecar.policy.rules import UNLIMITED
from sidecar.pools.engines import EngineOffer
from sidecar.scheduling.fleet_scheduler import FleetScheduler


def offers_of(engines: list[dict]) -> list[EngineOffer]:
    return [
        EngineOffer(
            engine["id"],
            engine["tokens"],
            engine["requests"],
            engine.get("prefill", UNLIMITED),
            engine.get("speed", 1000),
            engine.get("takes_new", True),
            round(engine.get("ramp_s", 0) * 1e6),
            round(engine.get("since_s", 0) * 1e6),
        )
        for engine in engines
    ]


def play(pool: FleetScheduler | FleetOracle, step: dict, tiers: list[str]) -> list:
    now_us = round(step["at"] * 1e6)
    match step["do"]:
        case "submit":
            named = ("tokens", "requests", "prompt", "tenant", "weight", "hits", "barred")
            fields = {name: step[name] for name in named if name in step}
            pool.submit(step["id"], tier=tiers.index(step["tier"]), now_us=now_us, **fields)
        case "settle":
            pool.settle(step["id"], now_us)
        case "prefilled":
            pool.prefilled(step["id"], now_us)
        case "engines":
            pool.set_engines(offers_of(step["engines"]), now_us)
        case "cap":
            pool.cap(step["engine"], step["requests"], round(step["until"] * 1e6), now_us)
        case "cancel":
            cancel = (step["id"], now_us) if isinstance(pool, FleetScheduler) else (step["id"],)
            pool.cancel(*cancel)
        case "hand_back":
            if isinstance(pool, FleetScheduler):
                pool.bar(step["id"], step["barred"])
                pool.hand_back(step["id"], now_us, None)
            else:
                pool.hand_back(step["id"], now_us, step["barred"])
        case "wait":
            pass
        case unknown:
            raise ValueError(unknown)
    return pool.dispatch(now_us)


def test_the_oracle_gives_exactly_the_answers_worked_out_by_hand():
    wrong = []
    for scenario in OF_FLEETS:
        oracle, tiers = FleetOracle(policy_of(scenario)), [tier["name"] for tier in scenario["tiers"]]
        oracle.set_engines(offers_of(scenario["engines"]), 0)
        for number, step in enumerate(scenario["steps"]):
            found = [{"id": placed.answer.id, "engine": placed.engine} for placed in play(oracle, step, tiers)]
            if found != step["admitted"]:
                wrong.append(f"{scenario['name']}, step {number}: {step}, not {found}; {scenario['lesson']}")
    assert wrong == []


def answers(kind: type[FleetScheduler], scenario: dict) -> list:
    scheduler = kind(FleetOracle(policy_of(scenario)).rules_of)
    scheduler.set_engines(offers_of(scenario["engines"]), 0)
    tiers = [tier["name"] for tier in scenario["tiers"]]
    return [
        [{"id": admission.ticket.id, "engine": admission.engine} for admission in play(scheduler, step, tiers)]
        for step in scenario["steps"]
    ]


def recorded(scenario: dict) -> list:
    return [step["admitted"] for step in scenario["steps"]]
