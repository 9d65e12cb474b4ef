"""The servers that `overhead.py` compares, each the same small app with one thing around it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Awaitable, Callable

from opentelemetry import trace
from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import Response

from sidecar import AdmissionMiddleware
from sidecar.asgi.types import ASGIApp, Receive, Scope, Send

ANSWER = json.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "word " * 40}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 480, "completion_tokens": 40, "total_tokens": 520},
    }
).encode()


async def bare(scope: Scope, receive: Receive, send: Send) -> None:
    """An app that parses its JSON and answers; `GET /cpu` says how much CPU its process has used, in seconds."""
    if scope["type"] == "lifespan":
        await _lifespan(receive, send)
        return
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body", False):
            break
    answer = repr(time.process_time()).encode() if scope["path"] == "/cpu" else ANSWER
    if scope["method"] == "POST":
        json.loads(body)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(answer)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": answer, "more_body": False})


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


class DoNothing(BaseHTTPMiddleware):
    """What most people write first, without the part that does something."""

    async def dispatch(self, request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        """Passes the request on."""
        return await call_next(request)


class Nowhere(SpanExporter):
    """Takes spans and forgets them: what recording costs, without a backend."""

    def export(self, spans: object) -> SpanExportResult:
        """Succeeds."""
        return SpanExportResult.SUCCESS


def _record_spans() -> None:
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(Nowhere()))
    trace.set_tracer_provider(provider)


def base_http() -> ASGIApp:
    """With one do-nothing `BaseHTTPMiddleware`."""
    return DoNothing(bare)


def admission() -> ASGIApp:
    """With our middleware, no SDK."""
    return AdmissionMiddleware(bare, policy=os.environ["SIDECAR_POLICY"])


def admission_traced() -> ASGIApp:
    """With our middleware and an SDK that records every span."""
    _record_spans()
    return AdmissionMiddleware(bare, policy=os.environ["SIDECAR_POLICY"])


def contributed() -> ASGIApp:
    """With the contributed OpenTelemetry ASGI instrumentation alone, its spans per message left out."""
    _record_spans()
    return OpenTelemetryMiddleware(bare, exclude_spans=["receive", "send"])
