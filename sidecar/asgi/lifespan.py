"""The pool's life, and what must be known of the engine, tied to the server's start and end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from sidecar.asgi.types import ASGIApp, Message, Receive, Scope, Send

Step = Callable[[], Awaitable[None]]


class Lifespan:
    """Around an app: takes `opening`'s steps when the app has started, `closing`'s before it hears of the server's end.

    A step may ask the app about its engine, so the app comes first. A server says `lifespan.shutdown` when its last
    request is over. No step raises: what cannot get ready does not keep the server from starting, and says so itself,
    request by request and on the readiness page.
    """

    def __init__(self, app: ASGIApp, *, opening: Sequence[Step], closing: Sequence[Step] = ()) -> None:
        self.app = app
        self._opening = opening
        self._closing = closing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one ASGI scope."""

        async def received() -> Message:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                for step in self._closing:
                    await step()
            return message

        async def sent(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                for step in self._opening:
                    await step()
            await send(message)

        if scope["type"] == "lifespan":
            await self.app(scope, received, sent)
        else:
            await self.app(scope, receive, send)
