"""Services of a middleware that another server constructs from the environment alone: telemetry and the admin pages.

Such a server gives the middleware its app and its lifespan, and nothing else. So the services start and end with the
lifespan, and a mistake in the environment fails the server's start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sidecar.server.lifespan import startup_failed
from sidecar.server.server import CannotServe
from sidecar.server.workers import processes, refuse_separate_pools

_LAST_MESSAGES = frozenset(("lifespan.startup.failed", "lifespan.shutdown.complete", "lifespan.shutdown.failed"))


class Mounted:
    """Runs `services` around an app's lifespan. `is_shared` says that the pool is in a store.

    `services` gets the number of server processes, and raises CannotServe or ValueError where it cannot start.
    """

    def __init__(
        self,
        app: ASGIApp,
        services: Callable[[int], AbstractAsyncContextManager[None]],
        *,
        is_shared: bool,
        environment: Mapping[str, str],
    ) -> None:
        self.app = app
        self._services = services
        self._is_shared = is_shared
        self._environment = environment

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one ASGI scope."""
        if scope["type"] == "lifespan":
            await self._lifespan(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        pending: list[Message] = [await receive()]  # lifespan.startup: for the app, when the services have started

        async def received() -> Message:
            return pending.pop() if pending else await receive()

        async def sent(message: Message) -> None:
            if message["type"] in _LAST_MESSAGES:  # after these the server may end the loop at once
                await started.aclose()
            await send(message)

        async with AsyncExitStack() as started:
            try:
                count = processes(scope, self._environment)
                if not self._is_shared:
                    refuse_separate_pools(count)
                await started.enter_async_context(self._services(count))
            except (CannotServe, ValueError) as mistake:
                await send(startup_failed(mistake))
                raise
            await self.app(scope, received, sent)
