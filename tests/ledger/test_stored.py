"""The ledger in a store: the same bytes as the ledger in the process, whatever a replica says."""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import fakeredis
import msgspec
import pytest
import redis

from sidecar.pools import ledger
from sidecar.pools.calls import LAYOUT, Bid, Call, Cell, EngineView, Reply
from tests.ledger.player import LedgerPlayer, rules_told
from tests.ledger.stored_ledger import OLD_POOLS, ROOT, Both, StoredLedger
from tests.ledger.world import PROFILES, World
from tests.scheduling.player import first_difference
from tests.scheduling.programs import programs, scenarios
from tests.support.each import each

os.environ["LUA_PATH"] = f"{Path(__file__).parents[1] / 'support' / 'lua'}/?.lua;;"
pytestmark = pytest.mark.hasty  # the time is the world's: replicas are as patient as they are


@pytest.fixture
def store(server: Any) -> Any:
    server.flushdb()
    return server


def fake() -> Any:
    return fakeredis.FakeRedis(server=fakeredis.FakeServer(version=(7,)), lua_modules={"struct", "cmsgpack"})


# -- in the world of faults: what replicas say to one another


def play(stored: StoredLedger, seed: int, profile: str) -> None:
    stored.client.flushdb()
    world = World(seed, profile)
    world.store = Both(stored)
    world.do_lost_bids = lambda _: None  # a fault in the one ledger only
    world.run()


@each("profile", ("all", "rules"))
def test_a_function_answers_the_same_under_faults(profile: str, store: Any) -> None:
    play(StoredLedger(store, as_function=True), 1, profile)


def test_a_script_answers_the_same_under_faults(store: Any) -> None:
    play(StoredLedger(store), 2, "all")


@pytest.mark.soak
@each("profile", PROFILES)
def test_it_answers_the_same_in_more_runs(profile: str, store: Any) -> None:
    for seed in range(2, 12):
        play(StoredLedger(store, as_function=seed % 2 == 0), seed, profile)


# -- scenarios and programs: every rule


@pytest.fixture
def time_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "LOST_US", 10**15)
    monkeypatch.setattr(ledger, "DEAD_US", 10**15)


@pytest.fixture
def patient(store: Any, time_does_not_matter: None) -> StoredLedger:
    return StoredLedger(store, as_function=True, is_patient=True)


def both(stored: StoredLedger) -> Both:
    stored.client.flushdb()
    return Both(stored)


def wrong(stored: StoredLedger, played: Iterable[dict[str, Any]]) -> list[str]:
    def player(program: dict[str, Any]) -> LedgerPlayer:
        return LedgerPlayer(program, both(stored))

    return [found for program in played if (found := first_difference(program, player))]


def test_it_gives_the_answers_of_scenarios(patient: StoredLedger) -> None:
    assert wrong(patient, scenarios()[::6]) == []


def test_it_answers_random_programs_as_the_reference(patient: StoredLedger) -> None:
    assert wrong(patient, programs([*range(12), 34, 83])) == []


@pytest.mark.usefixtures("time_does_not_matter")
def test_it_answers_programs_as_the_reference_in_a_fake() -> None:
    assert wrong(StoredLedger(fake(), is_patient=True), programs(range(4))) == []


@pytest.mark.soak
def test_it_gives_the_answers_of_all_scenarios_and_programs(patient: StoredLedger) -> None:
    assert wrong(patient, [*scenarios(), *programs(range(500))]) == []


# -- who has missed a heartbeat


def test_who_has_missed_a_heartbeat_is_granted_nothing_until_it_states_anew(store: Any) -> None:
    """It may have been killed: then what it is granted is lost until it counts as dead."""
    held, numbers = Both(StoredLedger(store)), Counter[str]()

    def told(at_s: float, who: str, **news: Any) -> Reply:
        numbers[who] += 1
        first = statement() if "whole" in news else Call(LAYOUT, who, 1, "call")
        call = msgspec.structs.replace(first, who=who, number=numbers[who], **news)
        return held.execute(call, round(at_s * 1e6))[0]

    full, bid = Cell("a", "e#1", 10, 1), msgspec.structs.replace(BID, barred=[])
    for who in ("alive", "silent"):
        told(100, who, whole=True, cells=[full] if who == "alive" else [])
    for at_s in (101, 102.5, 103):
        told(at_s, "alive")
    assert told(103, "silent", bids=[bid]).grants == []
    assert told(105.1, "alive").waiting == 1
    assert told(105.3, "alive").waiting == 0
    assert told(106, "alive", cells=[Cell("a", "e#1")]).waiting == 0
    assert told(107, "silent", bid_count=1).kind == "unknown"
    assert [grant.bid for grant in told(107, "silent", whole=True, bids=[bid]).grants] == [bid.id]


# -- what is no call

RULES = rules_told({"tiers": [{"name": "a", "reserve": 0.5}, {"name": "b"}]})
VIEW = [EngineView("e#1", 10, 10, 10, 1000, True)]
BID = Bid(1, "a", "t", 2, 1, 3, 1, {"e#1": 1}, ["f"], 0, 1)


