"""Spans without the SDK's span objects: its processors get the same records that they would get anyway.

Only where the result is the same: the processors do nothing when a span begins, the sampler lets a child follow its
parent and writes nothing of its own, ids are random, the limits are beyond what we write, and the SDK does not count
its own spans. Some of what is checked has no public name: a test compares the two ways span by span.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, Tracer, TraceState

from sidecar.telemetry import sdk_bypass
from sidecar.telemetry.spans.open_span import Attributes, Moment, OpenSpan

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanLimits, SpanProcessor
    from opentelemetry.sdk.trace import Tracer as SdkTracer
    from opentelemetry.sdk.trace.sampling import Sampler

MOST_ATTRIBUTES = 64
MOST_LINKS = 16
"""More than a span of ours has, but where a policy has dozens of tiers that all go ahead of one request."""
_RANDOM = 0x02
"""W3C's flag for an id that is random; the SDK sets it since 1.42."""
_UNSET = Status(StatusCode.UNSET)
_FLAGS = tuple(TraceFlags(flags) for flags in range(4))
_NO_STATE = TraceState()
_new = tuple.__new__


def _context(trace_id: int, span_id: int, flags: TraceFlags, state: TraceState | None) -> SpanContext:
    """As the API's constructor, at a tenth of its cost: it checks the ids, which were made a moment ago."""
    return _new(SpanContext, (trace_id, span_id, False, flags, _NO_STATE if state is None else state, True))


def _is_known_context() -> bool:
    """Whether a span's context has the form that `_context` gives it."""
    known = SpanContext(1, 2, is_remote=False, trace_flags=_FLAGS[1])
    return tuple(known) == tuple(_context(1, 2, _FLAGS[1], None)) and known.is_valid


def bypass_of(tracer: Tracer) -> SpanBypass | None:
    """The bypass where it makes no difference, else None."""
    if not sdk_bypass.is_enabled():
        return None
    from opentelemetry.sdk.trace import Tracer as SdkTracer

    return SpanBypass(tracer) if type(tracer) is SdkTracer and _is_unmodified(tracer) else None


class SpanBypass:
    """Begins spans that become a record when they end. Holds for as long as `is_current`."""

    def __init__(self, tracer: SdkTracer) -> None:
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.sdk.trace.sampling import Decision

        self._record_and_sample = Decision.RECORD_AND_SAMPLE
        self.event, self.record = Event, ReadableSpan
        self.resource, self.scope = tracer.resource, tracer._instrumentation_scope
        self.processors = _processors(tracer)
        self.new_span_id = tracer.id_generator.generate_span_id
        self._new_trace_id = tracer.id_generator.generate_trace_id
        self._random = _RANDOM if hasattr(tracer.id_generator, "is_trace_id_random") else 0
        self._tracer = tracer
        self._sampler = tracer.sampler

    def is_current(self) -> bool:
        """Whether nothing about the tracer has changed."""
        tracer = self._tracer
        return tracer.sampler is self._sampler and _processors(tracer) is self.processors and _is_enabled(tracer)

    def start(
        self, name: str, parent: Context, kind: SpanKind, start_ns: int, attributes: Attributes
    ) -> tuple[SpanContext, OpenSpan | None]:
        """The context of a span, and the span where it is sampled. Decides as the SDK's `start_span`, in its order."""
        above: SpanContext | None = trace.get_current_span(parent).get_span_context() if parent else None
        if above is None or not above.is_valid:
            above, trace_id, random = None, self._new_trace_id(), self._random
        else:
            trace_id, random = above.trace_id, above.trace_flags & self._random
        sampled = self._sampler.should_sample(parent, trace_id, name, kind, attributes, ())
        is_sampled = sampled.decision is self._record_and_sample
        flags = _FLAGS[is_sampled | random]
        context = _context(trace_id, self.new_span_id(), flags, sampled.trace_state)
        if not is_sampled:
            return context, None
        return context, DirectSpan(self, name, context, above, kind, start_ns, attributes, ())


