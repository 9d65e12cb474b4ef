"""Whether requests had to wait inside the engine, where its scheduler orders them, and not just a long time.

Clients alone cannot tell: requests that a server takes in slowly wait just as long, and so do those that a proxy holds
back. So one of these has to hold as well: the engine's own gauge counts them; or as many run as the engine can run; or,
where neither can be read, much longer answers do not make more requests run at once. Where there is no queue
and only a slow way in, they do (Little's law: what runs at once is the rate of arrival times the length of a stay).
"""

from __future__ import annotations

from enum import Enum

from sidecar.doctor.burst import Burst
from sidecar.doctor.judging import FEWEST
from sidecar.policy.policy import EngineName

FULL = 0.8
"""Of what the engine says it can run: clients see a little less, for a first token comes after its slot."""
LONGER = 3
"""By this factor a control's answers are longer, where nobody could tell that the engine was full."""
SAME = 1.7
"""At most this much more ran at once then, on average: the number is held by a bound. Otherwise it grows by `LONGER`.

A little growth is the first tokens' doing: a slot is taken before them, and clients do not see it yet."""
ON_GAUGE = 0.25
"""Of the requests that waited, for a reading to be their queue: a request that just came in is counted for a step."""
FEWEST_READINGS = 3
"""Of the gauge within one burst, for its silence to mean anything."""
_ELSEWHERE = frozenset({EngineName.DYNAMO})
"""Its gauge is the router's queue; while that is off, requests wait in the workers, which do not show."""


OVERLOADED = 529
"""Dynamo's status for what its workers do not take, unless DYN_HTTP_OVERLOAD_STATUS_CODE says another."""


class Queueing(str, Enum):
    """Where requests waited."""

    INSIDE = "inside the engine"
    BEFORE = "before the engine"
    BOUNDED = "behind a bound"
    TOO_LITTLE = "too little load"


def queueing(burst: Burst, control: Burst | None, engine: EngineName, max_running: int | None) -> Queueing:
    """Where a burst's requests waited. `BOUNDED` is for certain a queue, but nobody says whose."""
    if burst.judgment.waited < FEWEST:
        return Queueing.TOO_LITTLE
    if _shows_on_gauge(burst) or (max_running is not None and burst.at_once >= FULL * max_running):
        return Queueing.INSIDE
    if control is None or control.plan.tokens < LONGER * burst.plan.tokens or _grows(burst, control):
        return Queueing.TOO_LITTLE
    readings = [one.waiting for one in burst.gauges if one.waiting is not None]
    is_watched = engine not in _ELSEWHERE and len(readings) >= FEWEST_READINGS
    return Queueing.BEFORE if is_watched else Queueing.BOUNDED


def seems_switched_off(burst: Burst, engine: EngineName) -> bool:
    """Whether Dynamo's router shows no queue: requests beyond what the workers take are refused, and none waits."""
    return engine is EngineName.DYNAMO and burst.is_answered_by(OVERLOADED) and burst.waiting_inside == 0


def _grows(burst: Burst, control: Burst) -> bool:
    return control.mean_at_once > SAME * burst.mean_at_once


def _shows_on_gauge(burst: Burst) -> bool:
    return (burst.waiting_inside or 0) >= ON_GAUGE * burst.judgment.waited


def queueing_at_door(burst: Burst) -> Queueing:
    """The same for one of our own sidecars, which says of each request how long it held it."""
    return Queueing.INSIDE if burst.held_at_door >= FEWEST else Queueing.TOO_LITTLE
