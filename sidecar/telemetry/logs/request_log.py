"""What happened to requests, as log lines: one per refusal, failure and departure, none for what goes well.

The lines go to the logger `sidecar.requests` with everything about the request as fields of the record (`extra`), so
that a host's own formatter may show them; `log_format` has ours. Of each tier and code only so many lines are written a
second; a line then says how many were left out. At DEBUG every settled request is a line as well.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, NamedTuple

from sidecar.events import Admitted, Classified, Event, Outcome, Preempted, Received, Refused, Settled
from sidecar.telemetry.failures import what_failed
from sidecar.telemetry.logs.flood import WINDOW_S, Flood
from sidecar.telemetry.preemption import end_of_wait, engine_time_us
from sidecar.telemetry.telemetry import Tell, Trace

REQUESTS = "sidecar.requests"
"""The name of the logger."""
MOST_MESSAGE = 500
"""Characters of a refusal's message in a line."""

Fields = dict[str, Any]


class Kind(NamedTuple):
    """What lines have in common that are bounded together. `tier` is empty where it was not known yet."""

    event: str
    tier: str
    code: str


class RequestLog:
    """A listener. One per process; use it from one event loop. `flush` at the end tells what was left out last."""

    def __init__(self, logger: logging.Logger | None = None, flood: Flood[Kind] | None = None) -> None:
        self._logger = logging.getLogger(REQUESTS) if logger is None else logger
        self._flood: Flood[Kind] = Flood() if flood is None else flood
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, received: Received, trace: Trace | None) -> Tell:
        """See `Listener.begin`."""
        return _Request(self, received, trace).tell

    def flush(self) -> None:
        """Says what was left out and not said yet."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for kind, count in self._flood.left_out():
            of_tier = f" of tier {kind.tier}" if kind.tier else ""
            fields = {
                "event": "left_out",
                "code": kind.code,
                "left_out": count,
                **({"tier": kind.tier} if kind.tier else {}),
            }
            self._logger.warning(
                "left out %d more lines about requests%s: %s, %s", count, of_tier, kind.event, kind.code, extra=fields
            )

    def would_write(self, level: int) -> bool:
        """Whether anybody wants lines of this level."""
        return self._logger.isEnabledFor(level)

    def has_a_line_for(self, event: Settled) -> bool:
        """Whether a request that ended so is worth one: where it failed, or left its wait, and at DEBUG always."""
        has_left_its_wait = event.outcome is Outcome.CLIENT_LEFT and event.error is not None
        return has_left_its_wait or _failure(event) is not None or self.would_write(logging.DEBUG)

    def write(self, level: int, message: str, arguments: tuple[object, ...], fields: Fields) -> None:
        """One line. What is None is left out."""
        extra = {name: value for name, value in fields.items() if value is not None}
        self._logger.log(level, message, *arguments, extra=extra)

    def write_bounded(self, level: int, message: str, arguments: tuple[object, ...], fields: Fields) -> None:
        """One line, or one more that is left out."""
        if not self.would_write(level):
            return
        if self._flood.allows(Kind(fields["event"], fields.get("tier") or "", fields["code"])):
            self.write(level, message, arguments, fields)
        elif self._timer is None:
            self._flush_soon()

    def _flush_soon(self) -> None:
        try:
            self._timer = asyncio.get_running_loop().call_later(WINDOW_S, self.flush)
        except RuntimeError:  # nobody's event loop: whoever calls us so flushes at the end
            return


class _Request:
    """What is kept of one request until it ends."""

    __slots__ = (
        "_admitted", "_classified", "_engine_lost_us", "_log", "_preemptions", "_received_us", "_request_id", "_trace",
        "_waits_again",
    )  # fmt: skip

    def __init__(self, log: RequestLog, received: Received, trace: Trace | None) -> None:
        self._log = log
        self._request_id = received.request_id
        self._received_us = received.at_us
        self._trace = trace
        self._classified: Classified | None = None
        self._admitted: Admitted | None = None
        self._preemptions = self._engine_lost_us = 0
        self._waits_again = False

    def tell(self, event: Event) -> None:
        """See `Tell`."""
        if type(event) is Classified:
            self._classified = event
        elif type(event) is Admitted:
            self._admitted = event
            self._waits_again = False
        elif type(event) is Preempted:
            self._preemptions, self._waits_again = event.times, True
            self._engine_lost_us += engine_time_us(event)
        elif type(event) is Settled and self._waits_again and self._admitted is not None:
            self._refused(end_of_wait(self._admitted, event))
        elif type(event) is Settled:
            self._settled(event)
        elif type(event) is Refused:
            self._refused(event)

    def _refused(self, event: Refused) -> None:
        message = event.message[:MOST_MESSAGE]
        waits = {**_waits(event), **self._preempted()}
        if event.status is None:
            fields = {"event": "abandoned", "code": event.code, **self._who(), **waits}
            self._log.write_bounded(logging.INFO, "request %s: %s", (self._request_id, message), fields)
            return
        fields = {"event": "refused", "code": event.code, "status": event.status, **self._who(), **waits}
        # What the client did wrong is its affair; what the pool cannot give is the operator's.
        level = logging.WARNING if event.status >= 500 else logging.INFO
        arguments = (self._request_id, event.status, event.code, message)
        self._log.write_bounded(level, "request %s refused with %d %s: %s", arguments, fields)

    def _settled(self, event: Settled) -> None:
        if not self._log.has_a_line_for(event):
            return
        failure = _failure(event)
        fields = {
            "event": "settled" if failure is None else "failed",
            "code": event.outcome.value if failure is None else failure,
            "status": event.status,
            **self._who(),
            **({} if self._admitted is None else _waits(self._admitted)),
            **self._preempted(),
            "duration_s": round((event.at_us - self._received_us) / 1e6, 6),
            "tokens_used": event.tokens_used,
        }
        if failure is None:
            self._log.write(logging.DEBUG, "request %s %s", (self._request_id, fields["code"]), fields)
        else:
            arguments = (self._request_id, what_failed(event.outcome, event.status, event.error))
            self._log.write_bounded(logging.WARNING, "request %s failed: %s", arguments, fields)

    def _preempted(self) -> Fields:
        """How often it was preempted and what that cost, where it was."""
        if not self._preemptions:
            return {}
        return {"preemptions": self._preemptions, "engine_lost_s": self._engine_lost_us / 1e6}

    def _who(self) -> Fields:
        trace, classified = self._trace, self._classified
        return {
            "request_id": self._request_id,
            "trace_id": None if trace is None else f"{trace.trace_id:032x}",
            "span_id": None if trace is None else f"{trace.span_id:016x}",
            "tier": None if classified is None else classified.tier,
            "tenant": None if classified is None else classified.tenant,
        }


def _waits(event: Admitted | Refused) -> Fields:
    """How it had waited, where it had."""
    if not event.queue_wait_us:
        return {}
    return {"queue_wait_s": event.queue_wait_us / 1e6, "starvation_s": event.starvation_us / 1e6}


def _failure(event: Settled) -> str | None:
    """A word for what went wrong at the engine, None where nothing did; a client that left is no failure."""
    if event.outcome is Outcome.FAILED:
        return event.error or Outcome.FAILED.value
    if event.outcome is Outcome.COMPLETED and event.status is not None and event.status >= 500:
        return event.error or str(event.status)
    return None
