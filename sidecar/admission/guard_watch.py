"""Watch over guarded tiers: says when an SLO is missed for another reason than less important work."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from sidecar.pools import Pool

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
