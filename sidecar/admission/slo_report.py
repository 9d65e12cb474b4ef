"""Report of one request of a guarded tier: whether it met its objective, as far as less important work can be why.

The pool is told once: that the first token is late, as soon as that is known, or else at the end of the answer whether
the later ones came in time. A first token that is not there when it is due has missed, before anyone knows when it
comes. An answer that does not stream shows no tokens. It has missed where it comes after its last token is due: then
one of both times was too long.

A first token that is late for another reason than less important work (`excuse`) is no miss, and was not in time:
such a request counts only if its later tokens are slow.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from sidecar.events import Obstacle

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
