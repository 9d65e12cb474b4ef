"""Lifespan of a mounted middleware: steps at the server's start and end, a start that fails, services.

A server gives the middleware its app and its lifespan, and nothing else. So telemetry and the admin pages start and end
with the lifespan, and a mistake in the environment fails the server's start. Each process of such a server has a queue
of its own, unless they share one pool in a store.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sidecar.admission.responses import send_error, speaks_anthropic
from sidecar.errors import NotStarted
from sidecar.server import CannotServe
from sidecar.server.workers import (
    ServerProcesses,
    refuse_separate_pools,
    refuse_shared_engine,
    server_processes,
)

_log = logging.getLogger("sidecar.mounted")
_NOT_STARTED = (
    "the admission control of this server could not start: no request is served, and the server's log says why"
)
_LAST_MESSAGES = frozenset(("lifespan.startup.failed", "lifespan.shutdown.complete", "lifespan.shutdown.failed"))


class MountedLifespan:
    """Runs `services` around an app's lifespan. `is_shared` says that the pool is in a store, `is_engine` that each
    process is an engine of it.

    `services` gets the server's processes, and raises CannotServe or ValueError where it cannot start. So does a server
    of several processes without a store. Several lifespans at once have the same services, from the start of the first
    to the end of the last.
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
        self._open = 0
        self._started = AsyncExitStack()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves a lifespan's scope."""
        pending: list[Message] = [await receive()]  # lifespan.startup: for the app, when the services have started
        is_open = False

        async def received() -> Message:
            return pending.pop() if pending else await receive()

        async def sent(message: Message) -> None:
            if message["type"] in _LAST_MESSAGES:  # after these the server may end the loop at once
                await end()
            await send(message)

        async def end() -> None:
            nonlocal is_open
            if is_open:
                is_open = False
                await self._end()

        try:
            processes = check_processes(scope, self._environment, is_shared=self._is_shared, is_engine=self._is_engine)
            await self._begin(processes)
        except (CannotServe, ValueError) as mistake:
            await send(startup_failed(mistake))
            raise
        is_open = True
        try:
            await self.app(scope, received, sent)
        finally:
            await end()

    async def _begin(self, processes: ServerProcesses) -> None:
        self._open += 1
        try:
            if self._open == 1:
                from sidecar.server.own_limits import report_own_limit

                await self._started.enter_async_context(self._services(processes))
                report_own_limit()
        except BaseException:
            self._open -= 1
            raise

    async def _end(self) -> None:
        self._open -= 1
        if not self._open:
            await self._started.aclose()


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
    also run where the app has no lifespan. Of several lifespans at once, the first to start runs `opening` and
    `asking`, and the last to end `closing`: whichever way it ends, but for a server that cancels it.
    """

    def __init__(
        self, app: ASGIApp, *, opening: Sequence[Step] = (), asking: Sequence[Step] = (), closing: Sequence[Step] = ()
    ) -> None:
        self.app = app
        self._opening, self._asking, self._closing = opening, asking, closing
        self._open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves a lifespan's scope."""
        heard: list[str] = []
        has_failed = is_first = is_open = False

        async def received() -> Message:
            nonlocal is_first, is_open
            message = await receive()
            heard.append(message["type"])
            if message["type"] == "lifespan.startup":
                self._open += 1
                is_first, is_open = self._open == 1, True
                await _run(self._opening if is_first else ())
            else:
                await close()
            return message

        async def close() -> None:
            nonlocal is_open
            if is_open:
                is_open = False
                self._open -= 1
                await _run(() if self._open else self._closing)

        async def sent(message: Message) -> None:
            nonlocal has_failed
            if has_failed:  # the server has heard why, and takes no other message
                return
            heard.append(message["type"])
            try:
                if message["type"] == "lifespan.startup.complete" and is_first:
                    await _run(self._asking)
            except CannotServe as mistake:
                has_failed = True
                await close()
                await send(startup_failed(mistake))
                raise
            if message["type"] == "lifespan.startup.failed":
                await close()
            await send(message)

        try:
            await self._serve_app(scope, received, sent, heard)
        except asyncio.CancelledError:
            self._open -= is_open
            raise
        except BaseException:
            await close()
            raise
        await close()

    async def _serve_app(self, scope: Scope, received: Receive, sent: Send, heard: list[str]) -> None:
        try:
            await self.app(scope, received, sent)
        except Exception as error:
            # Starlette sets `app`. An app of Starlette's has a lifespan, and this is a failure of its start.
            if any(each in _OF_APP for each in heard) or "app" in scope:
                raise
            _log.info("the app has no lifespan (%s)", type(error).__name__, extra={"event": "no_lifespan"})
        if not any(each in _OF_APP for each in heard):
            await _without_app(received, sent, has_begun=bool(heard))


async def _run(steps: Sequence[Step]) -> None:
    for step in steps:
        await step()


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
    """An app that reports to the server why its start failed, and raises that mistake then. Requests get an error.

    Starlette constructs its middleware when the lifespan starts, and uvicorn takes an exception there for an app
    without a lifespan: it logs "startup complete" and answers every request with a 500. Only `lifespan.startup.failed`
    stops it. Starlette's TestClient waits for the app's end after that message, and hangs where the app ends without an
    exception. A request reaches it only where the server has no lifespan for it, or goes on without: the log says why
    once, and the client is not told.
    """

    def __init__(self, mistake: Exception) -> None:
        self.mistake = mistake
        self._is_logged = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one ASGI scope."""
        if scope["type"] == "lifespan":
            await receive()
            await send(startup_failed(self.mistake))
        if scope["type"] != "http":
            raise self.mistake.with_traceback(None)  # else the traceback would grow with every connection
        if not self._is_logged:
            self._is_logged = True
            _log.error("no request is served: %s", self.mistake, extra={"event": "not_started"})
        await send_error(send, NotStarted(_NOT_STARTED), anthropic=speaks_anthropic(scope["path"]))


def startup_failed(mistake: Exception) -> Message:
    """The message that tells a server that its app cannot start. The app must raise `mistake` after it."""
    return {"type": "lifespan.startup.failed", "message": str(mistake)}