@dataclass(slots=True, eq=False)
class DirectSpan:
    """A span that becomes a record when it ends. `above` is its parent's context."""

    bypass: SpanBypass
    name: str
    context: SpanContext
    above: SpanContext | None
    kind: SpanKind
    start_ns: int
    attributes: Attributes | None
    links: Sequence[Link]

    def child(
        self, name: str, kind: SpanKind, start_ns: int, attributes: Attributes | None, links: Sequence[Link] = ()
    ) -> OpenSpan:
        """See `OpenSpan.child`."""
        own = self.context
        context = _context(own.trace_id, self.bypass.new_span_id(), own.trace_flags, own.trace_state)
        return DirectSpan(self.bypass, name, context, own, kind, start_ns, attributes, links)

    def end(self, at_ns: int, attributes: Attributes, events: Sequence[Moment] = (), error: str | None = None) -> None:
        """See `OpenSpan.end`."""
        bypass = self.bypass
        record = bypass.record(
            name=self.name,
            context=self.context,
            parent=self.above,
            resource=bypass.resource,
            attributes={**self.attributes, **attributes} if self.attributes else attributes,
            events=[bypass.event(name, {}, moment_ns) for name, moment_ns in events],
            links=self.links,
            kind=self.kind,
            status=_UNSET if error is None else Status(StatusCode.ERROR, error),
            start_time=self.start_ns,
            end_time=at_ns,
            instrumentation_scope=bypass.scope,
        )
        for processor in bypass.processors:
            processor.on_end(record)


def _is_unmodified(tracer: SdkTracer) -> bool:
    from opentelemetry.sdk.trace import SynchronousMultiSpanProcessor
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    return (
        type(tracer.span_processor) is SynchronousMultiSpanProcessor
        and all(type(processor) in {BatchSpanProcessor, SimpleSpanProcessor} for processor in _processors(tracer))
        and type(tracer.id_generator) is RandomIdGenerator
        and _lets_children_follow(tracer.sampler)
        and _is_ample(tracer._span_limits)
        and not _counts_spans(tracer)
        and _is_known_context()
        and _is_enabled(tracer)
    )


def _processors(tracer: SdkTracer) -> Sequence[SpanProcessor]:
    # The provider replaces the tuple when a processor is added.
    return tracer.span_processor._span_processors


def _lets_children_follow(sampler: Sampler) -> bool:
    """Whether it decides by the trace alone, or by the parent, and adds nothing."""
    from opentelemetry.sdk.trace.sampling import (
        ALWAYS_ON,
        ParentBased,
        ParentBasedTraceIdRatio,
        StaticSampler,
        TraceIdRatioBased,
    )

    plain = {StaticSampler, TraceIdRatioBased}
    if type(sampler) in plain:
        return True
    if type(sampler) not in {ParentBased, ParentBasedTraceIdRatio}:
        return False
    parts = [part for part in vars(sampler).values() if hasattr(part, "should_sample")]
    return vars(sampler).get("_local_parent_sampled") is ALWAYS_ON and all(type(part) in plain for part in parts)


def _is_ample(limits: SpanLimits) -> bool:
    counts = [
        (limits.max_span_attributes, MOST_ATTRIBUTES),
        (limits.max_link_attributes, MOST_ATTRIBUTES),
        (limits.max_links, MOST_LINKS),
        (limits.max_events, MOST_LINKS),
    ]
    lengths = [limits.max_attribute_length, limits.max_span_attribute_length]
    return all(limit is None or limit >= needed for limit, needed in counts) and lengths == [None, None]


def _counts_spans(tracer: SdkTracer) -> bool:
    """Whether OTEL_PYTHON_SDK_INTERNAL_METRICS_ENABLED makes the SDK count its spans, which it can since 1.40."""
    counting = getattr(tracer, "_tracer_metrics", None)
    return counting is not None and type(counting).__name__ != "NoOpTracerMetrics"


def _is_enabled(tracer: SdkTracer) -> bool:
    enabled = getattr(tracer, "_is_enabled", None)
    return enabled is None or enabled()
