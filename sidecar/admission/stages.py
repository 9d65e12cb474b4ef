"""The stages of one admitted request.

    READING -> WAITING -> RUNNING -> OVER      (WAITING ends at once where there is room)
       |        |  ^       |  |       ^
       |        |  +-------+  |       |        (preempted, or the engine could not be reached)
       |        |             +-> FOLLOWED     (a background response runs on after its request is answered)
       +--------+-> OVER                       (refused, or the client disconnected)

A request costs less where nothing checks this while it runs. The tests check every step of every request in them.
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
