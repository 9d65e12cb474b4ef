"""Mounted in one line, and invisible but for what it is there for."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Mount, Route

from sidecar import AdmissionMiddleware, granted
from tests.support.middleware import (
    CHAT,
    COMPLETIONS,
    SMALL,
    App,
    Caller,
    TestedMiddleware,
    chat,
    guarding,
    key,
    policy,
)
from tests.support.serving import serving
from tests.support.wire import exchange, get, post

pytestmark = pytest.mark.anyio


async def answered(port: int, path: str = CHAT, body: bytes = SMALL, *headers: str) -> bytes:
    return await exchange(port, post(path, body, *headers))


# Mounting


async def test_one_line_mounts_it_into_fastapi() -> None:
    from fastapi import FastAPI

    app = FastAPI()
    app.add_middleware(AdmissionMiddleware, policy=policy())

    @app.post(CHAT)
    async def chat_completions(request: Request) -> dict[str, Any]:
        return {"asked": await request.json(), "tier": request.scope["admission"].tier}

    @app.get("/health")
    async def health() -> str:
        return "well"

    async with serving(app) as served:
        answer = await answered(served.port, CHAT, SMALL, key("acme"))
        assert b"x-admission-tier: normal" in answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2]) == {"asked": chat(), "tier": "normal"}
        assert b"x-admission" not in await exchange(served.port, get("/health"))


async def test_below_a_mount_the_endpoints_are_the_mounted_apps_own() -> None:
    seen: list[tuple[str, str]] = []

    async def completions(request: Request) -> JSONResponse:
        seen.append((request.scope["path"], request.scope["root_path"]))
        return JSONResponse({})

    inner = Starlette(routes=[Route(COMPLETIONS, completions, methods=["POST"])])
    inner.add_middleware(AdmissionMiddleware, policy=policy())
    async with serving(Starlette(routes=[Mount("/api", inner)])) as served:
        assert b"x-admission-tier: normal" in await answered(served.port, "/api" + COMPLETIONS, b'{"prompt":"a"}')
        batch = await answered(served.port, "/api/v1/batch/completions", b'{"prompt":"a"}')
    assert b"200 OK" in batch
    assert b"x-admission-tier: batch" in batch
    assert seen == [("/api" + COMPLETIONS, "/api")] * 2


async def test_behind_a_proxy_that_strips_the_root_path_nothing_is_put_back() -> None:
    app = App()
    sidecar = AdmissionMiddleware(app, policy=policy())
    caller = Caller(sidecar, b'{"prompt":"a"}', path="/v1/batch/completions", root_path="/api")
    await caller.run()
    assert (app.seen[0].scope["path"], app.seen[0].scope["raw_path"]) == (COMPLETIONS, COMPLETIONS.encode())


async def test_uvicorns_root_path_is_understood() -> None:
    app = App()
    async with serving(AdmissionMiddleware(app, policy=policy()), root_path="/api") as served:
        assert b"x-admission-tier: batch" in await answered(served.port, "/v1/batch/completions", b'{"prompt":"a"}')
    assert app.seen[0].scope["path"] == "/api" + COMPLETIONS


# What it leaves alone


async def test_what_is_not_guarded_passes_with_the_servers_own_objects() -> None:
    calls: list[tuple[Any, Any, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        calls.append((scope, receive, send))

    sidecar = AdmissionMiddleware(app, policy=policy())

    async def receive() -> Any: ...

    async def send(message: Any) -> None: ...

    unguarded = [
        {"type": "websocket", "path": "/chat", "headers": []},
        *(
            {"type": "http", "method": method, "path": path, "headers": []}
            for method, path in (("GET", CHAT), ("OPTIONS", CHAT), ("POST", "/v1/models"), ("POST", CHAT + "/x"))
        ),
    ]
    for scope in unguarded:
        await sidecar(scope, receive, send)
    assert all(
        call[0] is scope and call[1] is receive and call[2] is send
        for call, scope in zip(calls, unguarded, strict=True)
    )


async def test_lifespan_reaches_the_app() -> None:
    app = App()
    async with guarding(app):
        assert app.others == ["lifespan"]


# forward_to


async def test_forward_to_changes_path_and_raw_path_and_keeps_the_query() -> None:
    app = App()
    async with guarding(app) as guarded:
        answer = await guarded.ask({"prompt": "a"}, path="/v1/batch/completions?stream=1&x=%20y")
        assert answer.headers["x-admission-tier"] == "batch"
        scope = app.seen[0].scope
        assert scope["path"] == COMPLETIONS
        assert scope["raw_path"] == COMPLETIONS.encode()
        assert scope["query_string"] == b"stream=1&x=%20y"
        assert guarded.recorder.stories[0].received.path == "/v1/batch/completions"


async def test_the_clients_scope_is_not_changed() -> None:
    caller = Caller(rewriting_sidecar(App()), b'{"prompt":"a"}', path="/v1/batch/completions")
    before = {**caller.scope, "headers": list(caller.scope["headers"])}
    await caller.run()
    assert caller.scope == before


def rewriting_sidecar(app: Any) -> TestedMiddleware:
    return AdmissionMiddleware(app, policy=policy(engine="sglang"))


# What the app and the client get


async def test_the_app_reads_its_grant_from_the_scope_and_from_the_context() -> None:
    grants: list[Any] = []

    async def deep_inside() -> Any:
        await asyncio.sleep(0)
        return granted()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            grants.extend([scope["admission"], granted(), await asyncio.create_task(deep_inside())])
            await JSONResponse({})(scope, receive, send)
        else:
            await App()(scope, receive, send)

    async with guarding(app, policy(engine="vllm")) as guarded:
        await guarded.ask(chat(priority="high"), key("acme"))
    assert granted() is None
    assert grants[0] is grants[1] is grants[2]
    grant = grants[0]
    assert (grant.tier, grant.tenant, grant.level, grant.engine_priority) == ("high", "acme", 1, 10)
    assert (grant.queue_wait_s, grant.starvation_s) == (0, 0)
    assert grant.tokens > 10


async def test_what_was_clamped_and_what_was_ignored_is_said() -> None:
    async with guarding(App()) as guarded:
        answer = await guarded.ask(chat(priority="critical"), key("acme"), "x-vllm-priority: 3", "x-priority: batch")
        plain = await guarded.ask()
    assert answer.headers["x-admission-tier"] == "high"
    assert answer.headers["x-admission-clamped-from"] == "critical"
    assert answer.headers["x-admission-ignored"] == "x-vllm-priority, x-priority"
    assert answer.headers["x-admission-wait-ms"] == "0"
    assert answer.headers["server-timing"] == "admission;dur=0.0"
    assert not {"x-admission-clamped-from", "x-admission-ignored"} & set(plain.headers)


# Disconnects


async def test_starlette_stops_streaming_when_the_client_leaves() -> None:
    stopped = asyncio.Event()
    announced: list[str] = []

    async def endless(request: Request) -> StreamingResponse:
        announced.append(request.scope["asgi"]["spec_version"])

        async def events() -> Any:
            try:
                while True:
                    yield b"data: x\n\n"
                    await asyncio.sleep(0.005)
            finally:
                stopped.set()

        return StreamingResponse(events(), media_type="text/event-stream")

    app = Starlette(routes=[Route(CHAT, endless, methods=["POST"])])
    async with guarding(app) as guarded:
        reader, writer = await asyncio.open_connection("127.0.0.1", guarded.port)
        writer.write(post(CHAT, SMALL))
        await reader.readuntil(b"data: x")
        writer.close()
        if announced == ["2.4"]:
            # uvicorn 0.30 says so, which promises that send() raises, and does not; later versions say 2.3 again.
            # Starlette believes it and streams into the void, with us or without. The lease is given back all the same.
            await guarded.until(leases=0)
            pytest.skip("this uvicorn hides from Starlette that the client left")
        await asyncio.wait_for(stopped.wait(), 60)
        await guarded.until(leases=0)
        assert guarded.recorder.ends == ["client_left"]


async def test_rounds_leave_an_app_alone_that_listens_itself(caplog: pytest.LogCaptureFixture) -> None:
    async with guarding(listens_until_the_client_leaves, policy(body_timeout="50ms")) as guarded:
        _, writer = await asyncio.open_connection("127.0.0.1", guarded.port)
        writer.write(post(CHAT, SMALL))
        await guarded.until(leases=1)
        await asyncio.sleep(0.2)  # four rounds
        assert guarded.leases == 1
        writer.close()
        await guarded.until(leases=0)
    assert caplog.text == ""


async def listens_until_the_client_leaves(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        await App()(scope, receive, send)
        return
    await receive()
    assert (await receive())["type"] == "http.disconnect"


async def test_the_server_is_listened_to_by_one_at_a_time() -> None:
    has_polled = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await asyncio.sleep(0.15)  # rounds pass, and listen for it
        for _ in range(3):  # as one who polls: asks, and gives up
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(receive(), 0.01)
        has_polled.set()
        assert [message["type"] for message in await asyncio.gather(receive(), receive())] == ["http.disconnect"] * 2

    caller = Caller(AdmissionMiddleware(app, policy=policy(body_timeout="50ms")), SMALL)
    running = caller.begin()
    await asyncio.wait_for(has_polled.wait(), 60)
    caller.leave()
    await asyncio.wait_for(running, 60)
    assert caller.most_receivers == 1


async def test_keep_alive_serves_one_request_after_another() -> None:
    async with guarding(App()) as guarded, aiohttp.ClientSession() as session:
        for number in range(5):
            url = f"http://127.0.0.1:{guarded.port}{CHAT}"
            async with session.post(url, json=chat(priority="gold" if number % 2 else "normal")) as answer:
                assert answer.status == (400 if number % 2 else 200)
                await answer.read()
