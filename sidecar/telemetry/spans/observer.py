"""Spans from events: what one request's stay at the door looks like in a trace.

    admission               SERVER    arrival to settlement or refusal; child of the client's `traceparent`
      admission.queued      INTERNAL  it stands in line to admission or departure; only if it waited
      admission.starved     INTERNAL  first overtaken to admission or departure; only if it starved
      engine                CLIENT    admission to settlement; its context is what the engine is sent

Only `admission` is open while a request waits: a waiting request costs nothing. Nothing is made current: the context
goes from span to span by argument. Everything here is called on the request's path, so nothing raises; the first
failure is logged, and the request goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from opentelemetry import trace
from opentelemetry.trace import NoOpTracer, NoOpTracerProvider, ProxyTracerProvider, SpanContext

from sidecar.events import Event, Headers, Received
from sidecar.telemetry import semconv
from sidecar.telemetry.spans.attributes import Attributes
from sidecar.telemetry.spans.links import WhoWasAhead
from sidecar.telemetry.spans.propagation import injected, parent_of
from sidecar.telemetry.spans.recording import Starter
from sidecar.telemetry.spans.request_spans import RequestSpans, SpanSettings
from sidecar.telemetry.spans.shortcut import starter_of
from sidecar.version import __version__

logger = logging.getLogger(__name__)


class SpanObserver:
    """Makes the spans of every request. One per process; holds nothing of any request.

    `tracer_provider` None means the global one, looked up at each request: an SDK that is installed later is found.
    `starvation_limits_s` has the seconds that a tier promises to starve at most: a request that starved longer is
    marked, so that a Collector can keep its trace whatever it samples. `provider_name` is the engine's name, for
    `gen_ai.provider.name`. `who_was_ahead` says where links lead to; without it there are none.
    """

    def __init__(
        self,
        tracer_provider: trace.TracerProvider | None = None,
        *,
        starvation_limits_s: Mapping[str, float] | None = None,
        provider_name: str | None = None,
        who_was_ahead: WhoWasAhead | None = None,
    ) -> None:
        self._given_provider = tracer_provider
        self._provider: trace.TracerProvider | None = None
        self._tracer: trace.Tracer | None = None
        self._starter: Starter | None = None
        self._reported = False
        limits_s = {} if starvation_limits_s is None else dict(starvation_limits_s)
        self._settings = SpanSettings(self.report, limits_s, provider_name, who_was_ahead)

    def change_limits(self, starvation_limits_s: Mapping[str, float]) -> None:
        """Another policy promises something else. Requests that are under way keep to what was promised them."""
        self._settings = replace(self._settings, starvation_limits_s=dict(starvation_limits_s))

    def listens(self) -> bool:
        """Whether there is an SDK that may record."""
        try:
            return self._current() is not None
        except Exception:
            self.report()
            return False

    def received(self, event: Received) -> RequestSpans | SampledOut | None:
        """Start `admission`. None without an SDK, or where tracing failed: the client's headers then pass untouched."""
        try:
            starter = self._current()
            return None if starter is None else self._observe(starter, event)
        except Exception:
            self.report()
            return None

    def report(self) -> None:
        """Log the exception being handled, the first time only: one broken exporter must not write a line a request."""
        if not self._reported:
            self._reported = True
            logger.exception("tracing failed; requests go on without, and further failures are not logged")

    def _current(self) -> Starter | None:
        """What begins spans now, None where nothing records them."""
        provider = self._given_provider or trace.get_tracer_provider()
        if provider is not self._provider:
            self._tracer = _tracer_of(provider)
            self._starter = None if self._tracer is None else starter_of(self._tracer)
            self._provider = provider
        elif self._tracer is not None and self._starter is not None and not self._starter.is_current():
            self._starter = starter_of(self._tracer)
        return self._starter

    def _observe(self, starter: Starter, event: Received) -> RequestSpans | SampledOut | None:
        parent, kind = parent_of(event.headers)
        request: Attributes = {
            semconv.HTTP_REQUEST_METHOD: event.method,
            semconv.URL_PATH: event.path,
            semconv.ADMISSION_REQUEST_ID: event.request_id,
        }
        span = starter.start(semconv.ADMISSION, parent, kind, event.wall_ns, request)
        if span.is_recording:
            return RequestSpans(self._settings, event, span)
        if span.context.is_valid:
            return SampledOut(self._settings, event, span.context)
        return None


class SampledOut:
    """A request whose trace is not recorded: only the context goes on, so that the engine does not record it either."""

    __slots__ = ("_context", "_received", "_settings")

    is_recording = False

    def __init__(self, settings: SpanSettings, received: Received, context: SpanContext) -> None:
        self._settings = settings
        self._received = received
        self._context = context

    @property
    def trace(self) -> tuple[int, int, bool]:
        """The trace's id, the span's, and that nothing is recorded."""
        return self._context.trace_id, self._context.span_id, False

    def headers(self) -> Headers:
        """The unrecorded span's context."""
        try:
            return injected(self._context, self._received.headers)
        except Exception:
            self._settings.report()
            return ()

    def on_event(self, event: Event) -> None:
        """Nothing is recorded."""


def _tracer_of(provider: trace.TracerProvider) -> trace.Tracer | None:
    """The provider's tracer, or None where it records nothing (no SDK, or an SDK switched off by OTEL_SDK_DISABLED)."""
    if isinstance(provider, ProxyTracerProvider | NoOpTracerProvider):
        return None
    tracer = provider.get_tracer("sidecar", __version__)
    return None if isinstance(tracer, NoOpTracer) else tracer
