"""Several middlewares in one process, and several event loops: one policy is one pool, and none outlives its loop."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route

from sidecar.app import AdmissionMiddleware
from sidecar.policy.compiler import load
from tests.support.each import each
from tests.support.in_process import start_failure
from tests.support.middleware import CHAT, SMALL, App, Caller, policy, write_policy
from tests.support.ports import free_ports
from tests.support.redis_servers import RedisServer
from tests.support.serving import serving

PATHS = (CHAT, "/v1/completions", "/v1/embeddings")
BODIES = (SMALL, b'{"model": "m", "prompt": "x", "max_tokens": 4}', b'{"model": "m", "input": "x"}')


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, no_providers: None) -> None:
    for name in [name for name in os.environ if name.startswith(("SIDECAR_", "OTEL_"))]:
        monkeypatch.delenv(name)


class Gate:
    """A handler that answers when it is opened, and counts."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.running = self.most = self.served = 0
        self.begun = asyncio.Condition()

    async def handle(self, request: Any) -> JSONResponse:
        self.running, self.served = self.running + 1, self.served + 1
        self.most = max(self.most, self.running)
        async with self.begun:
            self.begun.notify_all()
        await self.opened.wait()
        self.running -= 1
        return JSONResponse({})

    async def until(self, running: int) -> None:
        async with self.begun:
            await asyncio.wait_for(self.begun.wait_for(lambda: self.running == running), 60)


def by_route(handler: Any, given: Any, whole: Any = None) -> Starlette:
    """A middleware for each route, and with `whole` one around the app, which Starlette constructs when it serves."""
    one = [Middleware(AdmissionMiddleware, policy=given)]
    routes = [Route(path, handler, methods=["POST"], middleware=one) for path in PATHS]
    return Starlette(routes=routes, middleware=[] if whole is None else [Middleware(AdmissionMiddleware, policy=whole)])


async def settled(turns: int = 20) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


async def asked(app: Any, number: int = 0) -> int:
    headers = [(b"authorization", b"Bearer sk-acme")]
    caller = Caller(app, BODIES[number % 3], path=PATHS[number % 3], headers=headers)
    await asyncio.wait_for(caller.run(), 60)
    return caller.status


@pytest.mark.anyio
@each("is_nested", [False, True])
async def test_a_middleware_for_each_route_has_the_pool_of_all(is_nested: bool, tmp_path: Path) -> None:
    """An inner one lets pass what the outer one has admitted: with four leases of four it would wait forever."""
    path, gate = write_policy(tmp_path, requests="4"), Gate()
    app = by_route(gate.handle, path, path if is_nested else None)
    asking = [asyncio.create_task(asked(app, number)) for number in range(12)]
    await gate.until(4)
    await settled()
    assert gate.most == 4
    gate.opened.set()
    assert await asyncio.gather(*asking) == [200] * 12
    assert (gate.most, gate.served) == (4, 12)


@pytest.mark.anyio
async def test_one_that_a_thread_of_the_server_constructs_has_the_pool_of_all(tmp_path: Path) -> None:
    """As by a handler that a framework runs in a thread."""
    path, gate = write_policy(tmp_path, requests="1"), Gate()

    def made() -> Starlette:
        app = Starlette(routes=[Route(CHAT, gate.handle, methods=["POST"])])
        app.add_middleware(AdmissionMiddleware, policy=path)
        app.middleware_stack = app.build_middleware_stack()
        return app

    first = made()
    async with serving(first, lifespan="on"):
        second = await asyncio.to_thread(made)
        asking = [asyncio.create_task(asked(app)) for app in (first, second)]
        await gate.until(1)
        await settled()
        assert gate.most == 1
        gate.opened.set()
        assert await asyncio.gather(*asking) == [200, 200]
    assert (gate.most, gate.served) == (1, 2)


@pytest.mark.anyio
async def test_what_only_the_inner_one_guards_is_admitted_there(tmp_path: Path) -> None:
    """The outer one knows the path with the prefix that it is mounted under, and passes it as the app's own."""
    path, gate = write_policy(tmp_path, "unguarded: allow\n", requests="1"), Gate()
    inner = by_route(gate.handle, path)
    app = Starlette(routes=[Mount("/deep/er", inner)], middleware=[Middleware(AdmissionMiddleware, policy=path)])
    tasks = [asyncio.create_task(Caller(app, SMALL, path=f"/deep/er{CHAT}").run()) for _ in range(2)]
    await gate.until(1)
    await settled()
    assert gate.most == 1
    gate.opened.set()
    await asyncio.gather(*tasks)
    assert (gate.most, gate.served) == (1, 2)


