"""Spans made by the shortcut are those that the SDK makes; and it is taken only where nothing is anybody's own."""

import itertools
import random

import pytest
from opentelemetry.context import Context
from opentelemetry.sdk.trace import SpanLimits, SynchronousMultiSpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import (
    ALWAYS_OFF,
    ALWAYS_ON,
    ParentBased,
    ParentBasedTraceIdRatio,
    Sampler,
    TraceIdRatioBased,
)
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, TraceFlags, TraceState, set_span_in_context

from sidecar.events import Outcome
from sidecar.telemetry.sdk_bypass.spans import bypass_of
from tests.telemetry.span_stories import (
    TRACEPARENT,
    TWICE_PREEMPTED,
    SomebodysOwn,
    Tracing,
    admitted,
    classified,
    first_byte,
    in_vain,
    preempted,
    queued,
    received,
    refused,
    settled,
    span_id,
)

STARVED = admitted(2_100_000, 2_099_950, starvation_us=1_400_000, served_ahead={"high": 900})
STORIES = {
    "straight in": (classified(), admitted(), first_byte(900), settled(1000)),
    "starved": (classified(clamped_from="high"), queued(), STARVED, first_byte(2_200_000), settled(3_000_000)),
    "failed": (classified(), admitted(), settled(1000, Outcome.FAILED, 502, "engine_unreachable")),
    "refused by us": (classified(), queued(), refused("queue_timeout", 503, 900, queue_wait_us=850)),
    "refused as its own doing": (refused("invalid_api_key", 401),),
    "preempted": TWICE_PREEMPTED,
    "preempted in vain": (classified(), admitted(), *preempted(900, 60), in_vain(1900, "queue_timeout", 503)),
}
CLIENTS = {
    "no trace": (),
    "sampled": (TRACEPARENT, (b"tracestate", b"rojo=00f067aa0ba902b7,congo=t61rcWkgMzE")),
    "sampled out": ((b"traceparent", TRACEPARENT[1][:-2] + b"00"),),
    "with a random id": ((b"traceparent", TRACEPARENT[1][:-2] + b"03"),),
    "sampled out with a random id": ((b"traceparent", TRACEPARENT[1][:-2] + b"02"),),
}
SAMPLERS = {
    "all": ALWAYS_ON,
    "none": ALWAYS_OFF,
    "as the parent, else all": ParentBased(ALWAYS_ON),
    "as the parent, else none": ParentBasedTraceIdRatio(0.0),
    "half of them": TraceIdRatioBased(0.5),
}


