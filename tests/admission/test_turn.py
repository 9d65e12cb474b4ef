"""A turn owns its lease: however its block ends, nothing is left in the pool."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from sidecar.admission.turn import Turn
from sidecar.leases.lease_request import LeaseRequest
from sidecar.pools import Pool
from tests.support.middleware import policy

pytestmark = pytest.mark.anyio
RULES = policy(requests="1")
REQUEST = LeaseRequest(None, 10, None, 1, 0, None, True, None, None).sized(RULES, 0)


def turn(pool: Pool) -> Turn:
    return Turn(pool, RULES, REQUEST, REQUEST.ask())


def counts(pool: Pool) -> tuple[object, object]:
    state = pool.state()
    return state["leases"], state["waiting"]


@pytest.mark.parametrize("end", ["return", "error", "cancel", "settle"])
async def test_however_its_block_ends_it_holds_nothing(end: str) -> None:
    pool, is_in = Pool(RULES), asyncio.Event()

    async def hold() -> None:
        async with (own := turn(pool)):
            is_in.set()
            assert counts(pool) == (1, 0)
            if end == "error":
                raise ValueError
            if end == "cancel":
                await asyncio.Event().wait()
            if end == "settle":
                own.settle(3)
                assert counts(pool) == (0, 0)

    task = asyncio.create_task(hold())
    await is_in.wait()
    if end == "cancel":
        task.cancel()
    with suppress(asyncio.CancelledError, ValueError):
        await task
    assert counts(pool) == (0, 0)
    await pool.close()


async def test_one_that_is_canceled_while_it_waits_leaves_the_queue_and_says_so_once() -> None:
    pool, waiting = Pool(RULES), asyncio.get_running_loop().create_future()
    async with turn(pool):
        second = turn(pool)
        task = asyncio.ensure_future(second.take())
        await asyncio.sleep(0)
        assert counts(pool) == (1, 1)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        second.when_left(waiting.set_result)
        second.leave()
        assert (await waiting) is not None
        assert counts(pool) == (1, 0)
    assert counts(pool) == (0, 0)
    await pool.close()


async def test_a_lease_that_outlasts_its_block_is_settled_after_it() -> None:
    pool = Pool(RULES)
    async with (own := turn(pool)):
        own.outlast()
    assert counts(pool) == (1, 0)
    own.settle(3)
    assert counts(pool) == (0, 0)
    await pool.close()
