"""The end of a task, also of one to which a cancellation is lost."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from sidecar.tasks import end

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
