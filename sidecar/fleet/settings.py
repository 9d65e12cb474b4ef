"""Settings of a fleet, as its parts get them: immutable, already checked, durations in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field

from sidecar.engines.base import Engine
from sidecar.engines.pages import Health
from sidecar.engines.watch import EngineCheck
from sidecar.policy.fleet import MOST_ENGINES


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """How every engine of a fleet is watched and used.

    `engine` is the kind of all of them. `connect_timeout_s` is that of `ReverseProxy`, None for its own. An engine that
    is new gets its whole capacity after `slow_start_s`; 0: at once.
    """

    engine: type[Engine]
    health: Health = field(default_factory=Health)
    check: EngineCheck = EngineCheck.ON
    slow_start_s: float = 60.0
    most_engines: int = MOST_ENGINES
    connect_timeout_s: float | None = None
