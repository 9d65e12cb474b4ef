"""Lifespan of a mounted middleware: steps at the server's start and end, a start that fails, services.

A server gives the middleware its app and its lifespan, and nothing else. So telemetry and the admin pages start and end
with the lifespan, and a mistake in the environment fails the server's start. Each process of such a server has a queue
of its own, unless they share one pool in a store.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sidecar.server import CannotServe
from sidecar.server.own_limits import report_own_limit
from sidecar.server.workers import (
    ServerProcesses,
    refuse_separate_pools,
    refuse_shared_engine,
    server_processes,
)

_log = logging.getLogger("sidecar.mounted")
_LAST_MESSAGES = frozenset(("lifespan.startup.failed", "lifespan.shutdown.complete", "lifespan.shutdown.failed"))


class MountedLifespan:
    """Runs `services` around an app's lifespan. `is_shared` says that the pool is in a store, `is_engine` that each
    process is an engine of it.

    `services` gets the server's processes, and raises CannotServe or ValueError where it cannot start. So does a server
    of several processes without a store.
    """

    def __init__(
        self,
        app: ASGIApp,
        services: Callable[[ServerProcesses], AbstractAsyncContextManager[None]],
        *,
        is_shared: bool,
        environment: Mapping[str, str],
        is_engine: bool = False,
    ) -> None:
        self.app = app
        self._services = services
        self._is_shared = is_shared
        self._is_engine = is_engine
        self._environment = environment

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves a lifespan's scope."""
        pending: list[Message] = [await receive()]  # lifespan.startup: for the app, when the services have started

        async def received() -> Message:
            return pending.pop() if pending else await receive()

        async def sent(message: Message) -> None:
            if message["type"] in _LAST_MESSAGES:  # after these the server may end the loop at once
                await started.aclose()
            await send(message)

        async with AsyncExitStack() as started:
            try:
                processes = check_processes(
                    scope, self._environment, is_shared=self._is_shared, is_engine=self._is_engine
                )
                await started.enter_async_context(self._services(processes))
                report_own_limit()
            except (CannotServe, ValueError) as mistake:
                await send(startup_failed(mistake))
                raise
            await self.app(scope, received, sent)


def check_processes(
    scope: Scope, environment: Mapping[str, str], *, is_shared: bool, is_engine: bool = False
) -> ServerProcesses:
    """The server's processes, by its first scope.

    Raises ValueError where each would have a pool of its own, or (`is_engine`) offer a pool the one engine of all.
    """
    processes = server_processes(scope, environment)
    if is_engine:
        refuse_shared_engine(processes)
    elif not is_shared:
        refuse_separate_pools(processes)
    return processes


Step = Callable[[], Awaitable[None]]


class Lifespan:
    """Runs steps around an app's lifespan.

    The steps of `opening` run before the app hears of the server's start, those of `asking` when the app has started:
    they may ask the app about its engine. The steps of `closing` run before the app hears of the server's end, after
    its last request. A part that is not ready reports that itself, in its responses and on `/readyz`. Only a step of
    `asking` may raise, and only CannotServe: then the server's start fails, after the steps of `closing`. The steps
    also run where the app has no lifespan.
    """

    def __init__(
        self, app: ASGIApp, *, opening: Sequence[Step] = (), asking: Sequence[Step] = (), closing: Sequence[Step] = ()
    ) -> None:
        self.app = app
        self._before = {"lifespan.startup": opening, "lifespan.shutdown": closing}
        self._after = {"lifespan.startup.complete": asking}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves a lifespan's scope."""
        heard: list[str] = []
        has_failed = False

        async def received() -> Message:
            message = await receive()
            heard.append(message["type"])
            for step in self._before.get(message["type"], ()):
                await step()
            return message

        async def sent(message: Message) -> None:
            nonlocal has_failed
            if has_failed:  # the server has heard why, and takes no other message
                return
            heard.append(message["type"])
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

        try:
            await self.app(scope, received, sent)
        except Exception as error:
            # Starlette sets `app`. An app of Starlette's has a lifespan, and this is a failure of its start.
            if any(each in _OF_APP for each in heard) or "app" in scope:
                raise
            _log.info("the app has no lifespan (%s)", type(error).__name__, extra={"event": "no_lifespan"})
        if not any(each in _OF_APP for each in heard):
            await _without_app(received, sent, has_begun=bool(heard))


_OF_APP = frozenset(
    f"lifespan.{phase}.{result}" for phase in ("startup", "shutdown") for result in ("complete", "failed")
)


async def _without_app(receive: Receive, send: Send, *, has_begun: bool) -> None:
    """The lifespan of an app that has none: it raised, or returned, without an answer."""
    if not has_begun:
        await receive()
    await send({"type": "lifespan.startup.complete"})
    await receive()
    await send({"type": "lifespan.shutdown.complete"})


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