def ahead(*_):
    ids = SpanContext(0xABC, 0xDEF, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    about = {"admission.tier": "high", "admission.request_id": "request-0"}
    overtook = Link(ids, {**about, "admission.rule": "level"})
    return [Link(ids, about)], [overtook, overtook], {"admission.overtaken_by.high": 20}


def everything_of(span, roots):
    """All that is exported of a span; ids that are made up are replaced by what they belong to."""
    context, parent = span.get_span_context(), span.parent
    return {
        "name": span.name,
        "kind": span.kind,
        "times": (span.start_time, span.end_time),
        "trace": context.trace_id if parent is not None and parent.is_remote else None,
        "flags": context.trace_flags,
        "state": context.trace_state.to_header(),
        "remote": context.is_remote,
        "parent": None if parent is None else (roots.get(parent.span_id, parent.span_id), parent.is_remote),
        "parents flags": None if parent is None else parent.trace_flags,
        "attributes": dict(span.attributes),
        "events": [(event.name, event.timestamp, dict(event.attributes)) for event in span.events],
        "links": [(link.context, dict(link.attributes)) for link in span.links],
        "status": (span.status.status_code, span.status.description),
        "resource": {**span.resource.attributes, "service.instance.id": None},
        "scope": span.instrumentation_scope,
        "dropped": (span.dropped_attributes, span.dropped_events, span.dropped_links),
    }


def reported(sampler, story, headers, *, by_shortcut):
    tracing = Tracing(sampler, by_shortcut=by_shortcut, find_links=ahead, provider_name="vllm")
    observation = tracing.observer.received(received(headers))
    assert (tracing.tracer._bypass is not None) == by_shortcut
    for event in story:
        observation.on_event(event)
    passed_on = [
        (name, value[:3] + value[-3:] if name == b"traceparent" else value) for name, value in observation.headers()
    ]
    spans = tracing.exporter.get_finished_spans()
    roots = {span_id(span): span.name for span in spans}
    return observation.record.trace.is_sampled, passed_on, [everything_of(span, roots) for span in spans]


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_both_ways_leave_the_same_spans(story):
    different = {}
    for sampler, client in itertools.product(SAMPLERS, CLIENTS):
        if sampler == "half of them":
            continue
        ways = [reported(SAMPLERS[sampler], story, CLIENTS[client], by_shortcut=way) for way in (True, False)]
        if ways[0] != ways[1]:
            different[sampler, client] = ways

    assert different == {}


def test_half_of_the_traces_are_kept_whole():
    tracing = Tracing(TraceIdRatioBased(0.5))
    for _ in range(200):
        observation = tracing.observer.received(received())
        for event in STORIES["straight in"]:
            observation.on_event(event)

    names = {}
    for span in tracing.exporter.get_finished_spans():
        names.setdefault(span.context.trace_id, []).append(span.name)
    assert 50 < len(names) < 150
    assert set(map(tuple, names.values())) == {("engine", "admission")}


QUARTER, MOST = TraceIdRatioBased(0.25), TraceIdRatioBased(0.9)
DECIDING = {
    **SAMPLERS,
    "a quarter": QUARTER,
    "rare": TraceIdRatioBased(1e-9),
    "all by ratio": TraceIdRatioBased(1.0),
    "each parent otherwise": ParentBased(QUARTER, MOST, QUARTER, ALWAYS_ON, MOST),
    "against the parent": ParentBased(ALWAYS_OFF, ALWAYS_OFF, ALWAYS_ON, ALWAYS_ON, ALWAYS_ON),
}
EDGES = [1, 1 << 62, (1 << 62) - 1, (1 << 64) - 1, 1 << 64, (1 << 128) - 1, (1 << 127) | (1 << 62), round(1e-9 * 2**64)]


@pytest.mark.parametrize("sampler", DECIDING.values(), ids=DECIDING)
def test_a_sampler_is_not_called_and_its_decisions_are_the_same(sampler):
    tracer = provider(sampler=sampler).get_tracer("x")
    bypass = bypass_of(tracer)
    assert bypass is not None
    ids = [*EDGES, *(random.Random(7).getrandbits(128) for _ in range(500))]
    for trace_id, is_remote, flags in itertools.product(ids, (False, True), range(4)):
        above = SpanContext(trace_id, 5, is_remote, TraceFlags(flags), TraceState([("rojo", "1")]))
        parent = set_span_in_context(NonRecordingSpan(above), Context())
        by_sdk = tracer.start_span("admission", parent)
        context, found, is_sampled = bypass.context_of(parent)
        assert found == above
        assert is_sampled == by_sdk.is_recording()
        assert everything_but_the_id(context) == everything_but_the_id(by_sdk.get_span_context())


@pytest.mark.parametrize("sampler", DECIDING.values(), ids=DECIDING)
def test_the_decision_on_a_new_trace_is_that_of_the_sampler(sampler):
    bypass = bypass_of(provider(sampler=sampler).get_tracer("x"))
    assert bypass is not None
    for _ in range(500):
        context, above, is_sampled = bypass.context_of(Context())
        assert above is None
        assert context.is_valid
        assert not context.is_remote
        decided = sampler.should_sample(Context(), context.trace_id, "admission").decision.is_sampled()
        assert (is_sampled, context.trace_flags.sampled) == (decided, decided)


def everything_but_the_id(context):
    return context.trace_id, context.is_remote, context.trace_flags, context.trace_state.to_header(), context.is_valid


@pytest.mark.parametrize(
    "renamed", ["_root", "_remote_parent_sampled", "_remote_parent_not_sampled", "_local_parent_not_sampled"]
)
def test_a_sampler_with_other_parts_than_those_known_is_called(renamed):
    sampler = ParentBased(ALWAYS_ON)
    made = provider(sampler=sampler)
    assert bypass_of(made.get_tracer("x")) is not None
    vars(sampler)["_renamed"] = vars(sampler).pop(renamed)

    assert bypass_of(made.get_tracer("x")) is None


class OwnSampler(Sampler):
    def should_sample(self, *arguments, **named):
        return ALWAYS_ON.should_sample(*arguments, **named)

    def get_description(self):
        return "somebody's own"


class OwnIds(RandomIdGenerator):
    pass


def provider(**settings):
    made = TracerProvider(shutdown_on_exit=False, **settings)
    made.add_span_processor(SimpleSpanProcessor(InMemorySpanExporter()))
    return made


def with_processor(processor):
    made = provider()
    made.add_span_processor(processor)
    return made


class OwnBatch(BatchSpanProcessor):
    def on_start(self, span, parent_context=None):
        span.set_attribute("added", "by a processor")


OWN = {
    "processor": lambda: with_processor(SomebodysOwn()),
    "processor like the SDK's": lambda: with_processor(OwnBatch(InMemorySpanExporter())),
    "way to call processors": lambda: provider(
        active_span_processor=type("Own", (SynchronousMultiSpanProcessor,), {})()
    ),
    "sampler": lambda: provider(sampler=OwnSampler()),
    "sampler of new traces": lambda: provider(sampler=ParentBased(OwnSampler())),
    "sampler of children": lambda: provider(sampler=ParentBased(ALWAYS_ON, local_parent_sampled=OwnSampler())),
    "children that are left out": lambda: provider(sampler=ParentBased(ALWAYS_ON, local_parent_sampled=ALWAYS_OFF)),
    "ids": lambda: provider(id_generator=OwnIds()),
    "few attributes": lambda: provider(span_limits=SpanLimits(max_span_attributes=8)),
    "few links": lambda: provider(span_limits=SpanLimits(max_links=4)),
    "short values": lambda: provider(span_limits=SpanLimits(max_attribute_length=100)),
}


@pytest.mark.parametrize("make", OWN.values(), ids=OWN)
def test_whatever_is_somebodys_own_is_respected(make):
    made = make()
    assert bypass_of(made.get_tracer("x")) is None
    made.shutdown()


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_an_sdk_as_it_comes_takes_the_shortcut(sampler):
    assert bypass_of(provider(sampler=sampler).get_tracer("x")) is not None


def test_an_sdk_that_counts_its_spans_is_let_count(monkeypatch):
    monkeypatch.setenv("OTEL_PYTHON_SDK_INTERNAL_METRICS_ENABLED", "true")
    tracer = provider().get_tracer("x")

    assert bypass_of(tracer) is None or not hasattr(tracer, "_tracer_metrics")


def test_a_processor_that_is_added_later_gets_the_next_request():
    tracing = Tracing()
    tracing.play(*STORIES["straight in"])
    seen = []

    class Later(SomebodysOwn):
        def on_start(self, span, parent_context=None):
            seen.append(span.name)

    tracing.provider.add_span_processor(Later())
    observation = tracing.observer.received(received())
    for event in STORIES["straight in"]:
        observation.on_event(event)

    assert seen == ["admission", "engine"]


def test_a_variable_turns_it_off(monkeypatch):
    assert bypass_of(provider().get_tracer("x")) is not None
    monkeypatch.setenv("SIDECAR_SDK_BYPASS", "off")

    assert bypass_of(provider().get_tracer("x")) is None
