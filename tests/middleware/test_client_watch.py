"""The server's client watch reaches the app only where the app's `receive` has no disconnects of its own."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from sidecar import AdmissionMiddleware
from sidecar.policy.compiler import load
from sidecar.policy.model import Policy
from sidecar.proxy.proxy import ReverseProxy
from sidecar.sending import CLIENT_KEY
from sidecar.server.http_protocol import BoundedHttpProtocol
from tests.support.engine import OK, Connection, raw_engine
from tests.support.middleware import CHAT, chat, whole_body
from tests.support.serving import serving
from tests.support.wire import exchange, post

pytestmark = pytest.mark.anyio

UPLOAD, RESPONSES = "/v1/audio/transcriptions", "/v1/responses"
POLICY = f"""\
engine: none
capacity: {{tokens: 10k, requests: 1}}
background: hold
tiers:
  critical: {{preempt_after: 50ms}}
  batch: {{preemptible: true}}
default_tier: critical
anonymous: critical
sources: [header]
endpoints:
  {CHAT}: {{}}
  {RESPONSES}: {{}}
  {UPLOAD}: {{api: generic, tokens: {{base: 10, per_kilobyte: 1}}}}
"""
BATCH = "x-priority: batch"


def rules(folder: Path) -> Policy:
    file = folder / "policy.yaml"
    file.write_text(POLICY)
    return load(file)


def request(*headers: str, path: str = CHAT, **members: Any) -> bytes:
    sent = {"model": "m", "input": "hi", **members} if path == RESPONSES else chat(**members)
    return post(path, json.dumps(sent).encode(), "content-type: application/json", *headers)


async def test_a_request_at_the_engine_is_preempted_behind_our_own_server_too(tmp_path: Path) -> None:
    batches = 0
    arrived, aborted = asyncio.Event(), asyncio.Event()

    async def script(connection: Connection) -> None:
        nonlocal batches
        while True:
            received = await connection.request()
            if b"x-priority: batch" in received.head:
                batches += 1
                if batches == 1:
                    arrived.set()
                    await connection.hung_up()
                    aborted.set()
                    return
            await connection.send(OK)

    async with raw_engine(script) as engine:
        sidecar = AdmissionMiddleware(ReverseProxy(engine.url), rules(tmp_path))
        async with serving(sidecar, http=BoundedHttpProtocol) as served:
            batch = asyncio.ensure_future(exchange(served.port, request(BATCH)))
            await asyncio.wait_for(arrived.wait(), 60)
            urgent = await asyncio.wait_for(exchange(served.port, request()), 60)
            assert aborted.is_set()
            assert [urgent[9:12], (await asyncio.wait_for(batch, 60))[9:12]] == [b"200", b"200"]
    assert batches == 2


@pytest.mark.parametrize(
    ("sent", "is_watched"),
    [
        (request(), True),
        (request(BATCH), False),
        (request(path=RESPONSES, background=True), False),
        (request(path=RESPONSES), True),
        (post(UPLOAD, b"--b--", "content-type: multipart/form-data; boundary=b"), False),
    ],
)
async def test_an_app_whose_receive_has_disconnects_of_its_own_gets_no_watch(
    tmp_path: Path, sent: bytes, is_watched: bool
) -> None:
    seen: list[bool] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
        elif scope["method"] == "POST":
            seen.append(CLIENT_KEY in scope)
            await whole_body(receive)
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"{}"})

    async with serving(
        AdmissionMiddleware(app, rules(tmp_path), retry_handlers=True), http=BoundedHttpProtocol
    ) as served:
        assert b" 200 OK" in await exchange(served.port, sent)
    assert seen == [is_watched]
