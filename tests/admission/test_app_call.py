"""What is current while the app runs for a request, answers that are files, and a host that traces each `receive`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.responses import StreamingResponse
from starlette.routing import Route

from sidecar import AdmissionMiddleware, granted
from sidecar.events import FirstByte
from sidecar.policy.compiler import load
from tests.support.each import each
from tests.support.middleware import CHAT, App, answer, chat, guarding, policy, start, whole_body
from tests.support.serving import serving
from tests.support.waiting import until
from tests.support.wire import connected, exchange, post

pytestmark = pytest.mark.anyio

BODY = json.dumps(chat()).encode()
JSON = "content-type: application/json"
SPEECH, UPLOAD, RERANK = "/v1/audio/speech", "/v1/audio/transcriptions", "/v1/rerank"
FILES = f"""\
engine: none
capacity: {{tokens: 10k, requests: 1}}
tiers:
  critical: {{preempt_after: 50ms}}
  batch: {{preemptible: true}}
default_tier: critical
anonymous: critical
sources: [header]
keep_alive: 20ms
endpoints:
  {CHAT}: {{}}
  {SPEECH}: {{api: generic, tokens: 100}}
  {UPLOAD}: {{api: generic, tokens: 100}}
  {RERANK}: {{api: generic, tokens: 100, cost: {{member: total_tokens}}}}
"""


def files(folder: Path, more: str = "") -> Any:
    (folder / "policy.yaml").write_text(FILES + more)
    return load(folder / "policy.yaml")


# The grant


async def test_a_grant_ends_with_the_answer_also_for_what_the_request_began() -> None:
    found: dict[str, Any] = {}
    may_look, looked = asyncio.Event(), asyncio.Event()

    async def after() -> None:
        found["after the answer"] = granted()
        may_look.set()

    async def goes_on() -> None:
        found["in a task"] = granted()
        await may_look.wait()
        found["in a task that goes on"] = granted()
        looked.set()

    async def parts() -> Any:
        for name in ("first", "last"):
            found[f"{name} part"] = granted()
            yield b"data: 1\n\n"

    async def handle(_: Any) -> StreamingResponse:
        found["handler"] = granted()
        found["task"] = asyncio.create_task(goes_on())
        return StreamingResponse(parts(), background=BackgroundTask(after))

    app = Starlette(routes=[Route(CHAT, handle, methods=["POST"])])
    async with guarding(app) as guarded:
        await guarded.ask()
        await asyncio.wait_for(looked.wait(), 60)
        await found.pop("task")
    assert {name for name, grant in found.items() if grant is None} == {"after the answer", "in a task that goes on"}
    assert len(found) == 6


async def test_a_grant_ends_with_a_client_that_has_left() -> None:
    left = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await App()(scope, receive, send)
            return
        await whole_body(receive)
        assert granted() is not None
        await until(lambda: granted() is None)
        left.set()

    async with guarding(app, policy(grace="0s")) as guarded:
        async with connected(guarded.port) as (_, writer):
            writer.write(post(CHAT, BODY))
            await guarded.until(leases=1)
        await asyncio.wait_for(left.wait(), 60)


# Answers that are files


def file_app(messages: list[dict[str, Any]], seen: list[Any], may_end: asyncio.Event | None = None) -> Any:
    """An app that is offered the extensions, as by granian, and a server that would send the files."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await App()(scope, receive, send)
            return
        await whole_body(receive)
        seen.append(sorted(scope["extensions"]))
        if may_end is not None and len(seen) == 1:
            await may_end.wait()
            await answer(send, b"{}")
            return
        await start(send)
        for message in messages:
            await send(message)

    return app


def offering(app: Any, sent: list[Any]) -> Any:
    """A server's extensions around `app`. In the place of a file it sends its name."""

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        async def send_file(message: Any) -> None:
            sent.append(message)
            if message["type"] in EXTENSIONS:
                more = message.get("more_body", False)
                message = {"type": "http.response.body", "body": b"file", "more_body": more}
            await send(message)

        if scope["type"] == "http":
            scope = {**scope, "extensions": {name: {} for name in EXTENSIONS}}
        await app(scope, receive, send_file)

    return serve


EXTENSIONS = ["http.response.pathsend", "http.response.zerocopysend"]
PATH = {"type": "http.response.pathsend", "path": "/speech.mp3"}
PARTS = [{"type": "http.response.zerocopysend", "file": 3, "more_body": more} for more in (True, False)]


