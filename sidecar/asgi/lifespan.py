"""The pool's life, tied to the server's: ready before the first request, closed behind the last."""

from __future__ import annotations

from sidecar.asgi.types import ASGIApp, Message, Receive, Scope, Send
from sidecar.pools import Pool


class PoolLifespan:
    """Around an app: opens the pool before the app hears of the server's start, closes it before that of its end.

    A server says `lifespan.shutdown` when its last request is over. A pool that cannot get ready does not keep the
    server from starting: it says so itself, request by request and on the readiness page.
    """

    def __init__(self, app: ASGIApp, pool: Pool) -> None:
        self.app = app
        self.pool = pool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one ASGI scope."""

        async def received() -> Message:
            message = await receive()
            if message["type"] == "lifespan.startup":
                await self.pool.open()
            elif message["type"] == "lifespan.shutdown":
                await self.pool.close()
            return message

        await self.app(scope, received if scope["type"] == "lifespan" else receive, send)
