"""The door's one observer: tells the spans, and everybody else who listens, what happens to each request.

Everything here is called on the request's path, so nothing raises; a listener's first failure is logged, and the
request goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from sidecar.events import Admitted, Event, Headers, Observation, Received, Refused, Settled
from sidecar.telemetry.spans.observer import SampledOut, SpanObserver
from sidecar.telemetry.spans.propagation import client_trace
from sidecar.telemetry.spans.request_spans import RequestSpans

logger = logging.getLogger(__name__)

MOST_UNTOLD = 64
"""Events that are told in a row: some ten requests, a fraction of a millisecond."""

Tell = Callable[[Event], None]
_ENDS = frozenset((Refused, Settled))


class Trace(NamedTuple):
    """Where a request's `admission` span is: what an operator looks up in a tracing backend."""

    trace_id: int
    span_id: int
    is_sampled: bool


class Listener(Protocol):
    """Wants to be told of every request: metrics, the journal, the log."""

    def begin(self, received: Received, trace: Trace | None) -> Tell | None:
        """Called once per guarded request, first of all; what is returned is called with each of its events in order.

        `trace` is None where the process has no tracing and the client names none. None is returned where this request
        is of no interest.
        """


class Telemetry:
    """Makes the `Observation` of every request. One per process; use it from one event loop at a time.

    With a `delay_s`, what happened is told up to so many seconds later, many events in a row: between two requests the
    same work costs a processor several times as much as when it has just done it. `flush` tells it at once. The spans
    hear at once of what the engine is sent.
    """

    def __init__(self, spans: SpanObserver, listeners: Sequence[Listener], *, delay_s: float = 0.0) -> None:
        self.listeners = tuple(listeners)
        self._spans = spans
        self._delay_s = delay_s
        self._timer: asyncio.TimerHandle | None = None
        self._untold: list[tuple[_Told, Event | None]] = []
        self._reported = False

    def listens(self) -> bool:
        """Whether anybody does."""
        return bool(self.listeners) or self._spans.listens()

    def is_traced(self) -> bool:
        """Whether the process has an SDK that makes spans."""
        return self._spans.listens()

    def received(self, event: Received) -> Observation | None:
        """Begins a request for everybody."""
        told = _Told(self, event, self._spans.received(event))
        self.later(told, None)
        return told

    def later(self, told: _Told, event: Event | None) -> None:
        """Has an event told, or the beginning of a request."""
        untold = self._untold
        untold.append((told, event))
        if self._timer is None or len(untold) >= MOST_UNTOLD:
            self._tell_soon(len(untold))

    def flush(self) -> None:
        """Tells everything that has happened so far."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        untold, self._untold = self._untold, []
        for told, event in untold:
            told.tell(event)

    def report(self) -> None:
        """Log the exception being handled, the first time only: a defect must not write a line a request."""
        if not self._reported:
            self._reported = True
            logger.exception("telemetry failed; requests go on without, and further failures are not logged")

    def _tell_soon(self, count: int) -> None:
        if not self._delay_s or count >= MOST_UNTOLD:
            self.flush()
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # nobody's event loop: there is no later
            self.flush()
            return
        self._timer = loop.call_later(self._delay_s, self.flush)


def clients_trace(headers: Headers) -> Trace | None:
    """The client's own trace: by that the request is looked up where we make no spans."""
    found = client_trace(headers)
    return None if found is None else Trace(*found, is_sampled=False)


class _Told:
    """One request's observation."""

    __slots__ = ("_received", "_recording", "_spans", "_telemetry", "_tells")

    def __init__(self, telemetry: Telemetry, received: Received, spans: RequestSpans | SampledOut | None) -> None:
        self._telemetry = telemetry
        self._received = received
        self._spans = spans
        self._recording = spans if spans is not None and spans.is_recording else None
        self._tells: Sequence[Tell] = ()

    def headers(self) -> Headers:
        """The trace context that goes on to the engine."""
        return () if self._spans is None else self._spans.headers()

    def on_event(self, event: Event) -> None:
        """Has everybody told: the spans of an admission at once, as the engine is sent their context."""
        if self._recording is not None and type(event) not in _ENDS:
            if isinstance(event, Admitted) and event.queue_wait_us:
                self._telemetry.flush()  # who went ahead is asked for
            self._recording.on_event(event)
        self._telemetry.later(self, event)

    def tell(self, event: Event | None) -> None:
        """Tells everybody of the event; None is the beginning."""
        if event is None:
            self._begin()
            return
        if self._recording is not None and type(event) in _ENDS:
            self._recording.on_event(event)
        for tell in self._tells:
            try:
                tell(event)
            except Exception:  # noqa: PERF203  one that fails must not silence the others
                self._telemetry.report()

    def _begin(self) -> None:
        trace = clients_trace(self._received.headers) if self._spans is None else Trace(*self._spans.trace)
        tells: list[Tell] = []
        for listener in self._telemetry.listeners:
            try:
                tell = listener.begin(self._received, trace)
            except Exception:
                self._telemetry.report()
                continue
            if tell is not None:
                tells.append(tell)
        self._tells = tells