def test_the_same_policy_is_the_same_file_by_any_path_or_an_equal_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_policy(tmp_path / "one")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "one")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SIDECAR_POLICY", str(link))
    ways = [str(file), file, file.parent, link, link / "policy.yaml", "one", None]
    made = [AdmissionMiddleware(App(), given) for given in ways]
    assert len({each.controller for each in made}) == 1
    loaded = [AdmissionMiddleware(App(), given) for given in (load(file), load(file))]
    assert len({each.controller for each in loaded}) == 1
    others = [
        AdmissionMiddleware(App(), write_policy(tmp_path / "two")),  # another file, whatever it says
        AdmissionMiddleware(App(), policy("max_choices: 3\n")),
        AdmissionMiddleware(App(), file, environment={}),
        AdmissionMiddleware(App(), file, is_shown=True),
        AdmissionMiddleware(App(), file, retry_handlers=True),
    ]
    assert len({each.controller for each in [made[0], loaded[0], *others]}) == 7


def test_a_file_that_is_no_longer_a_policy_is_not_read_for_a_further_route(tmp_path: Path) -> None:
    file = write_policy(tmp_path)
    first = AdmissionMiddleware(App(), file)
    file.write_text("engine: vlm\n")
    assert AdmissionMiddleware(App(), file).controller is first.controller


@pytest.mark.anyio
async def test_a_second_policy_has_a_pool_of_its_own_and_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sidecar.app")
    first = AdmissionMiddleware(App(), write_policy(tmp_path / "1", "pool: chat\n", requests="1"))
    second = AdmissionMiddleware(App(), write_policy(tmp_path / "2", "pool: vectors\n"))
    third = AdmissionMiddleware(App(), write_policy(tmp_path / "3", "pool: chat\n"))
    for app in (first, second, third, first, second):
        assert await asked(app) == 200
    assert sorted((record.levelname, record.getMessage()[:58]) for record in caplog.records) == [
        ("INFO", "another policy serves in this process: pool chat beside po"),
        ("INFO", "another policy serves in this process: pool vectors beside"),
        ("WARNING", "two policies of this process have the pool name chat, and "),
    ]


@pytest.mark.anyio
async def test_a_reload_is_followed_by_every_middleware(tmp_path: Path) -> None:
    file = write_policy(tmp_path)
    first, second = AdmissionMiddleware(App(), file), AdmissionMiddleware(App(), file)
    assert [await asked(app) for app in (first, second)] == [200, 200]
    cors = "cors: {origins: ['https://page.example']}\nunguarded: deny\n"
    first.controller.change_policy(load(write_policy(tmp_path, cors)))
    late = AdmissionMiddleware(App(), file)
    for app in (first, second, late):
        asks = [(b"origin", b"https://page.example"), (b"access-control-request-method", b"POST")]
        caller = Caller(app, method="OPTIONS", headers=asks)
        await caller.run()
        assert (b"access-control-allow-origin", b"https://page.example") in caller.sent[0]["headers"]


# Lifespans


