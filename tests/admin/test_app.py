"""The admin pages over real HTTP."""

from __future__ import annotations

import aiohttp
import pytest
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from sidecar.admin.app import admin_app
from tests.support.serving import serving

pytestmark = pytest.mark.anyio


async def test_a_living_process_is_healthy_even_when_it_is_not_ready() -> None:
    app = admin_app(state=dict, readiness=lambda: ["draining"])
    async with serving(app) as admin, aiohttp.ClientSession(admin.url) as client:
        async with client.get("/healthz") as response:
            assert response.status == 200
        async with client.get("/readyz") as response:
            assert response.status == 503
            assert await response.json() == {"status": "not ready", "reasons": ["draining"], "notices": []}


async def test_readiness_is_asked_every_time() -> None:
    reasons = ["draining"]
    app = admin_app(state=dict, readiness=lambda: reasons)
    async with serving(app) as admin, aiohttp.ClientSession(admin.url) as client:
        async with client.get("/readyz") as response:
            assert response.status == 503
        reasons.clear()
        async with client.get("/readyz") as response:
            assert response.status == 200
            assert await response.json() == {"status": "ready", "reasons": [], "notices": []}


async def test_the_state_is_what_it_is_now() -> None:
    app = admin_app(state=lambda: {"tiers": {"high": {"waiting": 2}}}, readiness=list)
    async with serving(app) as admin, aiohttp.ClientSession(admin.url) as client, client.get("/state") as response:
        assert await response.json() == {"tiers": {"high": {"waiting": 2}}}


async def test_other_pages_can_be_added_and_the_rest_is_not_found() -> None:
    metrics = Route("/metrics", lambda _: PlainTextResponse("up 1"))
    app = admin_app(state=dict, readiness=list, routes=[metrics])
    async with serving(app) as admin, aiohttp.ClientSession(admin.url) as client:
        async with client.get("/metrics") as response:
            assert await response.text() == "up 1"
        async with client.get("/v1/models") as response:
            assert response.status == 404
