"""SLOs of tiers: reports to the guards, counts of them kept and missed, and the watch over guards in vain.

The pool is told once: that the first token is late, as soon as that is known, or else at the end of the answer whether
the later ones came in time. A first token that is not there when it is due has missed, before anyone knows when it
comes. An answer that does not stream shows no tokens. It has missed where it comes after its last token is due: then
one of both times was too long.

A first token that is late for another reason than less important work (`excuse`) is no miss, and was not in time:
such a request counts only if its later tokens are slow.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from sidecar.events import Obstacle
from sidecar.gain.token_deadlines import Objective
from sidecar.pools import Lease, Pool

OWN_OBSTACLES = frozenset((Obstacle.ENGINE, Obstacle.STORE, Obstacle.LIMIT, Obstacle.GUARDED))
"""Obstacles that would be there without less important work: no engine, no store, the tier's own limit, and what a more
important tier's objective leaves to it."""


class SloReport(msgspec.Struct, eq=False):
    """Tells the pool by `_note`, which takes whether it missed. `due_us` is when the first token is due.

    `_obstacle` says what is in the way of the request while it waits: None where it has not waited.
    """

    _note: Callable[[bool], None]
    due_us: int
    is_first_known: bool = False
    is_excused: bool = False
    _is_noted: bool = False
    _is_overdue: bool = False
    _is_late: bool = False
    _obstacle: Callable[[], tuple[Obstacle, str]] | None = None

    def queued(self, obstacle: Callable[[], tuple[Obstacle, str]]) -> None:
        """The request waits from now on. What is in its way is looked at now, and when its first token is due."""
        self._obstacle = obstacle
        self._look()

    def _look(self) -> None:
        if self._obstacle is not None and not self.is_excused:
            self.is_excused = self._obstacle()[0] in OWN_OBSTACLES

    def excuse(self) -> None:
        """Another cause than less important work makes its first token late, whenever that comes."""
        self.is_excused = True

    def failed(self) -> None:
        """The answer is an error: it says nothing of the objective."""
        self.is_first_known = self._is_noted = True

    def is_overdue(self, now_us: int, *, waits: bool) -> bool:
        """True if the first token is due since an earlier call, and nobody knows of it. Call it from time to time.

        Between two calls it is noticed that a client has left. `waits`: the request still waits for its grant.
        """
        if self.is_first_known or now_us < self.due_us:
            return False
        if waits:
            self._look()
        was_overdue, self._is_overdue = self._is_overdue, True
        return was_overdue

    def ends(self, now_us: int) -> bool:
        """True if the request, whose wait ends without a grant, has waited until its first token was due."""
        if self._obstacle is None or now_us < self.due_us:
            return False
        self._look()
        return True

    def first_token(self, *, is_missed: bool) -> None:
        """The first token came, or is overdue, or a whole answer came too late. Only the first call counts."""
        if not self.is_first_known:
            self.is_first_known = True
            if is_missed and not self.is_excused:
                self._note_once(is_missed=True)
            self._is_late = is_missed

    def complete(self, *, is_slow: bool) -> None:
        """The answer is complete: its later tokens came in time, or too slowly."""
        if is_slow or not self._is_late:
            self._note_once(is_missed=is_slow)

    def _note_once(self, *, is_missed: bool) -> None:
        if not self._is_noted:
            self._is_noted = True
            self._note(is_missed)


# -- One request of a guarded tier whose times are computed, not seen: a shadow request, or one of `sidecar simulate`.
#
# It tells the pool what a request of HTTP would (its rules are above). Its answer streams.

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


# -- Watch over guarded tiers: says when an SLO is missed for another reason than less important work.

_IN_VAIN = (
    "tier {} misses its SLO though less important work holds no more than its reserves: not the less important work, "
    "the engine or the tier itself is too slow for this SLO"
)
_ENDED = "tier %s no longer misses its SLO without less important work"
_log = logging.getLogger("sidecar.guard")


class GuardWatch:
    """The tiers whose guard is in vain. `look` is called at every interval of the watchdog."""

    def __init__(self, pool: Pool, is_enforced: Callable[[], bool] = lambda: True) -> None:
        self._pool, self._is_enforced = pool, is_enforced
        self._in_vain: tuple[str, ...] = ()

    def look(self) -> None:
        """Logs, once each, what has begun or ended since the last look."""
        before, self._in_vain = self._in_vain, self._found()
        for tier in self._in_vain:
            if tier not in before:
                _log.warning("%s", _IN_VAIN.format(tier), extra={"event": "guard_in_vain"})
        for tier in before:
            if tier not in self._in_vain:
                _log.warning(_ENDED, tier, extra={"event": "guard_in_vain_ended"})

    def notices(self) -> Sequence[str]:
        """A sentence about each tier of which that is so."""
        return [_IN_VAIN.format(tier) for tier in self._found()]

    def _found(self) -> tuple[str, ...]:
        found = tuple(guard.tier for guard in self._pool.guards() if guard.is_in_vain)
        return found if found and self._is_enforced() else ()  # in the dry run, others hold what they want
