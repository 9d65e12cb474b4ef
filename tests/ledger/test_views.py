"""Replicas that see different engines, at different times: what cannot enter one neither waits for it nor blocks it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import redis

from sidecar.policy.rules import Shares
from sidecar.pools.calls import HOLD_US, LAYOUT, Bid, Call, Cell, EngineView, Reply
from sidecar.scheduling.engines import ScheduledEngine
from sidecar.scheduling.figures import Rules
from sidecar.scheduling.scheduler import PATIENCE_US, Scheduler
from sidecar.scheduling.tickets import Ticket
from tests.ledger.player import rules_told
from tests.ledger.replica import pool_rules
from tests.ledger.stored_ledger import Both, StoredLedger
from tests.ledger.world import World
from tests.support.each import each
from tests.support.redis_servers import RedisServer, first_binary

pytestmark = pytest.mark.hasty


class Apart:
    """Three replicas, each with an engine of two requests, and `x` without one. One tenant asks at all of them."""

    def __init__(self, *tiers: str) -> None:
        self.scheduler = Scheduler(Rules(tuple(map(Shares, tiers))))
        self.ids = count(1)
        self.scheduler.set_engines(
            ScheduledEngine(f"{own}#1", tokens=100, requests=2, unreachable_for=frozenset(others))
            for own, others in (("a", "bcx"), ("b", "acx"), ("c", "abx"))
        )

    def ask(self, owner: str, times: int = 1, tier: int = 0, at_us: int = 0) -> list[str]:
        """So many requests come at once. Returns the owners of those that are admitted now."""
        for number in (next(self.ids) for _ in range(times)):
            ticket = Ticket(str(number), tier, "tenant", 1, arrived_us=at_us, owner=owner, number=number)
            self.scheduler.add(ticket)
        return self.admitted(at_us)

    def admitted(self, at_us: int) -> list[str]:
        grants = self.scheduler.decide(at_us)
        assert all(grant.engine == f"{grant.ticket.owner}#1" for grant in grants)
        return [grant.ticket.owner for grant in grants]

    @property
    def line(self) -> list[str]:
        return [ticket.owner for ticket in self.scheduler.line]


def test_a_queue_at_one_keeps_nobody_from_another() -> None:
    pool = Apart("only")
    assert pool.ask("a", 20) == ["a", "a"]
    assert pool.ask("b", 3, at_us=1) == ["b", "b"]


def test_each_has_its_own_places_in_line() -> None:
    pool = Apart("only")
    pool.ask("a", 20)
    assert pool.line == ["a"]
    pool.ask("b", 5, at_us=1)
    assert pool.line == ["a", "b"]


def test_a_long_wait_at_one_stops_nobody_at_another() -> None:
    pool = Apart("high", "low")
    pool.ask("a", 4)
    late_us = PATIENCE_US + 1
    assert pool.ask("b", at_us=late_us) == ["b"]
    assert pool.ask("b", tier=1, at_us=late_us) == ["b"]


def test_one_that_sees_no_engine_keeps_nobody_waiting() -> None:
    pool = Apart("only")
    assert pool.ask("x", 20) == []
    assert pool.line == []
    assert pool.ask("a", 3, at_us=1) == ["a", "a"]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoredLedger]:
    with RedisServer(first_binary(), tmp_path_factory.mktemp("server")) as running:
        yield StoredLedger(redis.Redis(port=running.port), as_function=True)


@each("profile", ("calm", "engines"))
def test_both_ledgers_answer_the_same(profile: str, stored: StoredLedger) -> None:
    stored.client.flushdb()
    world = World(1, profile, replicas=3, engines=[6, 10, 14], rate=1.2)
    for replica, own in zip(list(world.replicas.values()), world.engines, strict=True):
        for other in world.engines.values():
            if other.name != own:
                world.links_down.add((replica.name, other.name))
                world.see(replica, other)
    world.store = Both(stored)
    world.run()


# -- what replicas say of an engine, and of each other, in both ledgers


@pytest.fixture
def both(stored: StoredLedger) -> Both:
    stored.client.flushdb()
    return Both(stored)


def states(both: Both, who: str, number: int, tokens: int, at_s: float) -> Reply:
    view = [EngineView("e#1", tokens, 10, 10, 1_000, True)]
    call = Call(LAYOUT, who, number, "state", whole=True, rules=pool_rules([("a", 0.0)]), engines=view, replaces=True)
    return both.execute(call, round(at_s * 1e6))[0]


def test_who_states_again_what_it_saw_before_does_not_replace_what_another_has_seen_since(both: Both) -> None:
    sizes = [
        states(both, who, number, tokens, 1 + number).config
        for who, number, tokens in (("old", 1, 40), ("new", 2, 70), ("old", 3, 40), ("old", 4, 50))
    ]
    assert [engine.tokens for config in sizes for engine in config or ()] == [40, 70, 70, 50]


def test_silence_after_the_last_goodbye_begins_no_epoch(both: Both) -> None:
    """Nobody may have admitted anything alone. Where one is silent without a goodbye, it may have."""
    assert states(both, "first", 1, 10, 1).on_hold, "a new pool"
    both.execute(Call(LAYOUT, "first", 2, "bye"), 2_000_000)
    assert not states(both, "second", 1, 10, 100).on_hold
    held = states(both, "third", 1, 10, 103)
    assert (held.on_hold, held.next_us) == (True, HOLD_US)
    assert states(both, "third", 2, 10, 104).on_hold
    assert not states(both, "third", 3, 10, 103 + HOLD_US / 1e6).on_hold


def test_whoever_has_the_most_to_take_back_is_asked_and_for_a_second_nobody_else(both: Both) -> None:
    rules = rules_told(
        {"tiers": [{"name": "a", "preempt_after_s": 0}, {"name": "b", "preemptible": True}], "max_preemptions": 1}
    )
    numbers, woken = dict.fromkeys("xyz", 0), []

    def call(who: str, at_us: int, **changes: Any) -> Reply:
        numbers[who] += 1
        reply, wake_ups = both.execute(Call(LAYOUT, who, numbers[who], **{"kind": "call", **changes}), at_us)
        woken.extend(wake_up.to for wake_up in wake_ups if wake_up.is_asked)
        return reply

    for who, tokens in (("x", 3), ("y", 4), ("z", 0)):
        held = [Cell("b", "e#1", tokens, 1)] if tokens else []
        view = [EngineView("e#1", 7, 10, 10, 1_000, True)]
        call(who, 1, kind="state", whole=True, rules=rules, engines=view, cells=held, knew=3)
    call("z", 1, bids=[Bid(1, "a", "t", 5, 1, 1, 1, {}, [], 0, 1)])
    assert [call(who, 1_000_000).shortage is not None for who in "xzy"] == [False, False, True]
    assert woken == ["y"]
    call("y", 1_000_000, leaving=[Cell("b", "e#1", 4, 1)])
    assert (woken, call("x", 1_000_000).shortage is not None) == (["y", "x"], True)


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_grant_that_is_not_acknowledged_counts_until_its_replica_is_dead(is_silent: bool, both: Both) -> None:
    """Beside what the replica stated, also in a new epoch; then both are free."""
    view, rules = [EngineView("e#1", 10, 10, 10, 1_000, True)], pool_rules([("a", 0.0)])
    cells = [Cell("a", "e#1", 2)]
    both.execute(Call(LAYOUT, "x", 1, "state", whole=True, rules=rules, engines=view, knew=1, cells=cells), 1)
    asks = Call(LAYOUT, "x", 2, "call", bids=[Bid(1, "a", "t", 3, 1, 1, 1, {}, [], 0, 1)])
    assert len(both.execute(asks, 200_000)[0].grants) == 1
    held = []
    for number in range(1, 8):
        call = Call(LAYOUT, "y", number, "state", whole=True, rules=rules, engines=view, knew=2)
        held.append(both.execute(call, (2 * number + is_silent) * 1_000_000)[0].held[0].tokens)
    assert (held[0], held[-1]) == (5, 0)
