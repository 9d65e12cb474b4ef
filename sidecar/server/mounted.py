"""Lifespan of a mounted middleware: steps at the server's start and end, a start that fails, services.

A server that constructs the middleware from the environment alone gives it its app and its lifespan, and nothing else.
So telemetry and the admin pages start and end with the lifespan, and a mistake in the environment fails the server's
start. Each process of such a server has a queue of its own, unless they share one pool in a store.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sidecar.server.server import CannotServe

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


Step = Callable[[], Awaitable[None]]


class Lifespan:
    """Runs steps around an app's lifespan.

    The steps of `opening` run before the app hears of the server's start, those of `asking` when the app has started:
    they may ask the app about its engine. The steps of `closing` run before the app hears of the server's end, after
    its last request. A part that is not ready reports that itself, in its responses and on `/readyz`. Only a step of
    `asking` may raise, and only CannotServe: then the server's start fails, after the steps of `closing`.
    """

    def __init__(
        self, app: ASGIApp, *, opening: Sequence[Step] = (), asking: Sequence[Step] = (), closing: Sequence[Step] = ()
    ) -> None:
        self.app = app
        self._before = {"lifespan.startup": opening, "lifespan.shutdown": closing}
        self._after = {"lifespan.startup.complete": asking}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one ASGI scope."""
        if scope["type"] == "lifespan":
            await self._lifespan(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_failed = False

        async def received() -> Message:
            message = await receive()
            for step in self._before.get(message["type"], ()):
                await step()
            return message

        async def sent(message: Message) -> None:
            nonlocal has_failed
            if has_failed:  # the server has heard why, and takes no other message
                return
            try:
                for step in self._after.get(message["type"], ()):
                    await step()
            except CannotServe as mistake:
                has_failed = True
                for step in self._before["lifespan.shutdown"]:
                    await step()
                await send(startup_failed(mistake))
                raise
            await send(message)

        await self.app(scope, received, sent)


class FailedStart:
    """An app that reports to the server why its start failed, and raises that mistake then and at every request.

    Starlette constructs its middleware when the lifespan starts, and uvicorn takes an exception there for an app
    without a lifespan: it logs "startup complete" and answers every request with a 500. Only `lifespan.startup.failed`
    stops it. Starlette's TestClient waits for the app's end after that message, and hangs where the app ends without an
    exception.
    """

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


PROCESSES_VARIABLE = "SIDECAR_PROCESSES"
"""The number of processes, for servers that do not tell their app. The launchers set it."""


def processes(scope: Scope, environment: Mapping[str, str]) -> int:
    """The number that the server or the environment gives, else 1. Raises ValueError for an invalid number."""
    arguments = getattr(getattr(scope.get("app"), "state", None), "args", None)
    count = getattr(arguments, "api_server_count", None)  # vLLM's; None where there is one process
    if isinstance(count, int):
        return max(1, count)
    written = environment.get(PROCESSES_VARIABLE, "").strip() or "1"
    if not written.isdecimal() or int(written) < 1:
        raise ValueError(f"{PROCESSES_VARIABLE}: {written!r} is no number of processes; write 1 or more")
    return int(written)


def refuse_separate_pools(count: int) -> None:
    """Raises ValueError for several processes without a store."""
    if count > 1:
        raise ValueError(
            f"{count} server processes share this engine, and each would admit a whole pool of its own: "
            "set SIDECAR_STORE=redis://HOST:6379/0 so that they share one, start a single server process, "
            "or run `sidecar serve` in front"
        )
