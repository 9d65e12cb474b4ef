"""A preempted request leaves its engine behind our own server and proxy, too."""

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
from sidecar.server.http_protocol import BoundedHttpProtocol
from tests.support.engine import OK, Connection, raw_engine
from tests.support.middleware import CHAT, chat
from tests.support.serving import serving
from tests.support.wire import exchange, post

pytestmark = pytest.mark.anyio

UPLOAD, RESPONSES = "/v1/audio/transcriptions", "/v1/responses"
POLICY = f"""\
engine: none
capacity: {{tokens: 10k, requests: 1}}
background: hold
abort_latency: 10ms
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
