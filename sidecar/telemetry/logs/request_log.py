"""The log of requests: one line for each refusal, failure and disconnect, and none for a request that succeeds.

Or one for each request that has ended, an access log; or none at all: see `AccessLog`.

The lines go to the logger `sidecar.requests` with everything about the request as fields of the record (`extra`), so
that a host's own formatter can show them; `formats` has ours. Of each tier and code only a few lines are written a
second; a further line then says how many were left out, but in the access log. At DEBUG every settled request is a
line as well.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Generic, NamedTuple, TypeVar

from sidecar.events import FIRST_FAILURE, Admitted, Observed, Refused, Settled, UnguardedRequest, Verdict
from sidecar.tasks import running_loop
from sidecar.telemetry.request_record import EventHandlers, RequestRecord, failed_with, failure_description

# -- The bound on lines of one kind: the first few of every second pass, the others are counted.

Kind = TypeVar("Kind")

LINES_PER_S = 20
"""Of one kind: enough for a reader, and 20 lines cost an event loop less than a thousandth of a second."""
WINDOW_S = 1.0
MOST_KINDS = 1000
"""Windows that are kept. There are so many kinds only where a text varies that should not."""


class _Window:
    __slots__ = ("allowed", "began_s", "left_out")

    def __init__(self, began_s: float) -> None:
        self.began_s = began_s
        self.allowed = 0
        self.left_out = 0


class FloodGuard(Generic[Kind]):
    """Lets the first few of each kind pass in every second. Use it from one thread, or under a lock.

    `now_s` is for tests.
    """

    def __init__(self, lines_per_s: int = LINES_PER_S, now_s: Callable[[], float] = time.monotonic) -> None:
        self._lines_per_s = lines_per_s
        self._now_s = now_s
        self._windows: dict[Kind, _Window] = {}

    def allows(self, kind: Kind) -> bool:
        """True if one more may be written; else it is counted."""
        now_s = self._now_s()
        window = self._windows.get(kind)
        if window is None or (now_s - window.began_s >= WINDOW_S and not window.left_out):
            window = self._begin(kind, now_s)
        if window.allowed < self._lines_per_s:
            window.allowed += 1
            return True
        window.left_out += 1
        return False

    def left_out(self) -> list[tuple[Kind, int]]:
        """The number left out of every kind since the last call, for the caller to report; the counts begin again."""
        counts = [(kind, window.left_out) for kind, window in self._windows.items() if window.left_out]
        for kind, _ in counts:
            del self._windows[kind]
        return counts

    def _begin(self, kind: Kind, now_s: float) -> _Window:
        if len(self._windows) >= MOST_KINDS:
            self._windows = {kind: window for kind, window in self._windows.items() if window.left_out}
        window = self._windows[kind] = _Window(now_s)
        return window


REQUESTS = "sidecar.requests"
"""The name of the logger."""
MOST_MESSAGE = 500
"""Characters of a refusal's message in a line."""

ACCESS_VARIABLE = "SIDECAR_ACCESS_LOG"

_DRAINING, _STOPPED = "draining", "server_stopped"
_CODES = {"ResponseCut": "response_cut", "CancelledError": _STOPPED}
"""Words for values of `Settled.error` that are names of exceptions, which only the code knows."""

Fields = dict[str, Any]


class AccessLog(str, Enum):
    """Which requests have a line."""

    OFF = "off"
    FAILURES = "failures"
    ALL = "all"


def access_log(environment: Mapping[str, str]) -> AccessLog:
    """The environment's setting, else `failures`. Raises ValueError."""
    return AccessLog(one_of(environment, ACCESS_VARIABLE, list(AccessLog)) or AccessLog.FAILURES)


def one_of(environment: Mapping[str, str], variable: str, words: Sequence[str]) -> str | None:
    """The word in a variable; None where it is not set. Raises ValueError for any other word."""
    written = environment.get(variable, "").strip().lower()
    if written and written not in words:
        raise ValueError(f"{variable}: {written!r} is not one of {', '.join(words)}")
    return written or None


class LineKind(NamedTuple):
    """The kind of a line: of each kind only a few lines are written a second. `tier` is empty where it is unknown."""

    event: str
    tier: str
    code: str


