"""Random operations on several engines: the Lua script, the scheduler of one process and the slow oracle all agree."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sidecar.policy.rules import UNLIMITED, Shares, pool_rules
from sidecar.pools.base import Ask
from sidecar.pools.engines import EngineOffer
from sidecar.pools.redis import protocol
from sidecar.pools.redis.script import joined
from sidecar.scheduling.claims import MOST_CLAIMANTS
from sidecar.scheduling.placement import PATIENCE_US
from tests.pools.fleet_scripted import ScriptedFleet, Triplets, TwoReplicas, engines_policy
from tests.pools.harness import Clock
from tests.support.redis_servers import RedisServer, first_binary
from tests.support.walks import random_walks

sys.path.insert(0, str(Path(__file__).parents[1] / "scheduling"))

from fleets import MOMENTS, NAMES, OFTEN, hot_ticket, operate, random_ticket
from oracle import Policy
from scenario_policy import OF_FLEETS, policy_of
from strategies import preempting_policy, random_policy
from test_fleet_scenarios import offers_of, recorded

KINDS: dict[str, tuple[Callable[[random.Random], Policy], Callable[..., dict[str, Any]]]] = {
    "any": (random_policy, random_ticket),
    "preempting": (preempting_policy, random_ticket),
    "hot": (preempting_policy, hot_ticket),
}
"""The policies and the tickets of a run."""


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[Any]:
    with redis.Redis(host=redis_server.host, port=redis_server.port) as client:
        yield client


def run(client: Any, kind: str, seed: int, steps: int) -> Triplets:
    """So many random operations, each followed by a decision of all three. Then everything ends."""
    client.flushall()
    luck, (policy, ticket) = random.Random(seed), KINDS[kind]
    triplets = Triplets(policy(luck)).open(client)
    for name in NAMES[: luck.randint(1, 5)]:
        triplets.set_engine(name)
    triplets.dispatch()
    for _ in range(steps):
        operate(triplets, luck, ticket)
        triplets.dispatch()
    everything_ends(triplets)
    return triplets


def everything_ends(triplets: Triplets) -> None:
    """Everyone gets in at last, and the store keeps nothing of anyone."""
    triplets.pause(is_paused=False)
    triplets.dispatch()  # what is said in the same call as a statement is lost
    triplets.hold_back(0)
    triplets.dispatch()
    triplets.set_engine("z", tokens=1000, requests=100, prefill=500)
    triplets.dispatch()
    for _ in range(len(triplets.oracle.waiting()) + 2):
        for lease in [*triplets.oracle.held()]:
            triplets.settle(lease.id)
            triplets.dispatch()
        triplets.now_us += 1_000
        triplets.dispatch()
    assert (triplets.reply.waiting, triplets.reply.leases) == (0, 0)
    assert [ledger[17:] for ledger in triplets.replica.ledgers().values()] == [[0] * 4] * len(triplets.offers)
    kinds = {key.decode().split(":")[4] for key in triplets.replica.client.keys(f"{triplets.replica.root}:*")}
    assert kinds <= {"beats", "r", "o", "e", "n", "i", "h"}


@random_walks(3)
def test_a_real_server_chooses_engines_as_one_process_does(client: Any, seed: int) -> None:
    assert run(client, sorted(KINDS)[seed % len(KINDS)], seed, 150).admitted


@pytest.mark.long
@pytest.mark.parametrize("redis_server", [first_binary().name], indirect=True)
def test_the_random_operations_reach_what_is_special_about_several_engines(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claims, full lists of claimants, victims, engines that are passed over, and claimants that lose patience."""
    monkeypatch.setitem(OFTEN, "charge", 0)  # these seeds are for the others
    most_claimants, victims, impatient, engines = 0, 0, 0, set()
    for seed in (17, 28, 43):
        client.flushall()
        luck = random.Random(seed)
        triplets = Triplets(preempting_policy(luck)).open(client)
        for name in NAMES[:4]:
            triplets.set_engine(name)
        for _ in range(200):
            operate(triplets, luck, hot_ticket)
            placed = triplets.dispatch()
            engines |= {it.engine for it in placed}
            impatient += sum(it.answer.queue_wait_us >= PATIENCE_US for it in placed)
            most_claimants = max(most_claimants, len(triplets.oracle.claimants()))
            victims += len(triplets.reply.victims)
    assert most_claimants == MOST_CLAIMANTS
    assert victims
    assert impatient > 10
    assert len(engines) > 4


def run_two(client: Any, seed: int, steps: int) -> int:
    """How many were admitted in a pool of two replicas, of which one cannot use some engines."""
    client.flushall()
    luck = random.Random(seed)
    return play_two(client, TwoReplicas(random_policy(luck)), luck, steps)


