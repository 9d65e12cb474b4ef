"""Spans without the SDK's span objects: its processors get the same records that they would get anyway.

Only where the result is the same: the processors do nothing when a span begins, the sampler lets a child follow its
parent and writes nothing of its own, ids are random, the limits are beyond what we write, and the SDK does not count
its own spans. Some of what is checked has no public name: a test compares the two ways span by span.

A request that is not sampled costs its ids and a comparison: the known samplers decide by the trace's id and by the
parent alone, so that a sampler becomes a few bounds, and is not called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import getrandbits
from typing import TYPE_CHECKING, Final, NamedTuple

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags, Tracer, TraceState

from sidecar.telemetry import sdk_bypass
from sidecar.telemetry.sdk_bypass.app_span import AppSpan
from sidecar.telemetry.spans.open_span import ApiSpan, Attributes, Moment, OpenSpan

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanLimits, SpanProcessor
    from opentelemetry.sdk.trace import Tracer as SdkTracer
    from opentelemetry.sdk.trace.sampling import Sampler

MOST_ATTRIBUTES = 128
MOST_LINKS = 16
"""More than a span of ours has, but where a policy has a dozen tiers that all go ahead of one request."""
_RANDOM = 0x02
"""W3C's flag for an id that is random; the SDK sets it since 1.42."""
_UNSET = Status(StatusCode.UNSET)
_FLAGS = tuple(TraceFlags(flags) for flags in range(4))
_LOWER_BITS: Final = (1 << 64) - 1
"""The bits of a trace's id that samplers look at."""
NO_STATE = TraceState()
_new = tuple.__new__


def _context(trace_id: int, span_id: int, flags: TraceFlags, state: TraceState) -> SpanContext:
    """As the API's constructor, at a tenth of its cost: it checks the ids, which were made a moment ago."""
    return _new(SpanContext, (trace_id, span_id, False, flags, state, True))


def _is_known_context() -> bool:
    """Whether a span's context has the form that `_context` gives it."""
    known = SpanContext(1, 2, is_remote=False, trace_flags=_FLAGS[1])
    return tuple(known) == tuple(_context(1, 2, _FLAGS[1], NO_STATE)) and known.is_valid


def bypass_of(tracer: Tracer) -> SpanBypass | None:
    """The bypass where it makes no difference, else None."""
    if not sdk_bypass.is_enabled():
        return None
    from opentelemetry.sdk.trace import Tracer as SdkTracer

    if type(tracer) is not SdkTracer or not _is_unmodified(tracer):
        return None
    bounds = _bounds_of(tracer.sampler)
    return None if bounds is None else SpanBypass(tracer, bounds)


class SamplingBounds(NamedTuple):
    """A sampler: a trace is sampled where the lower bits of its id are below the bound.

    Of the four bounds for a span with a parent, the place has one bit for a remote parent and one for a sampled one.
    """

    root: int
    parents: tuple[int, int, int, int]


class SpanBypass:
    """Begins spans that become a record when they end. Holds for as long as nothing about the tracer has changed."""

    def __init__(self, tracer: SdkTracer, bounds: SamplingBounds) -> None:
        from opentelemetry.sdk.trace import Event, ReadableSpan

        from sidecar.telemetry.sdk_bypass.app_usage import AppUsage

        self.event, self.record = Event, ReadableSpan
        self.resource, self.scope = tracer.resource, tracer._instrumentation_scope
        self.processors = _processors(tracer)
        self.exporting = [processor for processor in self.processors if type(processor) is not AppUsage]
        self._random = _RANDOM if hasattr(tracer.id_generator, "is_trace_id_random") else 0
        self.tracer = tracer
        self._sampler = tracer.sampler
        self._is_enabled = getattr(tracer, "_is_enabled", None)
        self._root, self._parents = bounds

    def context_of(self, parent: Context) -> tuple[SpanContext, SpanContext | None, bool] | None:
        """The context of a new span, its parent's, and whether it is sampled. Decides as the SDK's `start_span`.

        None where the tracer has changed: then ask `bypass_of` for another.
        """
        tracer, is_enabled = self.tracer, self._is_enabled
        if (
            tracer.sampler is not self._sampler
            or tracer.span_processor._span_processors is not self.processors
            or (is_enabled is not None and not is_enabled())
        ):
            return None
        above: SpanContext | None = trace.get_current_span(parent).get_span_context() if parent else None
        if above is None or not above.is_valid:
            trace_id, random, state, bound = getrandbits(128) or 1, self._random, NO_STATE, self._root
            above = None
        else:
            trace_id, _, is_remote, flags, state, _ = above
            random, bound = flags & self._random, self._parents[2 * is_remote + (flags & 1)]
        is_sampled = trace_id & _LOWER_BITS < bound
        return _context(trace_id, getrandbits(64) or 1, _FLAGS[is_sampled | random], state), above, is_sampled


