"""A call that an event loop makes when it is due, the soonest of those that were asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Alarm:
    """Of one pool: `ring` is called on its event loop."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_us = 0
        self._soon: asyncio.Handle | None = None

    def set(self, due_us: int, now_us: int) -> None:
        """Something is due at this moment, perhaps in this tick of the event loop."""
        if due_us <= now_us:
            if self._soon is None:
                self._soon = asyncio.get_running_loop().call_soon(self._ring_soon)
        elif self._timer is None or due_us < self._timer_at_us:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at_us = due_us
            self._timer = asyncio.get_running_loop().call_later((due_us - now_us) / 1e6, self._ring_in_time)

    def stop(self) -> None:
        """Nothing is due any more, or its event loop has ended."""
        for handle in (self._timer, self._soon):
            if handle is not None:
                handle.cancel()
        self._timer = self._soon = None

    def _ring_soon(self) -> None:
        self._soon = None
        self._ring()

    def _ring_in_time(self) -> None:
        self._timer = None
        self._ring()
