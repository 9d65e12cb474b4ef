"""Dispatch of request events to the spans and to every listener: metrics, journal, log.

All of this runs on the request's path, so nothing raises; a listener's first failure is logged, and the request
goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from opentelemetry.trace import Span

from sidecar.events import Event, Headers, Observation, Received
from sidecar.telemetry.logs.request_log import RequestLog
from sidecar.telemetry.providers import FirstFailure, has_no_meter_provider, none_is_set
from sidecar.telemetry.request_record import EventHandlers, RequestRecord
from sidecar.telemetry.spans.app_trace import AppSpan
from sidecar.telemetry.spans.links import OpenSpan
from sidecar.telemetry.spans.propagation import client_trace, injected
from sidecar.telemetry.spans.request_spans import RequestSpans
from sidecar.telemetry.spans.tracer import RequestTracer, recorded_context

logger = logging.getLogger(__name__)
_FAILED = "telemetry failed; requests go on"

Item = TypeVar("Item")


class Listener(Protocol):
    """Looks at every request: metrics, the journal, the log."""

    @property
    def handlers(self) -> EventHandlers:
        """The functions that are called with a request's events."""


Handlers = Mapping[type, Sequence[Callable[[RequestRecord, Any], None]]]
"""By the type of event: who is called."""


class EventDispatcher:
    """Makes the `Observation` of every request. One per process; use it from one event loop at a time.

    With a `failure_log`, and as long as the process has no SDK, that alone gets a request's events: its failure.
    """

    def __init__(
        self, tracer: RequestTracer, listeners: Sequence[Listener], *, failure_log: RequestLog | None = None
    ) -> None:
        self.tracer = tracer
        self.listeners = tuple(listeners)
        self.failure_log = failure_log
        self.report = FirstFailure(logger, _FAILED)
        self._handlers = _new_handlers(self.listeners)
        self._handlers_of_failures = {} if failure_log is None else _new_handlers([failure_log])

    def listens(self) -> bool:
        """True if anything looks at requests."""
        return self.failure_log is not None or bool(self.listeners) or self.tracer.is_active()

    def follows(self) -> bool:
        """True if more than a failure of a request may be reported: at the level DEBUG, the log has each."""
        log = self.failure_log
        return log is None or log.writes(log.success_level) or not (self.tracer.is_global and none_is_set())

    def received(self, event: Received) -> Observation | None:
        """Begins a request."""
        admission, handlers = self.tracer.begin(event), self._handlers
        if admission is None:
            if self.failure_log is not None and (none_is_set() or has_no_meter_provider()):
                handlers = self._handlers_of_failures
            if not handlers:
                return None
            # Without a trace of ours the request is found by the client's own.
            record, spans = RequestRecord.of(event, client_trace(event)), None
        else:
            record = RequestRecord.of(event, recorded_context(admission))
            spans = self.tracer.spans(record, admission)
        observation = RequestObservation(self, handlers, event, record, admission=admission, spans=spans)
        observation.on_event(event)
        return observation


def _new_handlers(listeners: Sequence[Listener]) -> Handlers:
    handlers: dict[type, list[Callable[[RequestRecord, Any], None]]] = {}
    for listener in listeners:
        for kind, handler in listener.handlers.items():
            handlers.setdefault(kind, []).append(handler)
    return handlers


class RequestObservation:
    """One request, and its record. `admission` is there where something traces, `spans` where that is recorded."""

    __slots__ = ("_admission", "_dispatcher", "_handlers", "_received", "record", "spans")

    def __init__(
        self,
        dispatcher: EventDispatcher,
        handlers: Handlers,
        received: Received,
        record: RequestRecord,
        *,
        admission: OpenSpan | None,
        spans: RequestSpans | None,
    ) -> None:
        self._dispatcher = dispatcher
        self._handlers = handlers
        self._received = received
        self._admission = admission
        self.record = record
        self.spans = spans

    def headers(self) -> Headers:
        """The trace context for the engine: of the `engine` span once admitted, so that its spans are below that."""
        span = self._current()
        if span is None:
            return ()
        try:
            return injected(span, self._received)
        except Exception:
            self._dispatcher.tracer.report()
            return ()

    def app_trace(self) -> AppSpan | None:
        """See `Observation`. Where the request is not recorded, neither is what its app traces."""
        span = self._current()
        if span is None or self._admission is None or not self._dispatcher.tracer.is_mounted:
            return None
        try:
            current = AppSpan(span, self._admission.parent)
        except Exception:
            self._dispatcher.tracer.report()
            return None
        if self.spans is not None:
            self.spans.app_trace = current
        return current

    def on_event(self, event: Event | Received) -> None:
        """Adds the event to the record, and to the spans, and tells the listeners."""
        self.record.add(event)
        if self.spans is not None:  # before the journal has the request: it is asked who went ahead of it
            self.spans.note(event)
        for handler in self._handlers.get(type(event), ()):
            try:
                handler(self.record, event)
            except Exception:  # noqa: PERF203  the other handlers are called all the same
                self._dispatcher.report()

    def _current(self) -> Span | None:
        if self.spans is not None:
            return self.spans.current
        return None if self._admission is None else self._admission.span


class Fanout(Generic[Item]):
    """One callable for several. Nothing raises: the first failure is logged, and the others are still called."""

    def __init__(self, targets: Sequence[Callable[[Item], None]]) -> None:
        self._targets = tuple(targets)
        self._report = FirstFailure(logger, _FAILED)

    def __call__(self, item: Item) -> None:
        """Calls each."""
        for target in self._targets:
            try:
                target(item)
            except Exception:  # noqa: PERF203  the others are called all the same
                self._report()
