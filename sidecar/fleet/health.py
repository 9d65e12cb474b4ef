"""Health of a whole fleet: whether requests can be sent at all. Each engine has a watch of its own."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from sidecar.engines.watch import EngineHealth, EngineState
from sidecar.fleet.fleet import Fleet


class FleetHealth(EngineHealth):
    """Health of a fleet, which is up while one of its engines is. `FleetApp` closes it with the server's lifespan."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__()
        self._fleet = fleet
        fleet.on_state = self._look

    @property
    def reason(self) -> str | None:
        """See `EngineHealth`."""
        return "; ".join(self._fleet.readiness()) or None

    async def open(self) -> None:
        """Finds the engines, and looks at each once."""
        await self._fleet.open()
        self._look()

    def _look(self) -> None:
        if self._fleet.is_starting:
            return
        state = self._present_state()
        if state is not self.state:
            self.state, self.since_s = state, time.monotonic()
            self._changed()

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
        return {**super().document(), **self._fleet.document()}
