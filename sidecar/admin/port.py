"""Admin pages on a port of their own, inside a server process and an event loop that are not ours."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from socket import socket
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from sidecar.admin import PORT_VARIABLE
from sidecar.admin.auth import AdminGuard, open_port, read_access
from sidecar.server import CannotServe
from sidecar.server.http_protocol import BoundedHttpProtocol
from sidecar.server.listeners import listening
from sidecar.server.workers import ServerProcesses

HOST_VARIABLE = "SIDECAR_ADMIN_HOST"
_LOOPBACK = "127.0.0.1"
_LAST_PORT = 65535
RETRY_S = 1.0
"""Between two attempts to open a taken port. A process that is replaced takes seconds to end its last requests."""

_SECOND = (
    "sidecar: another middleware of this process has the admin port %d; the one of pool %s has no pages; "
    "to have them, run its app as a process of its own with another %s"
)
# Where the server that we are mounted in says what it listens on: nearly every one of them is a uvicorn.
_logger = logging.getLogger("uvicorn.error")


_open: set[tuple[str, int]] = set()
"""The address and first port of every middleware of this process that has opened its pages."""


@asynccontextmanager
async def admin_pages(
    app: ASGIApp, environment: Mapping[str, str], processes: ServerProcesses, *, pool: str
) -> AsyncIterator[None]:
    """Serves `app` while the block runs, where the environment names a port; else does nothing. `pool` is for the log.

    Each of several `processes` takes the first free port of as many, from the one that is named. The first middleware
    of a process has the pages: a further one logs a warning, and has none. Raises CannotServe where no port can be had,
    and ValueError for what is no port, and for a token that cannot be one. After a supervisor's start it does not raise
    CannotServe: the port may belong to the process that this one replaces, and is tried again until it is free.
    """
    first_port = _port(environment, processes.number)
    if first_port is None:
        yield
        return
    host = _host(environment)
    access = read_access(environment, host)
    if (host, first_port) in _open:
        _logger.warning(_SECOND, first_port, pool, PORT_VARIABLE, extra={"event": "admin_port_shared"})
        yield
        return
    pages = _Pages(AdminGuard(app, access), host, _ports(first_port, processes.number))
    if first_port:
        _open.add((host, first_port))
    try:
        await pages.open(waits=processes.supervisor is not None)
        if access.is_open:
            _logger.warning("sidecar: %s", open_port(host))
        yield
    finally:
        _open.discard((host, first_port))
        await pages.close()


class _Pages:
    """The admin pages on the first free one of `ports`."""

    def __init__(self, app: ASGIApp, host: str, ports: Sequence[int]) -> None:
        self._app = app
        self._host = host
        self._ports = ports
        self._state = ServerState()
        self._listening = ExitStack()
        self._server: asyncio.Server | None = None
        self._waiting: asyncio.Task[None] | None = None

    async def open(self, *, waits: bool) -> None:
        """Opens the port. `waits`: a port in use is tried again, every `RETRY_S`; else CannotServe is raised."""
        try:
            await self._serve()
        except CannotServe as error:
            if not waits:
                raise
            message = "sidecar: %s; the pages of this process come when the port is free"
            _logger.warning(message, error, extra={"event": "admin_port_taken"})
            self._waiting = asyncio.ensure_future(self._serve_later())

    async def close(self) -> None:
        """Closes the port, and every connection to it."""
        if self._waiting is not None:
            self._waiting.cancel()
        if self._server is not None:
            self._server.close()
        self._listening.close()
        for connection in tuple(self._state.connections):
            connection.shutdown()
        await asyncio.sleep(0)  # in the next round of the loop they are closed

    async def _serve(self) -> None:
        with ExitStack() as stack:
            listener = _listener(stack, self._host, self._ports)
            host = f"[{self._host}]" if ":" in self._host else self._host
            address = f"http://{host}:{listener.getsockname()[1]}"
            make = _protocol(self._app, self._state)
            self._server = await asyncio.get_running_loop().create_server(make, sock=listener)
            self._listening = stack.pop_all()
        _logger.info("sidecar: admin on %s", address)

    async def _serve_later(self) -> None:
        while self._server is None:
            await asyncio.sleep(RETRY_S)
            with suppress(CannotServe):
                await self._serve()


def try_ports(environment: Mapping[str, str], processes: int) -> None:
    """For a launcher, before a server spends minutes on its model: whether its `processes` will have their ports.

    Raises what `admin_pages` would raise in one of them. A port that is free now may be taken until then.
    """
    first_port = _port(environment, processes)
    if first_port is None:
        return
    host = _host(environment)
    read_access(environment, host)
    for port in _ports(first_port, processes):
        with ExitStack() as stack:
            _listen(stack, host, port, _place(port, _ports(first_port, processes)))


def _port(environment: Mapping[str, str], processes: int) -> int | None:
    written = environment.get(PORT_VARIABLE, "").strip()
    if not written:
        return None
    if not written.isdecimal() or int(written) > _LAST_PORT:
        raise ValueError(f"{PORT_VARIABLE}: {written!r} is not a port; write a number from 0 to {_LAST_PORT}")
    port, most = int(written), _LAST_PORT - processes + 1
    if port > most:
        raise ValueError(
            f"{PORT_VARIABLE}: {port} leaves no port for each of {processes} processes; write {most} or less"
        )
    return port


def _host(environment: Mapping[str, str]) -> str:
    return environment.get(HOST_VARIABLE) or _LOOPBACK


def _ports(first_port: int, processes: int) -> Sequence[int]:
    return range(first_port, first_port + processes) if first_port else (0,)


def _listener(stack: ExitStack, host: str, ports: Sequence[int]) -> socket:
    *others, last_port = ports
    for port in others:
        with suppress(CannotServe):  # another of the processes has it
            return stack.enter_context(listening(host, port))
    return _listen(stack, host, last_port, _place(last_port, ports))


def _listen(stack: ExitStack, host: str, port: int, place: str) -> socket:
    try:
        return stack.enter_context(listening(host, port))
    except CannotServe as error:
        raise CannotServe(
            f"{error} (for the admin pages, by {PORT_VARIABLE}{place}); end what listens there, or set another port"
        ) from None


def _place(port: int, ports: Sequence[int]) -> str:
    if len(ports) == 1:
        return ""
    place = "the last" if port == ports[-1] else "one"
    return f", {place} of {len(ports)} from {ports[0]} on"


def _protocol(app: ASGIApp, state: ServerState) -> Callable[[], asyncio.Protocol]:
    """Makes uvicorn's connections, without its server: that would log and catch signals beside the one that does."""
    config = uvicorn.Config(
        app,
        interface="asgi3",
        http=BoundedHttpProtocol,
        ws="none",
        lifespan="off",
        # Ours would replace the logging of the process.
        log_config=None,
        log_level=None,
        server_header=False,
        date_header=False,
        proxy_headers=False,
    )
    config.load()
    connection: Any = config.http_protocol_class

    def made() -> asyncio.Protocol:
        protocol = connection(config=config, server_state=state, app_state={})
        # The live page asks every second: that would fill the access log, which is the app's. The setting of that name
        # would take the log from the app.
        protocol.access_log = False
        return cast("asyncio.Protocol", protocol)

    return made
