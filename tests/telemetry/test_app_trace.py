"""The trace of a request is current in the mounted app: its own spans, what it writes, its baggage, its usage."""

from __future__ import annotations

import asyncio
import contextvars
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from opentelemetry import baggage, context, trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Sampler
from opentelemetry.trace import StatusCode

import sidecar
from sidecar import AdmissionMiddleware
from tests.support.each import each
from tests.support.middleware import CHAT, answer, chat, policy, whole_body
from tests.support.serving import serving
from tests.support.wire import connected, exchange, get, post
from tests.telemetry.span_stories import (
    TRACE_ID,
    TRACEPARENT,
    Tracing,
    admitted,
    classified,
    first_byte,
    parent_id,
    preempted,
    received,
    settled,
    span_id,
)

pytestmark = pytest.mark.anyio
BODY = json.dumps(chat()).encode()
CLIENT = f"traceparent: {TRACEPARENT[1].decode()}"
Handle = Callable[[], Any]


class Host:
    """A process with an SDK, whose app calls `handle` and then answers; in `/other`, which is not guarded, too."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        handle: Handle,
        *,
        sampler: Sampler = ALWAYS_ON,
        more: str = "",
    ) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        monkeypatch.setattr("opentelemetry.trace._TRACER_PROVIDER", provider)
        self.tracer = trace.get_tracer("app")
        self._handle = handle
        self.app = AdmissionMiddleware(self.answered, policy=policy(more))

    async def answered(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for _ in range(2):
                await send({"type": f"{(await receive())['type']}.complete"})
            return
        await whole_body(receive)
        await self._handle()
        await answer(send, b"{}")

    def spans(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    def by_name(self) -> dict[str, ReadableSpan]:
        spans = self.spans()
        assert len({span.name for span in spans}) == len(spans)
        return {span.name: span for span in spans}

    async def ask(self, *headers: str) -> None:
        async with serving(self.app) as served:
            assert b" 200 OK" in await exchange(served.port, post(CHAT, BODY, *headers))


async def test_the_apps_own_spans_are_below_engine_with_the_clients_baggage(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[object] = []

    async def handle() -> None:
        with host.tracer.start_as_current_span("call of the model"):
            found.append(baggage.get_baggage("user"))
            await asyncio.create_task(later("in a task"))
            await asyncio.to_thread(lambda: host.tracer.start_span("in a thread").end())
        found.append(trace.get_current_span().is_recording())

    async def later(name: str) -> None:
        host.tracer.start_span(name).end()

    host = Host(monkeypatch, handle)
    await host.ask(CLIENT, "baggage: user=alice")

    spans = host.by_name()
    own = spans["call of the model"]
    assert parent_id(own) == span_id(spans["engine"])
    assert parent_id(spans["in a task"]) == parent_id(spans["in a thread"]) == span_id(own)
    assert {span.get_span_context().trace_id for span in spans.values()} == {TRACE_ID}
    assert found == ["alice", True]


async def test_what_the_app_traces_is_sampled_as_its_request_is(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[trace.SpanContext] = []

    async def handle() -> None:
        found.append(trace.get_current_span().get_span_context())
        host.tracer.start_span("call of the model").end()

    host = Host(monkeypatch, handle, sampler=ALWAYS_OFF)
    await host.ask(CLIENT)

    assert host.spans() == []
    assert (found[0].trace_id, found[0].trace_flags.sampled) == (TRACE_ID, False)


async def test_without_an_sdk_the_app_has_no_context_of_ours() -> None:
    found: list[context.Context] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        found.append(context.get_current())
        await answer(send, b"{}")

    async with serving(AdmissionMiddleware(app, policy=policy()), lifespan="off") as served:
        await exchange(served.port, post(CHAT, BODY, CLIENT))
    assert found == [{}]


async def test_what_the_app_writes_to_the_current_span_is_on_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def handle() -> None:
        current = trace.get_current_span()
        current.set_attribute("app.user", "alice")
        current.set_attributes({"app.size": 3, "app.wrong": object()})  # type: ignore[dict-item]  # the SDK leaves it out
        current.add_event("looked up", {"in": "cache"})
        current.record_exception(KeyError("gone"))
        current.set_status(StatusCode.ERROR, "not whole")
        current.add_link(current.get_span_context())
        current.update_name("engine of the app")
        assert current.attributes["app.user"] == "alice"  # type: ignore[attr-defined]  # as the SDK's
        current.end()

    host = Host(monkeypatch, handle)
    await host.ask()

    spans = host.by_name()
    engine = spans["engine of the app"]
    assert parent_id(engine) == span_id(spans["admission"])
    assert engine.attributes is not None
    assert {name: engine.attributes[name] for name in ("app.user", "app.size", "gen_ai.operation.name")} == {
        "app.user": "alice",
        "app.size": 3,
        "gen_ai.operation.name": "chat",
    }
    assert [event.name for event in engine.events][:2] == ["looked up", "exception"]
    assert (engine.status.status_code, engine.status.description) == (StatusCode.ERROR, "not whole")
    assert len(engine.links) == 1


def test_what_is_written_after_the_end_is_lost_and_nothing_is_exported_for_it() -> None:
    tracing = Tracing(served_by="app")
    observation = tracing.observer.received(received())
    assert observation is not None
    for event in (classified(), admitted()):
        observation.on_event(event)
    with current_of(observation) as span:
        observation.on_event(settled(1000))
        span.set_attribute("app.user", "alice")
        assert not span.is_recording()
    assert [dict(found.attributes or {}).get("app.user") for found in tracing.exporter.get_finished_spans()] == [
        None
    ] * 2


@contextmanager
def current_of(observation: Any) -> Iterator[trace.Span]:
    """The span that is current in the app, while the app runs."""
    call = observation.app_trace()
    try:
        yield trace.get_current_span()
    finally:
        call.detach()


def test_each_attempt_has_its_own_engine_span_current() -> None:
    tracing = Tracing(served_by="app")
    observation = tracing.observer.received(received())
    assert observation is not None
    found = []
    for attempt in ((classified(preemptible=True), admitted()), (*preempted(900, 60), admitted(1000))):
        for event in attempt:
            observation.on_event(event)
        with current_of(observation) as span:
            found.append(span.get_span_context().span_id)
    observation.on_event(settled(2000))

    engines = [span for span in tracing.exporter.get_finished_spans() if span.name == "engine"]
    engines.sort(key=lambda span: span.start_time or 0)
    assert [span_id(span) for span in engines] == found
    assert trace.get_current_span() is trace.INVALID_SPAN


def test_in_front_of_another_process_nothing_is_made_current() -> None:
    observation = Tracing().observer.received(received())
    assert observation is not None
    assert observation.app_trace() is None


async def test_in_the_dry_run_the_apps_spans_are_below_admission(monkeypatch: pytest.MonkeyPatch) -> None:
    async def handle() -> None:
        host.tracer.start_span("call of the model").end()

    host = Host(monkeypatch, handle, more="mode: observe\n")
    await host.ask(CLIENT)

    spans = host.by_name()
    assert parent_id(spans["call of the model"]) == span_id(spans["admission"])


# Several requests on one connection


@each("http", ["httptools", "h11"])
async def test_a_pipelined_request_has_its_own_trace_and_no_grant_of_another(
    http: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    grants: list[Any] = []

    async def handle() -> None:
        with host.tracer.start_as_current_span("handler"):
            grants.append(sidecar.granted())
            await asyncio.sleep(0.01)  # the next request has come meanwhile

    host = Host(monkeypatch, handle)
    requests = [
        post(CHAT, BODY, f"traceparent: 00-{digit * 32}-{'b' * 16}-01", f"x-request-id: {digit}", close=False)
        for digit in "123"
    ]
    async with serving(host.app, http=http) as served, connected(served.port) as (reader, writer):
        writer.write(b"".join(requests) + get("/other"))
        assert (await reader.read()).count(b" 200 OK") == 4

    traces = {
        span.attributes["admission.request_id"]: f"{span.get_span_context().trace_id:x}"[:1]
        for span in host.spans()
        if span.name == "admission" and span.attributes
    }
    assert traces == {"1": "1", "2": "2", "3": "3"}
    assert [grant is not None for grant in grants] == [True, True, True, False]


def played(tracing: Tracing) -> Any:
    """The parent's context of a request that comes now, None where its trace begins with it."""
    tracing.exporter.clear()
    return tracing.play(classified(), admitted(), first_byte(900), settled(1000))["admission"].parent


