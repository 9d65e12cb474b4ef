"""An open span: of OpenTelemetry's API, or of the bypass of its SDK.

Every request pays for this. Through the API an empty span costs 11 us, each attribute another and an event 5, for locks
and checks that values of our own making pass by construction. `sdk_bypass.spans` makes the same records for a third of
that; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, StatusCode, Tracer

Attributes = dict[str, str | int | float | bool]
Moment = tuple[str, int]
"""A span event: its name, and its time in Unix nanoseconds."""


class OpenSpan(Protocol):
    """A span that has begun. Times are Unix nanoseconds."""

    @property
    def context(self) -> SpanContext:
        """Its ids, and whether it is sampled."""

    def for_app(self) -> Span:
        """The span as the app finds it where it is current."""

    def child(
        self, name: str, kind: SpanKind, start_ns: int, attributes: Attributes | None, links: Sequence[Link] = ()
    ) -> OpenSpan:
        """Begins a span below it."""

    def end(self, at_ns: int, attributes: Attributes, events: Sequence[Moment] = (), error: str | None = None) -> None:
        """Ends it. `error` is the description of its status, None where it is none."""

    def link(self, links: Sequence[Link]) -> None:
        """Adds links to those that it began with."""


@dataclass(slots=True)
class ApiSpan:
    """A span of the API, and the context that it was started in."""

    tracer: Tracer
    span: Span
    parent: Context

    @property
    def context(self) -> SpanContext:
        """See `OpenSpan.context`."""
        return self.span.get_span_context()

    def for_app(self) -> Span:
        """See `OpenSpan.for_app`."""
        return self.span

    def child(
        self, name: str, kind: SpanKind, start_ns: int, attributes: Attributes | None, links: Sequence[Link] = ()
    ) -> OpenSpan:
        """See `OpenSpan.child`."""
        below = trace.set_span_in_context(self.span, self.parent)
        span = self.tracer.start_span(name, below, kind, attributes, links, start_time=start_ns)
        return ApiSpan(self.tracer, span, below)

    def end(self, at_ns: int, attributes: Attributes, events: Sequence[Moment] = (), error: str | None = None) -> None:
        """See `OpenSpan.end`."""
        for name, moment_ns in events:
            self.span.add_event(name, timestamp=moment_ns)
        if attributes:
            self.span.set_attributes(attributes)
        if error is not None:
            self.span.set_status(StatusCode.ERROR, error)
        self.span.end(at_ns)

    def link(self, links: Sequence[Link]) -> None:
        """See `OpenSpan.link`."""
        for link in links:
            self.span.add_link(link.context, link.attributes)
