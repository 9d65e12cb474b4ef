"""`GET /metrics` of a real sidecar before an emulated engine: what a scraper reads while requests wait, and after
it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from sidecar.admin.app import admin_app
from sidecar.admin.routes import metrics_routes
from sidecar.cluster.document import PoolFigures, TierShare
from sidecar.cluster.sampler import KINDS, PoolSampler
from sidecar.engines import Vllm
from sidecar.lengths.token_estimates import Estimator
from sidecar.policy.compiler import load
from sidecar.pools import Pool
from sidecar.proxy.proxy import ReverseProxy
from sidecar.telemetry.dispatch import EventDispatcher
from sidecar.telemetry.metrics import PoolMetrics, RequestMetrics
from sidecar.telemetry.metrics.prometheus import PrometheusReader
from sidecar.telemetry.metrics.views import views
from sidecar.telemetry.setup import MetricsEndpoint
from sidecar.telemetry.spans.tracer import RequestTracer
from sidecar.tools.emulator import Emulator, EmulatorConfig, StepModel
from tests.cluster.test_overview import sources_of
from tests.support.middleware import TestedMiddleware
from tests.support.serving import serving
from tests.support.waiting import until
from tests.telemetry.span_stories import begin, received

POLICY = """\
engine: vllm
capacity: {tokens: 1000, requests: 1}
tiers:
  high: {reserve: 40%, slo: {ttft: 500ms, queue_wait: 2s}}
  batch: {slo: {starvation: 30m}}
default_tier: high
anonymous: high
sources: [header]
endpoints:
  /v1/chat/completions: {}