class Lifespans:
    """A lifespan of an app, which the test begins and ends."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._heard: asyncio.Queue[Any] = asyncio.Queue()
        self._said: asyncio.Queue[Any] = asyncio.Queue()

    async def begin(self) -> str:
        scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}
        self._task = asyncio.create_task(self._app(scope, self._heard.get, self._said.put))
        return await self._say("startup")

    async def end(self) -> str:
        said = await self._say("shutdown")
        await asyncio.wait_for(self._task, 60)
        return said

    async def raises(self) -> None:
        with pytest.raises(Exception):  # noqa: B017, PT011  # whatever the app raises
            await asyncio.wait_for(self._task, 60)

    async def _say(self, kind: str) -> str:
        await self._heard.put({"type": f"lifespan.{kind}"})
        return str((await asyncio.wait_for(self._said.get(), 60))["type"])


@asynccontextmanager
async def alive(app: Any) -> AsyncIterator[None]:
    lifespan = Lifespans(app)
    assert await lifespan.begin() == "lifespan.startup.complete"
    yield
    assert await lifespan.end() == "lifespan.shutdown.complete"


async def is_open(port: int) -> bool:
    async with aiohttp.ClientSession() as client:
        try:
            async with client.get(f"http://127.0.0.1:{port}/healthz") as page:
                return page.status == 200
        except aiohttp.ClientConnectionError:
            return False


@pytest.mark.anyio
@each("ends_first", [0, 1, 2])
async def test_the_last_lifespan_to_end_closes_what_the_first_has_opened(
    ends_first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SIDECAR_ADMIN_PORT", str(port := free_ports(1)))
    file = write_policy(tmp_path)
    apps = [AdmissionMiddleware(Starlette(), file) for _ in range(3)]
    logging.getLogger("uvicorn.error").addHandler(caplog.handler)
    for _ in range(2):  # and all of it once more
        lifespans = [Lifespans(app) for app in apps]
        assert await asyncio.gather(*(one.begin() for one in lifespans)) == ["lifespan.startup.complete"] * 3
        for at in range(3):
            assert await is_open(port)
            assert len({app.controller for app in apps}) == 1
            assert await lifespans[(ends_first + at) % 3].end() == "lifespan.shutdown.complete"
        assert not await is_open(port)
    logging.getLogger("uvicorn.error").removeHandler(caplog.handler)
    assert "another middleware" not in caplog.text  # none asked for the port a second time


@pytest.mark.anyio
async def test_an_app_that_fails_at_its_start_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIDECAR_ADMIN_PORT", str(port := free_ports(1)))
    fails = [True]

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        if fails.pop():
            raise RuntimeError("no model")
        yield

    file = write_policy(tmp_path)
    broken, whole = AdmissionMiddleware(Starlette(lifespan=lifespan), file), AdmissionMiddleware(Starlette(), file)
    before = asyncio.all_tasks()
    async with alive(whole):
        first = Lifespans(broken)
        assert await first.begin() == "lifespan.startup.failed"
        await first.raises()
        assert await is_open(port)  # the other one serves on
    assert not await is_open(port)
    assert asyncio.all_tasks() == before
    fails.append(True)
    alone = Lifespans(broken)
    assert await alone.begin() == "lifespan.startup.failed"
    await alone.raises()
    assert not await is_open(port)
    assert asyncio.all_tasks() == before
    fails.append(False)
    async with alive(broken):
        assert await is_open(port)


@pytest.mark.anyio
async def test_a_mounted_app_that_no_lifespan_reaches_has_those_of_the_outer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SIDECAR_ADMIN_PORT", str(port := free_ports(1)))
    file, gate = write_policy(tmp_path, "unguarded: allow\n"), Gate()
    gate.opened.set()
    app = Starlette(
        routes=[Mount("/a", by_route(gate.handle, file))], middleware=[Middleware(AdmissionMiddleware, policy=file)]
    )
    async with alive(app):
        caller = Caller(app, SMALL, path=f"/a{CHAT}")
        await caller.run()
        assert (caller.status, await is_open(port)) == (200, True)
    assert caplog.records == []


# Apps made anew, as tests make them


def exhausts(app: Any) -> list[int]:
    """Two requests of a tenant that may have one a minute."""

    async def both() -> list[int]:
        return [await asked(app) for _ in range(2)]

    return asyncio.run(both())


@each("has_lifespan", [True, False])
def test_an_app_made_anew_has_nothing_of_one_whose_loop_has_ended(has_lifespan: bool, tmp_path: Path) -> None:
    file = limited(tmp_path)
    kept = []
    for _ in range(3):
        kept.append(app := AdmissionMiddleware(App(), file))  # as a module's fixture would

        async def run(app: Any = app) -> list[int]:
            async with AsyncExitStack() as stack:
                if has_lifespan:
                    await stack.enter_async_context(alive(app))
                return [await asked(app) for _ in range(2)]

        assert asyncio.run(run()) == [200, 429]
    assert exhausts(kept[-1]) == [429, 429]  # without another lifespan it is the same app


def limited(folder: Path) -> Path:
    """A policy that lets `acme` send one request a minute."""
    return write_policy(folder, acme="limits: {requests_per_minute: 1}\n")


def test_the_same_app_begins_anew_with_each_lifespan(tmp_path: Path) -> None:
    app = AdmissionMiddleware(App(), limited(tmp_path))

    async def run() -> list[int]:
        async with alive(app):
            return [await asked(app) for _ in range(2)]

    assert [asyncio.run(run()) for _ in range(2)] == [[200, 429]] * 2


def test_apps_that_are_gone_are_not_kept(tmp_path: Path) -> None:
    from weakref import ref

    file = write_policy(tmp_path)

    def gone() -> ref[Any]:
        app = by_route(App(), file, file)
        asyncio.run(asked(app))
        return ref(app)

    made = [gone() for _ in range(3)]
    gc.collect()
    assert [one() for one in made] == [None] * 3


@pytest.mark.anyio
async def test_an_app_that_is_gone_leaves_nothing_to_the_next_in_its_loop(tmp_path: Path) -> None:
    """Tests that share an event loop, without lifespans."""
    file = limited(tmp_path)
    for _ in range(3):
        app = AdmissionMiddleware(App(), file)
        assert [await asked(app) for _ in range(2)] == [200, 429]
        del app  # with a framework's app around it, once it is collected


# Event loops


@pytest.fixture
def stored(store: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDECAR_STORE", store.url)


def test_a_second_loop_has_the_store_and_every_task_again(
    stored: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    budget = "limits: {tokens_per_day: 1M}\n"
    app = AdmissionMiddleware(App(), write_policy(tmp_path, "stored_tenants: true\n", acme=budget))

    async def run() -> set[str]:
        async with alive(app):
            assert await asyncio.gather(*(asked(app) for _ in range(9))) == [200] * 9
            return {task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("sidecar ")}

    first, second, third = (asyncio.run(run()) for _ in range(3))
    assert first == second == third > {"sidecar use of tenants", "sidecar tenants in the store"}
    assert [record.getMessage() for record in caplog.records if record.levelno > logging.INFO] == []


@contextmanager
def in_thread(run: Callable[[], Any]) -> Iterator[list[Any]]:
    """Runs it in an event loop of another thread; the list gets its result."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(asyncio.run(run())))
    thread.start()
    yield found
    thread.join(60)


