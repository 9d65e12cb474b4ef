"""Drains and restarts of engines while the store is away, and while a replica states what it has."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sidecar.events import StoreState
from sidecar.pools import Pool
from sidecar.pools.calls import Call
from sidecar.pools.engines import EngineOffer
from sidecar.pools.ledger import Ledger
from tests.pools.harness import simple
from tests.pools.scripted_link import Replicas

pytestmark = pytest.mark.anyio
A, B = EngineOffer("a#1", 100, 10), EngineOffer("b#1", 100, 10)
RESTARTED = A._replace(id="a#2")
LOST_S, BACK_S = 5, 5


async def two() -> Replicas:
    all_of_them = Replicas(simple(), weight_percent=200)
    for pool in all_of_them.pools:
        pool.set_engines([A, B])
    return await all_of_them.joined()


async def lost(all_of_them: Replicas) -> None:
    all_of_them.cut()
    await all_of_them.pass_s(LOST_S)
    assert not [pool for pool in all_of_them.pools if pool.status.state is StoreState.SHARED]


async def back(all_of_them: Replicas) -> None:
    all_of_them.cut(is_cut=False)
    await all_of_them.pass_s(BACK_S)
    assert [pool.status.state for pool in all_of_them.pools] == [StoreState.SHARED] * 2


@pytest.mark.hasty
async def test_a_loss_is_not_explained_by_the_one_before() -> None:
    all_of_them = await two()
    await lost(all_of_them)
    assert [pool.status.reason for pool in all_of_them.pools] == ["cut off"] * 2
    await back(all_of_them)
    for link in all_of_them.links:
        link.send = lambda call, user: None  # type: ignore[method-assign]
    await all_of_them.pass_s(LOST_S)
    assert [pool.status.reason for pool in all_of_them.pools] == ["no answer in time"] * 2


def takes(pool: Pool) -> dict[str, bool]:
    """The engines, and whether each takes new requests, by the ledger's latest answer."""
    return {engine.id: engine.takes_new for engine in pool.engines()}


def in_the_next_statement(all_of_them: Replicas, act: Callable[[], None]) -> None:
    """Does something while the answer to the first replica's next statement is on its way."""
    link = all_of_them.links[0]
    send, done = link.send, list[Call]()

    def sends(call: Call, user: Pool) -> None:
        send(call, user)
        if call.kind == "state" and not done:
            done.append(call)
            act()

    link.send = sends  # type: ignore[method-assign, assignment]


async def test_a_drained_engine_that_restarts_without_the_store_does_not_drain_in_an_empty_one() -> None:
    all_of_them = await two()
    all_of_them.pools[0].drain_engine("a", drains=True)
    await all_of_them.pass_s(2)
    assert [takes(pool)["a#1"] for pool in all_of_them.pools] == [False] * 2
    await lost(all_of_them)
    for pool in all_of_them.pools:
        pool.set_engines([RESTARTED, B])
    all_of_them.ledger = Ledger()
    await back(all_of_them)
    assert [takes(pool)["a#2"] for pool in all_of_them.pools] == [True] * 2


async def test_a_drain_that_was_not_answered_is_not_said_again_of_an_engine_that_others_saw_restart() -> None:
    all_of_them = await two()
    late, other = all_of_them.pools
    late.elsewhere.on_incarnation = lambda _, number, __: late.set_engines([A._replace(id=f"a#{number}"), B])
    await lost(all_of_them)
    late.drain_engine("a", drains=True)
    all_of_them.links[1].is_cut = False
    await all_of_them.pass_s(BACK_S)
    other.set_engines([RESTARTED, B])
    await all_of_them.pass_s(1)
    assert takes(other)["a#2"]
    await back(all_of_them)
    await all_of_them.pass_s(15)
    assert takes(other)["a#2"]
    assert takes(late) == {"a#2": True, "b#1": True}


async def test_a_drain_that_is_said_during_a_statement_reaches_all_replicas() -> None:
    all_of_them = await two()
    one, two_ = all_of_them.pools
    heard: list[tuple[str, bool]] = []
    one.elsewhere.on_drain = lambda name, does: heard.append((name, does))
    await lost(all_of_them)
    in_the_next_statement(all_of_them, lambda: one.drain_engine("a", drains=True))
    await back(all_of_them)
    assert [takes(pool)["a#1"] for pool in all_of_them.pools] == [False] * 2
    assert ("a", False) not in heard
    two_.drain_engine("a", drains=False)
    await all_of_them.pass_s(2)
    assert [takes(pool)["a#1"] for pool in all_of_them.pools] == [True] * 2
    assert heard[-1] == ("a", False)


async def test_an_engine_that_restarts_during_a_statement_is_known_to_all_replicas() -> None:
    all_of_them = await two()
    await lost(all_of_them)
    in_the_next_statement(all_of_them, lambda: all_of_them.pools[0].set_engines([RESTARTED, B]))
    await back(all_of_them)
    assert [takes(pool)["a#2"] for pool in all_of_them.pools] == [True] * 2
