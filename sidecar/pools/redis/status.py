"""The status of a replica's store, for the readiness page; every change goes to the log and to metrics."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from sidecar.events import StoreChanged, StoreObserver, StoreState
from sidecar.pools.runtime import Clock

_log = logging.getLogger("sidecar.store")


class StoreStatus:
    """The state, its reason and its age. CONNECTING ends with the first answer, or the first failure."""

    def __init__(self, pool: str, clock: Clock, observer: StoreObserver | None) -> None:
        self.state = StoreState.CONNECTING
        self.reason = "not reached yet"
        self._is_refused = False
        self._pool = pool
        self._clock = clock
        self._observer = observer
        self._since_us = clock()

    @property
    def since_s(self) -> float:
        """The age of the state, in seconds."""
        return (self._clock() - self._since_us) / 1e6

    def state_for_people(self) -> Mapping[str, object]:
        """The status for people and dashboards: JSON types only."""
        state, since_s = self.state.value, round(self.since_s, 3)
        return {"state": state, "since_s": since_s, "reason": self.reason, "pool": self._pool}

    def readiness(self) -> Sequence[str]:
        """Why no request is admitted at present; empty while requests are."""
        if self.state is StoreState.CLOSED:
            what = "the pool refuses this process" if self._is_refused else "store lost, requests are refused"
            return (f"{what}: {self.reason}",)
        return ("store not reached yet",) if self.state is StoreState.CONNECTING else ()

    def notices(self) -> Sequence[str]:
        """Warnings for the operator although requests are being admitted."""
        if self.state is not StoreState.DIVIDED:
            return ()
        return (f"store lost, this replica admits to its part of the pool: {self.reason}",)

    def change(self, state: StoreState, reason: str, *, is_refused: bool = False) -> None:
        """Notes a state, and reports a new one. `is_refused`: the pool is there, and refuses this process."""
        self.reason = reason
        was_refused, self._is_refused = self._is_refused, is_refused
        if is_refused and not was_refused:
            _log.warning("pool %s refuses this process: %s", self._pool, reason, extra=self._fields(state))
        if state is self.state:
            return
        before_s, is_first = self.since_s, self.state is StoreState.CONNECTING
        self.state, self._since_us = state, self._clock()
        if state is not StoreState.SHARED:
            if not is_refused:
                _log.warning(
                    "store lost, pool %s is %s: %s", self._pool, state.value, reason, extra=self._fields(state)
                )
        elif not is_first:
            back = "store is back after %.1f s, pool %s is %s: %s"
            _log.warning(back, before_s, self._pool, state.value, reason, extra=self._fields(state))
        if self._observer is not None:
            self._observer(StoreChanged(self._since_us, state, reason))

    def _fields(self, state: StoreState) -> dict[str, str]:
        """The fields of a log line about the state."""
        return {"event": f"store_{state.value}", "pool": self._pool}
