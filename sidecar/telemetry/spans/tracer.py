"""The tracer of requests: it begins the `admission` span of each, and with it the spans of one request.

    admission               SERVER    arrival to settlement or refusal; child of the client's `traceparent`
      admission.queued      INTERNAL  queued to admission or disconnect; only if it waited
        admission.starved   INTERNAL  first overtaken to admission or disconnect; only if it starved
        admission.waiting   INTERNAL  a moment in a long wait, exported at once
      engine                CLIENT    admission to settlement; its context is what the engine is sent

Phases follow one another, and the children of a span lie in it: their durations never add up to more than its own. Only
`admission` is open while a request waits; a long wait, which is reported meanwhile, has `admission.queued` open, too.
The context goes from span to span by argument. In a mounted app's own code `engine` is current, and in the dry run
`admission` (`app_trace`). All of this runs on the request's path, so nothing raises; the first failure is logged, and
the request goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from opentelemetry import trace
from opentelemetry.trace import NoOpTracer, NoOpTracerProvider, ProxyTracerProvider, SpanContext

from sidecar.events import Received
from sidecar.telemetry import semconv
from sidecar.telemetry.providers import FirstFailure, no_tracers_are_set
from sidecar.telemetry.request_record import RequestRecord
from sidecar.telemetry.spans.links import Attributes, FindLinks, LongWaits, OpenSpan
from sidecar.telemetry.spans.propagation import parent_for
from sidecar.telemetry.spans.request_spans import RequestSpans, SpanSettings
from sidecar.version import __version__

logger = logging.getLogger(__name__)


class RequestTracer:
    """Begins the spans of every request. One per process; holds nothing of any request.

    `tracer_provider` None means the global one, looked up at each request: an SDK that is installed later is found.
    `starvation_limits_s` has the seconds that a tier promises to starve at most: a request that starved longer is
    marked, so that a Collector can keep its trace whatever it samples. `provider_name` is the engine's name, for
    `gen_ai.provider.name`. `find_links` finds the links of spans; without it they have none. `served_by` is written on
    `engine`: an `app` of this process may trace itself. `long_waits` reports requests that wait for long. Of
    `writes_usage` see `SpanSettings`.
    """

    def __init__(
        self,
        tracer_provider: trace.TracerProvider | None = None,
        *,
        starvation_limits_s: Mapping[str, float] | None = None,
        provider_name: str | None = None,
        find_links: FindLinks | None = None,
        served_by: str | None = None,
        long_waits: LongWaits | None = None,
        writes_usage: bool | None = None,
    ) -> None:
        self._given_provider = tracer_provider
        self.is_global = tracer_provider is None
        self.is_mounted = served_by == "app"
        self._provider: trace.TracerProvider | None = None
        self._tracer: trace.Tracer | None = None
        self.report = FirstFailure(logger, "tracing failed; requests go on")
        limits_s = {} if starvation_limits_s is None else dict(starvation_limits_s)
        self._settings = SpanSettings(
            self.report, limits_s, provider_name, find_links, writes_usage, served_by, long_waits
        )

    def change(self, starvation_limits_s: Mapping[str, float], writes_usage: bool | None) -> None:
        """Follows another policy. Requests that have begun keep what they began with."""
        limits_s = dict(starvation_limits_s)
        self._settings = replace(self._settings, starvation_limits_s=limits_s, writes_usage=writes_usage)
        self._provider = None

    def is_active(self) -> bool:
        """True if there is an SDK that may record, as one may that failed now: the next request asks it again."""
        try:
            return self._current() is not None
        except Exception:
            self.report()
            return True

    def begin(self, event: Received) -> OpenSpan | None:
        """Starts `admission`; the engine is sent its context, recorded or not.

        None without an SDK, or where tracing failed: the client's headers then pass unchanged.
        """
        try:
            tracer = self._current()
            if tracer is None:
                return None
            parent, kind = parent_for(event)
            span = tracer.start_span(
                semconv.ADMISSION, parent, kind, _request_attributes(event), start_time=event.wall_ns
            )
            has_context = span.is_recording() or span.get_span_context().is_valid
            return OpenSpan(tracer, span, parent) if has_context else None
        except Exception:
            self.report()
            return None

    def spans(self, record: RequestRecord, admission: OpenSpan) -> RequestSpans | None:
        """The spans of a request, where its `admission` is recorded."""
        return RequestSpans(self._settings, record, admission) if admission.span.is_recording() else None

    def _current(self) -> trace.Tracer | None:
        """The tracer now, None where nothing records spans."""
        if self.is_global and no_tracers_are_set():
            return None
        provider = self._given_provider or trace.get_tracer_provider()
        if provider is not self._provider:
            self._tracer = _recording_tracer(provider)
            if self.is_mounted and self._settings.writes_usage is None and hasattr(provider, "add_span_processor"):
                from sidecar.telemetry.spans.app_usage import follow_app_usage

                follow_app_usage(provider)
            self._provider = provider
        return self._tracer


def recorded_context(span: OpenSpan) -> SpanContext:
    """A span's context. It is not sampled where the span is not recorded, whatever was sent with its parent."""
    context = span.span.get_span_context()
    return context if span.span.is_recording() else SpanContext(context.trace_id, context.span_id, is_remote=False)


def _request_attributes(event: Received) -> Attributes:
    return {
        semconv.HTTP_REQUEST_METHOD: event.method,
        semconv.URL_PATH: event.path,
        semconv.ADMISSION_REQUEST_ID: event.request_id,
    }


def _recording_tracer(provider: trace.TracerProvider) -> trace.Tracer | None:
    """The provider's tracer, or None where it records nothing (no SDK, or an SDK switched off by OTEL_SDK_DISABLED)."""
    if isinstance(provider, ProxyTracerProvider | NoOpTracerProvider):
        return None
    tracer = provider.get_tracer(semconv.SCOPE, __version__)
    return None if isinstance(tracer, NoOpTracer) else tracer
