"""Requests that wait in a pool that has become too small for them: they are refused, in slices.

A pool changes its size while very many requests wait. It looks at a part of them at once, and at the rest in the next
turns of the event loop. Such a request is never admitted meanwhile: it does not fit.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from sidecar.errors import AdmissionError
from sidecar.policy.size_limits import SizeLimits
from sidecar.pools.base import Lease

LOOKED_AT_ONCE = 1_000
"""Requests that one slice looks at: some 0.5 ms."""
REFUSED_AT_ONCE = 16
"""The most requests that one slice refuses: some 20 us each, and as much for what waits for each."""


class OutgrownRequests:
    """The requests that a pool still has to look at. `refuse` ignores those that do not wait any more."""

    def __init__(self, sizes: SizeLimits, refuse: Callable[[Lease, AdmissionError], None]) -> None:
        self._sizes = sizes
        self._refuse = refuse
        self._left: deque[Lease] = deque()
        self._soon: asyncio.Handle | None = None

    def look(self, waiting: Iterable[Lease]) -> None:
        """The pool has another size. Nothing is to do where it is not smaller than before for any tier.

        Of very many, all are looked at later: to note them takes 3 ms of 100,000.
        """
        if not self._sizes.has_shrunk:
            return
        self._left = deque(waiting)
        if len(self._left) <= LOOKED_AT_ONCE:
            self._look_at_some()
        elif self._soon is None:
            self._look_soon()

    def stop(self) -> None:
        """Looks at no more."""
        self._left.clear()
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None

    def _look_at_some(self) -> None:
        left, outgrown, refused = self._left, self._sizes.outgrown, 0
        for _ in range(min(LOOKED_AT_ONCE, len(left))):
            lease = left.popleft()
            if error := outgrown(lease.ask):
                self._refuse(lease, error)
                refused += 1
                if refused == REFUSED_AT_ONCE:
                    break
        if left and self._soon is None:
            self._look_soon()

    def _look_soon(self) -> None:
        self._soon = asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._soon = None
        self._look_at_some()
