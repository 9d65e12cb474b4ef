"""Mounted engines: apps that are engines themselves, each with the middleware in it, on one pool."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from sidecar.app import AdmissionMiddleware
from sidecar.engines.view import DrainEnd, EngineDocument, PoolEngines
from sidecar.policy.store import STORE_VARIABLE
from tests.support.middleware import CHAT, chat, chunk, start, whole_body
from tests.support.serving import serving
from tests.support.shared_pools import begun_store
from tests.support.waiting import until

pytestmark = pytest.mark.anyio
REQUESTS = 4
"""Of each engine. Half of what the pool has is reserved for the high tier."""
POLICY = f"""\
engine: none
engines: {{mounted: true, capacity: {{tokens: 100k, requests: {REQUESTS}}}, prefill: unbounded, slow_start: 0s}}
tiers: {{high: {{reserve: 50%, lend: 0%}}, low: {{}}}}
default_tier: low
anonymous: high
sources: [header]
endpoints: {{{CHAT}: {{}}}}
abort_latency: 100ms
"""


class CountingEngine:
    """Runs requests without any bound of its own, each until it may end or its client disconnects."""

    def __init__(self) -> None:
        self.running = self.most = self.served = 0
        self.may_end = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            raise NotImplementedError  # no lifespan of its own
        if scope["method"] != "POST":
            await start(send, status=404)
            await chunk(send, b"", more=False)
            return
        await whole_body(receive)
        run, left = asyncio.ensure_future(self._run(send)), asyncio.ensure_future(receive())
        try:
            await asyncio.wait((run, left), return_when=asyncio.FIRST_COMPLETED)
        finally:
            run.cancel()
            left.cancel()

    async def _run(self, send: Any) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await start(send, content_type=b"text/event-stream")
            await chunk(send, b'data: {"choices": [{"delta": {"content": "x"}}]}\n\n')
            await asyncio.sleep(0.01)
            await self.may_end.wait()
            self.served += 1
        finally:
            self.running -= 1
        await chunk(send, b"data: [DONE]\n\n", more=False)


class Mounted:
    """An app that is its own engine, as one process would have it."""

    def __init__(self, engine: CountingEngine, middleware: AdmissionMiddleware, client: aiohttp.ClientSession) -> None:
        self.engine, self.middleware, self.client = engine, middleware, client
        self.controller = middleware.controller

    async def ask(self, tier: str = "high") -> tuple[int, Mapping[str, str], bytes]:
        body = json.dumps(chat(stream=True)).encode()
        async with self.client.post(CHAT, data=body, headers={"x-priority": tier}) as response:
            return response.status, dict(response.headers), await response.read()

    def begin(self, number: int) -> list[asyncio.Task[Any]]:
        return [asyncio.ensure_future(self.ask()) for _ in range(number)]

    @property
    def view(self) -> PoolEngines:
        assert self.controller.engines is not None
        return self.controller.engines

    @property
    def rows(self) -> Mapping[str, EngineDocument]:
        return {row.name: row for row in self.view.documents()}

    @property
    def pool(self) -> Any:
        return self.controller.state()["pool"]

    @property
    def counts(self) -> tuple[int, int]:
        """(leases, waiting) of the pool."""
        return self.pool["leases"], self.pool["waiting"]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with begun_store(tmp_path) as server:
        monkeypatch.setenv(STORE_VARIABLE, server.url)
        yield


_numbers = count(2)


@asynccontextmanager
async def mounted(folder: Path, name: str, more: str = "") -> AsyncIterator[Mounted]:
    """One process, whose policy is a file of its own: else several would have one pool in this process."""
    number = next(_numbers)
    path = folder / f"policy-{number}.yaml"
    path.write_text(f"{POLICY}max_choices: {number}\n{more}")
    engine = CountingEngine()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SIDECAR_ENGINE_NAME", name)
        middleware = AdmissionMiddleware(engine, path, is_shown=True)
    connector = aiohttp.TCPConnector(limit=0)
    async with serving(middleware) as served, aiohttp.ClientSession(served.url, connector=connector) as client:
        yield Mounted(engine, middleware, client)


@asynccontextmanager
async def pair(folder: Path) -> AsyncIterator[tuple[Mounted, Mounted]]:
    """The engines `a` and `b`, when each process knows both."""
    async with mounted(folder, "a") as a, mounted(folder, "b") as b:
        for app in (a, b):
            await until(lambda app=app: app.pool["capacity"]["requests"] == 2 * REQUESTS)
        yield a, b


async def statuses(asked: list[asyncio.Task[Any]]) -> set[int]:
    return {status for status, _, _ in await asyncio.gather(*asked)}


@pytest.mark.usefixtures("store")
async def test_the_pool_is_the_sum_and_no_engine_gets_more_than_its_own(tmp_path: Path) -> None:
    async with pair(tmp_path) as (a, b):
        assert a.pool["capacity"] == {"tokens": 200_000, "requests": 8}
        for app in (a, b):
            app.engine.may_end.set()
        answers = await asyncio.gather(*a.begin(20), *b.begin(12))
        assert {status for status, _, _ in answers} == {200}
        assert [headers["x-admission-engine"] for _, headers, _ in answers] == ["a"] * 20 + ["b"] * 12
        assert [(app.engine.most, app.engine.served) for app in (a, b)] == [(REQUESTS, 20), (REQUESTS, 12)]
        await until(lambda: [(row.state, row.held.requests) for row in b.rows.values()] == [("ready", 0)] * 2)


@pytest.mark.long
@pytest.mark.usefixtures("store")
async def test_of_two_processes_with_one_name_the_later_one_has_it(tmp_path: Path) -> None:
    async with pair(tmp_path) as (first, _):
        incarnation = int(first.rows["a"].id.partition("#")[2])
        async with mounted(tmp_path, "a") as later:
            await until(first.controller.readiness)
            assert first.controller.readiness() == [
                "engine a, of this process: a process that began later has its name, a; "
                "give each process a SIDECAR_ENGINE_NAME of its own"
            ]
            assert later.controller.readiness() == []
            assert int(later.rows["a"].id.partition("#")[2]) > incarnation
            later.engine.may_end.set()
            assert (await later.ask())[0] == 200
        await until(lambda: not first.controller.readiness())
        first.engine.may_end.set()
        assert (await first.ask())[0] == 200


@pytest.mark.usefixtures("store")
async def test_a_drained_process_serves_what_it_has_and_leaves_the_pool(tmp_path: Path) -> None:
    async with pair(tmp_path) as (a, b):
        under_way = a.begin(REQUESTS + 2)
        await until(lambda: a.counts == (REQUESTS, 2))
        await a.view.drain("a")
        drained = asyncio.ensure_future(a.view.drained("a", 60))
        await until(lambda: a.rows["a"].state == "draining")
        status, headers, body = await a.ask()
        assert (status, b'"draining"' in body, "retry-after" in {name.lower() for name in headers}) == (503, True, True)
        assert a.controller.readiness() == ["engine a, of this process, is draining"]
        assert not drained.done()
        a.engine.may_end.set()
        b.engine.may_end.set()
        assert await statuses(under_way) == {200}
        assert await drained is DrainEnd.EMPTY
        await until(lambda: b.pool["capacity"]["requests"] == REQUESTS)
        assert (await b.ask())[0] == 200
        with pytest.raises(KeyError):
            await a.view.drain("b")
        await a.view.resume("a")
        await until(lambda: b.pool["capacity"]["requests"] == 2 * REQUESTS)
        assert (await a.ask())[0] == 200


async def test_one_process_without_a_store(tmp_path: Path) -> None:
    """Its name is the host's with a random end."""
    async with mounted(tmp_path, "") as app:
        app.engine.may_end.set()
        answers = await asyncio.gather(*app.begin(10))
        assert {status for status, _, _ in answers} == {200}
        assert app.engine.most == REQUESTS
        (row,) = app.rows.values()
        assert (row.state, row.capacity.tokens, row.capacity.requests) == ("ready", 100_000, REQUESTS)
        assert {headers["x-admission-engine"] for _, headers, _ in answers} == {row.name}


async def test_the_dry_run_holds_nothing_back(tmp_path: Path) -> None:
    async with mounted(tmp_path, "a", "mode: observe\n") as app:
        asked = app.begin(10)
        await until(lambda: app.engine.running == 10)
        assert app.pool["capacity"]["requests"] == REQUESTS
        await app.view.drain("a")
        app.engine.may_end.set()
        assert await statuses(asked) == {200}
        assert (await app.ask())[0] == 200
