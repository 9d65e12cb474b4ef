"""The record of one request: everything that telemetry knows of it, gathered from its events.

Metrics, journal, log, recent figures and spans all read this record; none keeps a state of a request of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from sidecar.events import (
    Admitted,
    Classified,
    Event,
    FirstByte,
    Observed,
    Outcome,
    Preempted,
    Queued,
    Received,
    Refused,
    Replayed,
    ReplayReason,
    Risen,
    Settled,
    Verdict,
)

if TYPE_CHECKING:  # the log needs records, and no tracing
    from opentelemetry.trace import SpanContext

CANCELED, PASSED = "canceled", "passed"
ABANDONED: Final = frozenset((Outcome.CLIENT_LEFT.value, CANCELED, PASSED))
"""The codes of `Refused` without an answer: the client disconnected, the server stopped, or every request passes."""
JITTER_US: Final = 10_000
"""The most time between two reports of one moment of a shared store, as they reach this process."""


class PreemptedAttempt(msgspec.Struct, frozen=True, gc=False):
    """An admission that was taken back, and the wait before it, None where there was none.

    It was preempted, or the engine could not be reached, or it did not serve the request (`replayed`).
    """

    queued: Queued | None
    admitted: Admitted
    preempted: Preempted
    replayed: Replayed | None = None


class RequestRecord(msgspec.Struct, gc=False, eq=False):
    """One guarded request: its arrival (`at_us` on the pool's clock, `wall_ns` in calendar time), and its events.

    For a preempted request, `queued` and `admitted` are of the last attempt, and `lost` has the earlier ones. Where it
    was not admitted again, `refused` is how its wait ended, beside `settled`. `copy_of` is the request itself where
    this is a copy that the journal keeps of an admission that was taken back. `replayed` is for a moment the cause of
    the next `Preempted`. `trace` is the context of its `admission` span, by which an operator finds it in a tracing
    backend: sampled where that is recorded. The client's headers are not kept: they hold its API key.
    """

    request_id: str
    trace: SpanContext | None
    method: str
    path: str
    at_us: int
    wall_ns: int
    classified: Classified | None = None
    queued: Queued | None = None
    admitted: Admitted | None = None
    refused: Refused | None = None
    first_byte: FirstByte | None = None
    settled: Settled | None = None
    observed: Observed | None = None
    lost: tuple[PreemptedAttempt, ...] = ()
    replayed: Replayed | None = None
    copy_of: RequestRecord | None = None

    @staticmethod
    def of(received: Received, trace: SpanContext | None) -> RequestRecord:
        """The record of a request that has just arrived."""
        return RequestRecord(
            received.request_id, trace, received.method, received.path, received.at_us, received.wall_ns
        )

    def add(self, event: Event | Received) -> None:
        """Adds one event. Its beginning, and an object that is no event, change nothing."""
        place = _PLACES.get(type(event))
        if place is not None:
            setattr(self, place, event)
        elif type(event) is Preempted:
            self._take_back(event)
        elif type(event) is Risen:
            self._rise(event)
        if self.lost and type(event) is Settled and self.admitted is None:
            self.refused = _end_of_wait(self.lost[-1].admitted, event)

    def _take_back(self, event: Preempted) -> None:
        if self.admitted is not None:
            self.lost = (*self.lost, PreemptedAttempt(self.queued, self.admitted, event, self.replayed))
            self.queued = self.admitted = self.replayed = None

    def _rise(self, event: Risen) -> None:
        """From now on it is a request of its new tier."""
        if (of := self.classified) is not None:
            self.classified = msgspec.structs.replace(of, tier=event.tier, risen_from=of.risen_from or of.tier)
        if self.queued is not None:
            self.queued = msgspec.structs.replace(self.queued, mark=event.mark)

    @property
    def is_refused_in_dry_run(self) -> bool:
        """True if it passed in `mode: observe`, and enforcing would have refused it."""
        return self.observed is not None and self.observed.verdict is Verdict.REFUSED

    @property
    def arrived_us(self) -> int:
        """When it entered the queue: after its body was read, in the order in which the pool accepted the requests."""
        return self.at_us if self.classified is None else self.classified.at_us

    @property
    def ended_us(self) -> int | None:
        """When it was settled or refused, None while it waits or runs."""
        end = self.settled or self.refused
        return None if end is None else end.at_us

    @property
    def waited(self) -> Admitted | Refused | None:
        """The end of its wait, None while it waits."""
        return self.admitted or self.refused

    @property
    def tenant(self) -> str | None:
        """Its tenant, None where its key is not known."""
        if self.classified is not None:
            return self.classified.tenant
        return None if self.refused is None else self.refused.tenant

    @property
    def tier(self) -> str | None:
        """Its tier, None where its key is not known."""
        if self.classified is not None:
            return self.classified.tier
        return None if self.refused is None else self.refused.tier

    @property
    def key(self) -> str | None:
        """The name of its API key, None where it has none."""
        asked = self.classified or self.refused
        return None if asked is None else asked.key

    @property
    def preemptions(self) -> int:
        """How often it was preempted."""
        return sum(not attempt.preempted.is_unreached for attempt in self.lost) if self.lost else 0

    @property
    def replays(self) -> int:
        """How often an engine did not serve it, and it waited for another."""
        return sum(attempt.replayed is not None for attempt in self.lost) if self.lost else 0

    @property
    def engine_lost_us(self) -> int:
        """The engine's time that was lost in attempts that were preempted."""
        return sum(engine_time_us(attempt.preempted) for attempt in self.lost if not attempt.preempted.is_unreached)

    def ran_at(self, at_us: int) -> bool:
        """True if it was at the engine then, in an attempt that was taken back: no one went ahead of it."""
        # The pool admits the preempting request a moment before the preemption is reported.
        return any(attempt.admitted.at_us <= at_us < attempt.preempted.at_us - JITTER_US for attempt in self.lost)

    def wall_s(self, at_us: int) -> float:
        """Calendar time, in Unix seconds, of a moment on the pool's clock."""
        return self.wall_ns / 1e9 + (at_us - self.at_us) / 1e6


EventHandlers = Mapping[type, Callable[[RequestRecord, Any], None]]
"""By the type of event, `Received` included: called with the request's record, which has the event already."""


_PLACES: Final = {
    Classified: "classified",
    Queued: "queued",
    Admitted: "admitted",
    Refused: "refused",
    FirstByte: "first_byte",
    Settled: "settled",
    Observed: "observed",
    Replayed: "replayed",
}
"""The attribute of a record that has an event of this kind as it is."""


REPLAYED_BECAUSE: Final[Mapping[str, str]] = {
    ReplayReason.UNREACHED: "no connection to the engine could be made",
    ReplayReason.FULL: "the engine said that it was full",
    ReplayReason.CRASHED: "the engine crashed before it answered",
    ReplayReason.BROKEN: "the engine broke the connection before it answered",
}
"""A clause for each reason of a replay."""


def engine_name(engine_id: str) -> str:
    """The operator's name of an engine, of its id `name#incarnation`."""
    return engine_id.rpartition("#")[0]


def engine_time_us(preempted: Preempted) -> int:
    """The engine's time that a preemption lost."""
    return preempted.at_us - preempted.admitted_us


def _end_of_wait(last: Admitted, settled: Settled) -> Refused:
    """The end of a wait that began again after `last`, of a request that was not admitted again.

    The request was admitted once, so it ends in `Settled`. Where that does not report the wait, it is computed: the
    request has waited since its arrival, and counts as not starved unless it had been overtaken before.
    """
    end = settled.wait
    if end is None:
        overtaken_us = last.overtaken_at_us
        end = Refused(
            at_us=settled.at_us,
            code=settled.error or settled.outcome.value,
            message="it waited again: its room had gone to another request, or the engine could not be reached",
            status=settled.status,
            queue_wait_us=settled.at_us - (last.at_us - last.queue_wait_us),
            starvation_us=0 if overtaken_us is None else settled.at_us - overtaken_us,
            overtaken_at_us=overtaken_us,
            served_ahead=last.served_ahead,
        )
    if end.status is not None:
        return end
    if settled.outcome is Outcome.CLIENT_LEFT:
        message = "the client disconnected while the request waited again, preempted"
    else:
        message = "the server gave the request up while it waited again, preempted"
    return msgspec.structs.replace(end, message=message)


_FAILURES: Final = {
    "ResponseCut": "the engine broke off in the middle of its answer",
    "incomplete_response": "the answer ended before it was complete",
    "engine_unreachable": "the engine could not be reached, or broke off before it answered",
    "engine_timeout": "the engine did not answer in time",
    "CancelledError": "the server stopped before the answer was complete",
}
"""A clause for each known value of `Settled.error`."""


def failed_with(event: Settled, *, from_status: int) -> str | None:
    """A word for the engine's failure, or for its answer of `from_status` and above; None where there was none.

    A client's disconnect is no failure.
    """
    if event.outcome is _FAILED:
        return event.error or _FAILED.value
    if event.outcome is _COMPLETED and event.status is not None and event.status >= from_status:
        return event.error or str(event.status)
    return None


# Looked up once: an enumeration's attribute costs as much as a call.
_COMPLETED, _, _FAILED = Outcome


def failure_description(outcome: str, status: int | None, error: str | None) -> str | None:
    """A clause that says how a settled request failed; None where it did not fail, and where its client disconnected.

    `outcome` is the value of an `Outcome`, or one that another replica, of another version, has written.
    """
    if outcome == Outcome.FAILED:
        return _FAILURES.get(error or "", f"the app around the engine failed with {error or 'an error'}")
    if outcome == Outcome.COMPLETED and status is not None and status >= 400:
        return _FAILURES.get(error or "", f"answered with an error, status {status}")
    return None
