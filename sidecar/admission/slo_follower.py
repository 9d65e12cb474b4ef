"""One request of a guarded tier whose times are computed, not seen: a shadow request, or one of `sidecar simulate`.

It tells the pool what a request of HTTP would (`slo_report` has the rules). Its answer streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from sidecar.admission.slo_report import SloReport
from sidecar.gain.token_deadlines import Objective
from sidecar.pools import Lease, Pool

CHECKED_AFTER_S = 0.25
"""A first token that is overdue is noticed so much later, as by the watchdog of requests."""


class SloFollower:
    """The request came at `arrived_us` of the pool's clock. `note` takes whether it missed.

    `is_too_long` says whether an idle engine would be late with its first token.
    """

    __slots__ = ("_is_sent", "_is_too_long", "_objective", "_pool", "_report", "_timer")

    def __init__(
        self,
        pool: Pool,
        objective: Objective,
        arrived_us: int,
        note: Callable[[bool], None],
        is_too_long: Callable[[], bool],
    ) -> None:
        self._pool, self._objective = pool, objective
        self._is_too_long = is_too_long
        self._is_sent = False
        self._report = SloReport(note, arrived_us + objective.ttft_us)
        self._timer = asyncio.get_running_loop().call_later(objective.ttft_us / 1e6, self._check)

    def entered(self, lease: Lease | None) -> None:
        """The pool has taken it."""
        if lease is not None and lease.grant is None:
            self._report.queued(partial(self._pool.obstacle, lease.ask))

    def granted(self) -> None:
        """It is sent to an engine."""
        self._is_sent = True

    def preempted(self) -> None:
        """A more important request has its room."""
        self._is_sent = False
        self._report.excuse()

    def first_token(self) -> None:
        """Its first token comes now."""
        self._timer.cancel()
        self._first(is_missed=self._pool.now_us() >= self._report.due_us)

    def finished(self, later_us: float, tokens: float) -> None:
        """An answer of so many tokens a sequence ends so long after its first token."""
        self._report.complete(is_slow=later_us > max(0.0, tokens - 1) * self._objective.tpot_us)

    def refused(self) -> None:
        """Its wait has ended without a grant, and its client is there."""
        if self._report.ends(self._pool.now_us()):
            self._first(is_missed=True)

    def close(self) -> None:
        """Nothing more will be known of it. Harmless where it is over."""
        self._timer.cancel()

    def _check(self) -> None:
        if self._report.is_overdue(self._pool.now_us(), waits=not self._is_sent):
            self._first(is_missed=True)
        elif not self._report.is_first_known:
            self._timer = asyncio.get_running_loop().call_later(CHECKED_AFTER_S, self._check)

    def _first(self, *, is_missed: bool) -> None:
        if is_missed and self._is_too_long():
            self._report.excuse()
        self._report.first_token(is_missed=is_missed)
