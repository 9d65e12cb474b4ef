"""How a measurement finds its request: by the context that it is recorded in."""

from __future__ import annotations

from typing import Final

from opentelemetry.context import Context, create_key, get_value, set_value
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

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
