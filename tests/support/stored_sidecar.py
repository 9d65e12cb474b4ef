"""A replica of a pool in a real store, in the test's own process: its clients' port and its admin port."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from sidecar import AdmissionMiddleware
from sidecar.admin.app import admin_app
from sidecar.admin.auth import Access, AdminGuard
from sidecar.cli import main
from tests.support.middleware import CHAT, Answer, App, chat, write_policy
from tests.support.serving import serving
from tests.support.waiting import until
from tests.support.wire import exchange, post


class Sidecar:
    """One replica, with its clients' port and its admin port."""

    def __init__(self, middleware: AdmissionMiddleware, port: int, admin: str, session: aiohttp.ClientSession) -> None:
        self.middleware, self.port, self.admin, self.session = middleware, port, admin, session

    async def ask(self, *headers: str) -> Answer:
        raw = json.dumps(chat()).encode()
        return Answer.parsed(await asyncio.wait_for(exchange(self.port, post(CHAT, raw, *headers)), 30))

    async def get(self, path: str, *headers: str) -> Answer:
        """One GET on the clients' port."""
        lines = [f"GET {path} HTTP/1.1", "host: h", "connection: close", *headers, "", ""]
        return Answer.parsed(await exchange(self.port, "\r\n".join(lines).encode()))

    async def status(self, written: str) -> int:
        return (await self.ask(f"authorization: Bearer {written}")).status

    async def gives(self, status: int, written: str) -> bool:
        """Whether the key is answered so by now."""
        return await self.status(written) == status

    async def call(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        async with self.session.request(method, self.admin + path, data=data, headers=sent) as answer:
            return answer.status, await answer.json()

    async def until(self, is_so: Callable[[], Any], within_s: float) -> float:
        """The time until it is so."""
        return await until(is_so, within_s)

    async def command(self, *words: str) -> int:
        """Runs `sidecar` beside this event loop."""
        return await asyncio.to_thread(main, [*words, "--admin", self.admin])

    def notices(self) -> str:
        return "\n".join(self.middleware.controller.notices())


def write(folder: Path, url: str, more: str = "", **settings: str) -> Path:
    """A policy with a store, where no one is anonymous."""
    path = write_policy(folder, f"store: {url}\n{more}", **settings)
    path.write_text(path.read_text().replace("anonymous: normal", "anonymous: deny"))
    return path


@asynccontextmanager
async def sidecar(
    folder: Path, url: str, more: str = "", access: Access | None = None, app: Any = None, **settings: str
) -> AsyncIterator[Sidecar]:
    """A replica of the pool at `url`. `more` and `settings` are as in `write_policy`."""
    write(folder, url, more, **settings)
    middleware = AdmissionMiddleware(App() if app is None else app, folder, is_shown=True)
    controller = middleware.controller
    pages = admin_app(state=controller.state, readiness=list, routes=middleware.observability.routes)
    guarded = AdminGuard(pages, access or Access())
    async with (
        serving(middleware) as served,
        serving(guarded, lifespan="off") as admin,
        aiohttp.ClientSession() as session,
    ):
        yield Sidecar(middleware, served.port, admin.url, session)
