"""Preemption through a real sidecar: everything that listens tells the same of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from sidecar.explain.builder import ExplanationBuilder
from sidecar.policy.compiler import load
from sidecar.telemetry.dispatch import EventDispatcher
from sidecar.telemetry.journal import Journal
from sidecar.telemetry.recent import Recent
from sidecar.telemetry.spans.links import WaitFinder
from sidecar.telemetry.spans.tracer import RequestTracer
from tests.support.middleware import App, Guarded, answer, guarding, monitor, whole_body
from tests.telemetry.measuring import Measuring

pytestmark = pytest.mark.anyio
POLICY = """\
engine: none
capacity: {requests: 1}
tiers:
  critical: {preempt_after: 20ms}
  batch: {preemptible: true}
default_tier: batch
anonymous: critical
sources: [header]
"""
BATCH = ("default", "batch")


class Engine(App):
    """Runs every request until it may end, or until its client leaves: as a serving app does."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end = {"batch": asyncio.Event(), "critical": asyncio.Event()}
        self.traceparents: list[bytes] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        self.traceparents.append(dict(scope["headers"])[b"traceparent"])
        await whole_body(receive)
        left = asyncio.ensure_future(receive())
        ended = asyncio.ensure_future(self.may_end[scope["admission"].tier].wait())
        await asyncio.wait((left, ended), return_when=asyncio.FIRST_COMPLETED)
        is_over = ended.done()
        for task in (left, ended):
            task.cancel()
        if is_over:
            await answer(send, b"{}")


class Watched:
    """A sidecar with all that listens to it."""

    def __init__(self, guarded: Guarded, engine: Engine) -> None:
        self.guarded, self.engine = guarded, engine
        self.journal, self.recent, self.measuring = Journal(), Recent(), Measuring()
        self.metrics = self.measuring.requests()
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        spans = RequestTracer(provider, find_links=WaitFinder(self.journal, ("critical", "batch")).ended)
        monitor(guarded.sidecar, EventDispatcher(spans, [self.journal, self.recent, self.metrics]))

    def story(self, request_id: str) -> Any:
        story = ExplanationBuilder(self.journal, lambda: ("critical", "batch"), "lab", is_shared=False).explain(
            request_id
        )
        assert story is not None
        return story

    def spans(self, request_id: str, name: str) -> list[ReadableSpan]:
        """Those of this name in the request's trace, in order of their beginnings."""
        story = self.story(request_id)
        found = [span for span in self.exporter.get_finished_spans() if span.name == name]
        of_trace = [span for span in found if f"{span.context.trace_id:032x}" == story.trace_id]
        return sorted(of_trace, key=lambda span: span.start_time or 0)

    async def sends(self, tier: str, request_id: str, *headers: str) -> asyncio.Task[Any]:
        asked = asyncio.create_task(
            self.guarded.ask(None, f"x-priority: {tier}", f"x-request-id: {request_id}", *headers)
        )
        await self.until(request_id, "running", "waiting")
        return asked

    async def until(self, request_id: str, *states: str, times: int = 0) -> None:
        """Until the request is in one of these states, preempted so often."""
        for _ in range(2500):
            record = self.journal.find(request_id)
            if record is not None:
                story = self.story(request_id)
                if story.state in states and len(story.preempted) == times:
                    return
            await asyncio.sleep(0.002)
        raise AssertionError(f"{request_id} is not {states}")


@asynccontextmanager
async def watched(tmp_path: Any) -> AsyncIterator[Watched]:
    file = tmp_path / "policy.yaml"
    file.write_text(POLICY)
    engine = Engine()
    async with guarding(engine, load(file)) as guarded:
        yield Watched(guarded, engine)


async def test_a_victim_is_reported_alike_by_every_listener(tmp_path: Any) -> None:
    async with watched(tmp_path) as sidecar:
        victim = await sidecar.sends("batch", "victim")
        important = await sidecar.sends("critical", "important")
        await sidecar.until("victim", "waiting", times=1)
        await sidecar.until("important", "running")
        assert sidecar.metrics.held()["anonymous"].leases == 1
        assert sidecar.metrics.held()["anonymous"].waiting == 1
        for may_end in sidecar.engine.may_end.values():
            may_end.set()
        assert [(await asked).status for asked in (important, victim)] == [200, 200]
    story = sidecar.story("victim")
    (lost,) = story.preempted
    assert story.conclusion.startswith("admitted at once; preempted after ")
    assert "at the engine: its room went to a more important request; waited again for " in story.conclusion
    assert "1 request of tier critical went ahead because critical " in story.conclusion
    measuring = sidecar.measuring
    assert measuring.values("admission.preemptions") == {BATCH: 1}
    assert measuring.values("admission.preempted.engine_time") == {BATCH: pytest.approx(lost.engine_s)}
    assert measuring.values("admission.admitted") == {BATCH: 1, ("default", "critical"): 1}
    count, wait_s = measuring.sums("admission.queue_wait")[("admitted", *BATCH)]
    assert (count, wait_s) == (1, pytest.approx(story.wait.queue_wait_s))
    assert measuring.sums("admission.starvation")[("admitted", *BATCH)] == (1, pytest.approx(story.wait.starvation_s))
    buckets = sidecar.recent.read("batch", story.told_at_s).buckets
    assert [sum(bucket.admitted for bucket in buckets), sum(bucket.preempted for bucket in buckets)] == [1, 1]
    assert sum(bucket.engine_lost_s for bucket in buckets) == pytest.approx(lost.engine_s)
    first, again = sidecar.spans("victim", "engine")
    assert first.attributes == {**dict(first.attributes or {}), "admission.preempted": True}
    sent = [traceparent.split(b"-")[2].decode() for traceparent in sidecar.engine.traceparents]
    (served,) = sidecar.spans("important", "engine")
    assert sent == [f"{span.context.span_id:016x}" for span in (first, served, again)]
    (queued,) = sidecar.spans("victim", "admission.queued")
    assert (queued.attributes or {})["admission.obstacle"] == "preempted"
    (admission,) = sidecar.spans("victim", "admission")
    assert admission.attributes is not None
    assert admission.attributes["admission.queue_wait_s"] == pytest.approx(story.wait.queue_wait_s)
    (starved,) = sidecar.spans("victim", "admission.starved")
    assert [(link.attributes or {})["admission.request_id"] for link in starved.links] == ["important"]
    assert str((starved.attributes or {})["admission.explanation"]) in story.conclusion
    assert admission.attributes["admission.explanation"] == (starved.attributes or {})["admission.explanation"]
    assert sidecar.metrics.held() == {}
