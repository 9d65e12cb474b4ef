"""The users of a tenant take turns across a replica's bids, across replicas, and in the store, which remembers few."""

from __future__ import annotations

from typing import Any

import pytest

from sidecar.pools.member import Member
from tests.ledger.one_replica import OneReplica
from tests.ledger.player import LedgerPlayer
from tests.ledger.stored_ledger import ROOT, StoredLedger
from tests.support.each import each

pytestmark = pytest.mark.hasty
POOL: dict[str, Any] = {"tiers": [{"name": "t"}], "capacity": {"tokens": 10}}


def ask(name: str, user: str) -> dict[str, Any]:
    return {"do": "submit", "id": name, "tier": "t", "tenant": "a", "user": user, "tokens": 10}


def entering(pools: list[OneReplica], now: int) -> list[str]:
    return [ticket for pool in pools for ticket, _ in pool.pump(now)[0]]


def serve(pools: list[OneReplica], running: str, admissions: int) -> list[str]:
    """The next that enter, one for each that ends."""
    found = [running]
    for now in range(1, admissions + 1):
        for pool in pools:
            pool.do({"do": "settle", "id": found[-1]}, now * 1_000)
        found += [name for _ in range(3) for name in entering(pools, now * 1_000)]
    return found[1:]


@each("near", (None, Member))
def test_a_user_that_comes_after_a_flood_is_shown_before_most_of_it(near: Any) -> None:
    pool = OneReplica(POOL, near=near)
    for number in range(200):
        pool.do(ask(f"flood{number}", "flood"), 0)
    assert entering([pool], 0) == ["flood0"]
    pool.do(ask("one", "u"), 0)
    pool.do(ask("two", "v"), 0)
    assert serve([pool], "flood0", 4) == ["flood1", "one", "two", "flood2"]


def test_a_user_that_floods_two_replicas_has_one_turn_in_both_together() -> None:
    pools = [OneReplica(POOL), OneReplica(POOL)]
    pools[1].ledger = pools[0].ledger
    pools[1].member.who = "two"
    pools[1].member._due_us = 0
    entering(pools, 0)
    for number in range(100):
        pools[number % 2].do(ask(f"flood{number}", "flood"), 0)
    (running,) = entering(pools, 0)
    for number in range(3):
        pools[0].do(ask(f"one{number}", "u"), 0)
    entering(pools, 0)
    served = serve(pools, running, 6)
    assert [name for name in served if name.startswith("one")] == ["one0", "one1", "one2"]
    assert max(served.index(f"one{number}") for number in range(3)) <= 5


def test_the_store_remembers_no_user_of_whom_nothing_waits(server: Any) -> None:
    """Users who come once each, while others wait: the queue in the store does not grow with them."""
    server.flushdb()
    player, sizes = LedgerPlayer(POOL, StoredLedger(server, as_function=True, is_patient=True)), list[int]()
    for number in range(3):
        player.do(ask(f"{number}", f"{number}"), 0)
    for number in range(300):
        now = number * 1_000
        ((name, _),) = player.dispatch(now)
        player.do({"do": "settle", "id": name}, now)
        player.do(ask(f"{number + 3}", f"{number + 3}"), now)
        sizes.append(server.hstrlen(ROOT, "q:1"))
    assert max(sizes) < 400
