"""Report of one request of a guarded tier: whether it met its objective, as far as less important work can be why.

The pool is told at most twice: of the first token, and of the pace of those after it. A first token that is not there
when it is due has missed, before anyone knows when it comes. An answer that does not stream shows neither: it is one
observation, which has missed where it comes after its last token is due. Then one of both times was too long.

What met is told always. What missed is not, where less important work is not to blame: see `excuse`.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from sidecar.events import Obstacle

OWN_OBSTACLES = frozenset((Obstacle.ENGINE, Obstacle.STORE, Obstacle.LIMIT))
"""Obstacles that would be there without less important work: no engine, no store, the tier's own limit."""


class SloReport(msgspec.Struct, eq=False):
    """Tells the pool by `_note`, which takes whether it missed. `due_us` is when the first token is due.

    `_obstacle` says what is in the way of the request while it waits: None where it has not waited.
    """

    _note: Callable[[bool], None]
    due_us: int
    is_first_known: bool = False
    is_excused: bool = False
    _is_overdue: bool = False
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
        self.is_first_known = True

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
        """The first token came, or is overdue, or a whole answer came. Only the first call counts."""
        if not self.is_first_known:
            self.is_first_known = True
            if not (is_missed and self.is_excused):
                self._note(is_missed)

    def later_tokens(self, *, is_slow: bool) -> None:
        """The answer is complete: its later tokens came in time, or too slowly."""
        self._note(is_slow)
