"""Admin pages on a port of their own, inside a server process and an event loop that are not ours."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from socket import socket
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from sidecar.admin.auth import AdminGuard, access_of, open_port
from sidecar.server.http_protocol import BoundedHttpProtocol
from sidecar.server.server import CannotServe, listening

PORT_VARIABLE, HOST_VARIABLE = "SIDECAR_ADMIN_PORT", "SIDECAR_ADMIN_HOST"
_LOOPBACK = "127.0.0.1"
_LAST_PORT = 65535

# Where the server that we are mounted in says what it listens on: every one of them is a uvicorn.
_logger = logging.getLogger("uvicorn.error")


@asynccontextmanager
async def admin_pages(app: ASGIApp, environment: Mapping[str, str], processes: int) -> AsyncIterator[None]:
    """Serves `app` while the block runs, where the environment names a port; else does nothing.

    Each of several `processes` takes the first free port of as many, from the one that is named. Raises CannotServe
    where none can be had, and ValueError for what is no port, and for a token that cannot be one.
    """
    first_port = _port(environment, processes)
    if first_port is None:
        yield
        return
    host = _host(environment)
    access = access_of(environment, host)
    with ExitStack() as stack:
        listener = _listener(stack, host, first_port, processes)
        _logger.info("sidecar: admin on http://%s:%d", f"[{host}]" if ":" in host else host, listener.getsockname()[1])
        if access.is_open:
            _logger.warning("sidecar: %s", open_port(host))
        state = ServerState()
        server = await asyncio.get_running_loop().create_server(
            _protocol(AdminGuard(app, access), state), sock=listener
        )
        try:
            yield
        finally:
            server.close()
            for connection in tuple(state.connections):
                connection.shutdown()
            await asyncio.sleep(0)  # in the next round of the loop they are closed


def try_ports(environment: Mapping[str, str], processes: int) -> None:
    """For a launcher, before a server spends minutes on its model: whether its `processes` will have their ports.

    Raises what `admin_pages` would raise in one of them. A port that is free now may be taken until then.
    """
    first_port = _port(environment, processes)
    if first_port is None:
        return
    host = _host(environment)
    access_of(environment, host)
    for port in _ports(first_port, processes):
        with ExitStack() as stack:
            _listen(stack, host, port, _place(port, first_port, processes))


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


def _listener(stack: ExitStack, host: str, first_port: int, processes: int) -> socket:
    *others, last_port = _ports(first_port, processes)
    for port in others:
        with suppress(CannotServe):  # another of the processes has it
            return stack.enter_context(listening(host, port))
    return _listen(stack, host, last_port, _place(last_port, first_port, processes))


def _listen(stack: ExitStack, host: str, port: int, place: str) -> socket:
    try:
        return stack.enter_context(listening(host, port))
    except CannotServe as taken:
        raise CannotServe(
            f"{taken} (for the admin pages, by {PORT_VARIABLE}{place}); end what listens there, or set another port"
        ) from None


def _place(port: int, first_port: int, processes: int) -> str:
    if processes == 1:
        return ""
    place = "the last" if port == first_port + processes - 1 else "one"
    return f", {place} of {processes} from {first_port} on"


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
    return partial(connection, config=config, server_state=state, app_state={})
