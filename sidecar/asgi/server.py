"""Runs the door and its admin pages in one event loop, and ends them without cutting off who is being served.

The end, in order: a signal calls `drain`, after which the door refuses new requests with a 503 and `/readyz` says not
ready, while the port goes on accepting so that they get that answer rather than a refused connection. When the
running requests are `drained`, or the grace is over, the port closes, then the admin port. A second signal ends the
waiting at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

import uvicorn

from sidecar.asgi.connection import Connection
from sidecar.asgi.proxy import ResponseCut
from sidecar.asgi.types import ASGIApp

# Above the 60 s after which ALB and nginx, by default, close an idle connection: they must be the first to do so.
_KEEP_ALIVE_S = 75
_ADMIN_KEEP_ALIVE_S = 5
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_HANGUP = (signal.SIGHUP,) if sys.platform != "win32" else ()


class CannotServe(Exception):
    """A port is taken, an address is not this machine's, the app did not start. The message is one line."""


async def serve(
    app: ASGIApp,
    *,
    host: str,
    port: int,
    admin: ASGIApp,
    admin_host: str,
    admin_port: int,
    drain: Callable[[], None],
    drained: Callable[[], Awaitable[None]],
    grace_s: float,
    reload: Callable[[], None] | None = None,
    announce: Callable[[str], None] = print,
) -> None:
    """Serves `app` and `admin` until SIGTERM or SIGINT; returns when both have ended. Call it in the main thread.

    SIGHUP calls `reload`, where there is one: a terminal that closes sends it, too, and does not end the server then.

    `announce` gets one line per address as soon as it answers, with the port that was chosen for port 0. Raises
    CannotServe when a port cannot be had or the app's startup failed.
    """
    signals = _Signals(reload)
    with listening(host, port) as door_socket, listening(admin_host, admin_port) as admin_socket, signals.caught():
        servers = [
            _Server("door", app, door_socket, lifespan="on", timeout_keep_alive=_KEEP_ALIVE_S),
            _Server("admin", admin, admin_socket, lifespan="off", timeout_keep_alive=_ADMIN_KEEP_ALIVE_S),
        ]
        running = [asyncio.ensure_future(server.serve(sockets=[server.socket])) for server in servers]
        await _wait_first(_all_ready(servers), *running)
        if running[0].done():
            raise CannotServe("the app failed to start")
        for server in servers:
            announce(server.address())
        await _wait_first(signals.first.wait(), *running)
        deadline_s = asyncio.get_running_loop().time() + grace_s
        drain()
        await _wait_first(drained(), signals.second.wait(), timeout_s=grace_s)
        for server, task in zip(servers, running, strict=True):
            await server.end(task, deadline_s, signals.second)


def run(main: Coroutine[Any, Any, None]) -> None:
    """Runs `main` on uvloop where there is one: it halves what a request costs."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


async def _all_ready(servers: list[_Server]) -> None:
    for server in servers:
        await server.ready.wait()


async def _wait_first(*awaitables: Awaitable[Any], timeout_s: float | None = None) -> None:
    """Returns when one has ended or the time is over; cancels the coroutines among the others, and leaves tasks be.

    Raises what the one that ended has raised.
    """
    own = [asyncio.ensure_future(each) for each in awaitables if not asyncio.isfuture(each)]
    given = [each for each in awaitables if asyncio.isfuture(each)]
    try:
        done, _ = await asyncio.wait([*own, *given], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for ended in done:
            ended.result()
    finally:
        for task in own:
            task.cancel()


class _Server(uvicorn.Server):
    """A uvicorn server that leaves the signals alone and says when it is ready."""

    def __init__(self, name: str, app: ASGIApp, listener: socket.socket, *, lifespan: Any, timeout_keep_alive: int):
        config = uvicorn.Config(
            app,
            # Said, not guessed: uvicorn takes a bound method for an older kind of app.
            interface="asgi3",
            lifespan=lifespan,
            timeout_keep_alive=timeout_keep_alive,
            http=Connection,
            ws="none",
            # Whoever runs the process decides how its log looks.
            log_config=None,
            log_level="warning",
            access_log=False,
            # A proxy passes on what the engine says of itself and of the time.
            server_header=False,
            date_header=False,
            # Anyone could write the headers that it would believe.
            proxy_headers=False,
        )
        super().__init__(config)
        logging.getLogger("uvicorn.error").addFilter(_without_traceback)
        self.name = name
        self.socket = listener
        self.ready = asyncio.Event()

    def address(self) -> str:
        host, port = self.socket.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        return f"sidecar: {self.name} on http://{shown}:{port}"

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except SystemExit:  # uvicorn's way to say that the app failed to start; it has logged why
            self.should_exit = True
        if self.started:
            self.ready.set()

    async def end(self, serving: asyncio.Task[None], deadline_s: float, at_once: asyncio.Event) -> None:
        """Closes the port. What still runs may end by itself until the loop's time is `deadline_s`, then is canceled.

        The same happens as soon as `at_once` is set. `serving` is the task that runs this server.
        """
        grace_left_s = 0.0 if at_once.is_set() else max(0.0, deadline_s - asyncio.get_running_loop().time())
        # uvicorn passes it to asyncio.wait_for, which takes fractions.
        self.config.timeout_graceful_shutdown = grace_left_s  # type: ignore[assignment]
        self.should_exit = True
        await _wait_first(serving, at_once.wait())
        for request in self.server_state.tasks:
            request.cancel()
        await serving

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Signals:
    """The first signal asks for a graceful end, the second for an end; SIGHUP calls `reload`."""

    def __init__(self, reload: Callable[[], None] | None) -> None:
        self._handlers = dict.fromkeys(_SIGNALS, self._on_signal)
        if reload is not None:
            self._handlers |= dict.fromkeys(_HANGUP, reload)
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number, handler in self._handlers.items():
            loop.add_signal_handler(number, handler)
        try:
            yield
        finally:
            for number in self._handlers:
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """A bound socket; the server begins to listen on it when the app is up. Raises CannotServe."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
        )[0]
        # With the protocol named: asyncio only then turns Nagle's algorithm off, which costs 40 ms per response.
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise CannotServe(f"cannot listen on {host}:{port}: {error.strerror}") from None
    with listener:
        try:
            if sys.platform != "win32":
                # Else a restart has to wait for the last connections' TIME_WAIT.
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            # Found out here rather than when everything has started: another process may listen on it already.
            listener.listen(1)
        except OSError as error:
            raise CannotServe(f"cannot listen on {host}:{port}: {error.strerror}") from None
        yield listener


def _without_traceback(record: logging.LogRecord) -> bool:
    """What ended for a known reason is one line in the log: the traceback would only show our own code."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, asyncio.CancelledError):
        record.msg, record.args, record.exc_info = "a request was cut off: the server stops", (), None
    elif isinstance(error, ResponseCut):
        record.msg, record.args, record.exc_info = str(error), (), None
    return True
