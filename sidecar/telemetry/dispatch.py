"""Dispatch of request events to the spans and to every listener: metrics, journal, log.

All of this runs on the request's path, so nothing raises; a listener's first failure is logged, and the request
goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from opentelemetry.trace import SpanContext

from sidecar.events import Admitted, Classified, Event, Headers, Observation, Preempted, Received, Refused, Settled
from sidecar.telemetry.logs.request_log import RequestLog
from sidecar.telemetry.request_record import EventHandlers, RequestRecord, TraceIds
from sidecar.telemetry.sdk_bypass.providers import meter_provider, none_is_set
from sidecar.telemetry.setup import has_no_meter_provider
from sidecar.telemetry.spans.propagation import client_trace, injected
from sidecar.telemetry.spans.request_spans import RequestSpans
from sidecar.telemetry.spans.tracer import RequestTracer

logger = logging.getLogger(__name__)

MOST_PENDING = 64
"""Events that are dispatched in a row: some ten requests, a fraction of a millisecond."""

Item = TypeVar("Item")


class Listener(Protocol):
    """Looks at every request: metrics, the journal, the log."""

    @property
    def handlers(self) -> EventHandlers:
        """The functions that are called with a request's events."""


class EventDispatcher:
    """Makes the `Observation` of every request. One per process; use it from one event loop at a time.

    With a `delay_s`, events are dispatched up to so many seconds later, many in a row: between two requests the same
    work costs a processor several times as much as directly after such work. `flush` dispatches at once. The spans get
    at once whatever the engine is sent. With a `failure_log`, and as long as the process has no SDK, only a request's
    failure is logged: nothing else is done with its events.
    """

    def __init__(
        self,
        tracer: RequestTracer,
        listeners: Sequence[Listener],
        *,
        delay_s: float = 0.0,
        failure_log: RequestLog | None = None,
    ) -> None:
        self.tracer = tracer
        self.listeners = tuple(listeners)
        self.failure_log = failure_log
        self._delay_s = delay_s
        self._timer: asyncio.TimerHandle | None = None
        self._pending: list[tuple[_RequestObservation, Event | Received]] = []
        self._is_reported = False
        self._meter_provider: object = None
        self._is_measured = False
        handlers: dict[type, list[Callable[[RequestRecord, Any], None]]] = {}
        for listener in listeners:
            for kind, handler in listener.handlers.items():
                handlers.setdefault(kind, []).append(handler)
        self._handlers = {kind: tuple(of_kind) for kind, of_kind in handlers.items()}

    def listens(self) -> bool:
        """Whether anything looks at requests."""
        return self.failure_log is not None or bool(self.listeners) or self.tracer.is_active()

    def only_failures(self) -> bool:
        """Whether there is nothing but the failure log, and that leaves out what succeeded."""
        log = self.failure_log
        if log is None or (not (self.tracer.is_global and none_is_set()) and self._has_sdk()):
            return False
        return log.only_failures()

    def received(self, event: Received) -> Observation | None:
        """Begins a request."""
        if self.failure_log is not None and not self._has_sdk():
            return _FailureObservation(self, self.failure_log, event)
        begun = self.tracer.begin(event)
        if begun is None and not self.listeners:
            return None
        observation = _RequestObservation(self, event, begun)
        self.add(observation, event)
        return observation

    def add(self, observation: _RequestObservation, event: Event | Received) -> None:
        """Adds an event to those that are dispatched next."""
        pending = self._pending
        pending.append((observation, event))
        if self._timer is None or len(pending) >= MOST_PENDING:
            self._schedule(len(pending))

    def flush(self) -> None:
        """Dispatches everything that has happened so far."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        pending, self._pending = self._pending, []
        handlers = self._handlers
        for observation, event in pending:
            observation.add(event)
            for handler in handlers.get(type(event), ()):
                try:
                    handler(observation.record, event)
                except Exception:  # noqa: PERF203  the other handlers are called all the same
                    self.report()

    def report(self) -> None:
        """Log the exception being handled, the first time only: a defect must not write a line a request."""
        if not self._is_reported:
            self._is_reported = True
            logger.exception("telemetry failed; requests go on without, and further failures are not logged")

    def _has_sdk(self) -> bool:
        if self.tracer.is_global and none_is_set():
            return False
        provider = meter_provider()
        if provider is not self._meter_provider:
            self._meter_provider, self._is_measured = provider, not has_no_meter_provider()
        return self._is_measured or self.tracer.is_active()

    def _schedule(self, count: int) -> None:
        if not self._delay_s or count >= MOST_PENDING:
            self.flush()
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # outside of an event loop there is no later
            self.flush()
            return
        self._timer = loop.call_later(self._delay_s, self.flush)


class _RequestObservation:
    """One request that is dispatched: its record, and its spans where they are recorded."""

    __slots__ = ("_client_headers", "_context", "_dispatcher", "_spans", "record")

    def __init__(
        self, dispatcher: EventDispatcher, received: Received, begun: tuple[SpanContext, RequestSpans | None] | None
    ) -> None:
        self._dispatcher = dispatcher
        self._client_headers = received.headers
        self._context: SpanContext | None = None
        self._spans: RequestSpans | None = None
        trace = None
        if begun is not None:
            context, spans = self._context, self._spans = begun
            trace = TraceIds(context.trace_id, context.span_id, spans is not None and context.trace_flags.sampled)
        self.record = RequestRecord.of(received, trace)

    def headers(self) -> Headers:
        """The trace context for the engine: of the `engine` span once admitted, so that its spans are below that."""
        if self._context is None:
            return ()
        try:
            return injected(self._context, self._client_headers)
        except Exception:
            self._dispatcher.tracer.report()
            return ()

    def on_event(self, event: Event) -> None:
        """Has the event dispatched. Of an admission the spans know at once, as the engine is sent their context."""
        spans = self._spans
        if spans is not None:
            if type(event) is Classified:
                spans.classified = event
            elif type(event) is Admitted:
                if event.queue_wait_us:
                    self._dispatcher.flush()  # the journal is asked which requests went ahead
                self._context = spans.admit(self.record, event)
            elif type(event) is Preempted:
                self._context = spans.context
        self._dispatcher.add(self, event)

    def add(self, event: Event | Received) -> None:
        """Adds the event to the record; the last one ends the spans."""
        if type(event) is Received:  # quicker than isinstance: records have no subclasses
            if self._context is None:  # no spans: the request is found by the client's own trace
                self.record.trace = client_trace(self._client_headers)
            return
        self.record.add(event)  # type: ignore[arg-type]  # mypy does not narrow by the type of another
        if self._spans is not None and (type(event) is Settled or type(event) is Refused):
            self._spans.end(self.record)


class _FailureObservation:
    """One request of a process without an SDK: its end is logged."""

    __slots__ = ("_dispatcher", "_log", "_record")

    def __init__(self, dispatcher: EventDispatcher, log: RequestLog, received: Received) -> None:
        self._dispatcher = dispatcher
        self._log = log
        self._record = RequestRecord.of(received, client_trace(received.headers))

    def headers(self) -> Headers:
        """Nothing is added to the client's headers."""
        return ()

    def on_event(self, event: Event) -> None:
        """Keeps the event; the last one is logged where the request failed."""
        try:
            self._record.add(event)
            if type(event) is Refused or type(event) is Settled:
                self._log.handlers[type(event)](self._record, event)
        except Exception:
            self._dispatcher.report()


class Fanout(Generic[Item]):
    """One callable for several. Nothing raises: the first failure is logged, and the others are still called."""

    def __init__(self, targets: Sequence[Callable[[Item], None]]) -> None:
        self._targets = tuple(targets)
        self._is_reported = False

    def __call__(self, item: Item) -> None:
        """Calls each."""
        for target in self._targets:
            try:
                target(item)
            except Exception:  # noqa: PERF203  the others are called all the same
                if not self._is_reported:
                    self._is_reported = True
                    logger.exception("telemetry failed; requests go on without, and further failures are not logged")
