"""The door's one observer: tells the spans, and everybody else who listens, what happens to each request.

Everything here is called on the request's path, so nothing raises; a listener's first failure is logged, and the
request goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from sidecar.events import Event, Headers, Observation, Received
from sidecar.telemetry.propagation import client_trace
from sidecar.telemetry.spans import SpanObserver

logger = logging.getLogger(__name__)

Tell = Callable[[Event], None]


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
    """Makes the `Observation` of every request. One per process; holds nothing of any request."""

    def __init__(self, spans: SpanObserver, listeners: Sequence[Listener]) -> None:
        self._spans = spans
        self._listeners = tuple(listeners)
        self._reported = False

    def listens(self) -> bool:
        """Whether anybody does."""
        return bool(self._listeners) or self._spans.listens()

    def received(self, event: Received) -> Observation | None:
        """Begins a request for everybody."""
        spans = self._spans.received(event) if self._spans.listens() else None
        tells: list[Tell] = [spans.on_event] if spans is not None and spans.is_recording else []
        trace = _clients(event.headers) if spans is None else Trace(*spans.trace)
        for listener in self._listeners:
            try:
                tell = listener.begin(event, trace)
            except Exception:
                self.report()
                continue
            if tell is not None:
                tells.append(tell)
        return _Told(self, spans, tells)

    def report(self) -> None:
        """Log the exception being handled, the first time only: a defect must not write a line a request."""
        if not self._reported:
            self._reported = True
            logger.exception("telemetry failed; requests go on without, and further failures are not logged")


def _clients(headers: Headers) -> Trace | None:
    """The client's own trace: by that the request is looked up where we make no spans."""
    found = client_trace(headers)
    return None if found is None else Trace(*found, is_sampled=False)


class _Told:
    """One request's observation."""

    __slots__ = ("_spans", "_telemetry", "_tells")

    def __init__(self, telemetry: Telemetry, spans: Observation | None, tells: Sequence[Tell]) -> None:
        self._telemetry = telemetry
        self._spans = spans
        self._tells = tells

    def headers(self) -> Headers:
        """The trace context that goes on to the engine."""
        return () if self._spans is None else self._spans.headers()

    def on_event(self, event: Event) -> None:
        """Tells everybody."""
        for tell in self._tells:
            try:
                tell(event)
            except Exception:  # noqa: PERF203  one that fails must not silence the others
                self._telemetry.report()
