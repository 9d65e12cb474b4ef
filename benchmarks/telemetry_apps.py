"""The servers that `telemetry.py` compares: one app, alone and behind admission, without telemetry and with it."""

from __future__ import annotations

import asyncio
import json
import os

from opentelemetry import metrics, trace
from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, Sampler, TraceIdRatioBased
from starlette.types import ASGIApp, Receive, Scope, Send

from benchmarks.overhead_apps import CHUNK, CHUNKS, Nowhere, NowhereMetrics, bare
from sidecar import AdmissionMiddleware
from sidecar.telemetry.setup import meter_provider_for

EXPORT_EVERY_MS = 5_000.0
"""Twelve times as often as the SDK's default, so that exports fall into every round."""


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """The app of `overhead_apps`, but that it streams as fast as it can: what counts here is CPU, not time."""
    if scope["type"] != "http" or scope["path"] == "/cpu":
        await bare(scope, receive, send)
        return
    message = await receive()
    body: bytes = message["body"]
    while message.get("more_body", False):
        message = await receive()
        body += message["body"]
    if json.loads(body).get("stream"):
        await _stream(send)
    else:
        await bare(scope, _once(body), send)


def _once(body: bytes) -> Receive:
    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


async def _stream(send: Send) -> None:
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for _ in range(CHUNKS):
        await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _trace(sampler: Sampler) -> None:
    provider = TracerProvider(sampler=sampler)
    provider.add_span_processor(BatchSpanProcessor(Nowhere()))
    trace.set_tracer_provider(provider)


def _measure_as_we_do() -> None:
    """With the provider that `sidecar serve` sets up."""
    os.environ["OTEL_METRIC_EXPORT_INTERVAL"] = str(EXPORT_EVERY_MS)
    metrics.set_meter_provider(meter_provider_for([NowhereMetrics()], Resource.create()))


def plain() -> ASGIApp:
    """The app alone."""
    return app


def contributed() -> ASGIApp:
    """With the contributed instrumentation: a span for each request, none per message, no metrics."""
    _trace(ParentBased(ALWAYS_ON))
    return OpenTelemetryMiddleware(app, exclude_spans=["receive", "send"])


def admission() -> ASGIApp:
    """With admission that no one observes."""
    middleware = _middleware()
    object.__setattr__(middleware.controller, "observer", None)
    return middleware


def everything() -> ASGIApp:
    """With admission and all of our telemetry: every span recorded, metrics, journal, log."""
    _trace(ParentBased(ALWAYS_ON))
    _measure_as_we_do()
    return _middleware()


def sampled_out() -> ASGIApp:
    """The same, but that no trace is sampled."""
    _trace(ParentBased(TraceIdRatioBased(0.0)))
    _measure_as_we_do()
    return _middleware()


def _middleware() -> AdmissionMiddleware:
    return AdmissionMiddleware(app, os.environ["SIDECAR_POLICY"])