class RequestLog:
    """A listener. One per process; use it from one event loop. `flush` at the end writes the last counts."""

    def __init__(
        self,
        logger: logging.Logger | None = None,
        flood: FloodGuard[LineKind] | None = None,
        *,
        access: AccessLog = AccessLog.FAILURES,
    ) -> None:
        self._logger = logging.getLogger(REQUESTS) if logger is None else logger
        self.has_all = access is AccessLog.ALL
        self.success_level = logging.INFO if self.has_all else logging.DEBUG
        """That of the line of a request which did not fail."""
        self.writes = self._writes_nothing if access is AccessLog.OFF else self._logger.isEnabledFor
        """Whether lines of a level are written now."""
        self._flood: FloodGuard[LineKind] = FloodGuard() if flood is None else flood
        self._timer: asyncio.TimerHandle | None = None
        self.handlers: EventHandlers = {Refused: self._refused, Settled: self._settled}

    def flush(self) -> None:
        """Writes how many lines were left out since the last time."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for kind, count in self._flood.left_out():
            of_tier = f" of tier {kind.tier}" if kind.tier else ""
            fields = {"event": "left_out", "code": kind.code, "left_out": count, "tier": kind.tier or None}
            arguments = (count, of_tier, kind.event, kind.code)
            self._write(logging.WARNING, "left out %d more lines about requests%s: %s, %s", arguments, fields)

    def note_unguarded(self, request: UnguardedRequest) -> None:
        """Writes a line for a request that was refused as the policy does not guard its path, bounded as others."""
        if request.is_refused:
            fields: Fields = {
                "event": "refused",
                "code": request.code,
                "status": request.status,
                "request_id": request.request_id,
                "route": request.route,
            }
            arguments = (request.request_id, request.status, request.code, request.message)
            self.write_bounded(logging.WARNING, "request %s refused with %d %s: %s", arguments, fields)

    def note_observed(self, observed: Observed) -> None:
        """Writes a line for a request that enforcing would have refused, bounded as others."""
        if observed.verdict is not Verdict.REFUSED:
            return
        fields: Fields = {
            "event": "would_be_refused",
            "code": observed.code,
            "request_id": observed.request_id,
            "tier": observed.tier,
            "tenant": observed.tenant,
            "route": observed.path,
            "client": observed.client,
        }
        if observed.queue_wait_us:
            fields["queue_wait_s"] = observed.queue_wait_us / 1e6
            fields["starvation_s"] = observed.starvation_us / 1e6
        arguments = (observed.request_id, observed.code)
        self.write_bounded(logging.INFO, "request %s passed; enforcing would refuse it: %s", arguments, fields)

    def write_bounded(self, level: int, message: str, arguments: tuple[object, ...], fields: Fields) -> None:
        """One line, or one more that is left out. Fields that are None are left out."""
        if not self.writes(level):
            return
        if self.has_all or self._flood.allows(LineKind(fields["event"], fields.get("tier") or "", fields["code"])):
            self._write(level, message, arguments, fields)
        elif self._timer is None and (loop := running_loop()) is not None:  # else the caller flushes at the end
            self._timer = loop.call_later(WINDOW_S, self.flush)

    def _writes_nothing(self, _level: int) -> bool:
        return False

    def _write(self, level: int, message: str, arguments: tuple[object, ...], fields: Fields) -> None:
        extra = {name: value for name, value in fields.items() if value is not None}
        self._logger.log(level, message, *arguments, extra=extra)

    def _refused(self, record: RequestRecord, event: Refused) -> None:
        message = event.message[:MOST_MESSAGE]
        is_abandoned = event.status is None
        fields = {
            "event": "abandoned" if is_abandoned else "refused",
            "code": event.code,
            "status": event.status,
            **_request_fields(record, event, event.at_us),
        }
        if event.status is None:
            self.write_bounded(logging.INFO, "request %s: %s", (record.request_id, message), fields)
            return
        # An error of the client's is the client's concern; a refusal for lack of room is the operator's. A server that
        # stops has lines of its own, with the number of the requests.
        level = logging.WARNING if event.status >= 500 else logging.INFO
        level = self.success_level if event.code == _DRAINING else level
        arguments = (record.request_id, event.status, event.code, message)
        self.write_bounded(level, "request %s refused with %d %s: %s", arguments, fields)

    def _settled(self, record: RequestRecord, event: Settled) -> None:
        if record.refused is not None:  # preempted, and not admitted again
            self._refused(record, record.refused)
            return
        failure = failed_with(event, from_status=FIRST_FAILURE)
        if failure is None and not self.writes(self.success_level):
            return
        classified, held = record.classified, event.held_tokens
        fields = {
            "event": "settled" if failure is None else "failed",
            "code": event.outcome._value_ if failure is None else _CODES.get(failure, failure),
            "status": event.status,
            **_request_fields(record, record.admitted, event.at_us),
            "tokens_held": classified.tokens if held is None and classified is not None else held,
            "tokens_used": event.tokens_used,
        }
        if failure is None:
            self._write(self.success_level, "request %s %s", (record.request_id, fields["code"]), fields)
        else:
            arguments = (record.request_id, failure_description(event.outcome, event.status, event.error))
            level = self.success_level if fields["code"] == _STOPPED else logging.WARNING
            self.write_bounded(level, "request %s failed: %s", arguments, fields)


def _request_fields(record: RequestRecord, wait: Admitted | Refused | None, ended_us: int) -> Fields:
    """Who asked for what, how long it took, its wait where it waited, and its preemptions where it had any."""
    trace, classified, first_byte = record.trace, record.classified, record.first_byte
    fields: Fields = {
        "request_id": record.request_id,
        "trace_id": None if trace is None else f"{trace.trace_id:032x}",
        "span_id": None if trace is None else f"{trace.span_id:016x}",
        "tier": record.tier,
        "tenant": record.tenant,
        "key": record.key,
        "user": None if classified is None else classified.user,
        "risen_from": None if classified is None else classified.risen_from,
        "model": None if classified is None else classified.model,
        "first_byte_s": None if first_byte is None else _seconds(first_byte.at_us - record.at_us),
        "duration_s": _seconds(ended_us - record.at_us),
        "tokens_asked": None if classified is None else classified.tokens,
    }
    if wait is not None and wait.queue_wait_us:
        fields |= {"queue_wait_s": wait.queue_wait_us / 1e6, "starvation_s": wait.starvation_us / 1e6}
    if isinstance(wait, Admitted) and wait.engine is not None:  # of several
        fields["engine"] = wait.engine
    if preemptions := record.preemptions:
        fields |= {"preemptions": preemptions, "engine_lost_s": record.engine_lost_us / 1e6}
    return fields


def _seconds(us: int) -> float:
    return round(us / 1e6, 6)
