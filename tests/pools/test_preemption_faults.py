"""Preemption across replicas, and what goes wrong on the way: on real servers."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from sidecar.errors import StoreUnavailable
from sidecar.policy.model import StoreLoss
from sidecar.pools.redis import RedisPool
from sidecar.tasks import is_set_within
from tests.pools.conftest import FIRST, OTHERS, Servers
from tests.pools.harness import ask
from tests.pools.load import heard_of_each_other, nothing_left, recovered, replicas, until
from tests.pools.test_preemption import HIGH, LOW, Holder, enter, preempting
from tests.support.redis_servers import RedisServer

pytestmark = pytest.mark.anyio
POLICY = preempting(after_s=0.05)


@pytest.fixture(params=[FIRST, *(pytest.param(name, marks=pytest.mark.soak) for name in OTHERS)])
def server(request: pytest.FixtureRequest, servers: Servers) -> RedisServer:
    """One kind of server now, the others in the long run."""
    server = servers[request.param]
    server.command("FLUSHALL")
    return server


def deaf(pool: RedisPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is published does not reach it: only what the store lists for it."""
    monkeypatch.setattr(pool, "heard", lambda message: None)


async def reported(holder: Holder, times: int = 1) -> None:
    await until(lambda: holder.reported == times, 60, "asked to give its room back")


async def test_a_victim_of_another_replica_is_asked_at_once_and_waits_on_there(server: RedisServer) -> None:
    async with replicas(POLICY, [server.url] * 2) as (one, two):
        victim = await enter(one, LOW, 100)
        high = await enter(two, HIGH, 60)
        await reported(victim)
        assert high.lease.grant is None
        again = victim.lease.requeue()
        await asyncio.wait_for(high.lease.wait(), 60)
        assert not again.done()
        high.lease.settle()
        grant = await asyncio.wait_for(again, 60)
        assert grant.served_ahead == {"high": 60}
        victim.lease.settle()
        await nothing_left([one, two])