@dataclass(slots=True, eq=False)
class DirectSpan:
    """A span that becomes a record when it ends. `above` is its parent's context.

    `written` is the SDK's own span, where the app has written something to it. `ended_ns` is None before the end.
    """

    bypass: SpanBypass
    name: str
    context: SpanContext
    above: SpanContext | None
    kind: SpanKind
    start_ns: int
    attributes: Attributes | None
    links: Sequence[Link]
    written: ApiSpan | None = None
    ended_ns: int | None = None

    def for_app(self) -> Span:
        """See `OpenSpan.for_app`."""
        return AppSpan(self)

    def child(
        self, name: str, kind: SpanKind, start_ns: int, attributes: Attributes | None, links: Sequence[Link] = ()
    ) -> OpenSpan:
        """See `OpenSpan.child`."""
        trace_id, _, _, flags, state, _ = self.context
        context = _context(trace_id, getrandbits(64) or 1, flags, state)
        return DirectSpan(self.bypass, name, context, self.context, kind, start_ns, attributes, links)

    def end(self, at_ns: int, attributes: Attributes, events: Sequence[Moment] = (), error: str | None = None) -> None:
        """See `OpenSpan.end`."""
        self.ended_ns = at_ns
        if self.written is not None:
            self.written.end(at_ns, attributes, events, error)
            return
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
        for processor in bypass.exporting:
            processor.on_end(record)

    def of_sdk(self) -> Span:
        """The same span as the SDK makes it, which has begun. After the end, one that takes nothing."""
        if self.written is None and self.ended_ns is not None:
            return trace.INVALID_SPAN
        if self.written is None:
            from opentelemetry.sdk.trace import _Span

            bypass, tracer = self.bypass, self.bypass.tracer
            span = _Span(
                name=self.name,
                context=self.context,
                parent=self.above,
                sampler=tracer.sampler,
                resource=bypass.resource,
                attributes=self.attributes,
                span_processor=tracer.span_processor,
                kind=self.kind,
                links=self.links,
                limits=tracer._span_limits,
                instrumentation_scope=bypass.scope,
            )
            span.start(self.start_ns)
            self.written = ApiSpan(tracer, span, Context())
        return self.written.span

    def link(self, links: Sequence[Link]) -> None:
        """See `OpenSpan.link`."""
        self.links = [*self.links, *links]


def _is_unmodified(tracer: SdkTracer) -> bool:
    from opentelemetry.sdk.trace import SynchronousMultiSpanProcessor
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    from sidecar.telemetry.sdk_bypass.app_usage import AppUsage

    known = {BatchSpanProcessor, SimpleSpanProcessor, AppUsage}
    return (
        type(tracer.span_processor) is SynchronousMultiSpanProcessor
        and all(type(processor) in known for processor in _processors(tracer))
        and type(tracer.id_generator) is RandomIdGenerator
        and _is_ample(tracer._span_limits)
        and not _counts_spans(tracer)
        and _is_known_context()
        and _is_enabled(tracer)
    )


def _processors(tracer: SdkTracer) -> Sequence[SpanProcessor]:
    # The provider replaces the tuple when a processor is added.
    return tracer.span_processor._span_processors


def _bounds_of(sampler: Sampler) -> SamplingBounds | None:
    """The bounds of a sampler; None where it is not known, does more, or does not let children follow their parents."""
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, ParentBasedTraceIdRatio

    if type(sampler) not in {ParentBased, ParentBasedTraceIdRatio}:
        bound = _bound(sampler)
        return None if bound is None else SamplingBounds(bound, (bound, bound, bound, bound))
    parts = vars(sampler)
    if parts.get("_local_parent_sampled") is not ALWAYS_ON:
        return None
    bounds = [bound for place in _PLACES if (bound := _bound(parts.get(place))) is not None]
    if len(bounds) != len(_PLACES):
        return None
    root, *(local, local_sampled, remote, remote_sampled) = bounds
    return SamplingBounds(root, (local, local_sampled, remote, remote_sampled))


_PLACES = (
    "_root",
    "_local_parent_not_sampled",
    "_local_parent_sampled",
    "_remote_parent_not_sampled",
    "_remote_parent_sampled",
)


def _bound(sampler: object) -> int | None:
    from opentelemetry.sdk.trace.sampling import Decision, StaticSampler, TraceIdRatioBased

    if type(sampler) is TraceIdRatioBased:
        return sampler.bound
    if type(sampler) is StaticSampler and "_decision" in vars(sampler):
        return (_LOWER_BITS + 1) * (sampler._decision is Decision.RECORD_AND_SAMPLE)
    return None


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
