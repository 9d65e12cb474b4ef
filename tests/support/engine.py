"""A raw TCP server that plays an engine from a script of bytes, and tells exactly what it was sent."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

OWN_AGENT = b"admission-sidecar"
NO_PAGE = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


@dataclass
class Received:
    """One request as it came in: the head with its blank line, and the body after removing chunks."""

    head: bytes
    body: bytes = b""

    @property
    def target(self) -> bytes:
        """The request's target, byte for byte."""
        return self.head.split(b" ")[1]

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Header lines in the order received, names in lower case."""
        lines = self.head.split(b"\r\n")[1:-2]
        return [(name.lower(), value.strip()) for name, _, value in (line.partition(b":") for line in lines)]

    def all(self, name: bytes) -> list[bytes]:
        """Every value of the header `name`."""
        return [value for found, value in self.headers if found == name]


class Connection:
    """One connection to the raw engine, driven by a script. Reading past its end raises IncompleteReadError."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, engine: RawEngine) -> None:
        self._reader = reader
        self._writer = writer
        self._engine = engine

    async def request(self) -> Received:
        """Reads one whole request."""
        received = await self.head()
        if received.all(b"transfer-encoding") == [b"chunked"]:
            while chunk := await self.chunk():
                received.body += chunk
        elif length := received.all(b"content-length"):
            received.body = await self._reader.readexactly(int(length[0]))
        return received

    async def head(self) -> Received:
        """Reads one request's head and leaves its body on the wire. Requests of the sidecar itself get a 404."""
        while True:
            received = Received(await self._reader.readuntil(b"\r\n\r\n"))
            if received.all(b"user-agent") != [OWN_AGENT]:
                self._engine.requests.append(received)
                return received
            self._engine.own.append(received)
            await self.send(NO_PAGE)

    async def chunk(self) -> bytes:
        """Reads one chunk of a chunked body; the last one is empty."""
        size = int(await self._reader.readuntil(b"\r\n"), 16)
        return (await self._reader.readexactly(size + 2))[:-2]

    async def read(self, size: int) -> bytes:
        """Reads exactly `size` bytes."""
        return await self._reader.readexactly(size)

    async def send(self, data: bytes) -> None:
        """Sends bytes as they are and waits until the peer's slowness allows more."""
        self._writer.write(data)
        await self._writer.drain()

    async def send_chunk(self, data: bytes) -> None:
        """Sends one HTTP chunk; an empty one ends the body."""
        await self.send(b"%x\r\n%s\r\n" % (len(data), data))

    async def hung_up(self) -> None:
        """Returns when the peer closed or reset the connection."""
        with suppress(ConnectionError):
            await self._reader.read()

    def close(self) -> None:
        """Closes the connection as a server does."""
        self._writer.close()

    def abort(self) -> None:
        """Breaks the connection without sending what is still buffered."""
        self._writer.transport.abort()

    def reset(self) -> None:
        """The same, and the peer gets a reset in place of an end."""
        opened = self._writer.get_extra_info("socket")
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.abort()


Script = Callable[[Connection], Awaitable[None]]


@dataclass
class RawEngine:
    """What the engine saw. `connections` counts the accepted ones; `requests` are those of clients, in order.

    `own` are the sidecar's, which asks whether the engine lives and which one it is.
    """

    url: str = ""
    port: int = 0
    connections: int = 0
    requests: list[Received] = field(default_factory=list)
    own: list[Received] = field(default_factory=list)


@asynccontextmanager
async def raw_engine(script: Script, unix: Path | None = None) -> AsyncIterator[RawEngine]:
    """Runs `script` once per connection and closes the connection after it. A peer that leaves ends the script.

    `unix` is the path of a Unix socket to listen on, in place of a port.
    """
    engine = RawEngine()
    tasks: set[asyncio.Task[None]] = set()
    ended = asyncio.Event()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if ended.is_set():  # it was accepted in the moment of the end: no one may wait for an engine that is gone
            writer.transport.abort()
            return
        task = asyncio.current_task()
        tasks.add(task)
        engine.connections += 1
        try:
            await script(Connection(reader, writer, engine))
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            tasks.discard(task)
            writer.close()

    if unix is None:
        server = await asyncio.start_server(accept, "127.0.0.1", 0, backlog=1024)
        engine.port = server.sockets[0].getsockname()[1]
        engine.url = f"http://127.0.0.1:{engine.port}"
    else:
        server = await asyncio.start_unix_server(accept, unix)
        engine.url = f"unix:{unix}"
    try:
        yield engine
    finally:
        ended.set()
        server.close()
        running = list(tasks)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await asyncio.sleep(0)


def answering(response: bytes = OK) -> Script:
    """A script that answers every request on the connection with the same bytes."""

    async def script(connection: Connection) -> None:
        while True:
            await connection.request()
            await connection.send(response)

    return script
