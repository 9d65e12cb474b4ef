"""Settings of a fleet, as its parts get them: immutable, already checked, durations in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field

from sidecar.engines.base import Engine
from sidecar.engines.pages import Health
from sidecar.engines.watch import EngineCheck


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """How every engine of a fleet is watched and used.

    `engine` is the kind of all of them. One that is new gets its whole capacity after `slow_start_s`; 0: at once.
    """

    engine: type[Engine]
    health: Health = field(default_factory=Health)
    check: EngineCheck = EngineCheck.ON
    slow_start_s: float = 60.0
