"""Random operations on several engines by gain: the Lua script, the scheduler of one process and the oracle agree."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fakeredis
import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pools.fleet_scripted import GainTriplets
from tests.pools.test_fleet_differential import everything_ends
from tests.support.redis_servers import RedisServer

sys.path.insert(0, str(Path(__file__).parents[1] / "scheduling"))

from fleets import NAMES, hot_ticket, operate, random_ticket
from test_gain_fleet import policy_by

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


@pytest.mark.parametrize("kind", TICKETS)
def test_the_fake_redis_chooses_engines_by_gain_as_one_process_does(kind: str) -> None:
    run(fakeredis.FakeRedis(server=fakeredis.FakeServer(version=(7,))), kind, 7, 60)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", TICKETS)
def test_a_real_server_chooses_engines_by_gain_as_one_process_does(client: Any, kind: str, seed: int) -> None:
    assert run(client, kind, seed, 150).admitted


@pytest.mark.soak
@given(kind=st.sampled_from(sorted(TICKETS)), seed=st.integers(0, 10**9))
@settings(max_examples=1000, deadline=None, database=None)
def test_a_real_server_chooses_engines_by_gain_as_one_process_does_for_long(
    redis_server: RedisServer, kind: str, seed: int
) -> None:
    with redis.Redis(host=redis_server.host, port=redis_server.port) as client:
        run(client, kind, seed, 300)
