"""Preemption across replicas, and what goes wrong on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from sidecar.errors import StoreUnavailable
from sidecar.policy.choices import StoreLoss
from sidecar.pools.ledger import Ledger
from tests.pools.load import nothing_left, replicas
from tests.pools.scripted_link import Replicas
from tests.pools.test_preemption import HIGH, LOW, Holder, enter, preempting
from tests.support.redis_servers import RedisServer
from tests.support.shared_pools import begun
from tests.support.waiting import until

pytestmark = pytest.mark.anyio
POLICY = preempting(after_s=0.05)
SOON_S = 3
"""A heartbeat, and the calls after it: the scripted ledger wakes nobody, so that every wake-up is lost."""
LOST_S, BACK_S, DEAD_S = 5, 9, 13


async def asked(count: int = 2, on_loss: StoreLoss = StoreLoss.DIVIDE) -> tuple[Replicas, Holder, Holder]:
    """Replicas of which the first is asked to give back what it holds, for a request of the last."""
    all_of_them = await Replicas(replace(POLICY, on_store_loss=on_loss), count).joined()
    victim = await enter(all_of_them.pools[0], LOW, 100)
    high = await enter(all_of_them.pools[-1], HIGH, 60)
    await all_of_them.pass_s(SOON_S)
    assert (victim.reported, high.lease.grant) == (1, None)
    return all_of_them, victim, high


async def gives_room_and_comes_back(
    all_of_them: Replicas, victim: Holder, high: Holder, untouched: Sequence[Holder] = ()
) -> None:
    """It lets the other in, and enters when that has ended. No one else is asked."""
    again = victim.lease.requeue()
    await all_of_them.pass_s(BACK_S)
    assert high.lease.grant is not None
    assert not again.done()
    high.lease.settle()
    await all_of_them.pass_s(SOON_S)
    assert again.result().queue_wait_us > BACK_S * 10**6
    for holder in (victim, *untouched):
        assert holder.lease.settle()
        assert holder.reported == (holder is victim)
    await nothing_left(all_of_them.pools)


# -- faults between the question and the return


def nothing(_: Replicas) -> None:
    pass


def flushed(all_of_them: Replicas) -> None:
    all_of_them.ledger = Ledger()


def loses_an_answer(all_of_them: Replicas) -> None:
    """The ledger takes the return in, and the replica does not hear of it."""
    link = all_of_them.links[0]
    send, link.loses_answers = link.send, True

    def sends(call: object, user: object) -> None:
        if call.kind == "ask":  # type: ignore[attr-defined]
            link.loses_answers = False
        send(call, user)  # type: ignore[arg-type]

    link.send = sends  # type: ignore[method-assign]


@pytest.mark.parametrize("fault", [nothing, flushed, loses_an_answer])
async def test_a_victim_of_another_replica_gives_its_room_and_waits_on(fault: Callable[[Replicas], None]) -> None:
    all_of_them, victim, high = await asked()
    fault(all_of_them)
    await gives_room_and_comes_back(all_of_them, victim, high)


async def test_a_question_whose_answer_is_lost_is_asked_again() -> None:
    all_of_them = await Replicas(POLICY, 2).joined()
    victim = await enter(all_of_them.pools[0], LOW, 100)
    all_of_them.links[0].loses_answers = True
    high = await enter(all_of_them.pools[1], HIGH, 60)
    await all_of_them.pass_s(SOON_S)
    assert victim.reported == 0
    all_of_them.links[0].loses_answers = False
    await all_of_them.pass_s(SOON_S)
    assert victim.reported == 1
    await gives_room_and_comes_back(all_of_them, victim, high)


async def test_a_statement_in_between_takes_no_other() -> None:
    all_of_them = await Replicas(POLICY, 2).joined()
    one, two = all_of_them.pools
    older, victim = await enter(one, LOW, 50), await enter(one, LOW, 50)
    high = await enter(two, HIGH, 40)
    await all_of_them.pass_s(SOON_S)
    assert (older.reported, victim.reported) == (0, 1)
    flushed(all_of_them)
    await all_of_them.pass_s(BACK_S)
    assert (older.reported, victim.reported, high.lease.grant) == (0, 1, None)
    await gives_room_and_comes_back(all_of_them, victim, high, [older])


@pytest.mark.parametrize("says_goodbye", [True, False])
async def test_a_replica_that_is_asked_and_dies_gives_its_room(says_goodbye: bool) -> None:
    all_of_them, _, high = await asked(3)
    dead, *alive = all_of_them.pools
    if says_goodbye:
        await dead.close()
    else:
        all_of_them.links[0].is_cut = True
    await all_of_them.pass_s(SOON_S if says_goodbye else DEAD_S, without=dead)
    assert high.lease.grant is not None
    assert high.lease.settle()
    await all_of_them.pass_s(SOON_S, without=dead)
    await nothing_left(alive)


async def test_the_room_of_a_preempting_replica_that_dies_goes_back() -> None:
    all_of_them, victim, _ = await asked()
    await all_of_them.pools[1].close()
    again = victim.lease.requeue()
    await all_of_them.pass_s(SOON_S)
    assert again.done()
    assert victim.lease.settle()
    await nothing_left(all_of_them.pools[:1])


# -- without the store


async def test_a_victim_that_comes_back_without_the_store_waits_in_its_part() -> None:
    all_of_them, victim, high = await asked(1)
    all_of_them.cut()
    await all_of_them.pass_s(LOST_S)
    assert all_of_them.pools[0].status.state.value == "divided"
    again = victim.lease.requeue()
    await all_of_them.pass_s(1)
    assert high.lease.grant is not None
    all_of_them.cut(is_cut=False)
    await all_of_them.pass_s(SOON_S)
    assert not again.done()
    high.lease.settle()
    await all_of_them.pass_s(SOON_S)
    assert again.done()
    assert victim.lease.settle()
    await nothing_left(all_of_them.pools)


@pytest.mark.parametrize("comes_back", [True, False])
async def test_a_victim_that_comes_back_while_the_store_is_closed_waits_for_it_and_not_for_ever(
    comes_back: bool,
) -> None:
    all_of_them, victim, high = await asked(1, StoreLoss.CLOSED)
    all_of_them.cut()
    await all_of_them.pass_s(LOST_S)
    assert all_of_them.pools[0].status.state.value == "closed"
    again, waiting = victim.lease.requeue(), high.lease.wait()
    if comes_back:
        all_of_them.cut(is_cut=False)
        await all_of_them.pass_s(SOON_S)
        assert (waiting.done(), again.done()) == (True, False)
        high.lease.settle()
        await all_of_them.pass_s(SOON_S)
        assert again.done()
        victim.lease.settle()
    else:
        await all_of_them.pass_s(DEAD_S)
        for refused in (waiting, again):
            with pytest.raises(StoreUnavailable):
                await refused
        all_of_them.cut(is_cut=False)
        await all_of_them.pass_s(SOON_S)
    await nothing_left(all_of_them.pools)


async def test_a_replica_alone_preempts_among_its_own() -> None:
    all_of_them = await Replicas(POLICY, 1).joined()
    (pool,) = all_of_them.pools
    all_of_them.cut()
    await all_of_them.pass_s(LOST_S)
    assert pool.status.state.value == "divided"
    victim, kept = await enter(pool, LOW, 50), await enter(pool, LOW, 50)
    kept.lease.keep()
    high = await enter(pool, HIGH, 40)
    await all_of_them.pass_s(1)
    assert (victim.reported, kept.reported) == (1, 0)
    again = victim.lease.requeue()
    await all_of_them.pass_s(1)
    assert high.lease.grant is not None
    all_of_them.cut(is_cut=False)  # and it hears that the victim waits
    await all_of_them.pass_s(SOON_S)
    high.lease.settle()
    await all_of_them.pass_s(SOON_S)
    assert again.done()
    assert kept.lease.settle()
    assert victim.lease.settle()
    await nothing_left([pool])


# -- on a server


async def test_a_victim_of_another_replica_is_asked_at_once(redis_server: RedisServer) -> None:
    begun(redis_server, "asked")
    async with replicas(POLICY, [redis_server.url] * 2, name="asked") as (one, two):
        victim = await enter(one, LOW, 100)
        high = await enter(two, HIGH, 60)
        await until(lambda: victim.reported == 1, what="asked to give its room back")
        again = victim.lease.requeue()
        await asyncio.wait_for(high.lease.wait(), 60)
        assert not again.done()
        high.lease.settle()
        await asyncio.wait_for(again, 60)
        victim.lease.settle()
        await nothing_left([one, two])
