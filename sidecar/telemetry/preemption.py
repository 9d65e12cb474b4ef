"""What a preemption cost, and how the wait behind it ended where the request was not admitted again."""

from __future__ import annotations

import msgspec

from sidecar.events import Admitted, Outcome, Preempted, Refused, Settled


def engine_time_us(preempted: Preempted) -> int:
    """For how long the engine had worked for nothing."""
    return preempted.at_us - preempted.admitted_us


def end_of_wait(last: Admitted, settled: Settled) -> Refused:
    """The end of a wait that began anew behind `last`, of a request that was not admitted again.

    It was admitted once, so it ends in `Settled`. Where that does not tell of the wait, it is worked out: since its
    arrival the request has only waited, and who had not been overtaken before counts as not starved.
    """
    told = settled.wait or _worked_out(last, settled)
    return told if told.status is not None else msgspec.structs.replace(told, message=_departure(settled))


def _worked_out(last: Admitted, settled: Settled) -> Refused:
    overtaken_us = last.overtaken_at_us
    return Refused(
        at_us=settled.at_us,
        code=settled.error or settled.outcome.value,
        message="it waited again, as its room had gone to a more important request",
        status=settled.status,
        queue_wait_us=settled.at_us - (last.at_us - last.queue_wait_us),
        starvation_us=0 if overtaken_us is None else settled.at_us - overtaken_us,
        overtaken_at_us=overtaken_us,
        served_ahead=last.served_ahead,
    )


def _departure(settled: Settled) -> str:
    if settled.outcome is Outcome.CLIENT_LEFT:
        return "the client hung up while the request waited again, preempted"
    return "the server gave the request up while it waited again, preempted"