@each(
    ("path", "messages", "tier", "mode"),
    [
        (SPEECH, [PATH], "critical", "enforce"),
        (SPEECH, [PATH], "batch", "enforce"),
        (SPEECH, PARTS, "critical", "enforce"),
        (SPEECH, [{"type": "http.response.body", "body": b"head", "more_body": True}, *PARTS], "batch", "enforce"),
        (CHAT, PARTS, "critical", "enforce"),
        (SPEECH, [PATH], "critical", "observe"),
    ],
)
async def test_a_file_is_an_answer_like_another(
    path: str, messages: list[Any], tier: str, mode: str, tmp_path: Path
) -> None:
    sent: list[Any] = []
    async with guarding(file_app(messages, []), files(tmp_path, f"mode: {mode}\n")) as guarded:
        async with serving(offering(guarded.sidecar, sent), lifespan="off") as served:
            raw = await exchange(served.port, post(path, BODY, f"x-priority: {tier}"))
        assert f"x-admission-tier: {tier}".encode() in raw
        assert [message["type"] for message in sent[1:]] == [message["type"] for message in messages]
        assert guarded.recorder.ends == ["completed"]
        assert guarded.recorder.stories[0].one(FirstByte).status == 200


async def test_files_are_not_offered_where_the_answer_is_read_or_framed(tmp_path: Path) -> None:
    seen: list[Any] = []
    may_end = asyncio.Event()
    async with (
        guarding(file_app([PATH], seen, may_end), files(tmp_path)) as guarded,
        serving(offering(guarded.sidecar, []), lifespan="off") as served,
    ):
        first = asyncio.create_task(exchange(served.port, post(RERANK, BODY)))
        await guarded.until(leases=1)
        async with connected(served.port) as (reader, writer):
            writer.write(post(CHAT, json.dumps(chat(stream=True)).encode()))
            await reader.readuntil(b": queued")
            may_end.set()
            await reader.readuntil(b"file")
        await first
        await exchange(served.port, post(SPEECH, BODY))
    assert seen == [[], [], EXTENSIONS]


# A host that traces every `receive`


class TracedHost:
    """The spans of the real instrumentation around the middleware."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def receives(self) -> list[str]:
        """What each traced `receive` returned."""
        spans = [span for span in self._exporter.get_finished_spans() if span.name.endswith("http receive")]
        return [str((span.attributes or {}).get("asgi.event.type")) for span in spans]


def fastapi_app(host: TracedHost, may_end: asyncio.Event, folder: Path) -> Any:
    from fastapi import FastAPI

    app = FastAPI()
    app.add_middleware(AdmissionMiddleware, policy=files(folder, "disconnect_grace: 50ms\n"))
    app.add_middleware(OpenTelemetryMiddleware, tracer_provider=host.provider)

    @app.post(CHAT)
    async def held(body: dict[str, Any]) -> dict[str, Any]:
        await may_end.wait()
        return body

    @app.post(UPLOAD)
    async def taken() -> None:
        await may_end.wait()

    return app


async def test_our_watch_for_a_disconnect_is_no_span_of_the_hosts_instrumentation(tmp_path: Path) -> None:
    host, may_end = TracedHost(), asyncio.Event()
    app = fastapi_app(host, may_end, tmp_path)
    async with serving(app) as served:
        runs = asyncio.create_task(exchange(served.port, post(CHAT, BODY, JSON)))
        await until(lambda: leases_of(app) == 1)
        waits = asyncio.create_task(exchange(served.port, post(CHAT, BODY, JSON)))
        uploads = asyncio.create_task(exchange(served.port, post(UPLOAD, BODY, "content-type: audio/wav")))
        controller = controller_in(app)
        await until(lambda: controller.pool.state()["waiting"] == 2 and is_watched(controller))
        may_end.set()
        for asked in (runs, waits, uploads):
            assert b" 200 OK" in await asked
    assert host.receives() == ["http.request"] * 3


def controller_in(app: Any) -> Any:
    """The controller of the middleware in the app's stack, as soon as that is built."""
    layer = app.middleware_stack
    while layer is not None and not isinstance(layer, AdmissionMiddleware):
        layer = getattr(layer, "app", None)
    return None if layer is None else layer.controller


def leases_of(app: Any) -> int:
    """The leases that are held, none before the app's first request."""
    controller = controller_in(app)
    return 0 if controller is None else controller.pool.state()["leases"]


def is_watched(controller: Any) -> bool:
    """Whether a disconnect is looked for at every request under way."""
    return all(request._client._disconnect is not None for request in controller.watchdog._watched)


async def test_a_disconnect_is_seen_through_the_instrumentation(tmp_path: Path) -> None:
    host = TracedHost()
    app = fastapi_app(host, asyncio.Event(), tmp_path)
    async with serving(app) as served:
        async with connected(served.port) as (_, writer):
            writer.write(post(CHAT, BODY, JSON))
            await until(lambda: leases_of(app) == 1)
        await until(lambda: leases_of(app) == 0)
    assert "http.disconnect" not in host.receives()
