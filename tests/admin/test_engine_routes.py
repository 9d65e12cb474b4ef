"""`/engines` on the admin port, over real HTTP: a real fleet before emulated engines, and its pool."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from sidecar.admin.app import admin_app
from sidecar.admin.auth import Access, AdminGuard
from sidecar.admin.engine_routes import EngineRoutes
from sidecar.engines.view import PoolEngines
from sidecar.fleet import view as fleet_view
from tests.fleet.views import Viewed, lease_of, viewed
from tests.support.each import each
from tests.support.serving import serving
from tests.support.waiting import other_tasks, until

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_view, "LOOK_EVERY_S", 0.01)


class Client:
    """Asks the admin port; `routes` are its own."""

    def __init__(self, session: aiohttp.ClientSession, routes: EngineRoutes) -> None:
        self.session = session
        self.routes = routes

    async def get(self, path: str = "/engines") -> Any:
        async with self.session.get(path) as response:
            return response.status, await response.json()

    async def post(self, path: str, **headers: str) -> Any:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.session.post(path, headers=sent) as response:
            return response.status, await response.json()


@asynccontextmanager
async def admin(view: Callable[[], PoolEngines | None], access: Access | None = None) -> AsyncIterator[Client]:
    routes = EngineRoutes(view)
    app = AdminGuard(admin_app(state=dict, readiness=list, routes=routes.routes()), access or Access())
    async with serving(app) as served, aiohttp.ClientSession(served.url) as session:
        yield Client(session, routes)


@asynccontextmanager
async def both(count: int = 2, **settings: str) -> AsyncIterator[tuple[Viewed, Client]]:
    async with viewed(count, **settings) as seen, admin(lambda: seen.view) as client:
        yield seen, client


async def test_a_list_of_engines_in_their_order() -> None:
    async with both(3) as (seen, client):
        lease = await lease_of(seen.pool, tokens=30, prompt=20)
        status, found = await client.get()
        assert status == 200
        assert [row["name"] for row in found["engines"]] == ["a", "b", "c"]
        first = found["engines"][0]
        assert (first["id"], first["state"], first["held"]) == ("a#1", "ready", {"tokens": 30, "requests": 1})
        assert (first["unprefilled_tokens"], first["capacity"]) == (20, {"tokens": 1000, "requests": 8})
        lease.settle()


async def test_a_pool_of_one_engine_says_so() -> None:
    async with admin(lambda: None) as client:
        for answer in (
            await client.get(),
            await client.post("/engines/a/drain"),
            await client.post("/engines/a/resume"),
        ):
            assert answer[0] == 404
            assert answer[1]["error"]["code"] == "no_engines"
            assert "its policy has no `engines`" in answer[1]["error"]["message"]


async def test_an_unknown_engine_is_told_the_names() -> None:
    async with both() as (_, client):
        for verb in ("drain", "drain?wait=true", "resume"):
            status, found = await client.post(f"/engines/c%20d/{verb}")
            assert (status, found["error"]["code"]) == (404, "unknown_engine")
            assert found["error"]["message"] == "no engine is called 'c d'; the engines are a, b"


async def test_a_name_may_be_an_address() -> None:
    async with both() as (_, client):
        status, found = await client.post("/engines/[::1]:8000/x/drain")
        assert (status, found["error"]["message"]) == (
            404, "no engine is called '[::1]:8000/x'; the engines are a, b",
        )  # fmt: skip


async def test_a_drain_is_answered_when_the_engine_is_empty() -> None:
    async with both() as (seen, client):
        leases = [await lease_of(seen.pool) for _ in range(2)]
        status, found = await client.post("/engines/a/drain")
        assert (status, found["drained"], found["engine"]["draining"]) == (200, False, True)
        waits = asyncio.create_task(client.post("/engines/a/drain?wait=true"))
        await asyncio.sleep(0.1)
        assert not waits.done()
        leases[0].settle()
        status, found = await waits
        assert (status, found["drained"], found["engine"]["state"]) == (200, True, "draining")
        status, found = await client.post("/engines/a/drain?wait=true")
        assert (status, found["drained"]) == (200, True)
        status, found = await client.post("/engines/a/resume")
        assert (status, found["engine"]["state"]) == (200, "ready")
        leases[1].settle()


async def test_a_drain_that_takes_too_long_says_what_is_left_and_what_to_do() -> None:
    async with both(drain_timeout="200ms") as (seen, client):
        lease = await lease_of(seen.pool, tokens=30)
        for path in ("/engines/a/drain?wait=true", "/engines/a/drain?wait=true&timeout=50ms"):
            status, found = await client.post(path)
            assert (status, found["error"]["code"]) == (504, "drain_timeout")
        assert found["error"]["message"] == (
            "engine a is not empty after 50 ms: it holds 1 requests (30 tokens), and 0 of this process are under way "
            "there; it gets no new ones. Send the same again to wait on, or POST /engines/a/resume to end the drain"
        )
        lease.settle()


async def test_a_drain_that_another_ends() -> None:
    async with both() as (seen, client):
        lease = await lease_of(seen.pool)
        waits = asyncio.create_task(client.post("/engines/a/drain?wait=true"))
        await until(lambda: seen.view.documents()[0].draining)
        await client.post("/engines/a/resume")
        status, found = await waits
        assert (status, found["error"]["code"]) == (409, "resumed")
        lease.settle()


@each("query", ["wait=perhaps", "wait=true&timeout=soon", "wait=true&timeout=-1s", "timeout="])
async def test_bad_parameters_drain_nothing(query: str) -> None:
    async with both() as (seen, client):
        status, found = await client.post(f"/engines/a/drain?{query}")
        assert (status, found["error"]["code"]) == (400, "bad_parameter")
        assert not seen.view.documents()[0].draining


async def test_clients_that_go_away_while_they_wait_leave_nothing() -> None:
    async with both() as (seen, client):
        lease = await lease_of(seen.pool)
        await client.post("/engines/a/drain")
        before = other_tasks()
        waits = [asyncio.create_task(client.post("/engines/a/drain?wait=true")) for _ in range(20)]
        await until(lambda: len(other_tasks()) >= len(before) + 60)
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        await until(lambda: len(other_tasks()) <= len(before))  # probes come and go
        assert seen.view.documents()[0].state == "draining"
        lease.settle()


async def test_a_server_that_stops_answers_those_that_wait() -> None:
    async with both() as (seen, client):
        lease = await lease_of(seen.pool)
        waits = asyncio.create_task(client.post("/engines/a/drain?wait=true"))
        await until(lambda: seen.view.documents()[0].draining)
        await asyncio.sleep(0.05)
        client.routes.close()
        status, found = await waits
        assert (status, found["error"]["code"]) == (503, "stopping")
        lease.settle()


async def test_a_get_changes_nothing() -> None:
    async with both() as (seen, client):
        async with client.session.get("/engines/a/drain") as response:
            assert response.status == 405
        assert not seen.view.documents()[0].draining


FROM_A_PAGE = [
    {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"},  # a form that the browser navigates to
    {"sec_fetch_site": "cross-site", "sec_fetch_mode": "no-cors"},
    {"sec_fetch_site": "same-site"},  # another port of this machine
    {"sec_fetch_site": "none"},
    {"origin": "http://evil.example"},  # a browser of before 2023
    {"origin": "null"},
]


@each("headers", FROM_A_PAGE, ids=str)
async def test_a_page_of_another_site_drains_nothing(headers: dict[str, str]) -> None:
    async with both() as (seen, client):
        status, found = await client.post("/engines/a/drain", **headers)
        assert (status, found["error"]["code"]) == (403, "cross_site")
        assert not seen.view.documents()[0].draining


async def test_the_ports_own_page_and_the_tokens_bearer_may() -> None:
    async with viewed() as seen, admin(lambda: seen.view, Access("token-of-this-test-0123456789")) as client:
        status, _ = await client.post("/engines/a/drain")
        assert status == 401
        status, _ = await client.post("/engines/a/drain", authorization="Bearer token-of-this-test-0123456789")
        assert status == 200
    async with both() as (seen, client):
        own = str(client.session._base_url).rstrip("/")
        for headers in ({"sec_fetch_site": "same-origin"}, {"origin": own}):
            assert (await client.post("/engines/a/drain", **headers))[0] == 200


async def test_a_port_that_the_network_reaches_needs_a_token_for_changes() -> None:
    async with viewed() as seen, admin(lambda: seen.view, Access(is_local=False)) as client:
        assert (await client.get())[0] == 200
        status, found = await client.post("/engines/a/drain")
        assert (status, found["error"]["code"]) == (403, "admin_token_required")
        assert "SIDECAR_ADMIN_TOKEN" in found["error"]["message"]
        assert not seen.view.documents()[0].draining
