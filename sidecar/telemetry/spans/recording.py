"""An open span: made through OpenTelemetry's API, or by a shortcut where the SDK is just as it comes.

Every request pays for this. Through the API an empty span costs 11 us, each attribute another and an event 5, for locks
and checks that values of our own making pass by construction. Where neither the processors nor the sampler are
somebody's own, and the limits are beyond what we write (`shortcut`), the processors are handed the same records for a
third of that. A test holds the two ways to the same spans; whatever is not known goes by the API.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, StatusCode, Tracer

from sidecar.telemetry.spans.attributes import Attributes

Moment = tuple[str, int]
"""A span event: its name, and when in Unix nanoseconds."""


class OpenSpan(Protocol):
    """A span that has begun. Times are Unix nanoseconds."""

    @property
    def context(self) -> SpanContext:
        """Its ids, and whether it is sampled."""

    @property
    def is_recording(self) -> bool:
        """Whether what is written on it goes anywhere."""

    def child(
        self, name: str, kind: SpanKind, start_ns: int, attributes: Attributes | None, links: Sequence[Link] = ()
    ) -> OpenSpan:
        """Begins a span below it."""

    def end(self, at_ns: int, attributes: Attributes, events: Sequence[Moment] = (), error: str | None = None) -> None:
        """Ends it. `error` is the description of its status, None where it is none."""


class Starter(Protocol):
    """Begins spans that have no parent of ours."""

    def is_current(self) -> bool:
        """Whether the tracer is as it was; else another must be made."""

    def start(self, name: str, parent: Context, kind: SpanKind, start_ns: int, attributes: Attributes) -> OpenSpan:
        """Begins a span as the parent's child, or a trace of its own where the parent has no span."""


class ThroughApi:
    """Begins spans as everybody does."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def is_current(self) -> bool:
        """Always: the tracer itself knows what it is."""
        return True

    def start(self, name: str, parent: Context, kind: SpanKind, start_ns: int, attributes: Attributes) -> OpenSpan:
        """See `Starter.start`."""
        span = self._tracer.start_span(name, parent, kind, attributes, start_time=start_ns)
        return _SpanOfApi(self._tracer, span, parent)


class _SpanOfApi:
    """A span of the tracer's."""

    __slots__ = ("_parent", "_span", "_tracer")

    def __init__(self, tracer: Tracer, span: Span, parent: Context) -> None:
        self._tracer = tracer
        self._span = span
        self._parent = parent

    @property
    def context(self) -> SpanContext:
        return self._span.get_span_context()

    @property
    def is_recording(self) -> bool:
        return self._span.is_recording()

    def child(
        self, name: str, kind: SpanKind, start_ns: int, attributes: Attributes | None, links: Sequence[Link] = ()
    ) -> OpenSpan:
        below = trace.set_span_in_context(self._span, self._parent)
        span = self._tracer.start_span(name, below, kind, attributes, links, start_time=start_ns)
        return _SpanOfApi(self._tracer, span, below)

    def end(self, at_ns: int, attributes: Attributes, events: Sequence[Moment] = (), error: str | None = None) -> None:
        for name, moment_ns in events:
            self._span.add_event(name, timestamp=moment_ns)
        if attributes:
            self._span.set_attributes(attributes)
        if error is not None:
            self._span.set_status(StatusCode.ERROR, error)
        self._span.end(at_ns)
