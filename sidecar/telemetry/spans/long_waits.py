"""Waits that last: each is reported in its trace now and then, so that a process that is killed leaves a last word.

One timer serves all requests that wait and whose trace is recorded. Those come first that were not reported for the
longest time, and at most `MOST_AT_ONCE` in `PAUSE_S`: where more wait, each is reported less often.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from sidecar.tasks import running_loop
from sidecar.telemetry.request_record import RequestRecord
from sidecar.telemetry.spans.links import WaitSoFar

MOST_AT_ONCE = 4
PAUSE_S = 0.05
"""80 in a second: a report takes 1 ms where a thousand requests went ahead, and the SDK keeps 2,048 spans for 5 s."""


SoFar = Callable[[RequestRecord], WaitSoFar]
"""Finds how a request has waited up to now."""


class WaitingSpans(Protocol):
    """The spans of a request that waits."""

    def report_wait(self, so_far: SoFar) -> None:
        """Exports how the wait has gone. Must not raise."""


class LongWaits:
    """All recorded requests that wait. `every_s` is how often each is reported, 0 for never: a change may come.

    `so_far` finds what is to be reported. Use it from one event loop at a time.
    """

    def __init__(self, every_s: float, so_far: SoFar) -> None:
        self._every_s = every_s
        self._so_far = so_far
        self._due: OrderedDict[WaitingSpans, float] = OrderedDict()  # the first due is first
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def change_interval(self, every_s: float) -> None:
        """Follows another policy, for the requests that wait now, too."""
        if every_s == self._every_s:
            return
        self._every_s = every_s
        waiting = list(self._due)
        self._due.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for spans in waiting:
            self.add(spans)

    def add(self, spans: WaitingSpans) -> None:
        """The request waits from now on."""
        loop = running_loop()
        if loop is None:  # there is no later
            return
        if self._loop is not loop:  # what waited in a loop that has ended, waits no more
            self._due.clear()
            self._timer, self._loop = None, loop
        self._due[spans] = loop.time() + self._every_s
        if self._every_s and self._timer is None:
            self._timer = loop.call_later(self._every_s, self._report_due, loop)

    def discard(self, spans: WaitingSpans) -> None:
        """Its wait is over."""
        self._due.pop(spans, None)

    def _report_due(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._loop is not loop:
            return
        self._timer = None
        now_s = loop.time()
        for _ in range(min(MOST_AT_ONCE, len(self._due))):
            spans, due_s = next(iter(self._due.items()))
            if due_s > now_s:
                break
            self._due[spans] = now_s + self._every_s
            self._due.move_to_end(spans)
            spans.report_wait(self._so_far)
        if self._due:
            due_s = next(iter(self._due.values()))
            self._timer = loop.call_later(max(due_s - now_s, PAUSE_S), self._report_due, loop)
