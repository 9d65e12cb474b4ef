"""An open span of OpenTelemetry's API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, StatusCode, Tracer

Attributes = dict[str, str | int | float | bool | None]
"""Those that are None are not known, or say nothing: they are not written."""
(SPAN_KEY,) = trace.set_span_in_context(trace.INVALID_SPAN, Context())
"""In a context: its span. A context that is made with it is one mapping, where the API makes three."""
Moment = tuple[str, int]
"""A span event: its name, and its time in Unix nanoseconds."""


@dataclass(slots=True)
class OpenSpan:
    """A span that has begun, and the context that it was started in. Times are Unix nanoseconds."""

    tracer: Tracer
    span: Span
    parent: Context

    def child(
        self, name: str, kind: SpanKind, start_ns: int, attributes: Attributes, links: Sequence[Link] = ()
    ) -> OpenSpan:
        """Begins a span below it."""
        below = Context({**self.parent, SPAN_KEY: self.span})
        span = self.tracer.start_span(name, below, kind, _known(attributes), links, start_time=start_ns)
        return OpenSpan(self.tracer, span, below)

    def end(self, at_ns: int, attributes: Attributes, events: Sequence[Moment] = (), error: str | None = None) -> None:
        """Ends it. `error` is the description of its status, None where it is none."""
        for name, moment_ns in events:
            self.span.add_event(name, timestamp=moment_ns)
        if attributes:
            self.span.set_attributes(_known(attributes))
        if error is not None:
            self.span.set_status(StatusCode.ERROR, error)
        self.span.end(at_ns)

    def link(self, links: Sequence[Link]) -> None:
        """Adds links to those that it began with."""
        for link in links:
            self.span.add_link(link.context, link.attributes)


def _known(attributes: Attributes) -> dict[str, str | int | float | bool]:
    return {name: value for name, value in attributes.items() if value is not None}
