"""Dispatch of request events to the spans and to every listener: metrics, journal, log.

All of this runs on the request's path, so nothing raises; a listener's first failure is logged, and the request
goes on.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from sidecar.events import (
    Admitted,
    Classified,
    Event,
    Headers,
    Observation,
    Preempted,
    Queued,
    Received,
    Refused,
    Settled,
)
from sidecar.telemetry.logs.request_log import RequestLog
from sidecar.telemetry.providers import has_no_meter_provider, none_is_set
from sidecar.telemetry.request_record import KEEPERS, EventHandlers, RequestRecord, TraceIds
from sidecar.telemetry.spans.app_trace import AppTrace
from sidecar.telemetry.spans.propagation import client_trace, injected
from sidecar.telemetry.spans.request_spans import RequestSpans
from sidecar.telemetry.spans.tracer import RequestTracer

logger = logging.getLogger(__name__)

MOST_PENDING = 64
"""So many events are dispatched before one more request: of some ten requests, in a fraction of a millisecond."""

Item = TypeVar("Item")


class Listener(Protocol):
    """Looks at every request: metrics, the journal, the log."""

    @property
    def handlers(self) -> EventHandlers:
        """The functions that are called with a request's events."""


Handler = Callable[[RequestRecord, Any], None]
Reaction = tuple[Handler | None, tuple[Handler, ...]]
"""The reaction to a kind of event: how the record keeps it, None where the observation's `add` does that, and who is
called then."""
Reactions = dict[type, Reaction]


class EventDispatcher:
    """Makes the `Observation` of every request. One per process; use it from one event loop at a time.

    With a `delay_s`, events are dispatched up to so many seconds later, many in a row: between two requests the same
    work costs a processor several times as much as directly after such work. `flush` dispatches at once. The spans get
    at once whatever the engine is sent. With a `failure_log`, and as long as the process has no SDK, only a request's
    failure is logged: nothing else is done with its events. `of_recorded` listen only to requests whose trace is
    recorded. `hears_everything` is of the listeners, see `Observation`; a recorded trace has everything.
    `note_loop` is called now and then with the event loop that serves requests.
    """

    def __init__(
        self,
        tracer: RequestTracer,
        listeners: Sequence[Listener],
        *,
        delay_s: float = 0.0,
        failure_log: RequestLog | None = None,
        of_recorded: Sequence[Listener] = (),
        hears_everything: bool = True,
        note_loop: Callable[[asyncio.AbstractEventLoop], None] | None = None,
    ) -> None:
        self.tracer = tracer
        self.listeners = tuple(listeners)
        self.failure_log = failure_log
        self.timer: asyncio.TimerHandle | None = None
        self.pending: list[tuple[RequestObservation, Event | Received]] = []
        self._delay_s = delay_s
        self._hears_everything = hears_everything
        self._note_loop = note_loop
        self._is_reported = False
        self._reactions = _reactions(listeners, has_spans=False)
        self._reactions_to_unsampled = _reactions(listeners, has_spans=True)
        self._reactions_to_recorded = _reactions([*listeners, *of_recorded], has_spans=True)

    def listens(self) -> bool:
        """Whether anything looks at requests."""
        return self.failure_log is not None or bool(self.listeners) or self.tracer.is_active()

    def only_failures(self) -> bool:
        """Whether there is nothing but the failure log, and that leaves out what succeeded."""
        log = self.failure_log
        return log is not None and not self._has_sdk() and not log.writes(log.success_level)

    def received(self, event: Received) -> Observation | None:
        """Begins a request."""
        if len(self.pending) >= MOST_PENDING:
            self.flush()
        begun = self.tracer.begin(event)
        if begun is None:
            return self._untraced(event)
        context, parent, spans = begun
        trace_id, span_id, _, flags, _, _ = context  # each of its properties is a call
        is_sampled = spans is not None and flags & _SAMPLED == _SAMPLED
        ids = TraceIds(trace_id, span_id, is_sampled)
        record = RequestRecord(event.request_id, ids, event.method, event.path, event.at_us, event.wall_ns)
        observation: RequestObservation
        if spans is None:
            hears = self._hears_everything
            observation = RequestObservation(self, self._reactions, event, record, context, parent, hears)
        else:
            reactions = self._reactions_to_recorded if is_sampled else self._reactions_to_unsampled
            observation = RecordedObservation(self, reactions, event, record, context, parent, True, spans)
        if Received in observation.reactions:
            observation.on_event(event)
        return observation

    def _untraced(self, event: Received) -> Observation | None:
        if self.failure_log is not None and not self._has_sdk():
            return _FailureObservation(self, self.failure_log, event)
        if not self.listeners:
            return None
        # No spans: the request is found by the client's own trace.
        record = RequestRecord.of(event, client_trace(event))
        observation = RequestObservation(self, self._reactions, event, record, None, None, self._hears_everything)
        if Received in observation.reactions:
            observation.on_event(event)
        return observation

    def schedule(self) -> None:
        """Dispatches what is pending, at once or a moment later."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # outside of an event loop there is no later
            self.flush()
            return
        if self._note_loop is not None:
            self._note_loop(loop)
        if not self._delay_s:
            self.flush()
        else:
            # In no request's context: events of many are dispatched, and would count as that one's.
            self.timer = loop.call_later(self._delay_s, self.flush, context=contextvars.Context())

    def flush(self) -> None:
        """Dispatches everything that has happened so far."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        pending, self.pending = self.pending, []
        for observation, event in pending:
            try:
                keep, handlers = observation.reactions[type(event)]
            except KeyError:  # no event that is known
                continue
            record = observation.record
            if keep is None:
                observation.add(event)
            else:
                keep(record, event)
            for handler in handlers:
                try:
                    handler(record, event)
                except Exception:  # noqa: PERF203  the other handlers are called all the same
                    self.report()

    def report(self) -> None:
        """Log the exception being handled, the first time only: a defect must not write a line a request."""
        if not self._is_reported:
            self._is_reported = True
            logger.exception("telemetry failed; requests go on without, and further failures are not logged")

    def _has_sdk(self) -> bool:
        """Whether there is anyone to tell of a request that goes well."""
        if none_is_set() and self.tracer.is_global:
            return False
        return not has_no_meter_provider() or self.tracer.is_active()


