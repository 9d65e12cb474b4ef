"""A request that was preempted and never admitted again: how its second wait ended.

It was admitted once, so it ends in `Settled`, which knows nothing of waits. What `Refused` would have told is worked out
from when it was last admitted: since its arrival it has only waited, as what the engine did for it is lost.
"""

from __future__ import annotations

from sidecar.events import Admitted, Outcome, Preempted, Refused, Settled


def end_of_wait(last: Admitted, settled: Settled) -> Refused:
    """The end of a wait that began anew behind `last`. Whoever had not been overtaken by then counts as not starved."""
    overtaken_us = last.overtaken_at_us
    return Refused(
        at_us=settled.at_us,
        code=settled.error or settled.outcome.value,
        message=_message(settled),
        status=settled.status,
        queue_wait_us=settled.at_us - (last.at_us - last.queue_wait_us),
        starvation_us=0 if overtaken_us is None else settled.at_us - overtaken_us,
        overtaken_at_us=overtaken_us,
        served_ahead=last.served_ahead,
    )


def engine_time_us(preempted: Preempted) -> int:
    """For how long the engine had worked for nothing."""
    return preempted.at_us - preempted.admitted_us


def _message(settled: Settled) -> str:
    if settled.status is not None:
        return "it waited again, as its room had gone to a more important request"
    if settled.outcome is Outcome.CLIENT_LEFT:
        return "the client hung up while the request waited again, preempted"
    return "the server gave the request up while it waited again, preempted"
