"""Preemption where the first engine, or the first replica, that is asked for room has none to give."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from sidecar.policy.model import Policy
from sidecar.policy.rules import Shares, pool_rules
from sidecar.policy.store import store_address
from sidecar.pools import Ask, Lease, Pool
from sidecar.pools.engines import EngineOffer
from sidecar.pools.redis import RedisLink, ledger_connector
from tests.pools.harness import policy_of
from tests.pools.load import nothing_left
from tests.pools.scripted_link import Replicas
from tests.pools.test_preemption import HIGH, LOW, Holder, enter, preempting
from tests.support.redis_servers import RedisServer
from tests.support.waiting import until

pytestmark = pytest.mark.anyio
SOON_S = 3
ENGINES, ON_EACH = 4, 4


def emergencies() -> Policy:
    """An always_first tier that preempts at once, and a preemptible one."""
    tiers = (Shares("first", always_first=True, preempt_after_us=0), Shares("low", preemptible=True))
    return policy_of(pool_rules(tokens=ENGINES * ON_EACH, requests=None, tiers=tiers, max_preemptions=2))


@pytest.fixture(params=["one process", "two replicas"])
async def pools(request: pytest.FixtureRequest, redis_server: RedisServer) -> AsyncIterator[list[Pool]]:
    """The same engines in one process, or shared by two replicas."""
    policy = replace(emergencies(), pool="spreads")
    if request.param == "one process":
        made = [Pool(policy, weight_percent=200)]
    else:
        redis_server.command("FLUSHALL")
        address = store_address(redis_server.url)
        links = [RedisLink(ledger_connector(address, "spreads"), "spreads") for _ in range(2)]
        made = [Pool(policy, link=link, weight_percent=200) for link in links]
    for pool in made:
        await pool.open()
        pool.set_engines([EngineOffer(f"{name}#1", ON_EACH, 100) for name in "abcd"[:ENGINES]])
    yield made
    for pool in made:
        await pool.close()


def one(tier: int) -> Ask:
    return Ask(tier, "t", 1, 1, 1)


async def test_all_emergencies_get_in_wherever_there_is_room_to_take_back(pools: list[Pool]) -> None:
    taken: list[Lease] = []

    def gives_back(lease: Lease) -> None:
        taken.append(lease)
        lease.requeue()

    low = []
    for number in range(ENGINES * ON_EACH):
        lease = await pools[number % len(pools)].enter(one(LOW))
        await asyncio.wait_for(lease.wait(), 60)
        lease.on_preempt = lambda lease=lease: gives_back(lease)
        low.append(lease)
    first = [await pools[number % len(pools)].enter(one(HIGH)) for number in range(10)]
    grants = await asyncio.wait_for(asyncio.gather(*(lease.wait() for lease in first)), 60)
    assert len({grant.engine for grant in grants}) == 3, "an engine for four of them"
    assert len(taken) == 10, "and nobody gave room in vain"
    for lease in first:
        lease.settle()
    await asyncio.wait_for(asyncio.gather(*(lease.wait() for lease in low)), 60)
    for lease in low:
        lease.settle()
    for pool in pools:
        await until(lambda pool=pool: not pool.state()["waiting"], what="nothing is left")


# -- on the test's clock; the scripted ledger wakes nobody


async def most_is_at_the_first(count: int) -> tuple[Replicas, Holder, Holder]:
    """The first replica holds the most, the second the rest."""
    all_of_them = await Replicas(preempting(after_s=0.05), count).joined()
    most = await enter(all_of_them.pools[0], LOW, 60)
    return all_of_them, most, await enter(all_of_them.pools[1], LOW, 40)


async def test_another_replica_is_asked_where_the_first_can_give_nothing() -> None:
    all_of_them, kept, victim = await most_is_at_the_first(3)
    kept.lease.keep()
    high = await enter(all_of_them.pools[2], HIGH, 40)
    await all_of_them.pass_s(SOON_S)
    assert (kept.reported, victim.reported) == (0, 1)
    victim.lease.requeue()
    await all_of_them.pass_s(SOON_S)
    assert high.lease.grant is not None
    for holder in (kept, high):
        assert holder.lease.settle()
    await all_of_them.pass_s(SOON_S)
    assert victim.lease.settle()
    await nothing_left(all_of_them.pools)


async def test_another_replica_is_asked_where_the_first_is_silent() -> None:
    all_of_them, silent, victim = await most_is_at_the_first(2)
    all_of_them.links[0].is_cut = True
    high = await enter(all_of_them.pools[1], HIGH, 40)
    await all_of_them.pass_s(SOON_S, without=all_of_them.pools[0])
    assert (silent.reported, victim.reported, high.lease.grant) == (0, 1, None)


async def test_replicas_that_can_all_give_nothing_are_asked_no_more_often_than_they_call_anyway() -> None:
    all_of_them, one, two = await most_is_at_the_first(2)
    for holder in (one, two):
        holder.lease.keep()
    high = await enter(all_of_them.pools[1], HIGH, 40)
    await all_of_them.pass_s(SOON_S)
    before = [len(link.calls) for link in all_of_them.links]
    await all_of_them.pass_s(18)
    assert all(len(link.calls) - was <= 2 * 11 for link, was in zip(all_of_them.links, before, strict=True))
    assert one.lease.settle()
    await all_of_them.pass_s(SOON_S)
    assert high.lease.grant is not None
