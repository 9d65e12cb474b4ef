"""Membership of a process in a pool, which refuses a process with another ladder of tiers while its replicas live."""

from __future__ import annotations

from collections.abc import Sequence

from sidecar.pools.dispatcher import Clock
from sidecar.pools.redis import protocol
from sidecar.pools.redis.connection import PoolRefuses


class Membership:
    """Of one process. `takes_over`: it makes the pool anew where the tiers are others, once."""

    def __init__(self, pool: str, tier_names: Sequence[str], clock: Clock, *, takes_over: bool) -> None:
        self.is_refused = False
        self.why = ""
        """Why it is refused, for people."""
        self._pool = pool
        self._tier_names = tier_names
        self._clock = clock
        self._takes_over = takes_over
        self._refused_us = 0

    def brings(self, *, are_rules_new: bool) -> int:
        """What becomes of the store's rules: new ones replace them, others are brought to an empty store alone.

        A process that was refused does not make the pool, where it is gone, before its replicas had the time to.
        """
        if self._takes_over:
            return protocol.TAKES_OVER
        if self.is_refused and self._clock() - self._refused_us < protocol.SILENCE_S * 1e6:
            return protocol.JOINS
        return protocol.REPLACES if are_rules_new else protocol.KEEPS

    def accepted(self) -> None:
        """The pool has taken it."""
        self._takes_over = self.is_refused = False

    def refused(self, error: PoolRefuses) -> None:
        """The pool has not, or is gone and was not to be made."""
        self.is_refused = True
        if error.tiers is None:
            return
        self._refused_us = self._clock()
        theirs, own = ", ".join(error.tiers.split()), ", ".join(self._tier_names)
        self.why = (
            f"pool {self._pool} has the tiers {theirs}, and the policy of this process has {own}; start it with the "
            "pool's tiers, name another pool, end all replicas of the pool first, or take it over with "
            "--take-over-pool"
        )
