"""What happened to the requests of the last minutes, in memory: answers who went ahead of whom, and why.

A record holds a request's events as they were told; nothing is rendered before somebody asks. Four bounded places:

    open        requests that wait or run, in order of arrival; one that waits for long stays until it is over
    admissions  the latest admitted, in order of the moment of the decision: "admitted while it waited" is a bisect.
                An admission that was taken back stays, as a copy of its record: it went ahead of others all the same
    ended       the latest that waited or broke off: what went well does not push out what is asked about
    refused     the latest that were answered with an error at the door, or by it when they had been preempted

A request that was admitted at once and ended well is found as long as its admission is kept. Only this process's
requests are here: of a shared pool's other replicas, `served_ahead` of an event knows the tokens.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right, insort_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from time import monotonic_ns

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
    Settled,
)
from sidecar.telemetry.preemption import end_of_wait
from sidecar.telemetry.telemetry import Tell, Trace

MOST_ADMISSIONS = 16_384
"""15 minutes of a busy engine, which takes in 18 requests a second; a record is 1.2 KB, so 20 MB in the worst case."""
MOST_ENDED = 4096
MOST_OPEN = 16_384
"""Requests that wait or run: more connections than a process is usually allowed. Beyond, the oldest is forgotten."""
MOST_REFUSED = 1024
"""Apart from the others: a flood of refusals, which cost nothing, must not push out those that waited."""
RETENTION_S = 15 * 60.0
MOST_LOOKED_AT = 1024
"""Admissions that `overtook` looks at: it is asked on a request's path, and 1024 take 0.1 ms."""

LONGEST_MODEL = 128
"""Of a model's name that is kept: it is the client's, and as long as it likes."""
JITTER_US = 10_000
"""How far apart this process may hear of what its pool's store did at one moment."""

_is_trace_id = re.compile(r"[0-9a-f]{32}").fullmatch


class Lost(msgspec.Struct, frozen=True, gc=False):
    """An admission that was taken back, and the wait before it, None where there was none."""

    queued: Queued | None
    admitted: Admitted
    preempted: Preempted


class Record(msgspec.Struct, gc=False, eq=False):
    """One guarded request: when it came (`at_us` on the pool's clock, `wall_ns` in calendar time), and its events.

    Of one that was preempted, `queued` and `admitted` are the last, and `lost` has those before. Where it was not
    admitted again, `refused` is how its wait ended, beside `settled`. `copy_of` is the request itself where this is
    what was kept of an admission that was taken back. The client's headers are not here: they hold its API key.
    """

    request_id: str
    trace: Trace | None
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
    lost: tuple[Lost, ...] = ()
    copy_of: Record | None = None

    @property
    def arrived_us(self) -> int:
        """When it stood in line: behind reading its body, and in the order in which the pool took the requests in."""
        return self.at_us if self.classified is None else self.classified.at_us

    @property
    def ended_us(self) -> int | None:
        """When it was settled or refused, None while it waits or runs."""
        end = self.settled or self.refused
        return None if end is None else end.at_us

    @property
    def waited(self) -> Admitted | Refused | None:
        """What ended its wait, None while it waits."""
        return self.admitted or self.refused

    def ran_at(self, at_us: int) -> bool:
        """Whether it was at the engine then, in an attempt that was taken back: nobody went ahead of it."""
        # The pool admits whoever takes its room a moment before the door tells of it.
        return any(lost.admitted.at_us <= at_us < lost.preempted.at_us - JITTER_US for lost in self.lost)

    def wall_s(self, at_us: int) -> float:
        """Calendar time, in Unix seconds, of a moment on the pool's clock."""
        return self.wall_ns / 1e9 + (at_us - self.at_us) / 1e6


Waiter = Record | Admitted | Refused
"""A request, or what ended its wait, for whoever has nothing but that at hand."""


