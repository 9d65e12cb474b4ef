"""Random operations on several engines by gain: the Lua script, the scheduler of one process and the oracle agree."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pools.fleet_scripted import GainTriplets, ScriptedGainFleet, TwoGainReplicas
from tests.pools.test_fleet_differential import everything_ends, only_moments, play_two
from tests.support.redis_servers import RedisServer, first_binary
from tests.support.walks import random_walks

sys.path.insert(0, str(Path(__file__).parents[1] / "scheduling"))

from fleets import NAMES, OFTEN, hot_ticket, operate, random_ticket
from strategies import random_policy
from test_gain_fleet import policy_by
from test_gain_oracle import by_gain

TICKETS = {"any": random_ticket, "hot": hot_ticket}


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[Any]:
    with redis.Redis(host=redis_server.host, port=redis_server.port) as client:
        yield client


def run(client: Any, kind: str, seed: int, steps: int) -> GainTriplets:
    """So many random operations, each followed by a decision of all three. Then everything ends."""
    client.flushall()
    luck = random.Random(seed)
    triplets = GainTriplets(policy_by(luck, seed), seed=seed).open(client)
    for name in NAMES[: luck.randint(1, 5)]:
        triplets.set_engine(name)
    triplets.dispatch()
    for _ in range(steps):
        operate(triplets, luck, TICKETS[kind])
        triplets.dispatch()
    everything_ends(triplets)
    return triplets


@random_walks(3)
def test_a_real_server_chooses_engines_by_gain_as_one_process_does(client: Any, seed: int) -> None:
    assert run(client, sorted(TICKETS)[seed // 2 % 2], seed, 150).admitted


@random_walks(1)
def test_engines_that_a_replica_cannot_use_are_as_barred_for_its_requests(
    client: Any, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setitem(OFTEN, "pause", 0)  # the one replica that cannot reach any engine is another matter
    monkeypatch.setattr("fleets.some_time", only_moments)
    client.flushall()
    luck = random.Random(seed)
    two = TwoGainReplicas(by_gain(random_policy(luck), Fraction(1, 4)), seed=seed)
    assert play_two(client, two, luck, 100)


@pytest.mark.long
@pytest.mark.parametrize(
    ("right", "wrong", "first"),
    [
        ("ticket.charged_from = math.max(lane.finish, lane.start)", "ticket.charged_from = lane.finish", ("hot", 79)),
        # Claims have no order.
        ("return ticket.patient_until - pool.patience_of(ticket)", "return LATEST_US", ("hot", 6)),
        ("if place == kept then found = kept end", "", ("hot", 0)),  # no claimant keeps its engine
        ("found[ticket.sequence], is_first = CLASS_INSIDE, false", "found[ticket.sequence] = CLASS_INSIDE", ("hot", 3)),
        ("if not owes or pool.is_small(ticket) then", "do", ("any", 8)),
        # Claims by gain fill floors, too.
        ("(not last or is_before_in_fair_order(ticket, last))", "true", ("any", 3)),
        (
            "is_below_floor(level) and tiers[level][FLOOR_PREFILL] < rules",
            "is_below_floor(level) and 0 <= rules",
            ("any", 6),
        ),
        ("if meta[WAITING] > 0 then pool.refresh_densities() end", "", ("hot", 5)),
        ("function pool.engines_that_work() return math.max(1, #pool.taking()) end", "", ("any", 5)),
        ("if tiers[level][ASIDE] > 0 then pool.bring_back(level, tenant) end", "", ("hot", 26)),
        ("if claimant.gain and not claimant.is_urgent then pool.forget_deadline(claimant) end", "", ("hot", 66)),
        ("if best and best.sequence == ticket.sequence then fleet[SAME_UNTIL] = 0 end", "", ("hot", 18)),
        ("return lease.engine == pool.target and is_eligible", "return is_eligible", ("any", 44)),
        ("ticket.start, lane.finish = ticket.charged_from, ticket.charge", "lane.finish = ticket.charge", ("any", 58)),
    ],
)
def test_another_rule_in_the_script_is_noticed(
    servers: Any, monkeypatch: pytest.MonkeyPatch, right: str, wrong: str, first: tuple[str, int]
) -> None:
    """The negative controls, each with the run that notices it at present; else another must."""
    server = servers[first_binary().name]
    assert ScriptedGainFleet.source is not None
    assert right in ScriptedGainFleet.source
    monkeypatch.setattr(ScriptedGainFleet, "source", ScriptedGainFleet.source.replace(right, wrong))
    with (  # noqa: PT012
        redis.Redis(host=server.host, port=server.port) as client,
        pytest.raises((AssertionError, redis.ResponseError)),
    ):
        for kind, seed in (first, *product(sorted(TICKETS), range(60))):
            run(client, kind, seed, 150)


@pytest.mark.soak
@given(kind=st.sampled_from(sorted(TICKETS)), seed=st.integers(0, 10**9))
@settings(max_examples=1000)
def test_a_real_server_chooses_engines_by_gain_as_one_process_does_for_long(
    redis_server: RedisServer, kind: str, seed: int
) -> None:
    with redis.Redis(host=redis_server.host, port=redis_server.port) as client:
        run(client, kind, seed, 300)
