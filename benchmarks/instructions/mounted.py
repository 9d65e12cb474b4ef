"""Counted program: requests to an ASGI app inside one process, without sockets. Also the pool and the scheduler alone.

    python -m benchmarks.instructions.mounted POLICY PART=COUNT [PART=COUNT ...]

Each part warms up, then repeats COUNT times between two marks. The `observed` parts install an OpenTelemetry SDK for
the whole process: they come last.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import uvloop
from opentelemetry import metrics, trace
from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from benchmarks.crowd import Crowd
from benchmarks.instructions import marks
from benchmarks.instructions.counters import call
from benchmarks.overhead import BODY, HEADERS
from benchmarks.overhead_apps import CHUNK, DoNothing, Nowhere, NowhereMetrics, bare
from sidecar import AdmissionMiddleware
from sidecar.policy.compiler import load
from sidecar.policy.model import Policy
from sidecar.policy.tier import ServiceObjectives
from sidecar.pools import Ask, Pool

WARM_UP = 200
"""Repetitions before the first mark: they fill caches and let the interpreter specialize its bytecode."""
PATH = "/v1/chat/completions"
WAITING, LEASES, TENANTS = 1_000, 160, 200
"""Tickets that wait while the scheduler decides."""
STREAMING_BODY = BODY[:-1] + b', "stream": true}'
"""The service gain of a stream is measured only where the client asked for one."""


class Request:
    """One request as an HTTP server presents it to an ASGI app."""

    __slots__ = ("_body", "_ended", "status")

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._ended = asyncio.Event()
        self.status = 0

    async def receive(self) -> Message:
        """The body, then a disconnect as soon as the response has ended."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._ended.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Keeps the status, and notes the end of the response."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif not message.get("more_body", False):
            self._ended.set()


async def request(app: ASGIApp, body: bytes = BODY) -> None:
    """Sends one request with `body` to `app` in a task of its own. Raises RuntimeError for a status other than 200."""
    own = Request(body)
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "server": ("127.0.0.1", 8000),
        "client": ("127.0.0.1", 40000),
        "scheme": "http",
        "method": "POST",
        "root_path": "",
        "path": PATH,
        "raw_path": PATH.encode(),
        "query_string": b"",
        "headers": [*_HEADERS, (b"content-length", b"%d" % len(body))],
        "state": {},
    }
    await asyncio.ensure_future(_present(app, scope, own))
    if own.status != 200:
        raise RuntimeError(f"the app answered with status {own.status}")


async def _present(app: ASGIApp, scope: Scope, own: Request) -> None:
    await app(scope, own.receive, own.send)


_HEADERS = [
    (b"host", b"127.0.0.1"),
    (b"content-type", b"application/json"),
    *((name.lower().encode(), value.encode()) for name, value in HEADERS),
]


async def requests(app: ASGIApp, count: int) -> None:
    """Counts `count` requests, one after the other."""
    for _ in range(WARM_UP):
        await request(app)
    marks.begin()
    for _ in range(count):
        await request(app)
    marks.end()


def stream_of(count: int) -> ASGIApp:
    """An app that answers with one stream, and marks `count` of its chunks."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:  # the signature of ASGI
        headers = [(b"content-type", b"text/event-stream")]
        if scope["path"] != PATH:
            await bare(scope, receive, send)
            return
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await _chunks(WARM_UP, send)
        marks.begin()
        await _chunks(count, send)
        marks.end()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return app


async def _chunks(count: int, send: Send) -> None:
    for _ in range(count):
        await asyncio.sleep(0)  # an engine's app yields to the event loop before each chunk
        await send({"type": "http.response.body", "body": CHUNK, "more_body": True})


def install_sdk() -> None:
    """Installs an SDK that records every span and every metric. No metrics are exported while the figures run."""
    if isinstance(trace.get_tracer_provider(), TracerProvider):
        return
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(Nowhere()))
    trace.set_tracer_provider(provider)
    reader = PeriodicExportingMetricReader(NowhereMetrics(), export_interval_millis=3_600_000)
    metrics.set_meter_provider(MeterProvider([reader]))


async def pool_cycles(policy: Policy, count: int) -> None:
    """Counts enter + settle of one request in a local pool that has room."""
    pool = Pool(policy)
    ask = Ask(2, "standard", 1, 700, 1)

    async def cycles(repetitions: int) -> None:
        for _ in range(repetitions):
            lease = await pool.enter(ask)
            if not lease.settle(500):
                raise RuntimeError("the pool had room, and did not admit")

    await cycles(WARM_UP)
    marks.begin()
    await cycles(count)
    marks.end()


async def decisions(count: int) -> None:
    """Counts the end of a lease, the admission of one that waits and the entry of another, with 1,000 waiting."""
    crowd = Crowd(WAITING, LEASES, TENANTS)
    await crowd.fill()

    async def cycles(repetitions: int) -> None:
        for _ in range(repetitions):
            await crowd.cycle()
            await asyncio.sleep(0)

    await cycles(WARM_UP)
    marks.begin()
    await cycles(count)
    marks.end()


async def part(name: str, policy: Policy, count: int) -> None:
    """Runs one part."""
    if name == "pool":
        await pool_cycles(policy, count)
    elif name == "scheduler":
        await decisions(count)
    else:
        around, is_streamed, _ = name.partition("_chunk")
        app = around_app(around, stream_of(count) if is_streamed else bare, policy)
        body = STREAMING_BODY if around == "measured" else BODY
        await (request(app, body) if is_streamed else requests(app, count))


def around_app(name: str, app: ASGIApp, policy: Policy) -> ASGIApp:
    """The app with one thing around it."""
    if name == "bare":
        return app
    if name == "base_http":
        return DoNothing(app)
    if name in {"observed", "contributed"}:
        install_sdk()
    if name == "contributed":
        return OpenTelemetryMiddleware(app, exclude_spans=["receive", "send"])
    if name == "measured":
        slo = ServiceObjectives(ttft_s=1.0, tpot_s=0.06)
        policy = replace(policy, tiers=tuple(replace(tier, slo=slo) for tier in policy.tiers))
    return AdmissionMiddleware(app, policy)


async def _run(policy: Policy, parts: Sequence[str]) -> None:
    for name, _, count in (each.partition("=") for each in parts):
        await part(name, policy, int(count))


def run(
    prefix: Sequence[str], environment: Mapping[str, str], parts: Mapping[str, int], *, policy: Path
) -> dict[str, float]:
    """Runs this module under the command `prefix`: see `counters.Run`."""
    program = [sys.executable, "-m", "benchmarks.instructions.mounted", str(policy)]
    call([*prefix, *program, *(f"{name}={count}" for name, count in parts.items())], environment)
    return {}


if __name__ == "__main__":
    uvloop.run(_run(load(sys.argv[1]), sys.argv[2:]))
