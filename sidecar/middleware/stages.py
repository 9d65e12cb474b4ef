"""The stages of one admitted request.

    READING -> WAITING -> RUNNING -> OVER      (WAITING ends at once where there is room)
       |        |  ^       |  |       ^
       |        |  +-------+  |       |        (preempted, or the engine could not be reached)
       |        |             +-> FOLLOWED     (a background response runs on after its request is answered)
       +--------+-> OVER                       (refused, or the client disconnected)

`NEXT_STAGES` is this diagram as a table.
"""

from __future__ import annotations

from enum import IntEnum


class Stage(IntEnum):
    """The stages of a request."""

    READING = 0
    WAITING = 1
    RUNNING = 2
    FOLLOWED = 3
    OVER = 4


NEXT_STAGES: tuple[tuple[Stage, ...], ...] = (
    (Stage.WAITING, Stage.OVER),  # after READING
    (Stage.RUNNING, Stage.OVER),  # after WAITING
    (Stage.WAITING, Stage.FOLLOWED, Stage.OVER),  # after RUNNING
    (Stage.OVER,),  # after FOLLOWED
    (),  # after OVER
)
"""The stages that may follow each stage, by its number."""


class IllegalTransition(Exception):
    """A request would enter a stage that cannot follow its present one: a defect in the middleware."""
