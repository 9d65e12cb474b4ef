"""An app's own traces of its calls of a model, seen as its spans end."""

from __future__ import annotations

from typing import Any, Final
from weakref import WeakSet

from opentelemetry import context as otel_context
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor

from sidecar.telemetry.semconv import SCOPE
from sidecar.telemetry.spans.app_trace import APP_TRACE, AppSpan

_USAGE: Final = ("gen_ai.usage.", "llm.usage.", "llm.token_count.")
"""How the names of attributes with a usage begin: OpenTelemetry's, OpenLLMetry's and OpenInference's."""


class AppUsage(SpanProcessor):
    """Notes where an app's own span has a usage. It exports nothing, and changes no span."""

    def on_end(self, span: ReadableSpan) -> None:
        """See `SpanProcessor`. Called in the app's context, which says whose call that was."""
        scope = span.instrumentation_scope
        if scope is not None and scope.name == SCOPE:
            return
        call = otel_context.get_value(APP_TRACE)
        if isinstance(call, AppSpan) and any(name.startswith(_USAGE) for name in span.attributes or ()):
            call.has_usage = True


_followed: WeakSet[Any] = WeakSet()


def follow_app_usage(provider: Any) -> None:
    """Looks at the spans of a provider from now on, once for a process."""
    if provider not in _followed:
        _followed.add(provider)
        provider.add_span_processor(AppUsage())
