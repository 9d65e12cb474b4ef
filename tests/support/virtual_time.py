"""An event loop whose time is the test's: where no one has anything to do, it is at once as late as the next timer."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class _Skipping(selectors.DefaultSelector):
    now_s = 1000.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise AssertionError("nobody will ever do anything again")
            self.now_s += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """No thread may be waited for in it, and no socket: both would be overtaken by the next timer."""

    def __init__(self) -> None:
        self._skipping = _Skipping()
        super().__init__(self._skipping)

    def time(self) -> float:
        return self._skipping.now_s


def run_virtually(main: Coroutine[Any, Any, Result]) -> Result:
    """Runs `main` in such a loop."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()


def virtual_now_us() -> int:
    """The running loop's own time in whole microseconds."""
    return round(asyncio.get_running_loop().time() * 1e6)