async def test_a_message_that_is_lost_comes_with_the_next_beat(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replicas(POLICY, [server.url] * 2) as (one, two):
        deaf(one, monkeypatch)
        victim = await enter(one, LOW, 100)
        high = await enter(two, HIGH, 60)
        await reported(victim)
        victim.lease.requeue()
        await asyncio.wait_for(high.lease.wait(), 60)
        high.lease.settle()
        await asyncio.wait_for(victim.lease.wait(), 60)
        victim.lease.settle()
        await nothing_left([one, two])


async def test_what_is_heard_late_or_twice_changes_nothing(server: RedisServer) -> None:
    async with replicas(POLICY, [server.url]) as (pool,):
        victim = await enter(pool, LOW, 100)
        high = await enter(pool, HIGH, 60)
        await reported(victim)
        pool.heard(b"!1 0\n!1 0")
        victim.lease.requeue()
        pool.heard(b"1\n!1 0")  # its first grant, and the choice, once more
        assert victim.lease.grant is None
        await asyncio.wait_for(high.lease.wait(), 60)
        high.lease.settle()
        await asyncio.wait_for(victim.lease.wait(), 60)
        pool.heard(b"!1 0\n!99 0")
        await asyncio.sleep(0)
        assert victim.reported == 1
        victim.lease.settle()
        await nothing_left([pool])


async def test_a_store_that_forgot_everything_between_the_choice_and_the_return(server: RedisServer) -> None:
    async with replicas(POLICY, [server.url] * 2) as (one, two):
        small, victim = await enter(one, LOW, 10), await enter(one, LOW, 90)
        high = await enter(two, HIGH, 60)
        await reported(victim)
        server.command("FLUSHALL")
        again = victim.lease.requeue()
        await asyncio.wait_for(high.lease.wait(), 60)
        assert not again.done()
        high.lease.settle()
        grant = await asyncio.wait_for(again, 60)
        assert grant.queue_wait_us > 50_000
        for lease in (victim.lease, small.lease):
            assert lease.settle()
        await nothing_left([one, two])


async def test_a_return_that_was_not_answered_is_stated_again(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store still has the victim as a lease when the replica states it as waiting."""
    async with replicas(POLICY, [server.url] * 2) as (one, two):
        victim = await enter(one, LOW, 100)
        high = await enter(two, HIGH, 60)
        await reported(victim)
        with monkeypatch.context() as lossy:
            lossy.setattr(one._batches, "requeue", lambda lease, waited_us, **how: None)
            again = victim.lease.requeue()
        assert one._session is not None
        one._session.restate()
        await asyncio.wait_for(high.lease.wait(), 60)
        assert not again.done()
        high.lease.settle()
        await asyncio.wait_for(again, 60)
        victim.lease.settle()
        await nothing_left([one, two])


async def test_what_a_sync_restated_is_not_preempted_but_a_return_under_way_still_works(server: RedisServer) -> None:
    async with replicas(POLICY, [server.url] * 2) as (one, two):
        older, victim = await enter(one, LOW, 50), await enter(one, LOW, 50)
        high = await enter(two, HIGH, 40)
        await reported(victim)
        assert one._session is not None
        one._session.restate()
        await heard_of_each_other([one, two])
        await asyncio.sleep(0.1)
        assert (older.reported, victim.reported, high.lease.grant) == (0, 1, None)
        again = victim.lease.requeue()
        await asyncio.wait_for(high.lease.wait(), 60)
        assert older.reported == 0
        high.lease.settle()
        await asyncio.wait_for(again, 60)
        assert older.lease.settle()
        assert victim.lease.settle()
        await nothing_left([one, two])


async def test_the_owner_of_a_victim_says_good_bye(server: RedisServer) -> None:
    async with replicas(POLICY, [server.url] * 2) as (one, two):
        victim = await enter(one, LOW, 100)
        high = await enter(two, HIGH, 60)
        await reported(victim)
        await one.close()
        await asyncio.wait_for(high.lease.wait(), 60)
        high.lease.settle()
        await nothing_left([two])


async def test_the_preempting_replica_dies_and_the_room_goes_back(server: RedisServer) -> None:
    async with replicas(POLICY, [server.url] * 2) as (one, two):
        victim = await enter(one, LOW, 100)
        await enter(two, HIGH, 60)
        await reported(victim)
        await two.close()
        await asyncio.wait_for(victim.lease.requeue(), 60)
        victim.lease.settle()
        await nothing_left([one])


@pytest.mark.parametrize("on_loss", [StoreLoss.DIVIDE, StoreLoss.CLOSED])
async def test_a_store_that_is_gone_when_a_victim_comes_back(server: RedisServer, on_loss: StoreLoss) -> None:
    async with replicas(POLICY, [server.url], on_loss=on_loss) as (pool,):
        victim = await enter(pool, LOW, 100)
        high = await enter(pool, HIGH, 60)
        await reported(victim)
        server.kill()
        try:
            state = "divided" if on_loss is StoreLoss.DIVIDE else "closed"
            await until(lambda: pool.status.state.value == state, 60, state)
            again = victim.lease.requeue()
            if on_loss is StoreLoss.DIVIDE:
                await asyncio.wait_for(high.lease.wait(), 60)
                high.lease.settle()
                await asyncio.wait_for(again, 60)
                victim.lease.settle()
        finally:
            server.restart()
        await recovered([pool])
        if on_loss is StoreLoss.CLOSED:  # they waited for the store, and it came back
            await asyncio.wait_for(high.lease.wait(), 60)
            high.lease.settle()
            await asyncio.wait_for(again, 60)
            victim.lease.settle()
        await nothing_left([pool])


async def test_a_replica_alone_preempts_among_its_own(server: RedisServer) -> None:
    async with replicas(POLICY, [server.url]) as (pool,):
        server.kill()
        try:
            await until(lambda: pool.status.state.value == "divided", 60, "divided")
            victim, kept = await enter(pool, LOW, 50), await enter(pool, LOW, 50)
            kept.lease.keep()
            high = await enter(pool, HIGH, 40)
            await reported(victim)
            again = victim.lease.requeue()
            await asyncio.wait_for(high.lease.wait(), 60)
        finally:
            server.restart()
        await recovered([pool])  # which hears that the victim waits
        assert kept.reported == 0
        high.lease.settle()
        await asyncio.wait_for(again, 60)
        assert kept.lease.settle()
        assert victim.lease.settle()
        await nothing_left([pool])


@pytest.mark.long
async def test_many_of_all_replicas_come_and_go_and_every_one_ends(server: RedisServer) -> None:
    """Victims let go after a moment; some leave then, and some send their first byte as they are chosen."""
    luck, ended, preempted, held, peak = random.Random(1), 0, 0, 0, 0

    async def one_request(pool: RedisPool, tier: int, tokens: int) -> None:
        nonlocal ended, preempted, held, peak
        await asyncio.sleep(luck.uniform(0, 1.5))
        lease = await pool.enter(ask(tier=tier, tokens=tokens))
        taken = asyncio.Event()
        lease.on_preempt = taken.set
        await asyncio.wait_for(lease.wait(), 30)
        held += tokens
        peak = max(peak, held)
        while await is_set_within(taken, luck.uniform(0.1, 0.3) if tier == LOW else luck.uniform(0.01, 0.05)):
            await asyncio.sleep(luck.uniform(0, 0.01))  # the engine lets go
            taken.clear()
            preempted += 1
            held -= tokens
            again = lease.requeue()
            if luck.random() < 0.1:
                again.cancel()
                assert await lease.leave() or lease.settle()
                ended += 1
                return
            await asyncio.wait_for(again, 30)
            held += tokens
            peak = max(peak, held)
        lease.keep()
        taken.clear()
        await asyncio.sleep(luck.uniform(0, 0.02))
        assert not taken.is_set()
        held -= tokens
        assert lease.settle()
        ended += 1

    async with replicas(preempting(after_s=0.01), [server.url] * 3) as pools:
        for pool in pools:  # all admit from now on: else all wait at first, and none of the more important needs room
            lease = await pool.enter(ask(tier=LOW, tokens=20))
            await asyncio.wait_for(lease.wait(), 30)
            assert lease.settle()
        await asyncio.gather(
            *(
                one_request(luck.choice(pools), LOW if luck.random() < 0.7 else HIGH, luck.choice([20, 40]))
                for _ in range(100)
            )
        )
        assert (ended, held) == (100, 0)
        assert peak <= 100
        assert preempted > 5
        await nothing_left(pools)


async def test_a_victim_whose_patience_ends_while_the_store_is_closed_is_refused(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sidecar.pools.redis.outage.SILENCE_S", 0.2)
    async with replicas(POLICY, [server.url], on_loss=StoreLoss.CLOSED) as (pool,):
        victim = await enter(pool, LOW, 100)
        high = await enter(pool, HIGH, 60)
        waiting: Any = high.lease.wait()
        await reported(victim)
        server.kill()
        try:
            await until(lambda: pool.status.state.value == "closed", 60, "closed")
            with pytest.raises(StoreUnavailable):
                await asyncio.wait_for(waiting, 60)
            with pytest.raises(StoreUnavailable):
                await asyncio.wait_for(victim.lease.requeue(), 60)
        finally:
            server.restart()
        await recovered([pool])
        await nothing_left([pool])
