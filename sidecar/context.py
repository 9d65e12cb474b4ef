"""The grant of the current request, for an app in the same process that calls its engine itself.

The app finds it under `scope["admission"]` or, in any code of the request, as `granted()`.
"""

from __future__ import annotations

from contextvars import ContextVar

import msgspec

SCOPE_KEY = "admission"


class Granted(msgspec.Struct, frozen=True, gc=False):
    """A request's grant. `engine_priority` is in the engine's own range and direction, whether it is sent or not.

    `level` is the aged level (0 is the most important), `tier` the tier that is charged. `tokens` is what the request
    holds. `request_id` is the one that the client gets, and that log, trace and `sidecar explain` know it by.
    """

    tier: str
    tenant: str
    level: int
    engine_priority: int | float
    queue_wait_s: float
    starvation_s: float
    tokens: int
    request_id: str


current: ContextVar[Granted | None] = ContextVar("admission_granted", default=None)


def granted() -> Granted | None:
    """The grant of the request that this code runs for; None outside of an admitted request."""
    return current.get()
