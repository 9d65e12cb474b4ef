"""The journal of the last minutes' requests, in memory: it answers which request went ahead of which, and why.

Nothing is rendered before it is asked for. The records are in four bounded places:

    open        requests that wait or run, in order of arrival; one that waits for long stays until it has ended
    admissions  the latest admitted, in order of the moment of the decision: "admitted while it waited" is a bisect.
                An admission that was taken back stays, as a copy of its record: it went ahead of others all the same
    ended       the latest that waited or broke off: requests that succeeded do not push out those that are asked about
    refused     the latest that were answered with an error by the middleware, preempted ones included

A request that was admitted at once and ended well is found as long as its admission is kept. Only this process's
requests are here: of a shared pool's other replicas, `served_ahead` of an event has the tokens.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right, insort_right
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain, islice
from time import monotonic_ns

import msgspec

from sidecar.events import Admitted, Outcome, Preempted, Received, Refused, Settled
from sidecar.telemetry.request_record import JITTER_US, EventHandlers, RequestRecord

MOST_ADMISSIONS = 16_384
"""15 minutes of a busy engine, which admits 18 requests a second; a record is 1.2 KB, so 20 MB in the worst case."""
MOST_ENDED = 4096
MOST_OPEN = 16_384
"""Requests that wait or run: more connections than a process is usually allowed. Beyond, the oldest is dropped."""
MOST_REFUSED = 1024
"""Apart from the others: a flood of refusals, which cost nothing, must not push out those that waited."""
RETENTION_S = 15 * 60.0
MOST_LOOKED_AT = 1024
"""Admissions that `overtook` looks at: it is asked on a request's path, and 1024 take 0.1 ms."""

_is_trace_id = re.compile(r"[0-9a-f]{32}").fullmatch


