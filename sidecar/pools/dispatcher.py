"""A scheduler on a clock: it admits whenever something changes, and when aging alone changes who may go."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from sidecar.pools.pool import Ask
from sidecar.scheduling import Admission, Scheduler

Clock = Callable[[], int]


def monotonic_us() -> int:
    """The process's monotonic clock in whole microseconds."""
    return time.monotonic_ns() // 1000


class Dispatcher:
    """Calls `on_admission` with every admission and its moment, and `on_preemption` with the id of every lease that is
    to give its room back. Belongs to the event loop of its first wait.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        clock: Clock,
        on_admission: Callable[[Admission, int], None],
        on_preemption: Callable[[str], None],
    ) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._on_admission = on_admission
        self._on_preemption = on_preemption
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_us = 0

    def submit(self, ticket_id: str, ask: Ask, arrived_us: int, preemptions: int = 0) -> None:
        """Puts a request in its tier's queue. It is admitted by `dispatch` at the earliest.

        One that was preempted so often elsewhere goes to the front.
        """
        self._scheduler.submit(
            ticket_id,
            tier=ask.tier,
            tokens=ask.tokens,
            requests=ask.requests,
            tenant=ask.tenant,
            weight=ask.weight,
            now_us=arrived_us,
            preemptions=preemptions,
        )

    def dispatch(self, now_us: int) -> None:
        """Admits everybody whom the rules let in now; for the first whom they do not, others are preempted.

        Call it after every change of the scheduler.
        """
        for admission in self._scheduler.dispatch(now_us):
            self._on_admission(admission, now_us)
        if self._scheduler.waiting():
            for victim in self._scheduler.preempt(now_us):
                self._on_preemption(victim.id)
            self._wake_in_time(now_us)

    def stop(self) -> None:
        """Admits nobody any more by itself."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wake_in_time(self, now_us: int) -> None:
        change_us = self._scheduler.next_change_us(now_us)
        if change_us is None or (self._timer is not None and self._timer_at_us <= change_us):
            return
        self.stop()
        self._timer_at_us = change_us
        self._timer = asyncio.get_running_loop().call_later((change_us - now_us) / 1e6, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.dispatch(self._clock())
