"""The script of a pool of several engines, called directly: patience through all that moves a ticket, and caps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import redis

from sidecar.policy.rules import Shares
from sidecar.pools.base import Ask
from sidecar.pools.engines import EngineOffer, Found
from sidecar.pools.redis import protocol
from sidecar.pools.redis.protocol import Reply
from sidecar.scheduling.placement import PATIENCE_US, PATIENCE_US_PER_HIT
from tests.pools.fleet_scripted import ScriptedFleet, engines_policy
from tests.pools.harness import Clock
from tests.support.redis_servers import RedisServer

A, B = (EngineOffer(f"{name}#1", tokens=100, requests=10, prefill=20) for name in "ab")
HIT = 20
PATIENT_FOR_US = PATIENCE_US + PATIENCE_US_PER_HIT * HIT
FILLS = Ask(0, "t", 1, 95, 1, prompt=10)
WAITS = Ask(0, "t", 1, 20, 1, prompt=20, hits=(("a#1", HIT),))
"""It has its prompt on a, which `FILLS` fills; b has room for it."""


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[Any]:
    with redis.Redis(host=redis_server.host, port=redis_server.port) as client:
        client.flushall()
        yield client


def replica_of(client: Any, clock: Clock, name: str = "replica-a", *offers: EngineOffer) -> ScriptedFleet:
    replica = ScriptedFleet(client, clock, engines_policy((Shares("only"),)), name)
    replica.sync(*protocol.engines(offers or (A, B), (), clock.us), known=1)
    return replica


def enters(replica: ScriptedFleet, lease_id: int, ask: Ask) -> Reply:
    return replica.call(*protocol.placing(ask), *protocol.enter(lease_id, ask, None))


def claims(replica: ScriptedFleet, first: int = 1) -> None:
    """Engine a is full of `first`; the next one claims it."""
    assert placed(enters(replica, first, FILLS)) == {first: "a#1"}
    replica.call(protocol.PREFILLED, first)
    reply = enters(replica, first + 1, WAITS)
    assert (placed(reply), reply.change_after_us) == ({}, PATIENT_FOR_US)


def placed(reply: Reply) -> dict[int, str | None]:
    return {lease_id: wait and wait.engine for lease_id, wait in reply.grants}


def later(replica: ScriptedFleet, by_us: int) -> dict[int, str | None]:
    replica.clock.us += by_us
    return placed(replica.call())


def states(replica: ScriptedFleet, lease_id: int, ask: Ask, engine: str | None = None) -> list[Any]:
    if engine is None:
        return [*protocol.placing(ask), *protocol.statement(lease_id, ask, 0)]
    return [*protocol.on_engine(engine, 0), *protocol.statement(lease_id, ask, None)]


def test_a_claimant_without_patience_enters_another_engine_and_the_grant_says_why(client: Any) -> None:
    replica = replica_of(client, Clock())
    claims(replica)
    assert later(replica, PATIENT_FOR_US - 1) == {}
    replica.clock.us += 1
    ((lease_id, wait),) = replica.call().grants
    assert (lease_id, wait and wait.engine) == (2, "b#1")
    assert wait
    assert (wait.found, wait.claimed_us) == (Found(100, 10, 0, 0, 0), PATIENT_FOR_US)


def test_another_call_of_any_replica_sees_the_patience_end(client: Any) -> None:
    clock = Clock()
    one, other = replica_of(client, clock), replica_of(client, clock, "replica-b")
    claims(one)
    for _ in range(PATIENT_FOR_US // 1_000_000):
        clock.us += 1_000_000
        one.call(kind=protocol.BEAT)
        other.call(kind=protocol.BEAT)
    assert placed(one.call()) == {}
    assert later(other, PATIENT_FOR_US % 1_000_000) == {}
    assert placed(one.call()) == {2: "b#1"}


def test_a_ticket_that_had_to_return_to_its_queue_keeps_its_patience(client: Any) -> None:
    """The 17th claimant does, as long as there are 16 before it."""
    policy = engines_policy((Shares("high"), Shares("low")))
    replica, low = ScriptedFleet(client, Clock(), policy), msgspec.structs.replace(WAITS, tier=1)
    replica.sync(*protocol.engines([A, B._replace(speed=1)], (), 0), known=1)
    enters(replica, 1, FILLS)
    replica.call(protocol.PREFILLED, 1)
    busy = Ask(0, "t", 1, 10, 1, prompt=B.prefill - 1, barred=("a",))
    assert placed(enters(replica, 60, busy)) == {60: "b#1"}
    for number in range(2, 18):
        replica.clock.us += 1
        enters(replica, number, low)
    assert len(claimants(client, replica)) == 16
    replica.clock.us += 1_000_000
    enters(replica, 50, WAITS)
    assert sorted(claimants(client, replica)) == [*range(2, 17), 50]
    replica.clock.us += 1_000_000
    for number in (50, *range(2, 17)):
        replica.call(protocol.END, number)
    assert claimants(client, replica) == [17]
    replica.call(protocol.PREFILLED, 60)
    assert later(replica, PATIENT_FOR_US - 2_000_001) == {}
    assert later(replica, 1) == {17: "b#1"}


@pytest.mark.parametrize(("on_b", "engine"), [(HIT, "b#1"), (HIT - 1, None)])
def test_an_engine_with_room_and_no_less_of_the_prompt_is_not_waited_beside(
    client: Any, on_b: int, engine: str | None
) -> None:
    replica = replica_of(client, Clock(), "replica-a", A, B._replace(speed=A.speed))
    assert placed(enters(replica, 1, FILLS)) == {1: "a#1"}
    replica.call(protocol.PREFILLED, 1)
    busy = Ask(0, "t", 1, B.tokens // 2, 1, prompt=1, barred=("a",))
    assert placed(enters(replica, 2, busy)) == {2: "b#1"}
    both = msgspec.structs.replace(WAITS, hits=(("a#1", HIT), ("b#1", on_b)))
    assert placed(enters(replica, 3, both)).get(3) == engine


def test_sixteen_claimants_of_a_busy_engine_keep_no_other_from_an_idle_one(client: Any) -> None:
    replica = replica_of(client, Clock(), "replica-a", A, B._replace(speed=10))
    claims(replica)
    for number in range(3, 17):
        assert placed(enters(replica, number, WAITS)) == {}
    assert placed(enters(replica, 17, WAITS)) == {17: "b#1"}, "the last that the walk places"


def claimants(client: Any, replica: ScriptedFleet) -> list[int]:
    (key,) = client.keys(f"{replica.root}:*:r:{replica.name}")
    return [int(lease_id) for lease_id, record in client.hgetall(key).items() if record.startswith(b"C ")]


def test_a_parked_ticket_keeps_its_patience(client: Any) -> None:
    """Its replica reaches no engine for a while, and others are admitted meanwhile."""
    clock = Clock()
    one, other = replica_of(client, clock), replica_of(client, clock, "replica-b")
    assert placed(enters(other, 9, FILLS)) == {9: "a#1"}
    other.call(protocol.PREFILLED, 9)
    assert enters(one, 2, WAITS).change_after_us is not None
    clock.us += 1_000_000
    one.call(protocol.CUT_OFF)
    other.call(kind=protocol.BEAT)
    (key,) = client.keys(f"{one.root}:*:r:replica-a")
    assert client.hget(key, 2).startswith(b"P ")
    clock.us += 1_000_000
    one.sync(*protocol.engines([A, B], (), clock.us), *states(one, 2, WAITS), known=2, installs=False)
    assert client.hget(key, 2).startswith(b"C ")
    for _ in range(3):
        clock.us += 1_000_000
        other.call(kind=protocol.BEAT)
        assert placed(one.call(kind=protocol.BEAT)) == {}
    assert later(one, PATIENT_FOR_US % 1_000_000 - 1) == {}
    assert later(one, 1) == {2: "b#1"}


def test_a_ticket_that_is_stated_anew_is_patient_from_then_on(client: Any) -> None:
    replica = replica_of(client, Clock())
    claims(replica)
    replica.clock.us += PATIENT_FOR_US - 1
    client.flushall()
    stated = [*states(replica, 1, FILLS, "a#1"), *states(replica, 2, WAITS)]
    reply = replica.sync(*protocol.engines([A, B], (), replica.clock.us), *stated, known=1)
    assert (placed(reply), reply.waiting, reply.leases) == ({}, 1, 1)
    assert reply.change_after_us == PATIENT_FOR_US
    assert later(replica, PATIENT_FOR_US - 1) == {}
    assert later(replica, 1) == {2: "b#1"}


def test_a_lease_that_is_handed_back_starts_without_a_claim(client: Any) -> None:
    replica = replica_of(client, Clock())
    claims(replica)
    assert later(replica, PATIENT_FOR_US) == {2: "b#1"}
    again = protocol.requeue(2, WAITS, 0, 1, is_handed_back=True)
    reply = replica.call(*protocol.placing(WAITS), *again)
    assert (placed(reply), reply.change_after_us) == ({}, PATIENT_FOR_US)
    assert later(replica, PATIENT_FOR_US - 1) == {}
    assert later(replica, 1) == {2: "b#1"}


def test_a_cap_rises_with_each_answer_and_never_after_its_end(client: Any) -> None:
    replica, small = replica_of(client, Clock(), "replica-a", A), Ask(0, "t", 1, 5, 1, prompt=1)
    for number in (1, 2):
        assert placed(enters(replica, number, small)) == {number: "a#1"}
    replica.call(*protocol.cap("a#1", 0, 1_000_000))
    for number in (3, 4, 5):
        assert placed(enters(replica, number, small)) == {}
    assert placed(replica.call(*protocol.raise_cap("none#1", 1))) == {}
    assert placed(replica.call(*protocol.raise_cap("a#1", 1))) == {3: "a#1"}
    assert replica.ledgers()["a#1"][15] == 3
    assert later(replica, 999_999) == {}
    assert later(replica, 1) == {4: "a#1", 5: "a#1"}
    replica.call(*protocol.raise_cap("a#1", 4))
    assert replica.ledgers()["a#1"][14:16] == [0, 3]
    assert "none#1" not in replica.ledgers()


def test_the_time_in_which_a_ticket_fits_the_pool_and_no_engine_is_the_pools(client: Any) -> None:
    replica = replica_of(client, Clock())
    for number in (1, 2):
        enters(replica, number, Ask(0, "t", 1, 60, 1, prompt=1))
    replica.clock.us += 5_000_000
    assert enters(replica, 3, Ask(0, "t", 1, 70, 1, prompt=1)).blocked_us == 0  # 80 are free, 40 on each
    replica.clock.us += 2_000_000
    assert replica.call().blocked_us == 2_000_000
    assert placed(enters(replica, 4, Ask(0, "t", 1, 10, 1, prompt=1))) == {4: "b#1"}
    replica.clock.us += 1_000_000
    reply = replica.call(protocol.END, 1)
    assert (placed(reply), reply.blocked_us) == ({3: "a#1"}, 3_000_000)
    replica.clock.us += 1_000_000
    assert replica.call().blocked_us == 3_000_000
