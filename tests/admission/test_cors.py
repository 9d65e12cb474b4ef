"""Browsers: where the policy names origins, preflights are answered, and every response may be read by their pages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sidecar import AdmissionMiddleware
from tests.support.middleware import CHAT, Answer, App, chat, key, whole_body, write_policy
from tests.support.serving import serving
from tests.support.waiting import until
from tests.support.wire import connected, exchange, get, post

pytestmark = pytest.mark.anyio

PAGE, OTHER = "https://app.example", "https://other.example"
CORS = 'cors: {{origins: ["{}"]}}\n'
MINE = CORS.format(PAGE)
ANY_PATH = (CHAT, "/v1/models", "/generate", "/nowhere")


class OwnCors(App):
    """An app that answers browsers itself, too, as vLLM does."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        await whole_body(receive)
        allowed = [(b"access-control-allow-origin", b"*"), (b"access-control-allow-origin", b"null")]
        await send({"type": "http.response.start", "status": 200, "headers": [*allowed, (b"vary", b"accept")]})
        await send({"type": "http.response.body", "body": b"{}"})


@asynccontextmanager
async def site(
    app: Any, folder: Path, more: str, *, anonymous: str = "normal", **settings: str
) -> AsyncIterator[tuple[AdmissionMiddleware, int]]:
    policy = write_policy(folder, more, **settings)
    policy.write_text(policy.read_text().replace("anonymous: normal", f"anonymous: {anonymous}"))
    sidecar = AdmissionMiddleware(app, folder, is_shown=True)
    async with serving(sidecar) as served:
        yield sidecar, served.port


async def raw(port: int, request: bytes) -> bytes:
    return await asyncio.wait_for(exchange(port, request), 60)


async def preflight(port: int, path: str = CHAT, *, origin: str = PAGE, headers: str = "authorization,x-own") -> Answer:
    asked = ("access-control-request-method: POST", f"access-control-request-headers: {headers}")
    return Answer.parsed(await raw(port, get(path, f"origin: {origin}", *asked).replace(b"GET", b"OPTIONS", 1)))


async def test_a_preflight_needs_no_key_and_no_room_and_asks_no_engine(tmp_path: Path) -> None:
    app = App(is_held=True)
    async with site(app, tmp_path, MINE, requests="1", anonymous="deny") as (sidecar, port):
        running = [asyncio.create_task(raw(port, post(CHAT, b'{"messages":["a"]}', key("acme")))) for _ in range(2)]
        await until(lambda: sidecar.controller.pool.state()["waiting"] == 1)
        for path in ANY_PATH:
            answer = await preflight(port, path)
            assert answer.status == 200
            assert answer.headers["access-control-allow-origin"] == PAGE
            assert answer.headers["access-control-allow-headers"] == "authorization,x-own"
            assert {"GET", "POST"} <= set(answer.headers["access-control-allow-methods"].split(", "))
            assert "Origin" in answer.headers["vary"]
            assert "access-control-allow-credentials" not in answer.headers
            refused = await preflight(port, path, origin=OTHER)
            assert (refused.status, refused.headers.get("access-control-allow-origin")) == (400, None)
        assert len(app.seen) == 1
        app.release(2)
        await asyncio.gather(*running)


async def test_every_response_has_the_headers_once(tmp_path: Path) -> None:
    async with site(OwnCors(), tmp_path, MINE + "unguarded: deny\n", max_body="1KiB") as (_, port):
        asked = {
            200: post(CHAT, b'{"messages":["a"]}', f"origin: {PAGE}"),
            400: post(CHAT, b"{", f"origin: {PAGE}"),
            401: post(CHAT, b"{}", f"origin: {PAGE}", "authorization: Bearer sk-unknown-0123456789"),
            404: post("/generate", b"{}", f"origin: {PAGE}"),
            413: post(CHAT, bytes(2000), f"origin: {PAGE}"),
        }
        for status, request in asked.items():
            head = (await raw(port, request)).partition(b"\r\n\r\n")[0].lower()
            assert head.startswith(b"http/1.1 %d" % status)
            assert head.count(b"access-control-allow-origin") == 1
            assert f"access-control-allow-origin: {PAGE}".encode() in head
            assert b"access-control-expose-headers: *" in head
            assert b"origin" in next(line for line in head.split(b"\r\n") if line.startswith(b"vary:"))
        assert b"vary: accept, origin" in (await raw(port, asked[200])).lower()
        foreign = Answer.parsed(await raw(port, post(CHAT, b"{", f"origin: {OTHER}")))
        assert "access-control-allow-origin" not in foreign.headers


async def test_a_stream_that_began_while_it_waited_has_them(tmp_path: Path) -> None:
    app = App(is_held=True)
    async with site(app, tmp_path, MINE + "keep_alive: 20ms\n", requests="1") as (sidecar, port):
        first = asyncio.create_task(raw(port, post(CHAT, b'{"messages":["a"]}')))
        await until(lambda: sidecar.controller.pool.state()["leases"] == 1)
        async with connected(port) as (reader, writer):
            writer.write(post(CHAT, b'{"messages":["a"],"stream":true}', f"origin: {PAGE}"))
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
            assert f"access-control-allow-origin: {PAGE}".encode() in head
            assert b": queued" in await asyncio.wait_for(reader.readuntil(b"\n\n"), 60)
            app.release(2)
            await asyncio.wait_for(reader.read(), 60)
        await first


async def test_every_origin_is_a_star_without_credentials(tmp_path: Path) -> None:
    async with site(App(), tmp_path, CORS.format("*")) as (_, port):
        for answer in (
            await preflight(port, origin=OTHER),
            Answer.parsed(await raw(port, post(CHAT, b"{", f"origin: {OTHER}", "cookie: a=b"))),
        ):
            assert answer.headers["access-control-allow-origin"] == "*"
            assert "access-control-allow-credentials" not in answer.headers


async def test_another_policy_has_other_origins_at_once(tmp_path: Path) -> None:
    app = App()
    async with site(app, tmp_path, "") as (sidecar, port):

        async def become(more: str) -> None:
            before = sidecar.controller.policy.generation
            write_policy(tmp_path, more)
            await until(lambda: sidecar.controller.policy.generation != before)

        await preflight(port)
        assert [seen.scope["method"] for seen in app.seen] == ["OPTIONS"]  # the app's, as all else that only reads
        await become(MINE)
        assert (await preflight(port)).headers["access-control-allow-origin"] == PAGE
        assert (await preflight(port, origin=OTHER)).status == 400
        await become('cors: {origins: ["' + OTHER + '"], headers: [Authorization]}\n')
        assert (await preflight(port, origin=PAGE)).status == 400
        assert (await preflight(port, origin=OTHER)).status == 400
        assert (await preflight(port, origin=OTHER, headers="authorization")).status == 200
        await become("")
        plain = Answer.parsed(await raw(port, post(CHAT, str(chat()).replace("'", '"').encode(), f"origin: {PAGE}")))
        assert (plain.status, "vary" in plain.headers) == (200, False)
        assert len(app.seen) == 2
