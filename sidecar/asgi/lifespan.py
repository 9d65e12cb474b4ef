"""The pool's life, and what must be known of the engine, tied to the server's start and end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from sidecar.asgi.types import ASGIApp, Message, Receive, Scope, Send

Step = Callable[[], Awaitable[None]]


class Lifespan:
    """Around an app: `opening`'s steps before the app hears of the server's start, `asking`'s when it has started.

    `closing`'s come before the app hears of the server's end; a server says so when its last request is over. What asks
    the app about its engine belongs to `asking`. No step raises: what cannot get ready does not keep the server from
    starting, and says so itself, request by request and on the readiness page.
    """

    def __init__(
        self, app: ASGIApp, *, opening: Sequence[Step] = (), asking: Sequence[Step] = (), closing: Sequence[Step] = ()
    ) -> None:
        self.app = app
        self._before = {"lifespan.startup": opening, "lifespan.shutdown": closing}
        self._behind = {"lifespan.startup.complete": asking}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one ASGI scope."""

        async def received() -> Message:
            message = await receive()
            await _take(self._before.get(message["type"], ()))
            return message

        async def sent(message: Message) -> None:
            await _take(self._behind.get(message["type"], ()))
            await send(message)

        if scope["type"] == "lifespan":
            await self.app(scope, received, sent)
        else:
            await self.app(scope, receive, send)


async def _take(steps: Sequence[Step]) -> None:
    for step in steps:
        await step()
