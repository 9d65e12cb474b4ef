"""Virtual time: the part of an event loop that pools use, on a clock that the simulation sets."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context
from heapq import heappop, heappush
from typing import Any


class VirtualLoop(asyncio.BaseEventLoop):
    """Callbacks and timers by `now_us`. It never runs by itself: `set_time` and `run_ready` do."""

    def __init__(self) -> None:
        super().__init__()
        self.now_us = 0
        self._soon: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[int, int, asyncio.TimerHandle]] = []
        self._count = 0

    def time(self) -> float:
        """See `AbstractEventLoop.time`."""
        return self.now_us / 1e6

    def call_soon(  # type: ignore[override]  # its parameters of variable types need Python 3.11
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """See `AbstractEventLoop.call_soon`."""
        handle = asyncio.Handle(callback, list(args), self, context)
        self._soon.append(handle)
        return handle

    def call_later(  # type: ignore[override]  # as above
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """See `AbstractEventLoop.call_later`. To the microsecond."""
        at_us = self.now_us + max(0, round(delay * 1e6))
        handle = asyncio.TimerHandle(at_us / 1e6, callback, list(args), self, context)
        self._count += 1
        heappush(self._timers, (at_us, self._count, handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """A timer that was canceled goes when it would be the next."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """See `AbstractEventLoop.call_exception_handler`. A defect ends the simulation."""
        if "exception" in context:
            raise context["exception"]

    @property
    def next_us(self) -> int | None:
        """The time of the next timer, None without one."""
        while self._timers and self._timers[0][2].cancelled():
            heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def run_ready(self) -> None:
        """Runs what is due at `now_us`, and what that brings, until nothing is left of it."""
        while True:
            next_us = self.next_us
            if next_us is not None and next_us <= self.now_us:
                self._soon.append(heappop(self._timers)[2])
            if not self._soon:
                return
            while self._soon:
                handle = self._soon.popleft()
                if not handle.cancelled():
                    handle._run()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Is the running loop of this thread in the block, and closed after it. What still waits then is canceled."""
        outer = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            yield
            for task in asyncio.all_tasks(self):
                task.cancel()
            self.run_ready()
        finally:
            asyncio._set_running_loop(outer)
            self.close()
