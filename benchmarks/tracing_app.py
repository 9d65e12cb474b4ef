"""The app of `tracing_backend --mounted`: FastAPI with the middleware, and a span of its own where it calls a model.

    python -m benchmarks.tracing_app MODEL_URL

It installs OpenTelemetry's SDK itself, as the host of a middleware does, and prints its address when it listens.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import uvicorn
from fastapi import FastAPI
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from sidecar import AdmissionMiddleware
from sidecar.tools.emulator.server import bind

MODEL_CALL = "ask the model"


def app(model_url: str, spans: TracerProvider) -> FastAPI:
    """The app, guarded by the policy that SIDECAR_POLICY names. At its end it sends its spans."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(model_url) as app.state.model:
            yield
        spans.shutdown()  # uvicorn ends by the signal that it got: nothing that is registered for the exit runs

    made = FastAPI(lifespan=lifespan)
    made.add_middleware(AdmissionMiddleware)

    @made.post("/v1/chat/completions")
    async def chat(body: dict[str, Any]) -> Any:
        with trace.get_tracer("app").start_as_current_span(MODEL_CALL):
            async with made.state.model.post("/v1/chat/completions", json=body) as answer:
                return await answer.json()

    return made


def main() -> None:
    """See the module."""
    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: "research-app"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    guarded = app(sys.argv[1], provider)
    listener = bind("127.0.0.1", 0)
    listener.listen(2048)
    sys.stdout.write(f"http://127.0.0.1:{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    uvicorn.Server(uvicorn.Config(guarded, log_level="error", access_log=False)).run(sockets=[listener])


if __name__ == "__main__":
    main()
