"""One timer for all requests of a process: it looks after those that need it, and costs a request nothing.

A timer of its own per request would be two or three microseconds each, for something (a client that trickles its body,
or hangs up on an app that does not listen) that hardly any request needs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol


class Visited(Protocol):
    """Something that is looked after."""

    def on_round(self) -> None:
        """Called every interval, on the event loop. Must not block."""


def _nothing() -> None:
    pass


class Rounds:
    """Everything that is under way. The timer runs only while there is something to visit.

    `on_armed` is called whenever the timer begins anew, on its event loop.
    """

    def __init__(self, interval_s: float, on_armed: Callable[[], None] = _nothing) -> None:
        self.interval_s = interval_s
        self._on_armed = on_armed
        self._visited: set[Visited] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._emptied: asyncio.Event | None = None

    def __len__(self) -> int:
        return len(self._visited)

    def add(self, visited: Visited) -> None:
        """Starts looking after it."""
        self._visited.add(visited)
        # A timer of another loop is a dead one: test clients run each request in a loop of its own.
        if self._timer is None or self._loop is not asyncio.get_running_loop():
            self._arm()

    def discard(self, visited: Visited) -> None:
        """Stops looking after it."""
        self._visited.discard(visited)
        if self._emptied is not None and not self._visited:
            self._emptied.set()

    async def emptied(self) -> None:
        """Returns when nothing is under way."""
        while self._visited:
            if self._emptied is None or self._emptied.is_set():
                self._emptied = asyncio.Event()
            await self._emptied.wait()

    def _arm(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self.interval_s, self._visit)
        self._on_armed()

    def _visit(self) -> None:
        self._timer = None
        if not self._visited:
            return
        self._arm()
        for visited in tuple(self._visited):
            visited.on_round()
