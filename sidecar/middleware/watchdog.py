"""Watchdog: one timer that checks all requests of a process.

It finds bodies that do not arrive, and disconnects that the app does not listen for. A timer for each request would
cost 2 to 3 microseconds, and hardly any request needs one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol


class Watched(Protocol):
    """A request that the watchdog checks."""

    def check(self) -> None:
        """Called at every interval, on the event loop. Must not block."""

    def give_up(self) -> None:
        """The process is about to end, or every request passes: ends the request's wait, where it waits."""


class Watchdog:
    """All requests under way. The timer runs only while there are any.

    `on_armed` is called whenever the timer starts, on its event loop.
    """

    def __init__(self, interval_s: float, on_armed: Callable[[], None] = lambda: None) -> None:
        self.interval_s = interval_s
        self._on_armed = on_armed
        self._watched: set[Watched] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._emptied: asyncio.Event | None = None

    def __len__(self) -> int:
        return len(self._watched)

    def add(self, watched: Watched) -> None:
        """Begins to check a request."""
        self._watched.add(watched)
        # The timer of another loop never fires: test clients run each request in a loop of its own.
        if self._timer is None or self._loop is not asyncio.get_running_loop():
            self._arm()

    def discard(self, watched: Watched) -> None:
        """Stops checking it."""
        self._watched.discard(watched)
        if self._emptied is not None and not self._watched:
            self._emptied.set()

    def give_up(self) -> None:
        """Ends the waits of all requests: the process is about to end, or all of them pass."""
        for watched in tuple(self._watched):
            watched.give_up()

    async def emptied(self) -> None:
        """Returns when no request is under way."""
        while self._watched:
            if self._emptied is None or self._emptied.is_set():
                self._emptied = asyncio.Event()
            await self._emptied.wait()

    def _arm(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self.interval_s, self._check_all)
        self._on_armed()

    def _check_all(self) -> None:
        self._timer = None
        if not self._watched:
            return
        self._arm()
        for watched in tuple(self._watched):
            watched.check()
