"""What comes with a door that a server constructs from its environment alone: everything `sidecar serve` has flags for.

The server gives us its app and its lifespan and nothing else. So the admin pages and the telemetry begin with its
start and end with its end, and what is wrong with the environment fails the start.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager

from starlette.routing import BaseRoute

from sidecar.admin.app import admin_app
from sidecar.admin.port import admin_pages
from sidecar.asgi.door import Door
from sidecar.asgi.failed_start import startup_failed
from sidecar.asgi.server import CannotServe
from sidecar.asgi.types import ASGIApp, Message, Receive, Scope, Send
from sidecar.asgi.workers import processes, refuse_separate_pools

_LAST_WORDS = frozenset(("lifespan.startup.failed", "lifespan.shutdown.complete", "lifespan.shutdown.failed"))


class Mounted:
    """Around an app. `door` is the door before it; `is_shared` says that its pool is in a store.

    `routes` are shown on the admin port beside the door's own pages. `telemetry` is entered when the server starts, in
    its event loop, and left when it ends; it gives what sends what is still held, which may block. It raises ValueError
    for an environment that cannot be.
    """

    def __init__(
        self,
        app: ASGIApp,
        door: Door,
        *,
        routes: Sequence[BaseRoute],
        is_shared: bool,
        environment: Mapping[str, str],
        telemetry: Callable[[], AbstractContextManager[Callable[[], None]]],
    ) -> None:
        self.app = app
        self._door = door
        self._routes = routes
        self._is_shared = is_shared
        self._environment = environment
        self._telemetry = telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one ASGI scope."""
        if scope["type"] == "lifespan":
            await self._live(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        pending: list[Message] = [await receive()]  # lifespan.startup: the app's, when ours has gone well

        async def received() -> Message:
            return pending.pop() if pending else await receive()

        async def sent(message: Message) -> None:
            if message["type"] in _LAST_WORDS:  # behind these the server may end the loop at once
                await began.aclose()
            await send(message)

        async with AsyncExitStack() as began:
            try:
                await began.enter_async_context(self._begun(scope))
            except (CannotServe, ValueError) as mistake:
                await send(startup_failed(mistake))
                raise
            await self.app(scope, received, sent)

    @asynccontextmanager
    async def _begun(self, scope: Scope) -> AsyncIterator[None]:
        count = processes(scope, self._environment)
        if not self._is_shared:
            refuse_separate_pools(count)
        door = self._door
        pages = admin_app(state=door.state, readiness=door.readiness, notices=door.notices, routes=self._routes)
        with self._telemetry() as send_the_rest:
            try:
                async with admin_pages(pages, self._environment, count):
                    yield
            finally:
                await asyncio.to_thread(send_the_rest)
