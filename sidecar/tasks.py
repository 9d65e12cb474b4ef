"""Event loops: cancellation of tasks, and waits that have an end."""

from __future__ import annotations

import asyncio
import sys

if sys.version_info >= (3, 11):
    timeout = asyncio.timeout
else:
    import async_timeout

    timeout = async_timeout.timeout

CANCEL_AGAIN_S = 0.05


def is_canceled_again(task: asyncio.Task[object] | None) -> bool:
    """True if a task that was canceled by its own doing was canceled by another, too: a server that stops."""
    # 3.10 does not count cancellations: the server's in the same instant is taken for our own.
    return sys.version_info >= (3, 11) and task is not None and task.uncancel() > 0


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop that runs in this thread."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


async def end(task: asyncio.Task[object]) -> None:
    """Cancels a task of the running event loop, and returns when it has ended. Its exception is not raised.

    One cancellation may be lost: before Python 3.12, `asyncio.wait_for` drops one that comes in the same step as its
    result (python/cpython#86296). A task that goes on after that is canceled again.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait((task,), timeout=CANCEL_AGAIN_S)


async def is_set_within(event: asyncio.Event, within_s: float) -> bool:
    """Waits until `event` is set, for `within_s` seconds at most. Returns whether it was set by then."""
    try:
        await asyncio.wait_for(event.wait(), within_s)
    except asyncio.TimeoutError:
        return False
    return True