def test_a_span_that_has_ended_is_no_parent_of_a_request_that_comes_in_its_context() -> None:
    tracing = Tracing(served_by="app")
    earlier = tracing.observer.received(received())
    assert earlier is not None
    for event in (classified(), admitted()):
        earlier.on_event(event)
    with current_of(earlier) as engine:
        in_app = contextvars.copy_context()
        assert in_app.run(played, tracing).span_id == engine.get_span_context().span_id  # the app asks itself
        with tracing.provider.get_tracer("app").start_as_current_span("handler") as handler:
            in_handler = contextvars.copy_context()
            assert in_handler.run(played, tracing).span_id == handler.get_span_context().span_id
    assert [inherited.run(played, tracing) for inherited in (in_app, in_handler)] == [None, None]


# What the app's own call of the model used


def traced(**attributes: object) -> Callable[[], Any]:
    """A handler that traces a call of the model, in a span below another."""

    async def handle() -> None:
        tracer = trace.get_tracer("llm")
        with tracer.start_as_current_span("step"), tracer.start_as_current_span("chat m") as span:
            span.set_attributes({name.replace("__", "."): value for name, value in attributes.items()})  # type: ignore[misc]
            await asyncio.sleep(0)

    return handle


USAGE = b'{"usage": {"prompt_tokens": 500, "completion_tokens": 300}}'


