"""The end of a task, also of one to which a cancellation is lost, and waits that have an end."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from sidecar.tasks import end, is_set_within

pytestmark = pytest.mark.anyio


async def test_a_task_that_has_lost_a_cancellation_ends_all_the_same() -> None:
    lost = 0

    async def deaf() -> None:
        nonlocal lost
        for _ in range(2):
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)
            lost += 1
        await asyncio.sleep(3600)

    task = asyncio.create_task(deaf())
    await asyncio.sleep(0)
    await end(task)
    assert (task.cancelled(), lost) == (True, 2)


async def test_a_task_that_has_ended_is_left_alone() -> None:
    async def broken() -> None:
        raise RuntimeError("not raised to the caller")

    task = asyncio.create_task(broken())
    await asyncio.wait((task,))
    await end(task)
    assert isinstance(task.exception(), RuntimeError)


async def test_a_wait_ends_with_the_event_or_with_its_time() -> None:
    event = asyncio.Event()
    assert not await is_set_within(event, 0.01)
    asyncio.get_running_loop().call_soon(event.set)
    assert await is_set_within(event, 60)


async def test_a_wait_that_is_canceled_says_so() -> None:
    task = asyncio.create_task(is_set_within(asyncio.Event(), 60))
    await asyncio.sleep(0)
    await end(task)
    assert task.cancelled()
