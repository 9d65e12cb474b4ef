"""The host's own OpenTelemetry beside ours: its spans have its resource, and all are sent when the server ends."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from sidecar.app import AdmissionMiddleware
from sidecar.telemetry import setup
from tests.support.middleware import CHAT, SMALL, Caller, write_policy
from tests.support.ports import free_ports
from tests.support.serving import serving

pytestmark = pytest.mark.anyio
HOST = Resource.create({"service.name": "the host's own"})


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, no_providers: None, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith(("SIDECAR_", "OTEL_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SIDECAR_POLICY", str(write_policy(tmp_path)))


class Exporter(InMemorySpanExporter):
    """With `hangs`, one that takes no span until the test ends it."""

    def __init__(self, hangs: threading.Event | None = None) -> None:
        super().__init__()
        self._hangs = hangs

    def export(self, spans: Any) -> SpanExportResult:
        if self._hangs is not None:
            self._hangs.wait(60)
        return super().export(spans)


def host(exporter: Exporter, seen: list[set[str]]) -> Starlette:
    """An app that sets its providers while it starts, and notes what was sent when it hears of the end."""

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        tracers = TracerProvider(resource=HOST, shutdown_on_exit=False)
        tracers.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=3_600_000))
        trace.set_tracer_provider(tracers)
        metrics.set_meter_provider(MeterProvider([InMemoryMetricReader()], HOST, shutdown_on_exit=False))
        yield
        seen.append({span.name for span in exporter.get_finished_spans()})

    async def chat(_: Any) -> JSONResponse:
        with trace.get_tracer("host").start_as_current_span("host's"):
            return JSONResponse({})

    return Starlette(routes=[Route(CHAT, chat, methods=["POST"])], lifespan=lifespan)


@pytest.mark.parametrize("is_by_name", [True, False])
async def test_the_hosts_spans_keep_its_resource_and_the_last_are_sent_before_it_ends(
    is_by_name: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    monkeypatch.setenv("SIDECAR_ADMIN_PORT", str(free_ports(1)))
    exporter, seen = Exporter(), list[set[str]]()
    app = AdmissionMiddleware(host(exporter, seen), None if is_by_name else os.environ["SIDECAR_POLICY"])
    async with serving(app):
        caller = Caller(app, SMALL)
        await caller.run()
    assert caller.status == 200
    assert {"host's", "admission"} <= seen[0]
    resources = {span.resource.attributes["service.name"] for span in exporter.get_finished_spans()}
    assert resources == {"the host's own"}


async def test_an_exporter_that_hangs_holds_up_the_end_for_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(setup.flush_providers.__kwdefaults__, "within_s", 0.1)
    ends = threading.Event()
    seen: list[set[str]] = []
    app = AdmissionMiddleware(host(Exporter(ends), seen), os.environ["SIDECAR_POLICY"])
    async with serving(app):
        await Caller(app, SMALL).run()
    ends.set()
    assert seen == [set()]
    assert "telemetry was not sent within 0.1 s" in caplog.text


async def test_a_second_lifespan_has_its_metrics_and_sends_its_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDECAR_ADMIN_PORT", str(port := free_ports(1)))
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")

    async def chat(_: Any) -> JSONResponse:
        return JSONResponse({})

    app = AdmissionMiddleware(Starlette(routes=[Route(CHAT, chat, methods=["POST"])]), os.environ["SIDECAR_POLICY"])
    exporter: Exporter | None = None
    for times in (1, 2):
        async with serving(app), aiohttp.ClientSession() as client:
            if exporter is None:  # the provider is ours, and the only one that the process has
                provider: Any = trace.get_tracer_provider()
                provider.add_span_processor(BatchSpanProcessor(exporter := Exporter()))
            await Caller(app, SMALL).run()
            async with client.get(f"http://127.0.0.1:{port}/metrics") as page:
                text = await page.text()
        assert (page.status, "admission_capacity_requests" in text) == (200, True), times
        assert [span.name for span in exporter.get_finished_spans()].count("admission") == times