def statement(number: int = 1) -> Call:
    return Call(LAYOUT, "r", number, "state", whole=True, rules=RULES, engines=VIEW, knew=1)


def fields(**changes: Any) -> list[Any]:
    return msgspec.to_builtins(msgspec.structs.replace(Call(LAYOUT, "r", 2, "call", bids=[BID]), **changes))


def with_bid(place: int, value: Any) -> list[Any]:
    bid = msgspec.to_builtins(BID)
    bid[place] = value
    return fields(bids=[bid])


WRONG: dict[str, Any] = {
    "nothing": b"",
    "no msgpack": b"\xc1",
    "cut off": msgspec.msgpack.encode(fields())[:-3],
    "two records": msgspec.msgpack.encode(fields()) * 2,
    "a number": 7,
    "a map": {"who": "r"},
    "a layout that is a text": fields(layout="100"),
    "a number that is a fraction": fields(number=2.5),
    "a replica without a name": fields(who=None),
    "an unknown kind": fields(kind="go"),
    "cells that are a map": fields(cells={"a": 1}),
    "a cell without an engine": fields(cells=[["a"]]),
    "an engine without a number": fields(cells=[Cell("a", "e")]),
    "an engine with two numbers": fields(cells=[Cell("a", "e#01")]),
    "a negative sum": fields(cells=[Cell("a", "e#1", -1)]),
    "a list with a hole": fields(acks=[1, None, 3]),
    "a name with NUL": with_bid(2, "a\0b"),
    "a bid of a negative size": with_bid(3, -1),
    "a bid without a weight": with_bid(6, 0),
    "hits that are a list": with_bid(7, [1]),
    "barred engines that are numbers": with_bid(8, [1]),
    "a time before": with_bid(9, -5),
    "a gain without a slack": with_bid(11, [1, 1, 1, 1, 0]),
    "a tag that is a text": with_bid(13, "1"),
    "no tiers": msgspec.structs.replace(statement(2), rules=msgspec.structs.replace(RULES, tiers=[])),
    "a tier twice": msgspec.structs.replace(
        statement(2), rules=msgspec.structs.replace(RULES, tiers=RULES.tiers[:1] * 2)
    ),
    "a share above one": msgspec.structs.replace(statement(2), rules=msgspec.structs.replace(RULES, fair_ppm=10**7)),
    "a ceiling that is no level": msgspec.structs.replace(
        statement(2), rules=msgspec.structs.replace(RULES, ceiling=2)
    ),
    "a statement without rules": fields(kind="state"),
}


def everything(client: Any) -> dict[bytes, bytes]:
    return {key: client.dump(key) for key in client.keys("*")}


@each("as_function", (True, False))
def test_what_is_no_call_gets_an_error_and_changes_nothing(as_function: bool, store: Any) -> None:
    store.flushdb()
    stored = StoredLedger(store, as_function=as_function)
    stored.execute(statement(), 1_000)
    before = everything(store)
    for what, wrong in WRONG.items():
        packed = wrong if isinstance(wrong, bytes) else msgspec.msgpack.encode(wrong)
        with pytest.raises(redis.ResponseError, match="this is no call of the ledger"):
            stored.answer(packed, 2_000)
        assert everything(store) == before, what
    assert stored.execute(Call(LAYOUT, "r", 2, "call", bids=[BID]), 3_000)[0].kind == "ok"


# -- pools of the layouts before


def meta(last_call: int, offset: int, replicas: int) -> bytes:
    return struct.pack("<13d", 0, last_call, offset, *[0] * 9, replicas)


@each("as_function", (True, False))
def test_it_grants_nothing_beside_replicas_of_a_layout_before(as_function: bool, store: Any) -> None:
    store.flushdb()
    stored, number = StoredLedger(store, as_function=as_function), iter(range(1, 100))

    def told(now_us: int, **changes: Any) -> Reply:
        call = msgspec.structs.replace(
            statement(next(number)) if not changes else Call(LAYOUT, "r", next(number), "call"), **changes
        )
        return stored.execute(call, now_us)[0]

    for old in OLD_POOLS:
        store.hset(old, "meta", meta(1_000_000, 500_000, 2))
        assert (told(1_000_000).on_hold, told(1_100_000, bids=[BID]).grants) == (True, [])
        store.hset(old, "meta", meta(1_000_000, 500_000, 0))  # they said goodbye
        assert told(1_200_000, bids=[]).grants
        store.delete(old)
        told(1_300_000)
    store.hset(OLD_POOLS[0], "meta", meta(2_000_000, 0, 1))
    assert told(2_000_000, bids=[BID]).on_hold
    for seconds in range(3, 12):
        assert told(seconds * 1_000_000, bids=[]).on_hold
    assert told(12_000_000, bids=[]).grants  # killed


def test_a_pool_vanishes_an_hour_after_its_last_heartbeat(store: Any) -> None:
    stored = StoredLedger(store)
    stored.execute(msgspec.structs.replace(statement(), cells=[Cell("a", "e#1", 1, 1)]), 1_000)
    assert store.hget(ROOT, "layout") == str(LAYOUT).encode()
    assert [store.pttl(key) > 3_590_000 for key in store.keys("*")] == [True]
