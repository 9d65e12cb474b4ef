"""Things that stand between the doctor and an engine: real servers around our own reverse proxy, each with a fault."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sidecar.proxy.proxy import ReverseProxy
from tests.support.serving import serving

Edit = Callable[[dict[bytes, bytes], dict[str, Any]], None]
"""Changes a request's headers, by lower-case name, and its body's members."""


def drops_header(name: str) -> Edit:
    def edit(headers: dict[bytes, bytes], body: dict[str, Any]) -> None:
        headers.pop(name.encode(), None)

    return edit


def drops_member(name: str) -> Edit:
    def edit(headers: dict[bytes, bytes], body: dict[str, Any]) -> None:
        body.pop(name, None)

    return edit


def negates_header(name: str) -> Edit:
    def edit(headers: dict[bytes, bytes], body: dict[str, Any]) -> None:
        if name.encode() in headers:
            headers[name.encode()] = b"%d" % -int(headers[name.encode()])

    return edit


def negates_everything(headers: dict[bytes, bytes], body: dict[str, Any]) -> None:
    negates_header("x-vllm-priority")(headers, body)
    if isinstance(body.get("priority"), int):
        body["priority"] = -body["priority"]


def evens_out(headers: dict[bytes, bytes], body: dict[str, Any]) -> None:
    if isinstance(body.get("priority"), int):
        body["priority"] = 0


class Between:
    """A reverse proxy that edits POSTs, holds them back, hides pages, or refuses who has no key."""

    def __init__(
        self,
        upstream: str,
        *,
        edit: Edit | None = None,
        at_once: int = 10_000,
        entry_s: float = 0.0,
        hides: tuple[str, ...] = (),
        key: str | None = None,
    ) -> None:
        self._proxy = ReverseProxy(upstream)
        self._edit = edit
        self._slots = asyncio.Semaphore(at_once)
        self._entry = asyncio.Lock()
        self._entry_s = entry_s
        self._hides = hides
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._proxy(scope, receive, send)
        elif scope["path"] in self._hides:
            await _answer(send, 404)
        elif self._key is not None and (b"authorization", f"Bearer {self._key}".encode()) not in scope["headers"]:
            await _answer(send, 401)
        elif scope["method"] != "POST":
            await self._proxy(scope, receive, send)
        else:
            await self._post(scope, receive, send)

    async def _post(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _read(receive)
        headers = dict(scope["headers"])
        if self._edit is not None:
            members = json.loads(body)
            self._edit(headers, members)
            body = json.dumps(members).encode()
            headers[b"content-length"] = b"%d" % len(body)
        if self._entry_s:
            async with self._entry:
                await asyncio.sleep(self._entry_s)
        async with self._slots:
            await self._proxy({**scope, "headers": list(headers.items())}, _replayed(body, receive), send)


@asynccontextmanager
async def between(upstream: str, **faults: Any) -> AsyncIterator[str]:
    """The address of such a proxy in front of `upstream`."""
    async with served(Between(upstream, **faults)) as url:
        yield url


@asynccontextmanager
async def served(app: ASGIApp) -> AsyncIterator[str]:
    async with serving(app) as server:
        yield server.url


async def _read(receive: Receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return body


def _replayed(body: bytes, receive: Receive) -> Receive:
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def _answer(send: Send, status: int) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"{}"})
