"""What replicas of one pool tell each other of their engines, through the ledger in the store."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest

from sidecar.policy.store import store_address
from sidecar.pools.engines import EngineOffer
from sidecar.pools.ledger_pool import LedgerPool
from sidecar.pools.redis import RedisLink, ledger_connector
from tests.pools.harness import ask, simple, with_shares
from tests.pools.load import until
from tests.support.redis_servers import RedisServer

pytestmark = pytest.mark.anyio


def pool_on(server: RedisServer) -> LedgerPool:
    policy = replace(with_shares(simple()), pool="engines")
    link = RedisLink(ledger_connector(store_address(server.url), "engines"), "engines")
    return LedgerPool(policy, link=link, weight_percent=200)


async def test_drains_restarts_and_reach_are_heard_of_by_the_other_replicas(redis_server: RedisServer) -> None:
    redis_server.command("FLUSHALL")
    one, two = pool_on(redis_server), pool_on(redis_server)
    drains: list[tuple[str, bool]] = []
    incarnations: list[tuple[str, int]] = []
    reached: list[Collection[str]] = []
    two.elsewhere.on_drain = lambda name, is_drained: drains.append((name, is_drained))
    two.elsewhere.on_incarnation = lambda name, number, _: incarnations.append((name, number))
    two.elsewhere.on_reached = reached.append
    try:
        for pool in (one, two):
            await pool.open()
            pool.set_engines([EngineOffer("a#1", 100, 10), EngineOffer("b#1", 100, 10)])
        held = await one.enter(ask(tokens=50))
        await held.wait()
        await until(lambda: sum(it.held_tokens for it in two.engines()) == 50, what="the other's lease is seen")
        one.drain_engine("a", drains=True)
        await until(lambda: ("a", True) in drains, what="the drain is heard of")
        one.set_engines([EngineOffer("a#2", 100, 10), EngineOffer("b#1", 100, 10)])
        await until(lambda: ("a", 2) in incarnations, what="the restart is heard of")
        await until(lambda: ("a", False) in drains, what="a new incarnation does not drain")
        two.set_engines([EngineOffer("b#1", 100, 10)])
        await until(lambda: bool(reached) and "a" in reached[-1], what="it is reached elsewhere")
        held.settle()
        await until(lambda: sum(it.held_tokens for it in two.engines()) == 0, what="it has ended")
    finally:
        await one.close()
        await two.close()
