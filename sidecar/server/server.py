"""Server of `sidecar serve`: clients and admin pages in one event loop, with a graceful end.

A signal calls `drain`: from then on new requests get a 503, and `/readyz` says not ready. The port still accepts
connections, so that clients get that answer rather than a refused connection. When the running requests are `drained`,
or the grace is over, the port closes, then the admin port. A second signal ends the waiting at once. Requests that are
still under way then are cut off: they get a 503, or the end of a response that has begun.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.types import ASGIApp

from sidecar.errors import Draining, ResponseCut
from sidecar.server import CannotServe
from sidecar.server.app_lifespan import AppLifespan
from sidecar.server.certificate import Certificate
from sidecar.server.http_protocol import HEAD_WITHIN_S, BoundedHttpProtocol
from sidecar.server.listeners import listening, socket_address
from sidecar.server.open_files import limit, most_clients
from sidecar.server.unix_address import socket_path

# -- Acceptance of connections, as many as there are open files for. More wait in the system's queue.
#
# uvloop's and asyncio's own servers accept until the process has no file left. Then no connection to an engine or to
# the store can be made, and the admin port answers no more; libuv closes what it cannot accept. So this accepts one
# after another, with a bound that leaves files for the rest. It also takes the certificate that is in force for
# each.

RETRY_S = 0.5
"""After a connection could not be accepted."""
_FULL = "%d connections of clients are open, as many as a limit of %d open files leaves room for: new ones wait"
_REMEDY = (
    "raise the limit (`ulimit -Hn`, systemd's LimitNOFILE=, a container's nofile), or have the clients, or the load "
    "balancer before them, keep fewer idle connections"
)
_OUT_OF_FILES = frozenset((errno.EMFILE, errno.ENFILE))


class Acceptor:
    """Serves the connections of `listener`, `most` at once, by a protocol of `make` each: a server to uvicorn."""

    def __init__(
        self,
        listener: socket.socket,
        make: Callable[[], BoundedHttpProtocol],
        *,
        most: int,
        certificate: Certificate | None,
    ) -> None:
        self._listener = listener
        self._make = make
        self._most = most
        self._certificate = certificate
        self._loop = asyncio.get_running_loop()
        self._open: set[BoundedHttpProtocol] = set()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._has_warned = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._run(self._accept())
        if certificate is not None:
            self._run(certificate.follow())

    def close(self) -> None:
        """Accepts no more. Connections that are served go on."""
        for task in self._tasks:
            task.cancel()

    async def wait_closed(self) -> None:
        """Returns when nothing is accepted any more."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _accept(self) -> None:
        while True:
            await self._has_room.wait()
            try:
                connection, _ = await self._loop.sock_accept(self._listener)
            except OSError as error:
                if error.errno in _OUT_OF_FILES:
                    self._warn("%s, with a limit of %d: new connections wait", error.strerror, limit())
                await asyncio.sleep(RETRY_S)
            else:
                self._begin(connection)

    def _begin(self, connection: socket.socket) -> None:
        protocol = self._make()
        protocol.on_lost = self._left
        self._open.add(protocol)
        if len(self._open) >= self._most:
            self._has_room.clear()
            self._warn(_FULL, len(self._open), limit())
        self._run(self._connect(connection, protocol))

    async def _connect(self, connection: socket.socket, protocol: BoundedHttpProtocol) -> None:
        tls = None if self._certificate is None else self._certificate.context
        within_s = None if tls is None else HEAD_WITHIN_S
        try:
            await self._loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=tls, ssl_handshake_timeout=within_s
            )
        except BaseException as error:
            self._left(protocol)
            if not isinstance(error, OSError | asyncio.TimeoutError):  # those: the client left, or speaks no TLS
                raise

    def _left(self, protocol: BoundedHttpProtocol) -> None:
        self._open.discard(protocol)
        if len(self._open) < self._most:
            self._has_room.set()
        if len(self._open) <= self._most // 2:
            self._has_warned = False

    def _warn(self, message: str, *of: object) -> None:
        """Once, until half of the connections have ended."""
        if not self._has_warned:
            self._has_warned = True
            _log.warning(f"{message}; {_REMEDY}", *of, extra={"event": "open_files"})

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


# -- Test for an upstream's address that this process itself listens on.

_PORTS = {"http": 80, "https": 443}


def leads_to(url: str, listeners: Sequence[socket.socket]) -> bool:
    """True if a request to `url` would reach one of `listeners`.

    A name is resolved only where its port is one of theirs. A name that cannot be resolved, and another machine's
    address that leads back here, are not noticed: there the `via` header shows the loop.
    """
    names = [listener.getsockname() for listener in listeners]
    if (path := socket_path(url)) is not None:
        return any(isinstance(name, str) and _is_same(path, name) for name in names)
    parts = urlsplit(url)
    port = parts.port or _PORTS.get(parts.scheme)
    own = [name[0] for name in names if not isinstance(name, str) and name[1] == port]
    if not own:
        return False
    try:
        found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_is_reached(str(info[4][0]), listens) for info in found for listens in own)


def _is_same(path: str, own: str) -> bool:
    try:
        return os.path.samefile(path, own)
    except OSError:
        return False


def _is_reached(address: str, listens: str) -> bool:
    if address == listens or ipaddress.ip_address(address.partition("%")[0]).is_unspecified:
        return True
    return ipaddress.ip_address(listens.partition("%")[0]).is_unspecified and _is_local(address)


def _is_local(address: str) -> bool:
    """True if this machine has the address: only then a socket can be bound to it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


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
