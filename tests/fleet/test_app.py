"""The fleet's app behind a real server: each request at its engine, and streams that outlive their engine's place."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from sidecar.admission.engine_pages import EnginePages
from sidecar.admission.handover import CALL_KEY, ENGINE_ID_KEY
from sidecar.engines.pages import NotConnected
from sidecar.errors import AdmissionError
from sidecar.fleet.app import FleetApp
from sidecar.fleet.fleet import Fleet
from tests.fleet.engines import LocalEngine, RudeEngine, engines, fleet_of, listed, states
from tests.support.serving import serving
from tests.support.waiting import open_sockets, until

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("in_a_hurry")]
CHAT = "/v1/chat/completions"


class Call:
    """As `EngineCall`, for a request that may wait again."""

    def __init__(self, *, answers: bool) -> None:
        self.answers = answers
        self.failures: list[tuple[AdmissionError, bool]] = []

    def failed(self, error: AdmissionError, *, was_sent: bool) -> bool:
        self.failures.append((error, was_sent))
        return self.answers


@asynccontextmanager
async def served(fleet: Fleet, call: Call | None = None) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of the app; the header `x-engine` stands for the grant's engine."""
    app = FleetApp(fleet)

    async def admitting(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            found = dict(scope["headers"]).get(b"x-engine")
            if found is not None:
                scope[ENGINE_ID_KEY] = found.decode()
            if call is not None:
                scope[CALL_KEY] = call
        await app(scope, receive, send)

    async with serving(admitting) as server, aiohttp.ClientSession(server.url) as client:
        yield client


async def started(*apps: Any) -> list[LocalEngine]:
    """An engine for each app."""
    found = [LocalEngine() for _ in apps]
    for engine, app in zip(found, apps, strict=True):
        await engine.start(app)
    return found


async def test_an_admitted_request_goes_to_its_engine_and_is_counted_there() -> None:
    rude = RudeEngine(), RudeEngine()
    a, b = await started(*rude)
    async with fleet_of([a.address("a"), b.address("b")]) as fleet, served(fleet) as client:
        async with client.post(CHAT, headers={"x-engine": "b#1"}) as response:
            assert (await response.content.readline()) == b"data: token\n"
            assert (rude[0].chats, rude[1].chats) == (0, 1)
            assert [member.in_flight for member in fleet.members()] == [0, 1]
            rude[1].ends.set()
            await response.read()
        await until(lambda: [member.in_flight for member in fleet.members()] == [0, 0])
    await a.stop()
    await b.stop()


async def test_no_redirect_names_an_engine_of_the_fleet() -> None:
    async def redirecting(scope: Any, receive: Any, send: Any) -> None:
        to = scope["query_string"] if scope["type"] == "http" else b""
        await receive()
        if to:
            await send({"type": "http.response.start", "status": 307, "headers": [(b"location", to)]})
            await send({"type": "http.response.body", "body": b""})

    a, b = await started(redirecting, redirecting)
    async with fleet_of([a.address("a"), b.address("b")]) as fleet, served(fleet) as client:
        found = []
        for where in (f"127.0.0.1:{a.port}", f"127.0.0.1:{b.port}", "elsewhere"):
            async with client.get(f"/v1/models/?http://{where}/v1/models", allow_redirects=False) as response:
                found.append(response.headers["location"])
    await a.stop()
    await b.stop()
    assert found == ["/v1/models", "/v1/models", "http://elsewhere/v1/models"]


async def test_other_paths_go_to_an_engine_that_can_be_used() -> None:
    async with engines(2) as (a, b), fleet_of([a.address("a"), b.address("b")]) as fleet, served(fleet) as client:
        fleet.drain("a")
        assert fleet.usable(is_client=True) is fleet.member("b#1")
        await b.stop()
        await until(lambda: states(fleet)["b#1"] == "down")
        assert fleet.usable(is_client=True) is fleet.member("a#1"), "a draining engine is better than none"
        async with client.get("/v1/models") as response:
            assert (response.status, json.loads(await response.read())["object"]) == (200, "list")
        await a.stop()
        await until(lambda: states(fleet)["a#1"] == "down")
        async with client.get("/v1/models") as response:
            assert response.status == 502
            assert "retry-after" in response.headers
            body = await response.text()
            assert json.loads(body)["error"]["code"] == "engine_unreachable"
            assert "127.0.0.1" not in body, "no address is for clients"


async def test_the_sidecars_own_pages_come_from_an_engine_that_can_be_used() -> None:
    async with engines(1) as (a,), fleet_of([a.address("a")]) as fleet:
        pages = EnginePages(FleetApp(fleet))
        assert (await pages.get("/v1/models")).status == 200
        await a.stop()
        await until(lambda: states(fleet)["a#1"] == "down")
        with pytest.raises(NotConnected, match=r"^no engine can be used: a: connection refused by http://"):
            await pages.get("/v1/models")


async def test_an_engine_that_is_gone_serves_its_stream_to_the_end_and_then_its_connections_close() -> None:
    rude = RudeEngine()
    (a,) = await started(rude)
    before = open_sockets()
    async with fleet_of([a.address("a")]) as fleet, served(fleet) as client:
        async with client.post(CHAT, headers={"x-engine": "a#1"}) as response:
            await response.content.readline()
            member = fleet.members()[0]
            listed(fleet, [])
            await until(lambda: states(fleet) == {"a#1": "gone"})
            assert [(offer.id, offer.takes_new) for offer in fleet.offers()] == [("a#1", False)]
            assert fleet.member("a#1") is member
            assert fleet.drain("a") is member, "a preStop hook that asks late is no mistake"
            listed(fleet, [a.address("a")])
            await until(lambda: states(fleet) == {"a#2": "starting", "a#1": "gone"})
            assert member.in_flight == 1
            assert [await response.content.readline() for _ in range(2)] == [b"\n", b"data: token\n"], "it goes on"
            rude.ends.set()
            assert (await response.content.read()).endswith(b"\n")
        await until(lambda: states(fleet) == {"a#2": "starting"})
        assert fleet.member("a#1") is None
    await a.stop()
    await until(lambda: open_sockets() <= before)


async def test_a_grant_whose_engine_has_restarted_since_was_sent_to_none_and_waits_again() -> None:
    rude, call = RudeEngine(), Call(answers=False)
    (a,) = await started(rude)
    async with fleet_of([a.address("a")]) as fleet:
        async with served(fleet) as client, client.post(CHAT, headers={"x-engine": "a#7"}) as response:
            assert response.status == 502
            assert "its engine has restarted or gone" in await response.text()
        async with served(fleet, call) as client, client.post(CHAT, headers={"x-engine": "a#7"}) as response:
            assert response.status == 500, "the app has left the request unanswered, and the server says so"
        ((error, was_sent),) = call.failures
        assert (type(error).__name__, was_sent) == ("EngineUnreachable", False)
        assert rude.chats == 0
    await a.stop()


async def test_a_request_that_an_engine_refuses_makes_it_suspect() -> None:
    call = Call(answers=True)
    async with engines(1) as (a,), fleet_of([a.address("a")]) as fleet, served(fleet, call) as client:
        await a.stop()
        async with client.post(CHAT, headers={"x-engine": "a#1"}) as response:
            assert response.status == 502
        ((_, was_sent),) = call.failures
        assert was_sent is False
        assert not fleet.members()[0].takes_new


async def test_websockets_are_refused_and_a_shutdown_closes_the_fleet() -> None:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    async with engines(1) as (a,), fleet_of([a.address("a")]) as fleet:
        await FleetApp(fleet)({"type": "websocket", "path": "/"}, receive, send)
        assert (sent[0]["type"], sent[0]["code"]) == ("websocket.close", 1011)
        async with served(fleet) as client, client.get("/health") as response:
            assert response.status == 200
        assert fleet.members() == []
