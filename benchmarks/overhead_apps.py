"""The servers that `overhead.py` compares: the same small app, each with one thing around it."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, Sequence

from opentelemetry import trace
from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricsData
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from sidecar import AdmissionMiddleware

ANSWER = json.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "word " * 40}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 480, "completion_tokens": 40, "total_tokens": 520},
    }
).encode()
CHUNKS, CHUNK_EVERY_S = 64, 0.010
CHUNK = b'data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{"content":" word"}}]}\n\n'


async def bare(scope: Scope, receive: Receive, send: Send) -> None:
    """An app that parses its JSON and answers, or streams. `GET /cpu` gives its process's CPU seconds so far."""
    if scope["type"] == "lifespan":
        await lifespan(receive, send)
    elif scope["path"] == "/cpu":
        await answer(send, repr(time.process_time()).encode())
    elif scope["method"] == "GET":
        # Which engine is it? The sidecar asks; this app is none.
        await answer(send, b'{"error": "not found"}', status=404)
    elif json.loads(await body_of(receive)).get("stream"):
        await stream(send)
    else:
        await answer(send)


async def lifespan(receive: Receive, send: Send) -> None:
    """Says that all is well, until the end."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


async def body_of(receive: Receive) -> bytes:
    """The whole body of a request."""
    body = b""
    while True:
        message = await receive()
        chunk: bytes = message.get("body", b"")
        body += chunk
        if not message.get("more_body", False):
            return body


async def answer(send: Send, content: bytes = ANSWER, status: int = 200) -> None:
    """Sends one whole JSON answer."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content, "more_body": False})


async def stream(send: Send, chunks: Sequence[bytes] = (CHUNK,) * CHUNKS) -> None:
    """Sends a stream, a chunk every 10 ms."""
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    due_s = asyncio.get_running_loop().time()
    for chunk in chunks:
        due_s += CHUNK_EVERY_S
        await asyncio.sleep(due_s - asyncio.get_running_loop().time())
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


class DoNothing(BaseHTTPMiddleware):
    """What most people write first, without the part that does something."""

    async def dispatch(self, request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        """Passes the request on."""
        return await call_next(request)


class Nowhere(SpanExporter):
    """Takes spans and forgets them: what recording costs, without a backend."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:  # noqa: ARG002  # the SDK's signature
        """Succeeds."""
        return SpanExportResult.SUCCESS


class NowhereMetrics(MetricExporter):
    """Takes metrics and forgets them."""

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **_: object) -> MetricExportResult:  # noqa: ARG002  # the SDK's signature
        """Succeeds."""
        return MetricExportResult.SUCCESS

    def force_flush(self, timeout_millis: float = 10_000) -> bool:  # noqa: ARG002  # the SDK's signature
        """Has nothing left to send."""
        return True

    def shutdown(self, timeout_millis: float = 30_000, **_: object) -> None:
        """Has nothing to close."""


def _record_spans() -> None:
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(Nowhere()))
    trace.set_tracer_provider(provider)


def plain() -> ASGIApp:
    """(a) The app alone."""
    return bare


def base_http() -> ASGIApp:
    """(b) With one do-nothing `BaseHTTPMiddleware`."""
    return DoNothing(bare)


def admission() -> ASGIApp:
    """(c) With our middleware, local pool, no SDK."""
    return AdmissionMiddleware(bare, os.environ["SIDECAR_POLICY"])


def admission_traced() -> ASGIApp:
    """(d) With our middleware and an SDK that records every span."""
    _record_spans()
    return admission()


def contributed() -> ASGIApp:
    """(e) With the contributed OpenTelemetry ASGI instrumentation alone, as it comes."""
    _record_spans()
    return OpenTelemetryMiddleware(bare)
