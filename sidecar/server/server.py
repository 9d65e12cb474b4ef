"""Server of `sidecar serve`: clients and admin pages in one event loop, with a graceful end.

A signal calls `drain`: from then on new requests get a 503, and `/readyz` says not ready. The port still accepts
connections, so that clients get that answer rather than a refused connection. When the running requests are `drained`,
or the grace is over, the port closes, then the admin port. A second signal ends the waiting at once. Requests that are
still under way then are cut off: they get a 503, or the end of a response that has begun.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from sidecar.errors import Draining, ResponseCut
from sidecar.server import CannotServe
from sidecar.server.acceptor import Acceptor
from sidecar.server.app_lifespan import AppLifespan
from sidecar.server.certificate import Certificate
from sidecar.server.http_protocol import BoundedHttpProtocol
from sidecar.server.listeners import listening, socket_address
from sidecar.server.open_files import most_clients
from sidecar.server.own_address import leads_to

# ALB and nginx close an idle connection after 60 s by default, and must be the first to close it.
_KEEP_ALIVE_S = 75
_ADMIN_KEEP_ALIVE_S = 5
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_HANGUP = (signal.SIGHUP,) if sys.platform != "win32" else ()


_CUT_WITHIN_S = 1.0
"""The longest time for the responses of requests that are cut off; afterwards their connections are aborted."""
_FLUSH_ROUNDS = 50
_STOPPED = Draining("this server stopped before the request was served; send it again", retry_after_s=1)

_log = logging.getLogger("sidecar.serve")


async def _at_once() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Served:
    """Apps that a process serves: `app` to its clients, and admin `pages`.

    `opened` is called when both answer, and `drain` at the first signal: the port closes when `drained` returns. SIGHUP
    calls `reload`, where there is one: then a terminal that closes does not end the server.
    """

    app: ASGIApp
    pages: ASGIApp
    opened: Callable[[], None] = lambda: None
    drain: Callable[[], None] = lambda: None
    drained: Callable[[], Awaitable[None]] = _at_once
    reload: Callable[[], None] | None = None


async def serve(
    served: Served,
    *,
    address: tuple[str, int],
    admin: tuple[str, int],
    grace_s: float,
    upstreams: Sequence[str] = (),
    announce: Callable[[str], None] = print,
    certificate: Certificate | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT; returns when both servers have ended. Call it in the main thread.

    As soon as both answer, `announce` gets one line per address, with the port that was chosen for port 0. With a
    `certificate` clients are served by TLS alone. `upstreams` are where the app sends requests. Raises CannotServe,
    also where one of those is one of the server's own addresses.
    """
    signals = Signals(served.reload)
    with listening(*address) as client_socket, listening(*admin) as admin_socket, signals.caught():
        refuse_own_addresses(upstreams, (client_socket, admin_socket))

        def announce_both() -> None:
            announce(f"sidecar: proxy on {socket_address(client_socket, has_tls=certificate is not None)}")
            announce(f"sidecar: admin on {socket_address(admin_socket)}")

        await serve_on(
            served,
            client_socket,
            admin_socket,
            end=signals,
            grace_s=grace_s,
            on_ready=announce_both,
            certificate=certificate,
        )


async def serve_on(
    served: Served,
    client_socket: socket.socket,
    admin_socket: socket.socket,
    *,
    end: End,
    grace_s: float,
    on_ready: Callable[[], None] = lambda: None,
    before_listening: Callable[[], Awaitable[None]] = _at_once,
    certificate: Certificate | None = None,
) -> None:
    """As `serve`, on sockets that are bound already, until `end`. `on_ready` is called when both addresses answer.

    `before_listening` is awaited when the app has started.
    """
    lifespan = AppLifespan(served.app)
    pages = Server(served.pages, admin_socket, timeout_keep_alive=_ADMIN_KEEP_ALIVE_S)
    async with pages.running(end):
        try:
            await lifespan.start()
            await before_listening()
            clients = Server(
                served.app,
                client_socket,
                state=lifespan.state,
                timeout_keep_alive=_KEEP_ALIVE_S,
                most=most_clients(),
                certificate=certificate,
            )
            async with clients.running(end) as running:
                served.opened()
                on_ready()
                await wait_first(end.first.wait(), running)
                end.deadline_s = asyncio.get_running_loop().time() + grace_s
                served.drain()
                await wait_first(served.drained(), end.second.wait(), timeout_s=grace_s)
        finally:
            await lifespan.end()


@contextlib.asynccontextmanager
async def serving_pages(pages: ASGIApp, listener: socket.socket) -> AsyncIterator[None]:
    """Serves admin pages alone while the block runs."""
    async with Server(pages, listener, timeout_keep_alive=_ADMIN_KEEP_ALIVE_S).running(End()):
        yield


def refuse_own_addresses(upstreams: Sequence[str], listeners: Sequence[socket.socket]) -> None:
    """Raises CannotServe where an upstream is one of the server's own addresses."""
    for upstream in upstreams:
        if leads_to(upstream, listeners):
            raise CannotServe(f"the upstream {upstream} is this sidecar itself; give the engine's address")


def run(main: Coroutine[Any, Any, None]) -> None:
    """Runs `main` on uvloop where that is installed: it halves the cost of a request."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


def _describe(requests: int) -> str:
    return "1 request was" if requests == 1 else f"{requests} requests were"


async def wait_first(*awaitables: Awaitable[Any], timeout_s: float | None = None) -> None:
    """Returns when one has ended or the time is over. Cancels the coroutines among the others, but no tasks.

    Raises the exception of the one that ended.
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