@each(
    ("key", "traces", "is_ours"),
    [
        ("", traced(gen_ai__usage__input_tokens=500), False),
        ("", traced(llm__token_count__prompt=500), False),
        ("", traced(gen_ai__operation__name="chat"), True),
        ("usage_in_traces: always\n", traced(gen_ai__usage__input_tokens=500), True),
        ("usage_in_traces: never\n", traced(), False),
    ],
)
async def test_what_a_request_used_is_in_its_trace_once(
    key: str, traces: Handle, is_ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host(monkeypatch, traces, more=key)
    host.app.controller.use_app(told(host.app.controller.app))
    await host.ask()

    attributes = host.by_name()["engine"].attributes or {}
    assert attributes.get("gen_ai.usage.input_tokens") == (500 if is_ours else None)
    assert ("gen_ai.usage.output_tokens" in attributes) is is_ours


def told(app: Any) -> Any:
    """The app, whose answers say a usage."""

    async def telling(scope: Any, receive: Any, send: Any) -> None:
        async def tell(message: Any) -> None:
            await send({**message, "body": USAGE} if "body" in message else message)

        await app(scope, receive, tell)

    return telling


def test_the_usage_of_one_request_is_not_taken_for_anothers() -> None:
    tracing = Tracing(served_by="app")
    tracer = tracing.provider.get_tracer("llm")

    def play(used: dict[str, int]) -> None:
        observation = tracing.observer.received(received())
        assert observation is not None
        observation.on_event(classified())
        observation.on_event(admitted())
        with current_of(observation):
            tracer.start_span("chat m", attributes=used).end()
            observation.on_event(settled(1000))  # here, and so in the context of the app's call

    for used in ({"gen_ai.usage.input_tokens": 1}, {}):
        contextvars.copy_context().run(play, used)
    engines = [span for span in tracing.exporter.get_finished_spans() if span.name == "engine"]
    assert ["gen_ai.usage.input_tokens" in (engine.attributes or {}) for engine in engines] == [False, True]


def test_another_policy_changes_where_the_usage_is_written() -> None:
    tracing = Tracing(served_by="app", writes_usage=False)
    assert "gen_ai.usage.input_tokens" not in (
        tracing.play(classified(), admitted(), settled(9))["engine"].attributes or {}
    )
    tracing.exporter.clear()
    tracing.tracer.change({}, None)
    assert "gen_ai.usage.input_tokens" in (
        tracing.play(classified(), admitted(), settled(9))["engine"].attributes or {}
    )