"""
LONG, SHORT = 600, 2
OPENMETRICS = {"accept": "application/openmetrics-text; version=1.0.0"}
PAST_FRESH_S = 0.03


@dataclass
class Stack:
    """A sidecar and its admin port, with everything that it measures."""

    sidecar: TestedMiddleware
    scrape: MetricsEndpoint
    spans: InMemorySpanExporter
    session: aiohttp.ClientSession
    url: str = ""
    admin_url: str = ""
    kept: list[Any] = field(default_factory=list)

    async def ask(self, tokens: int, tier: str = "high", *, stream: bool = True) -> int:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens, "stream": stream}
        async with self.session.post(
            f"{self.url}/v1/chat/completions", json=body, headers={"x-priority": tier}
        ) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()
            return answer.status

    async def metrics(self) -> list[Sample]:
        async with self.session.get(f"{self.admin_url}/metrics", headers=OPENMETRICS) as answer:
            assert answer.status == 200
            assert answer.headers["content-type"].startswith("application/openmetrics-text; version=")
            text = await answer.text()
        return [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    async def value(self, name: str, **labels: str) -> float:
        found = [sample.value for sample in await self.metrics() if matches(sample, name, labels)]
        assert len(found) == 1, (name, labels, found)
        return float(found[0])

    async def until(self, *, leases: int, waiting: int) -> None:
        state = self.sidecar.pool.state
        await until(lambda: (state()["leases"], state()["waiting"]) == (leases, waiting))


def matches(sample: Sample, name: str, labels: dict[str, str]) -> bool:
    return sample.name == name and all(sample.labels.get(f"admission_{key}") == labels[key] for key in labels)


@asynccontextmanager
async def stacked(folder: Path, step_s: float = 0.001) -> AsyncIterator[Stack]:
    (folder / "policy.yaml").write_text(POLICY)
    policy = load(folder)
    reader, spans, scrape = PrometheusReader(), InMemorySpanExporter(), MetricsEndpoint()
    meters = MeterProvider([reader], shutdown_on_exit=False, views=views())
    tracers = TracerProvider(shutdown_on_exit=False)
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    scrape.open(reader)
    pool = Pool(policy)
    sampler = PoolSampler(sources_of(pool, policy, policies_rejected=lambda: 3))
    requests = RequestMetrics(policy.pool, meter_provider=meters)
    kept = [PoolMetrics(policy.pool, sampler, KINDS, meters)]
    emulator = Emulator(EmulatorConfig(engine=Vllm, steps=StepModel(max_sequences=4, step_us=step_s * 1e6)))
    async with serving(emulator.app) as engine, aiohttp.ClientSession() as session:
        sidecar = TestedMiddleware(
            ReverseProxy(engine.url),
            policy=policy,
            pool=pool,
            dialect=policy.engine(policy.carrier),
            estimator=Estimator(),
            observer=EventDispatcher(RequestTracer(tracers), [requests, sampler]),
        )
        pages = admin_app(state=sidecar.state, readiness=sidecar.readiness, routes=metrics_routes(scrape))
        async with serving(sidecar) as served, serving(pages, lifespan="off") as admin:
            yield Stack(sidecar, scrape, spans, session, served.url, admin.url, kept)


@pytest.mark.anyio
async def test_a_scraper_sees_who_waits_who_borrows_and_what_became_of_all(tmp_path: Path) -> None:
    async with stacked(tmp_path, step_s=0.004) as stack:
        first = asyncio.create_task(stack.ask(LONG, "batch"))
        await stack.until(leases=1, waiting=0)
        second = asyncio.create_task(stack.ask(SHORT, "batch"))
        await stack.until(leases=1, waiting=1)
        third = asyncio.create_task(stack.ask(SHORT, "high"))
        await stack.until(leases=1, waiting=2)
        await asyncio.sleep(PAST_FRESH_S)

        for tier in ("high", "batch"):
            assert await stack.value("admission_queue_requests", tier=tier) == 1
            assert 0 < await stack.value("admission_queue_oldest_wait_seconds", tier=tier) < 60
        assert await stack.value("admission_held_requests", tier="batch") == 1
        held = await stack.value("admission_held_tokens", tier="batch")
        assert held > LONG
        assert await stack.value("admission_borrowed_tokens", tier="batch") == held - 600
        assert await stack.value("admission_lent_tokens", tier="high") == held - 600
        assert await stack.value("admission_slo_starvation_seconds", tier="batch") == 1800
        assert await stack.value("admission_capacity_requests") == 1
        assert await stack.value("admission_policy_rejected_total") == 3
        assert await stack.value("admission_tenant_tokens_held", tenant="anonymous") == held

        assert await asyncio.gather(first, second, third) == [200] * 3
        await asyncio.sleep(PAST_FRESH_S)

        assert await stack.value("admission_overtaken_total", tier="batch", by="high", rule="reserve") == 1
        assert await stack.value("admission_settled_total", tier="batch", outcome="completed") == 2
        assert await stack.value("admission_queue_wait_seconds_count", tier="high", decision="admitted") == 1
        assert await stack.value("admission_starvation_seconds_count", tier="batch", decision="admitted") == 1
        assert await stack.value("admission_time_to_first_token_seconds_count", tier="batch") == 2
        assert await stack.value("admission_held_tokens", tier="batch") == 0
        assert await stack.value("admission_queue_oldest_wait_seconds", tier="batch") == 0


@pytest.mark.anyio
async def test_without_metrics_the_page_says_why(tmp_path: Path) -> None:
    scrape = MetricsEndpoint()
    pages = admin_app(state=dict, readiness=tuple, routes=metrics_routes(scrape))
    async with serving(pages, lifespan="off") as admin, aiohttp.ClientSession() as session:
        scrape.close("OTEL_SDK_DISABLED is true, so that this process has no metrics; unset it to have them here")
        async with session.get(f"{admin.url}/metrics") as answer:
            assert (answer.status, await answer.text()) == (
                404,
                "OTEL_SDK_DISABLED is true, so that this process has no metrics; unset it to have them here\n",
            )


@pytest.mark.anyio
async def test_the_page_is_written_outside_of_the_event_loop() -> None:
    """An exporter's thread may hold the SDK's lock and wait for this loop: it must not wait for the lock."""
    threads: list[int] = []

    class Written:
        def text(self, accept: str | None) -> tuple[bytes, str]:
            threads.append(threading.get_ident())
            return f"for {accept}\n".encode(), "text/plain"

    scrape = MetricsEndpoint()
    scrape.open(Written())
    pages = admin_app(state=dict, readiness=tuple, routes=metrics_routes(scrape))
    async with (
        serving(pages, lifespan="off") as admin,
        aiohttp.ClientSession() as session,
        session.get(f"{admin.url}/metrics", headers=OPENMETRICS) as answer,
    ):
        assert await answer.text() == f"for {OPENMETRICS['accept']}\n"
    assert threads
    assert threading.get_ident() not in threads


@pytest.mark.anyio
async def test_a_sample_is_taken_in_the_pools_own_loop_for_every_caller(tmp_path: Path) -> None:
    async with stacked(tmp_path) as stack:
        await stack.ask(SHORT)
        threads: list[int] = []
        pool = stack.sidecar.pool
        state = pool.state
        pool.state = lambda: threads.append(threading.get_ident()) or state()  # type: ignore[method-assign,func-returns-value]
        await asyncio.sleep(PAST_FRESH_S)
        await asyncio.to_thread(stack.scrape.text, None)

        assert set(threads) == {threading.get_ident()}


@pytest.mark.anyio
async def test_a_loop_that_has_no_time_costs_an_exporter_half_a_second_and_the_latest_sample_is_reported(
    tmp_path: Path,
) -> None:
    async with stacked(tmp_path) as stack:
        await stack.ask(SHORT)
        await stack.metrics()
        await asyncio.sleep(PAST_FRESH_S)
        reported: list[bytes] = []
        took_s: list[float] = []

        def read() -> None:
            began_s = time.monotonic()
            reported.append(stack.scrape.text(None)[0])
            took_s.append(time.monotonic() - began_s)

        reading = threading.Thread(target=read)
        reading.start()
        reading.join(60)  # as a host does that shuts its provider down in its event loop

        assert 0.4 < took_s[0] < 20
        assert b'admission_capacity_requests{admission_pool="default"} 1.0' in reported[0]


def test_a_pool_whose_loop_has_ended_is_sampled_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text(POLICY)
    policy = load(tmp_path)
    sampler = PoolSampler(sources_of(Pool(policy), policy))

    async def live() -> None:
        begin(sampler, received())

    asyncio.run(live())
    sample = sampler()

    assert [it.tier for _, it in sample if isinstance(it, TierShare)] == ["high", "batch"]
    (pool,) = [it for _, it in sample if isinstance(it, PoolFigures)]
    assert (pool.replicas, pool.generation) == (None, policy.generation)
