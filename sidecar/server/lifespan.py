"""Lifespan steps around an app, and an app whose start failed.

Starlette constructs its middleware when the lifespan starts, and uvicorn takes an exception there for an app without a
lifespan: it logs "startup complete" and answers every request with a 500. Only `lifespan.startup.failed` stops it.
Starlette's TestClient waits for the app's end after that message, and hangs where the app ends without an exception.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

Step = Callable[[], Awaitable[None]]


class Lifespan:
    """Runs steps around an app's lifespan.

    The steps of `opening` run before the app hears of the server's start, those of `asking` when the app has started:
    they may ask the app about its engine. The steps of `closing` run before the app hears of the server's end, after
    its last request. No step raises: a part that is not ready reports that itself, in its responses and on `/readyz`.
    """

    def __init__(
        self, app: ASGIApp, *, opening: Sequence[Step] = (), asking: Sequence[Step] = (), closing: Sequence[Step] = ()
    ) -> None:
        self.app = app
        self._before = {"lifespan.startup": opening, "lifespan.shutdown": closing}
        self._after = {"lifespan.startup.complete": asking}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one ASGI scope."""

        async def received() -> Message:
            message = await receive()
            for step in self._before.get(message["type"], ()):
                await step()
            return message

        async def sent(message: Message) -> None:
            for step in self._after.get(message["type"], ()):
                await step()
            await send(message)

        if scope["type"] == "lifespan":
            await self.app(scope, received, sent)
        else:
            await self.app(scope, receive, send)


class FailedStart:
    """An app that reports to the server why its start failed, and raises that mistake then and at every request."""

    def __init__(self, mistake: Exception) -> None:
        self.mistake = mistake

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one ASGI scope."""
        if scope["type"] == "lifespan":
            await receive()
            await send(startup_failed(self.mistake))
        raise self.mistake.with_traceback(None)  # else the traceback would grow with every request


def startup_failed(mistake: Exception) -> Message:
    """The message that tells a server that its app cannot start. The app must raise `mistake` after it."""
    return {"type": "lifespan.startup.failed", "message": str(mistake)}