class Journal:
    """Listens to requests. Use it from one event loop.

    `retention_s` bounds the age of the answers about admitted and ended requests. `now_us` is the clock of the events.
    """

    def __init__(
        self,
        most_admissions: int = MOST_ADMISSIONS,
        most_ended: int = MOST_ENDED,
        retention_s: float = RETENTION_S,
        now_us: Callable[[], int] = lambda: monotonic_ns() // 1000,
    ) -> None:
        self.retention_s = retention_s
        self.now_us = now_us
        self._most_admissions = most_admissions
        self._open: dict[RequestRecord, None] = {}
        self._admissions: list[RequestRecord] = []
        self.knows_since_us: int | None = None  # from when on every admission is kept; None: none was dropped
        self._ended: deque[RequestRecord] = deque(maxlen=most_ended)
        self._refused: deque[RequestRecord] = deque(maxlen=MOST_REFUSED)
        self.handlers: EventHandlers = {
            Received: self._received,
            Admitted: self._admitted,
            Preempted: self._preempted,
            Refused: self._end,
            Settled: self._end,
        }

    def find(self, request_or_trace_id: str) -> RequestRecord | None:
        """The newest request of this id, None where none is kept."""
        return next(iter(self.all_for(request_or_trace_id)), None)

    def all_for(self, request_or_trace_id: str) -> Sequence[RequestRecord]:
        """Every request that is kept of this id, newest first: clients may repeat an id, and a trace have several."""
        self._drop_old()
        trace_id = _trace_id(request_or_trace_id)
        found = {
            record
            for record in chain(self._open, self._ended, self._refused, self._admissions)
            if record.copy_of is None
            and (
                record.request_id == request_or_trace_id
                or (trace_id is not None and record.trace is not None and record.trace.trace_id == trace_id)
            )
        }
        return sorted(found, key=lambda record: record.at_us, reverse=True)

    def find_ahead(self, waiter: RequestRecord, most: int = MOST_ADMISSIONS) -> Sequence[RequestRecord]:
        """The first `most` that were admitted while it waited, or has waited so far, in order; itself is left out.

        Those are among them that were admitted while it ran, and was preempted then: the pool counts them, too. One
        that came as it was admitted, by the same decision, is passed on first, and so counts as ahead wherever it was.
        """
        first, last = self._window(waiter)
        return _others(self._admissions[first : min(last, first + most)], waiter)

    def overtook(self, waiter: RequestRecord, most: int = 64) -> Sequence[RequestRecord]:
        """Of those that went ahead, the first `most` that had come later; at most `MOST_LOOKED_AT` are looked at."""
        if waiter.waited is not None and waiter.waited.overtaken_at_us is None:
            return ()
        first, last = self._overtaking(waiter)
        looked_at = _others(self._admissions[first : min(last, first + MOST_LOOKED_AT)], waiter)
        return [*islice((record for record in looked_at if record.arrived_us > waiter.arrived_us), most)]

    def looks_at_all(self, waiter: RequestRecord) -> bool:
        """True if `overtook` looks at all that were admitted since the overtaking."""
        first, last = self._overtaking(waiter)
        return last - first <= MOST_LOOKED_AT

    def refusals(self, limit: int) -> Sequence[RequestRecord]:
        """The last that the middleware, or the proxy in the engine's place, answered with an error, newest first."""
        self._drop_old()
        return [*islice(reversed(self._refused), limit)]

    def _received(self, record: RequestRecord, _: Received) -> None:
        self._open[record] = None
        if len(self._open) > MOST_OPEN:
            del self._open[next(iter(self._open))]

    def _admitted(self, record: RequestRecord, _: Admitted) -> None:
        # An admission after a wait is reported a moment later than one without, so the last few may have to be passed.
        admissions = self._admissions
        if not admissions or _admitted_us(admissions[-1]) <= _admitted_us(record):
            admissions.append(record)
        else:
            insort_right(admissions, record, key=_admitted_us)
        excess = len(self._admissions) - self._most_admissions
        if excess > self._most_admissions // 8:  # not one by one: it moves all that is after them
            self._drop_admissions(excess)

    def _preempted(self, record: RequestRecord, event: Preempted) -> None:
        if not record.lost or record.lost[-1].preempted is not event:
            return
        lost = record.lost[-1]
        first = bisect_left(self._admissions, lost.admitted.at_us, key=_admitted_us)
        for place in range(first, bisect_right(self._admissions, lost.admitted.at_us, first, key=_admitted_us)):
            if self._admissions[place] is record:
                self._admissions[place] = msgspec.structs.replace(
                    record, queued=lost.queued, admitted=lost.admitted, lost=record.lost[:-1], copy_of=record
                )
                break

    def _end(self, record: RequestRecord, _: Refused | Settled) -> None:
        self._open.pop(record, None)
        is_refused = record.refused is not None and record.refused.status is not None
        if is_refused or (record.settled is not None and record.settled.message is not None):
            self._refused.append(record)
        if record.queued is not None or record.is_refused_in_dry_run or _broke_off(record):
            self._ended.append(record)

    def _drop_old(self) -> None:
        oldest_us = self.now_us() - round(self.retention_s * 1e6)
        for ended in (self._ended, self._refused):
            while ended and (ended[0].ended_us or 0) < oldest_us:
                ended.popleft()
        self._drop_admissions(bisect_left(self._admissions, oldest_us, key=_admitted_us))

    def _drop_admissions(self, count: int) -> None:
        if count:
            self.knows_since_us = _admitted_us(self._admissions[count - 1]) + 1
            del self._admissions[:count]

    def _overtaking(self, waiter: RequestRecord) -> tuple[int, int]:
        """The part of the window since it was first overtaken; all of it while that is not known."""
        first, last = self._window(waiter)
        overtaken_us = None if waiter.waited is None else waiter.waited.overtaken_at_us
        if overtaken_us is not None:  # of a shared pool's store the moments come with the network's jitter
            first = max(first, bisect_left(self._admissions, overtaken_us - JITTER_US, key=_admitted_us))
        return first, last

    def _window(self, waiter: RequestRecord) -> tuple[int, int]:
        """The admissions from its arrival to the end of its wait, or to now: where they begin and end in the list."""
        wait = waiter.waited
        if wait is not None:
            start_us, end_us = wait.at_us - wait.queue_wait_us, wait.at_us
        elif waiter.queued is not None:
            start_us, end_us = waiter.arrived_us, self.now_us()
        else:
            return 0, 0
        if start_us == end_us:
            return 0, 0
        first = bisect_left(self._admissions, start_us, key=_admitted_us)
        last = bisect_right(self._admissions, end_us, first, key=_admitted_us)
        for place in range(last - 1, first - 1, -1):
            record = self._admissions[place]
            if _admitted_us(record) < end_us:
                break
            if record is waiter:
                return first, place  # requests that the same decision admitted after it were not ahead
        return first, last


# Looked up once: an enumeration's attribute costs as much as a call.
_, _, _FAILED = Outcome


def _others(records: Sequence[RequestRecord], waiter: RequestRecord) -> Sequence[RequestRecord]:
    """Without the waiter's own admissions that were taken back."""
    if waiter.lost:
        return [record for record in records if record.copy_of is not waiter]
    return records


def _admitted_us(record: RequestRecord) -> int:
    # For a moment the list has a record whose admission has just been taken back: `_preempted` replaces it.
    return (record.admitted or record.lost[-1].admitted).at_us


def _broke_off(record: RequestRecord) -> bool:
    """True if the engine failed, or the client disconnected before it was admitted."""
    if record.settled is not None:
        return record.settled.outcome is _FAILED
    return record.refused is not None and record.refused.status is None


def _trace_id(text: str) -> int | None:
    return int(text, 16) if _is_trace_id(text) else None
