"""Lifespan of a middleware: services and steps at the server's start and end, a start that fails.

A server gives a mounted middleware its app and its lifespan, and nothing else. So telemetry and the admin pages start
and end with the lifespan, and a mistake in the environment fails the server's start.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sidecar.admission.responses import send_error, speaks_anthropic
from sidecar.errors import NotStarted
from sidecar.server import CannotServe
from sidecar.server.workers import written_for_granian

_log = logging.getLogger("sidecar.mounted")
_NOT_STARTED = (
    "the admission control of this server could not start: no request is served, and the server's log says why"
)
Step = Callable[[], Awaitable[None]]
Services = Callable[[Scope], AbstractAsyncContextManager[None]]


class Lifespan:
    """Runs services and steps around an app's lifespan.

    `services` run from the server's start, before the app's own, to its end. They get the lifespan's scope, and
    raise CannotServe or ValueError where they cannot start: then the server's start fails. The steps of `opening` run
    after their start, those of `asking` when the app has started: they may ask the app about its engine. The steps of
    `closing` run before the app's own end, after its last request. A part that is not ready reports
    that itself, in its responses and on `/readyz`. Only a step of `asking` may raise, and only CannotServe: then the
    server's start fails, after the steps of `closing`.

    All of it also runs where the app has no lifespan. Of several lifespans at once, the first to start begins it, and
    the last to end ends it, whichever way; the steps of `closing` do not run where the server cancels that.
    """

    def __init__(
        self,
        app: ASGIApp,
        services: Services = lambda _: nullcontext(),
        *,
        opening: Sequence[Step] = (),
        asking: Sequence[Step] = (),
        closing: Sequence[Step] = (),
    ) -> None:
        self.app = app
        self._services = services
        self._opening, self._asking, self._closing = opening, asking, closing
        self._open = 0
        self._running = AsyncExitStack()
        self._is_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves a lifespan's scope."""
        types: list[str] = []
        failure: Exception | None = None
        is_first = is_open = False

        async def received() -> Message:
            nonlocal is_first, is_open
            message = await receive()
            types.append(message["type"])
            if message["type"] == "lifespan.startup":
                self._open += 1
                is_first, is_open = self._open == 1, True
                if is_first:
                    await begin(self._begin(scope))
            else:
                await close()
            return message

        async def begin(steps: Awaitable[None]) -> None:
            nonlocal failure
            try:
                await steps
            except (CannotServe, ValueError) as mistake:
                failure = mistake
                types.append("lifespan.startup.failed")
                await close()
                await send(startup_failed(mistake))
                raise

        async def close(*, is_canceled: bool = False) -> None:
            nonlocal is_open
            if is_open:
                is_open = False
                self._open -= 1
                if not self._open:
                    await self._end(is_canceled=is_canceled)

        async def sent(message: Message) -> None:
            if failure is not None:  # the server has been sent the reason, and takes no other message
                return
            types.append(message["type"])
            if message["type"] == "lifespan.startup.complete" and is_first:
                await begin(_run(self._asking))
            if message["type"] == "lifespan.startup.failed":
                await close()
            await send(message)

        try:
            await self._serve_app(scope, received, sent, types)
        except asyncio.CancelledError:
            await close(is_canceled=True)
            raise
        finally:
            await close()
        if failure is not None:  # the app has caught it
            raise failure

    async def _begin(self, scope: Scope) -> None:
        await self._running.enter_async_context(self._services(scope))
        self._is_begun = True
        await _run(self._opening)

    async def _end(self, *, is_canceled: bool) -> None:
        is_begun, self._is_begun = self._is_begun, False
        try:
            if is_begun and not is_canceled:
                await _run(self._closing)
        finally:
            await self._running.aclose()

    async def _serve_app(self, scope: Scope, received: Receive, sent: Send, types: list[str]) -> None:
        try:
            await self.app(scope, received, sent)
        except Exception as error:
            # Starlette sets `app`. An app of Starlette's has a lifespan, and this is a failure of its start.
            if any(each in _OF_APP for each in types) or "app" in scope:
                raise
            _log.info("the app has no lifespan (%s)", type(error).__name__, extra={"event": "no_lifespan"})
        if not any(each in _OF_APP for each in types):
            await _without_app(received, sent, has_begun=bool(types))


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
    once, and the answer does not.
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


# -- Limit that a server puts on requests by itself: it acts before admission, and knows no tier.
#
# Read as far as it can be: from uvicorn 0.54 (`server.py`), which uvicorn's workers for gunicorn use too, and from
# granian's command line (2.8). Hypercorn, daphne and gunicorn's own worker have none.

_NOTICE = (
    "the server's own limit (%s) acts before admission and knows no tier: %s; leave it out, or set it above all that "
    "may run and wait"
)


def report_own_limit() -> None:
    """Logs the limit of the server, where it is known to have one."""
    limit = _uvicorn_limits() or _granian_limits()
    if limit is not None:
        _log.warning(_NOTICE, *limit, extra={"event": "server_limit"})


def _uvicorn_limits() -> tuple[str, str] | None:
    """SIGTERM is handled by a method of uvicorn's server, which has its configuration."""
    server = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    most = getattr(getattr(server, "config", None), "limit_concurrency", None)
    if not isinstance(most, int):
        return None
    return f"limit_concurrency={most}", f"beyond {most} connections or requests uvicorn answers 503"


def _granian_limits() -> tuple[str, str] | None:
    written = written_for_granian("backpressure")
    return (f"backpressure={written}", f"beyond {written} requests the next wait unseen") if written else None
