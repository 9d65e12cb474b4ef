"""The status of a replica's store, for the readiness page; every change goes to the log and to metrics."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from sidecar.durations import short_duration
from sidecar.events import StoreChanged, StoreObserver, StoreState
from sidecar.pools.base import Clock

_log = logging.getLogger("sidecar.store")


class StoreStatus:
    """The state, its reason and its age. CONNECTING ends with the first answer, or the first failure.

    `was_reached` says that the store has answered this process at least once: only then can it be lost.
    """

    def __init__(self, pool: str, clock: Clock, observer: StoreObserver | None) -> None:
        self.state = StoreState.CONNECTING
        self.reason = "no attempt has ended yet"
        self.was_reached = False
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
        return {
            "state": state,
            "since_s": since_s,
            "reason": self.reason,
            "pool": self._pool,
            "reached": self.was_reached,
        }

    def readiness(self) -> Sequence[str]:
        """Why no request is admitted at present; empty while requests are."""
        if self.state is StoreState.CLOSED and self._is_refused:
            return (f"the pool refuses this process: {self.reason}",)
        if self.state is StoreState.CLOSED and self.was_reached:
            what = "new requests are refused, and only this replica's requests are shown"
            return (f"{self._silent()}: {what} ({self.reason})",)
        if self.state in (StoreState.CLOSED, StoreState.CONNECTING):
            return (f"{self._silent()}: {self.reason}",)
        return ()

    def notices(self, part: str) -> Sequence[str]:
        """Warnings for the operator although requests are being admitted. `part` is this replica's, in words."""
        if self.state is StoreState.WAITING:
            return (f"requests have waited for {short_duration(self.since_s)}: {self.reason}",)
        if self.state is not StoreState.DIVIDED:
            return ()
        what = f"only this replica's requests are shown, its part of the pool is {part}"
        return (f"{self._silent()}: {what} ({self.reason})",)

    def _silent(self) -> str:
        if not self.was_reached:
            return "the store has not been reached yet"
        return f"the store has not answered for {short_duration(self.since_s)}"

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
        if state is StoreState.WAITING:
            _log.warning("pool %s admits nothing yet: %s", self._pool, reason, extra=self._fields(state))
        elif state is not StoreState.SHARED:
            if not is_refused:
                self._log_loss(reason)
        elif not is_first:
            back = "store is back" if self.was_reached else "store is reached"
            text = "%s after %.1f s, pool %s is %s: %s"
            _log.warning(text, back, before_s, self._pool, state.value, reason, extra=self._fields(state))
        self.was_reached = self.was_reached or state in (StoreState.SHARED, StoreState.WAITING)
        if self._observer is not None:
            self._observer(StoreChanged(self._since_us, state, reason))

    def _log_loss(self, reason: str) -> None:
        """Logs that the store is lost, or that it was not there when this process began."""
        if self.was_reached:
            what = f"store lost, pool {self._pool} is {self.state.value}"
        else:
            what = f"the store of pool {self._pool} has not been reached yet"
        _log.warning("%s: %s", what, reason, extra=self._fields(self.state))

    def _fields(self, state: StoreState) -> dict[str, str]:
        """The fields of a log line about the state."""
        return {"event": f"store_{state.value}", "pool": self._pool}
