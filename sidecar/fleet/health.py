"""Health of a whole fleet: whether requests can be sent at all. Each engine has a watch of its own."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from sidecar.engines.watch import EngineState, KnownState
from sidecar.fleet.fleet import Fleet


class FleetHealth(KnownState):
    """See `EngineHealth`. A fleet is up while one of its engines is."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__()
        self._fleet = fleet
        fleet.on_state = self._changed

    @property
    def reason(self) -> str | None:
        """See `EngineHealth`."""
        return "; ".join(self._fleet.readiness()) or None

    async def open(self) -> None:
        """Finds the engines, and looks at each once."""
        await self._fleet.open()
        self._changed()

    async def close(self) -> None:
        """Does nothing: requests under way need the fleet, which `FleetApp` closes with the server's lifespan."""

    def _changed(self) -> None:
        if self._fleet.is_starting:
            return
        state = self._present_state()
        if state is not self.state:
            self.state, self.since_s = state, time.monotonic()
            for report in list(self.on_change):
                report()

    def _present_state(self) -> EngineState:
        if not self._fleet.readiness():
            return EngineState.UP
        found = {member.watch.state for member in self._fleet.members()}
        return EngineState.MISMATCH if found == {EngineState.MISMATCH} else EngineState.DOWN

    def readiness(self) -> Sequence[str]:
        """See `EngineHealth`."""
        return () if self.state is EngineState.UNKNOWN else self._fleet.readiness() or self._fleet.idleness()

    def notices(self) -> Sequence[str]:
        """See `EngineHealth`."""
        return self._fleet.notices()

    def document(self) -> Mapping[str, object]:
        """See `EngineHealth`."""
        return {
            "state": self.state.value,
            "reason": self.reason,
            "for_s": round(self.for_s, 3),
            **self._fleet.document(),
        }
