"""Acceptance of connections, as many as there are open files for. More wait in the system's queue.

uvloop's and asyncio's own servers accept until the process has no file left. Then no connection to an engine or to the
store can be made, and the admin port answers no more; libuv closes what it cannot accept. So this accepts one after
another, with a bound that leaves files for the rest. It also takes the certificate that is in force for each.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from sidecar.server.certificate import Certificate
from sidecar.server.http_protocol import HEAD_WITHIN_S, BoundedHttpProtocol
from sidecar.server.open_files import limit

RETRY_S = 0.5
"""After a connection could not be accepted."""
_FULL = "%d connections of clients are open, as many as a limit of %d open files leaves room for: new ones wait"
_REMEDY = (
    "raise the limit (`ulimit -Hn`, systemd's LimitNOFILE=, a container's nofile), or have the clients, or the load "
    "balancer before them, keep fewer idle connections"
)
_OUT_OF_FILES = frozenset((errno.EMFILE, errno.ENFILE))

_log = logging.getLogger("sidecar.serve")


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