class Server(uvicorn.Server):
    """A uvicorn server that handles no signals, accepts `most` connections, and says when it is ready."""

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        *,
        timeout_keep_alive: int,
        state: dict[str, Any] | None = None,
        most: int = sys.maxsize,
        certificate: Certificate | None = None,
    ):
        config = uvicorn.Config(
            app,
            # uvicorn would take a bound method for an app of an older interface.
            interface="asgi3",
            lifespan="off",  # it is started before, and ended after
            timeout_keep_alive=timeout_keep_alive,
            http=BoundedHttpProtocol,
            ws="none",
            # The process has its own logging.
            log_config=None,
            log_level="warning",
            access_log=False,
            # A proxy passes on the engine's own headers.
            server_header=False,
            date_header=False,
            # Any client could write the headers that uvicorn would trust.
            proxy_headers=False,
        )
        super().__init__(config)
        logging.getLogger("uvicorn.error").addFilter(self._without_traceback)
        self._is_cutting = False
        self.socket = listener
        self._most = most
        self._certificate = certificate
        self._state = {} if state is None else state
        self._ready = asyncio.Event()

    @contextlib.asynccontextmanager
    async def running(self, end: End) -> AsyncIterator[asyncio.Task[None]]:
        """Serves while the block runs. What runs at its end has until `end.deadline_s`, or until `end.second`."""
        serving = asyncio.ensure_future(self.serve(sockets=[self.socket]))
        await wait_first(self._ready.wait(), serving)
        try:
            yield serving
        finally:
            await self._end(serving, end.deadline_s, end.second)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: ARG002  # it has its own
        await super().startup([])  # without a server of the event loop's
        self._accept()
        self._ready.set()

    def _accept(self) -> None:
        self.socket.listen(self.config.backlog)
        self.socket.setblocking(False)
        acceptor = Acceptor(self.socket, self._protocol, most=self._most, certificate=self._certificate)
        self.servers.append(acceptor)  # type: ignore[arg-type]  # uvicorn closes them, and waits for that

    def _protocol(self) -> BoundedHttpProtocol:
        return BoundedHttpProtocol(self.config, self.server_state, self._state)

    async def _end(self, serving: asyncio.Task[None], deadline_s: float, at_once: asyncio.Event) -> None:
        """Closes the port. Requests are cut off that run at the loop's time `deadline_s`, or when `at_once` is set.

        `serving` is the task that runs this server.
        """
        self.should_exit = True
        grace_left_s = deadline_s - asyncio.get_running_loop().time()
        if not at_once.is_set() and grace_left_s > 0:
            await wait_first(serving, at_once.wait(), timeout_s=grace_left_s)
        if not serving.done():
            await self._cut("a second signal came" if at_once.is_set() else "the grace is over")
        await serving

    async def _cut(self, reason: str) -> None:
        """Cancels every request, and closes every connection. Nothing new comes in."""
        for listener in self.servers:
            listener.close()
        connections, requests = tuple(self.server_state.connections), tuple(self.server_state.tasks)
        self._is_cutting = True
        for connection in connections:
            connection.cut(_STOPPED)  # type: ignore[union-attr]  # all are of our protocol
            connection.shutdown()
        for request in requests:
            request.cancel()
        if requests:
            _log.warning("%s cut off: %s", _describe(len(requests)), reason, extra={"event": "cut", "code": "draining"})
            await asyncio.wait(requests, timeout=_CUT_WITHIN_S)
        for _ in range(_FLUSH_ROUNDS):
            if not self.server_state.connections:
                return
            await asyncio.sleep(_CUT_WITHIN_S / _FLUSH_ROUNDS)
        for connection in tuple(self.server_state.connections):  # their clients do not read
            if connection.transport is not None:
                connection.transport.abort()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def _without_traceback(self, record: logging.LogRecord) -> bool:
        """Logs an end with a known reason in one line, because its traceback would only show the sidecar's own code.

        Requests that the server cuts off have one line together.
        """
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, asyncio.CancelledError) and self._is_cutting:
            return False
        if isinstance(error, ResponseCut):
            record.msg, record.args, record.exc_info = str(error), (), None
        return True


class End:
    """The end of a server.

    `first` asks for a graceful one, which ends at the loop's time `deadline_s`, and `second` for one at once.
    """

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.deadline_s = 0.0


class Signals(End):
    """The first signal asks for a graceful end, the second for an end at once; SIGHUP calls `reload`.

    Where there is a signal `cut`, that one alone asks for an end at once.
    """

    def __init__(self, reload: Callable[[], None] | None, cut: signal.Signals | None = None) -> None:
        super().__init__()
        self._has_cut = cut is not None
        self._handlers = dict.fromkeys(_SIGNALS, self._on_signal)
        if cut is not None:
            self._handlers[cut] = self._on_cut
        if reload is not None:
            self._handlers |= dict.fromkeys(_HANGUP, reload)

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """The event loop handles the signals while the block runs."""
        loop = asyncio.get_running_loop()
        for number, handler in self._handlers.items():
            loop.add_signal_handler(number, handler)
        try:
            yield
        finally:
            for number in self._handlers:
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        (self.second if self.first.is_set() and not self._has_cut else self.first).set()

    def _on_cut(self) -> None:
        self.first.set()
        self.second.set()
