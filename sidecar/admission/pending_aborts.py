"""Pending aborts: leases of ended requests for which the engine may still compute. They keep their room until then.

A request that the engine answered completely never comes here. One timer serves all of them, and there are no more of
them than leases in the pool.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Sequence
from itertools import count
from typing import NamedTuple

ARRIVES_WITHIN_US = 1_000_000
"""An engine does not count a request yet whose prompt it is still reading."""
CLOSE_WITHIN_S = 5.0
"""A little more than the longest abort latency of a known engine."""
_SHORTEST_S = 0.001


class Held(NamedTuple):
    """Sequences and tokens that the pool holds."""

    requests: int
    tokens: int


class PendingAbort:
    """One lease. `release` is called once: after the engine's abort latency, or when its figures show the abort."""

    __slots__ = ("_owner", "_release", "held", "is_over", "since_us")

    def __init__(self, owner: PendingAborts, release: Callable[[], object], held: Held, since_us: int) -> None:
        self._owner = owner
        self._release = release
        self.held = held
        self.since_us = since_us
        self.is_over = False

    def then(self, release: Callable[[], object]) -> None:
        """Calls `release` instead of the function given before; at once where the abort is over."""
        self._release = release
        if self.is_over:
            release()

    def end(self) -> None:
        """The engine has aborted the request."""
        if not self.is_over:
            self.is_over = True
            self._owner.ended(self)
            self._release()


class PendingAborts:
    """All pending aborts of a process. `now_us` is the clock of their due times, in microseconds."""

    def __init__(self, now_us: Callable[[], int]) -> None:
        self._now_us = now_us
        self._due: list[tuple[int, int, PendingAbort]] = []
        self._numbers = count()
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._requests = self._tokens = 0

    def held(self) -> Held:
        """Amounts that they hold at present. May be called in any thread."""
        return Held(self._requests, self._tokens)

    def add(self, release: Callable[[], object], *, due_us: int, held: Held) -> PendingAbort:
        """Calls `release` at `due_us`, on the event loop; at once where that time is over."""
        now_us = self._now_us()
        pending = PendingAbort(self, release, held, now_us)
        self._requests += held.requests
        self._tokens += held.tokens
        if due_us <= now_us:
            pending.end()
            return pending
        heapq.heappush(self._due, (due_us, next(self._numbers), pending))
        if self._due[0][2] is pending:
            self._arm()
        else:
            self.follow()
        return pending

    def ended(self, pending: PendingAbort) -> None:
        """Called by a pending abort at its end."""
        self._requests -= pending.held.requests
        self._tokens -= pending.held.tokens

    def seen(self, unfinished: int, asked_us: int) -> None:
        """Releases requests that the engine no longer has: asked at `asked_us`, it had `unfinished` requests at most.

        The engine does not say which requests it still has, so that many of the largest stay.
        """
        known = [
            pending
            for _, _, pending in self._due
            if not pending.is_over and pending.since_us + ARRIVES_WITHIN_US <= asked_us
        ]
        if len(known) <= unfinished:
            return
        may_run = {*_largest(known, unfinished, 0), *_largest(known, unfinished, 1)}
        for pending in known:
            if pending not in may_run:
                pending.end()

    def follow(self) -> None:
        """Moves the timer to the running event loop, where it was set in another one, which may have ended."""
        if self._due and self._loop is not asyncio.get_running_loop():
            self._arm()

    async def close(self, *, waits: bool) -> None:
        """Releases all of them. `waits`: each at its due time, but within `CLOSE_WITHIN_S`."""
        end_us = self._now_us() + round(CLOSE_WITHIN_S * 1e6)
        while waits and (left_us := min(end_us, self._last_us()) - self._now_us()) > 0:  # noqa: ASYNC110  # no event: a time
            await asyncio.sleep(left_us / 1e6)
        due, self._due = self._due, []
        self._arm()
        for _, _, pending in due:
            pending.end()

    def _last_us(self) -> int:
        return max((due_us for due_us, _, pending in self._due if not pending.is_over), default=0)

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._due:
            self._loop = asyncio.get_running_loop()
            in_s = (self._due[0][0] - self._now_us()) / 1e6
            self._timer = self._loop.call_later(max(_SHORTEST_S, in_s), self._release_due)

    def _release_due(self) -> None:
        try:
            while self._due and self._due[0][0] <= self._now_us():
                heapq.heappop(self._due)[2].end()
        finally:
            self._arm()


def _largest(pending: Sequence[PendingAbort], most: int, dimension: int) -> Sequence[PendingAbort]:
    return heapq.nlargest(most, pending, key=lambda one: one.held[dimension])
