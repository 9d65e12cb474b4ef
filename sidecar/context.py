"""The grant of the current request, for an app in the same process that calls its engine itself.

The app finds it under `scope["admission"]` or, in any code of the request, as `granted()`.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Protocol

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


class Holder(Protocol):
    """The holder of a request's grant, which every task of the request finds. `granted` is None once it has ended."""

    granted: Granted | None


current: ContextVar[Holder | None] = ContextVar("admission_granted", default=None)


def granted() -> Granted | None:
    """The grant of the request that this code runs for; None outside of an admitted request.

    A request is admitted for as long as it holds its room: until the app has sent the last part of its answer, or the
    request ends before that, with its client for example. After that it is None in whatever the request began: a
    background task that runs after the answer, a task that goes on, the next request of the same connection. A response
    with `background: true` holds its room, and its grant, until the engine has ended it.
    """
    holder = current.get()
    return None if holder is None else holder.granted