class Journal:
    """Listens to every request. Use it from one event loop.

    `retention_s` bounds the age of what is told of those admitted or ended. `now_us` is the clock of the events.
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
        self._open: dict[Record, None] = {}
        self._admissions: list[Record] = []
        self._dropped_us: int | None = None
        self._ended: deque[Record] = deque(maxlen=most_ended)
        self._refused: deque[Record] = deque(maxlen=MOST_REFUSED)

    def begin(self, received: Received, trace: Trace | None) -> Tell:
        """See `Listener.begin`."""
        record = Record(received.request_id, trace, received.method, received.path, received.at_us, received.wall_ns)
        self._open[record] = None
        if len(self._open) > MOST_OPEN:
            del self._open[next(iter(self._open))]
        return partial(self._note, record)

    def find(self, request_or_trace_id: str) -> Record | None:
        """The newest request of this id, None where none is kept."""
        return next(iter(self.all_of(request_or_trace_id)), None)

    def all_of(self, request_or_trace_id: str) -> Sequence[Record]:
        """Every request that is kept of this id, newest first: clients may repeat an id, and a trace have several."""
        self._forget_the_old()
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

    def ahead_of(self, waiter: Waiter, most: int = MOST_ADMISSIONS) -> Sequence[Record]:
        """The first `most` that were admitted while it waited, or has waited so far, in order; itself is left out.

        Those are among them that were admitted while it ran, and was preempted then: the pool counts them, too.
        """
        first, last = self._window(waiter)
        return _others(self._admissions[first : min(last, first + most)], waiter)

    def overtook(self, waiter: Waiter, most: int = 64) -> Sequence[Record]:
        """Of those that went ahead, the first `most` that had come later; at most `MOST_LOOKED_AT` are looked at."""
        if not _may_have_been_overtaken(waiter):
            return ()
        first, last = self._window(waiter)
        arrived_us = waiter.arrived_us if isinstance(waiter, Record) else waiter.at_us - waiter.queue_wait_us
        overtaken_us = _overtaken_us(waiter)
        if overtaken_us is not None:  # of a shared pool's store the moments come with the network's jitter
            first = max(first, bisect_left(self._admissions, overtaken_us - JITTER_US, key=_admitted_us))
        looked_at = _others(self._admissions[first : min(last, first + MOST_LOOKED_AT)], waiter)
        return [*islice((record for record in looked_at if record.arrived_us > arrived_us), most)]

    def knows_since_us(self) -> int | None:
        """The moment from which on every admission is kept, None where none has been dropped yet."""
        return self._dropped_us

    def refusals(self, limit: int) -> Sequence[Record]:
        """The last that were answered with an error at the door, newest first."""
        self._forget_the_old()
        return [*islice(reversed(self._refused), limit)]

    def _note(self, record: Record, event: Event) -> None:
        if type(event) is Classified and event.model is not None and len(event.model) > LONGEST_MODEL:
            event = msgspec.structs.replace(event, model=event.model[:LONGEST_MODEL])
        if type(event) is Observed:
            return
        if type(event) is Preempted:
            self._take_back(record, event)
            return
        setattr(record, _FIELDS[type(event)], event)
        if type(event) is Settled and record.lost and record.admitted is None:
            record.refused = end_of_wait(record.lost[-1].admitted, event)
        if type(event) is Admitted:
            self._keep_admission(record)
        elif type(event) is Refused or type(event) is Settled:
            self._keep_ended(record)

    def _keep_admission(self, record: Record) -> None:
        # Who waited hears of its admission a moment later than who did not, so the last few may have to be passed.
        insort_right(self._admissions, record, key=_admitted_us)
        excess = len(self._admissions) - self._most_admissions
        if excess > self._most_admissions // 8:  # not one by one: it moves all that is behind them
            self._drop_admissions(excess)

    def _take_back(self, record: Record, event: Preempted) -> None:
        admitted = record.admitted
        if admitted is None:
            return
        first = bisect_left(self._admissions, admitted.at_us, key=_admitted_us)
        for place in range(first, bisect_right(self._admissions, admitted.at_us, first, key=_admitted_us)):
            if self._admissions[place] is record:
                self._admissions[place] = msgspec.structs.replace(record, copy_of=record)
                break
        record.lost = (*record.lost, Lost(record.queued, admitted, event))
        record.queued = record.admitted = None

    def _keep_ended(self, record: Record) -> None:
        self._open.pop(record, None)
        if record.refused is not None and record.refused.status is not None:
            self._refused.append(record)
        if record.queued is not None or _broke_off(record):
            self._ended.append(record)

    def _forget_the_old(self) -> None:
        oldest_us = self.now_us() - round(self.retention_s * 1e6)
        for ended in (self._ended, self._refused):
            while ended and (ended[0].ended_us or 0) < oldest_us:
                ended.popleft()
        self._drop_admissions(bisect_left(self._admissions, oldest_us, key=_admitted_us))

    def _drop_admissions(self, count: int) -> None:
        if count:
            self._dropped_us = _admitted_us(self._admissions[count - 1]) + 1
            del self._admissions[:count]

    def _window(self, waiter: Waiter) -> tuple[int, int]:
        """The admissions from its arrival to the end of its wait, or to now: where they begin and end in the list."""
        wait = waiter.waited if isinstance(waiter, Record) else waiter
        if wait is not None:
            start_us, end_us = wait.at_us - wait.queue_wait_us, wait.at_us
        elif isinstance(waiter, Record) and waiter.queued is not None:
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
            if record is waiter or record.admitted is waiter:
                return first, place  # what the same decision admitted behind it was not ahead
        return first, last


def _others(records: Sequence[Record], waiter: Waiter) -> Sequence[Record]:
    """Without the waiter's own admissions that were taken back."""
    if isinstance(waiter, Record) and waiter.lost:
        return [record for record in records if record.copy_of is not waiter]
    return records


_FIELDS: Mapping[type[Event], str] = {
    Classified: "classified",
    Queued: "queued",
    Admitted: "admitted",
    Refused: "refused",
    FirstByte: "first_byte",
    Settled: "settled",
}


def _admitted_us(record: Record) -> int:
    assert record.admitted is not None
    return record.admitted.at_us


def _broke_off(record: Record) -> bool:
    """The engine failed, or the client had gone before it was admitted."""
    if record.settled is not None:
        return record.settled.outcome is Outcome.FAILED
    return record.refused is not None and record.refused.status is None


def _overtaken_us(waiter: Waiter) -> int | None:
    wait = waiter.waited if isinstance(waiter, Record) else waiter
    return None if wait is None else wait.overtaken_at_us


def _may_have_been_overtaken(waiter: Waiter) -> bool:
    """It was, or it still waits, and only who looks can say."""
    is_waiting = isinstance(waiter, Record) and waiter.waited is None
    return is_waiting or _overtaken_us(waiter) is not None


def _trace_id(text: str) -> int | None:
    return int(text, 16) if _is_trace_id(text) else None