@each("has_lifespan", [True, False])
def test_two_loops_at_once_have_a_pool_each_or_are_told(
    has_lifespan: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_policy(tmp_path)
    first, second = AdmissionMiddleware(App(), file), AdmissionMiddleware(App(), file)
    serving, over = threading.Event(), threading.Event()

    async def serve() -> int:
        async with alive(first):
            status = await asked(first)
            serving.set()
            await asyncio.to_thread(over.wait, 60)
            return status

    async def beside() -> int:
        async with AsyncExitStack() as stack:
            if has_lifespan:
                await stack.enter_async_context(alive(second))
            return await asked(second)

    with in_thread(serve) as found:
        assert serving.wait(60)
        assert asyncio.run(beside()) == 200
        assert "serves in two event loops of this process" in caplog.text
        told = asyncio.run(start_failure(first))
        over.set()
    assert found == [200]
    assert "construct app and middleware once for each loop" in str(told)
    assert first.controller is not second.controller


def test_under_trio_the_start_and_a_request_say_that_it_needs_asyncio(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import trio

    app = AdmissionMiddleware(App(), write_policy(tmp_path))
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "lifespan.startup"}

    async def start() -> None:
        with pytest.raises(ValueError, match="needs asyncio"):
            await app({"type": "lifespan", "asgi": {"version": "3.0"}}, receive, send)

    async def ask() -> None:
        for _ in range(2):
            caller = Caller(app, SMALL)
            await app(caller.scope, receive, send)

    trio.run(start)
    assert sent[0]["type"] == "lifespan.startup.failed"
    assert "asyncio" in sent[0]["message"]
    trio.run(ask)
    assert [message["status"] for message in sent if message["type"] == "http.response.start"] == [500, 500]
    assert b"not_started" in sent[-1]["body"]
    assert [record.exc_info for record in caplog.records] == [None]  # said once, and as a sentence
    assert "needs asyncio" in caplog.text
    assert asyncio.run(asked(app)) == 200
