"""Waiting for what has no event, and counting what must be given back."""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def now_us() -> int:
    """A pool's clock."""
    return time.monotonic_ns() // 1000


async def until(condition: Callable[[], object], within_s: float = 60.0, what: str = "") -> float:
    """Waits for it, which may be a coroutine's. Returns how long that took, in seconds; fails after `within_s`."""
    began_s = time.monotonic()
    while not (await found if inspect.isawaitable(found := condition()) else found):
        assert time.monotonic() - began_s < within_s, what or condition
        await asyncio.sleep(0.002)
    return time.monotonic() - began_s


def open_sockets() -> int:
    """The sockets of this process."""
    return sum(_is_socket(Path("/proc/self/fd", name)) for name in os.listdir("/proc/self/fd"))


def _is_socket(file: Path) -> bool:
    with suppress(OSError):  # the folder itself, which is closed again
        return os.readlink(file).startswith("socket:")
    return False


def other_tasks() -> list[str]:
    """The tasks of this event loop besides the test's own."""
    return sorted(task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task())
