"""A mounted middleware, whole: the trace of a request that starves says by itself what the admin page says."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from sidecar.admin.app import admin_app
from sidecar.app import AdmissionMiddleware
from sidecar.policy.compiler import load
from tests.support.middleware import App
from tests.support.serving import serving
from tests.support.waiting import until

pytestmark = pytest.mark.anyio
POLICY = """\
engine: none
capacity: {requests: 1}
trace_waits: 20ms
tiers: {high: {}, batch: {}}
default_tier: batch
anonymous: high
sources: [header]
"""


class Traced:
    """The spans that the process has exported."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        trace.set_tracer_provider(provider)

    def spans(self, name: str, request_id: str | None = None) -> list[ReadableSpan]:
        """Those of this name, of the request's trace where they have its id."""
        found = [span for span in self.exporter.get_finished_spans() if span.name == name]
        return [span for span in found if request_id in {None, (span.attributes or {}).get("admission.request_id")}]


async def test_a_long_wait_and_its_starvation_are_told_alike_by_the_trace_and_the_page(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text(POLICY)
    traced, app = Traced(), App(is_held=True)
    sidecar = AdmissionMiddleware(app, tmp_path, is_shown=True)
    controller = sidecar.controller
    pages = admin_app(state=controller.state, readiness=list, routes=sidecar.observability.routes)
    async with (
        serving(sidecar) as served,
        serving(pages) as admin,
        aiohttp.ClientSession(served.url) as client,
        aiohttp.ClientSession(admin.url) as looker,
    ):

        async def ask(name: str, tier: str) -> int:
            headers = {"x-priority": tier, "x-request-id": name}
            async with client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=headers) as answer:
                return answer.status

        async def conclusion(name: str) -> str:
            async with looker.get(f"/requests/{name}") as page:
                return str((await page.json())["conclusion"])

        asked = [asyncio.ensure_future(ask("first", "batch"))]
        await until(lambda: app.seen)
        asked.append(asyncio.ensure_future(ask("starved", "batch")))
        await until(lambda: traced.spans("admission.waiting", "starved"))
        asked.append(asyncio.ensure_future(ask("urgent", "high")))
        await until(lambda: traced.spans("admission.waiting", "urgent"))
        assert traced.spans("admission.queued") == []
        app.release()
        overtaken = "1 request of tier high went ahead because high is more important"

        def last_word() -> str:
            return str((traced.spans("admission.waiting", "starved")[-1].attributes or {})["admission.explanation"])

        await until(lambda: last_word() == overtaken)
        assert (await conclusion("starved")).endswith(overtaken)
        (tmp_path / "policy.yaml").write_text(POLICY.replace("20ms", "0s"))
        controller.change_policy(load(tmp_path / "policy.yaml"))
        reports = traced.spans("admission.waiting", "starved")
        app.release(2)
        assert await asyncio.gather(*asked) == [200, 200, 200]
        said = await conclusion("starved")

    (starved,) = traced.spans("admission.starved")
    assert (starved.attributes or {})["admission.explanation"] == overtaken
    assert said.endswith(overtaken)
    queued = {span.context.span_id: span for span in traced.spans("admission.queued")}
    assert {span.parent.span_id for span in (*reports, starved) if span.parent is not None} == {
        span.context.span_id for span in queued.values() if span.context.trace_id == starved.context.trace_id
    }
    assert {(span.attributes or {})["admission.requests_before"] for span in reports} == {0, 1}
    assert traced.spans("admission.waiting", "starved") == reports
    assert {(span.attributes or {})["admission.served_by"] for span in traced.spans("engine")} == {"app"}
