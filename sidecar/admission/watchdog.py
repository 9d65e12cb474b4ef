"""Watchdog: one timer that checks all requests of a process.

It finds bodies that do not arrive, and disconnects that the app does not listen for. A timer for each request would
cost 2 to 3 microseconds, and hardly any request needs one. Where the timer comes seconds late, something has blocked
the event loop: it is said, because nothing of ours could be done meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

BLOCKED_S = 1.0
"""How late the timer must come to be counted: a garbage collection, or a busy machine, holds it up for less."""
LOGGED_EVERY_S = 60.0
_BLOCKED = (
    "the event loop stood still for %.1f s, with %d requests under way: none was admitted, served or timed out "
    "meanwhile (%d times, %.1f s in all). It is mostly a blocking call: await it, call it with `asyncio.to_thread`, or "
    "make the handler a plain `def` where the framework runs those in threads"
)
_TWO_LOOPS = (
    "requests of two event loops of this process are under way at once in one pool, which belongs to one: a wait may "
    "end late; construct app and middleware once for each loop"
)
_log = logging.getLogger("sidecar.watchdog")


class Watched(Protocol):
    """A request that the watchdog checks."""

    def check(self) -> None:
        """Called at every interval, on the event loop. Must not block."""

    def give_up(self) -> None:
        """The process is about to end, or every request passes: ends the request's wait, where it waits."""


class Watchdog:
    """All requests under way. The timer runs only while there are any.

    `blocked_s` is for how long the event loop stood still in all, as far as it was noticed. `on_armed` are called
    whenever the timer starts, on its event loop.
    """

    def __init__(self, interval_s: float = 1.0) -> None:
        self.interval_s = interval_s
        self.blocked_s = 0.0
        self.on_armed: list[Callable[[], None]] = []
        self._watched: set[Watched] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._due_s = 0.0
        self._blocked_times = 0
        self._logged_s: float | None = None
        self._knows_two_loops = False
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
        loop = asyncio.get_running_loop()
        if self._loop is not None and self._loop is not loop and self._loop.is_running():
            self._report_two_loops()
        self._loop, self._due_s = loop, loop.time() + self.interval_s
        self._timer = loop.call_at(self._due_s, self._check_all)
        for follow in self.on_armed:
            follow()

    def _check_all(self) -> None:
        self._timer = None
        if not self._watched:
            return
        self._note_lateness()
        self._arm()
        for watched in tuple(self._watched):
            try:
                watched.check()
            except Exception:  # noqa: PERF203  # the others are checked all the same
                _log.exception("the check of a request failed", extra={"event": "check_failed"})

    def _note_lateness(self) -> None:
        now_s = asyncio.get_running_loop().time()
        late_s = now_s - self._due_s
        if late_s < BLOCKED_S:
            return
        self.blocked_s += late_s
        self._blocked_times += 1
        if self._logged_s is None or now_s - self._logged_s >= LOGGED_EVERY_S:
            self._logged_s = now_s
            figures = (late_s, len(self._watched), self._blocked_times, self.blocked_s)
            _log.warning(_BLOCKED, *figures, extra={"event": "loop_blocked"})

    def _report_two_loops(self) -> None:
        if len(self._watched) > 1 and not self._knows_two_loops:
            self._knows_two_loops = True
            _log.warning(_TWO_LOOPS, extra={"event": "two_loops"})