def play_two(client: Any, two: TwoReplicas, luck: random.Random, steps: int) -> int:
    """Random operations on a pool of two replicas."""
    two.open(client)
    for name in NAMES[: luck.randint(2, 5)]:
        two.set_engine(name)
        two.dispatch()
    for _ in range(steps):
        operate(two, luck)
        two.dispatch()
    return len(two.admitted)


def only_moments(_: object, luck: random.Random) -> int:
    """No replica is silent for so long that the store waits for it."""
    return luck.choice(MOMENTS)


@random_walks(1)
def test_engines_that_a_replica_cannot_use_are_as_barred_for_its_requests(
    client: Any, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setitem(OFTEN, "pause", 0)  # the one replica that cannot reach any engine is another matter
    monkeypatch.setattr("fleets.some_time", only_moments)
    assert run_two(client, seed, 100)


@pytest.mark.soak
@given(seed=st.integers(0, 10**9))
@settings(max_examples=200, suppress_health_check=list(HealthCheck))
def test_engines_that_a_replica_cannot_use_are_as_barred_for_long(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setitem(OFTEN, "pause", 0)
    monkeypatch.setattr("fleets.some_time", only_moments)
    with redis.Redis(host=redis_server.host, port=redis_server.port) as client:
        run_two(client, seed, 200)


@pytest.mark.soak
@given(kind=st.sampled_from(sorted(KINDS)), seed=st.integers(0, 10**9))
@settings(max_examples=1000)
def test_a_real_server_chooses_engines_as_one_process_does_for_long(
    redis_server: RedisServer, kind: str, seed: int
) -> None:
    with redis.Redis(host=redis_server.host, port=redis_server.port) as client:
        run(client, kind, seed, 300)


@pytest.mark.long
@pytest.mark.parametrize(
    ("right", "wrong", "first"),
    [
        # Others enter a claimed engine.
        ("not claims[best] and pool.has_engine_room", "pool.has_engine_room", ("any", 18)),
        ("loads[place] = loads[place] + prompt * HELD_PER_PREFILL", "local _ = prompt", ("preempting", 45)),
        ("if found == 'again' then return found end", "", ("hot", 8)),
        # An engine does not hear of a size.
        ("pool.book_engine(level, on_engine[1], tokens - held, 0, 0, 0)", "", ("any", 10)),
        # No one pays for a lease that grows.
        ("pool.charge_more(tonumber(id),", "local _ = select(1, tonumber(id),", ("hot", 13)),
        ("ticket.charged_from = math.max(lane.finish, ticket.start)", "ticket.charged_from = ticket.start", ("hot", 4)),
        ("on_engine[2], on_engine[3], on_engine[4] = 0, 0, 0", "", ("hot", 5)),
        ("or now < ticket.patient_until)", ")", ("hot", 4)),  # no claimant has patience
        ("or now < ticket.patient_until)", "or now <= ticket.patient_until)", ("hot", 3)),
        ("and pool.placed < pool.most_looked_at() - 1", "", ("hot", 16)),  # nor takes the last of a walk any engine
        ("(hits[ledger.id] or 0) > (hits[other.id] or 0) or ", "", ("any", 3)),  # no one waits for a cache
        ("or ledger[SPEED] > other[SPEED]", "", ("preempting", 7)),  # nor for a faster engine
        (
            "PATIENCE_US, PATIENCE_US_PER_HIT = 5000000, 500",
            "PATIENCE_US, PATIENCE_US_PER_HIT = 5000000, 499",
            ("any", 1),
        ),
        # The first is passed for ever.
        ("tiers[level][CLAIMANTS] > 0 and pool.kept_from_being_passed(level)", "false", ("preempting", 0)),
        # None passes the first.
        ("if first.is_claimant and now < first.patient_until then return nil end", "", ("hot", 23)),
        ("return pool.next_impatience(next_change_of_waiting())", "return next_change_of_waiting()", ("any", 1)),
    ],
)
def test_another_rule_in_the_script_is_noticed(
    servers: Any, monkeypatch: pytest.MonkeyPatch, right: str, wrong: str, first: tuple[str, int]
) -> None:
    """The negative controls, each with the run that notices it at present; else another must."""
    server = servers[first_binary().name]
    assert right in ScriptedFleet.source
    monkeypatch.setattr(ScriptedFleet, "source", ScriptedFleet.source.replace(right, wrong))
    with redis.Redis(host=server.host, port=server.port) as client, pytest.raises(AssertionError):  # noqa: PT012
        for kind, seed in (first, *product(sorted(KINDS), range(60))):
            run(client, kind, seed, 150)


# The scenarios that were worked out by hand.


# In a store an engine has one incarnation that takes new work; "ties" has two.
SHARED = [scenario for scenario in OF_FLEETS if scenario["name"] != "ties"]


def test_the_script_gives_exactly_the_answers_worked_out_by_hand(client: Any) -> None:
    wrong = []
    for scenario in SHARED:
        client.flushall()
        of_oracle = policy_of(scenario)
        policy = engines_policy(of_oracle.tiers, of_oracle.promote_after_us, of_oracle.ceiling)
        found = answers(client, policy, scenario)
        steps = enumerate(zip(found, recorded(scenario), scenario["steps"], strict=True))
        wrong += [
            f"{scenario['name']}, step {number}: {step}, not {answer}; {scenario['lesson']}"
            for number, (answer, right, step) in steps
            if answer != right
        ]
    assert wrong == []


def answers(client: Any, policy: Any, scenario: dict[str, Any]) -> list[Any]:
    clock = Clock()
    begun_us, tiers = clock.us, [tier["name"] for tier in scenario["tiers"]]
    replica = ScriptedFleet(client, clock, policy)
    replica.sync(*protocol.engines(offers_of(scenario["engines"]), (), 0))
    ids: dict[str, int] = {}
    asks: dict[str, Ask] = {}
    found = []
    for step in scenario["steps"]:
        clock.us = begun_us + round(step["at"] * 1e6)
        said = said_in(step, tiers, ids, asks, replica=replica, now_us=clock.us - begun_us)
        names = {number: name for name, number in ids.items()}
        grants = replica.call(*said).grants
        found.append([{"id": names[number], "engine": wait and wait.engine} for number, wait in grants])
    return found


def said_in(
    step: dict[str, Any],
    tiers: list[str],
    ids: dict[str, int],
    asks: dict[str, Ask],
    *,
    replica: ScriptedFleet,
    now_us: int,
) -> list[protocol.Argument]:
    name = step.get("id", "")
    match step["do"]:
        case "submit":
            ids[name] = len(ids) + 1
            hits = tuple((engine, tokens) for engine, tokens in step.get("hits", ()))
            asks[name] = ask = Ask(
                tiers.index(step["tier"]), step.get("tenant", ""), step.get("weight", 1), step["tokens"],
                step.get("requests", 1), prompt=step.get("prompt", 0), hits=hits, barred=tuple(step.get("barred", ())),
            )  # fmt: skip
            return [*protocol.placing(ask), *protocol.enter(ids[name], ask, None)]
        case "settle" | "cancel":
            return [protocol.END, ids[name]]
        case "prefilled":
            return [protocol.PREFILLED, ids[name]]
        case "engines":
            return [*protocol.engines(offers_of(step["engines"]), (), now_us)]
        case "cap":
            held = replica.ledgers()[step["engine"]][18]
            for_us = round(step["until"] * 1e6) - now_us
            return [*protocol.cap(step["engine"], held - step["requests"], for_us)]
        case "hand_back":
            barred = (*asks[name].barred, *step["barred"])
            asks[name] = ask = msgspec.structs.replace(asks[name], barred=barred)
            again = protocol.requeue(ids[name], ask, 0, 1, is_handed_back=True)
            return [*protocol.placing(ask), *again]
        case "wait":
            return []
        case unknown:
            raise ValueError(unknown)


# The rules of a pool of some size.

SOME_SHARES = [
    Fraction(0), Fraction(1), Fraction(1, 3), Fraction(2, 7), Fraction(999_999, 1_000_000),
    Fraction(123_456_789, 10**10), Fraction(1, 2**40), Fraction(2**40 - 1, 2**40),
]  # fmt: skip


@pytest.mark.parametrize("tokens", [1, 7, 400_000, 10**9 + 7, 2**52 + 1, UNLIMITED - 1])
def test_the_script_computes_the_rules_of_a_size_exactly(client: Any, tokens: int) -> None:
    for reserve in SOME_SHARES:
        shares = (Shares("one", reserve=reserve, lend=Fraction(2, 3) if reserve.denominator < 2**38 else Fraction(1)),)
        client.flushall()
        replica = ScriptedFleet(client, Clock(), engines_policy(shares))
        offer = EngineOffer("a#1", tokens, 5, prefill=max(1, tokens // 3))
        replica.sync(*protocol.engines([offer], (), 0))
        sized = json.loads(client.hget(replica.root, "sized"))
        rules = pool_rules(tokens=tokens, requests=5, prefill=offer.prefill, tiers=shares).tiers[0]
        figures = dict(zip(protocol.TIER_FIELDS, sized[5], strict=False))
        for name in ("reserve", "headroom", "limit"):
            for unit in ("tokens", "requests", "prefill"):
                field = f"{name}_{unit}"
                assert figures[field] == getattr(rules, field), (field, reserve)


def test_a_pool_without_engines_has_a_script_without_them() -> None:
    assert "engine_room" not in joined()
    assert "with engines" not in joined()
    assert "pool.has_engine_room" in joined(has_engines=True)
