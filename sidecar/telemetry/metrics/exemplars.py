"""How a measurement finds its request: by the context that it is recorded in."""

from __future__ import annotations

import time
from typing import Final, NamedTuple

from opentelemetry.context import Context, create_key, get_value, set_value
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, get_current_span, set_span_in_context

from sidecar.telemetry.telemetry import Trace

_REQUEST_ID: Final = create_key("admission-request-id")
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)


def context_of(trace: Trace, request_id: str) -> Context:
    """A context with the request's `admission` span and its id, for a request whose trace is kept."""
    span = NonRecordingSpan(SpanContext(trace.trace_id, trace.span_id, is_remote=False, trace_flags=_SAMPLED))
    return set_value(_REQUEST_ID, request_id, set_span_in_context(span, Context()))


def request_id_of(context: Context) -> str | None:
    """The id that `context_of` put in."""
    request_id = get_value(_REQUEST_ID, context)
    return request_id if isinstance(request_id, str) else None


class Kept(NamedTuple):
    """A duration of a request whose trace is kept, and where to look that up. `at_ns` is Unix time."""

    seconds: float
    at_ns: int
    trace_id: int
    span_id: int
    request_id: str | None


def kept_of(seconds: float, context: Context) -> Kept | None:
    """The exemplar that a duration makes; None where the trace of its context is not kept."""
    span = get_current_span(context).get_span_context()
    if not span.trace_flags.sampled:
        return None
    return Kept(seconds, time.time_ns(), span.trace_id, span.span_id, request_id_of(context))