def _reactions(listeners: Sequence[Listener], *, has_spans: bool) -> Reactions:
    """The reactions of these listeners. With spans, the observation's `add` keeps a request's end, and ends them."""
    handlers: dict[type, list[Handler]] = {kind: [] for kind in KEEPERS}
    for listener in listeners:
        for kind, handler in listener.handlers.items():
            handlers.setdefault(kind, []).append(handler)
    added = (Settled, Refused) if has_spans else ()
    return {kind: (None if kind in added else KEEPERS.get(kind), tuple(of_kind)) for kind, of_kind in handlers.items()}


class RequestObservation(msgspec.Struct, eq=False):
    """One request that is dispatched, and its record. `context` is sent to the engine; None where nothing traces.

    `parent` is the context that the request came with.
    """

    _dispatcher: EventDispatcher
    reactions: Reactions
    received: Received
    record: RequestRecord
    context: SpanContext | None
    parent: Context | None
    hears_everything: bool

    def headers(self) -> Headers:
        """The trace context for the engine: of the `engine` span once admitted, so that its spans are below that."""
        if self.context is None:
            return ()
        try:
            return injected(self.context, self.received)
        except Exception:
            self._dispatcher.tracer.report()
            return ()

    def app_trace(self) -> AppTrace | None:
        """See `Observation`. Where the request is not recorded, neither is what its app traces."""
        if self.context is None or self.parent is None or not self._dispatcher.tracer.is_mounted:
            return None
        try:
            return self._current(self.context, self.parent)
        except Exception:
            self._dispatcher.tracer.report()
            return None

    def _current(self, context: SpanContext, parent: Context) -> AppTrace:
        return AppTrace(NonRecordingSpan(context), parent)

    def on_event(self, event: Event | Received) -> None:
        """Has the event dispatched with those that come next."""
        dispatcher = self._dispatcher
        dispatcher.pending.append((self, event))
        if dispatcher.timer is None:
            dispatcher.schedule()

    def add(self, event: Event | Received) -> None:
        """Adds the event to the record."""
        if not isinstance(event, Received):
            self.record.add(event)


class RecordedObservation(RequestObservation):
    """One request with spans; the last event ends them."""

    spans: RequestSpans

    def _current(self, _: SpanContext, parent: Context) -> AppTrace:
        self.spans.app_trace = current = AppTrace(self.spans.for_app(), parent)
        return current

    def on_event(self, event: Event | Received) -> None:
        """Has the event dispatched. Of an admission the spans know at once, as the engine is sent their context."""
        kind = type(event)
        if kind is Classified:
            self.spans.classified = event  # type: ignore[assignment]  # as in `add`
        elif kind is Admitted:
            if event.queue_wait_us:  # type: ignore[union-attr]
                self._dispatcher.flush()  # the journal is asked which requests went ahead
            self.context = self.spans.admit(self.record, event)  # type: ignore[arg-type]
        elif kind is Preempted:
            self.context = self.spans.context
        elif kind is Queued:
            self.spans.queue(self.record)
        super().on_event(event)

    def add(self, event: Event | Received) -> None:
        """Adds the event to the record."""
        super().add(event)
        if type(event) is Settled or type(event) is Refused:
            self.spans.end(self.record)


_SAMPLED = TraceFlags.SAMPLED


class _FailureObservation:
    """One request of a process without an SDK: its end is logged."""

    __slots__ = ("_dispatcher", "_log", "_record", "hears_everything")

    def __init__(self, dispatcher: EventDispatcher, log: RequestLog, received: Received) -> None:
        self.hears_everything = log.has_all  # the access log has the first byte of every request
        self._dispatcher = dispatcher
        self._log = log
        self._record = RequestRecord.of(received, client_trace(received))

    def headers(self) -> Headers:
        """Nothing is added to the client's headers."""
        return ()

    def app_trace(self) -> None:
        """Nothing traces."""

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
