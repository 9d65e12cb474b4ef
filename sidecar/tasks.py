"""The end of a task that runs until it is canceled."""

from __future__ import annotations

import asyncio

CANCEL_AGAIN_S = 0.05


async def end(task: asyncio.Task[object]) -> None:
    """Cancels a task of the running event loop, and returns when it has ended. Its exception is not raised.

    One cancellation may be lost: before Python 3.12, `asyncio.wait_for` drops one that comes in the same step as its
    result (python/cpython#86296). A task that goes on after that is canceled again.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait((task,), timeout=CANCEL_AGAIN_S)
