"""A TCP proxy in the test's own event loop that hurts connections to a Redis server in the ways that a network does."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

HOST = "127.0.0.1"
CHUNK = 65_536
NO_LINGER = struct.pack("ii", 1, 0)
"""SO_LINGER on, for 0 s: the kernel answers a close with RST in place of FIN."""
SUBSCRIBES = re.compile(rb"\r\n[PS]?SUBSCRIBE\r\n", re.IGNORECASE)
LONGEST_SUBSCRIBE = len(b"\r\nPSUBSCRIBE\r\n")
POLL_S = 0.01


class Stream(NamedTuple):
    """One connection, as asyncio gives it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class FaultProxy:
    """Forwards every connection to the target. Faults are plain attributes: set them at any time, they hold at once.

    What runs in the same event loop must not block while it talks through the proxy (`RedisServer.command` does).
    """

    def __init__(self, target_host: str, target_port: int) -> None:
        self.target = (target_host, target_port)
        self.port = 0

        self.delay_s = 0.0
        """How much later the client gets what the server sends. What is on its way already keeps its delay."""
        self.refuse = False
        """Accepts new connections and closes them at once."""
        self.swallow_replies = False
        """Nothing of the server's reaches the client, its end of the connection neither: it has died silently."""
        self.swallow_requests = False
        """The same in the other direction."""
        self.only_subscribers = False
        """All faults but `refuse` are for connections alone whose client has sent a SUBSCRIBE."""

        self._cut_after: int | None = None
        self._links: dict[_Link, asyncio.Task[None]] = {}
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> FaultProxy:
        self._server = await asyncio.start_server(self._accept, HOST, 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        ended = list(self._links.values())
        for link, task in self._links.items():
            link.abort()
            task.cancel()
        await asyncio.gather(*ended, return_exceptions=True)
        await self._server.wait_closed()

    def url(self) -> str:
        """What a client connects to in place of the server."""
        return f"redis://{HOST}:{self.port}/0"

    def drop_connections(self) -> None:
        """Ends every connection with RST, on both sides; the client sees it when the event loop next runs."""
        for link in self._links:
            if self.reaches(link):
                link.reset()

    def cut_reply_after(self, n_bytes: int) -> None:
        """Of what the server sends next, to anybody, `n_bytes` arrive; then that connection ends. It happens once."""
        self._cut_after = n_bytes

    def reaches(self, link: _Link) -> bool:
        """Whether the faults are for this connection."""
        return link.is_subscriber or not self.only_subscribers

    def take_cut(self, link: _Link) -> int | None:
        """Where to cut, for the one connection that comes first."""
        if not self.reaches(link):
            return None
        cut_after, self._cut_after = self._cut_after, None
        return cut_after

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuse:
            writer.close()
            return
        link = _Link(self, Stream(reader, writer))
        task = self._links[link] = asyncio.create_task(link.run())
        task.add_done_callback(lambda _: self._links.pop(link))


class _Link:
    """One client's connection, and the connection to the server that belongs to it."""

    def __init__(self, proxy: FaultProxy, client: Stream) -> None:
        self.is_subscriber = False
        self._proxy = proxy
        self._client = client
        self._server: Stream | None = None
        self._on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def run(self) -> None:
        """Until one side ends the connection, then for the other side too."""
        try:
            with suppress(OSError):
                self._server = Stream(*await asyncio.open_connection(*self._proxy.target))
                await self._forward(self._server)
        finally:
            for stream in self._both():
                stream.writer.close()
            for stream in self._both():
                with suppress(OSError):
                    await stream.writer.wait_closed()

    def reset(self) -> None:
        """Ends both connections with RST."""
        for stream in self._both():
            with suppress(OSError):  # it has ended by itself
                stream.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        self.abort()

    def abort(self) -> None:
        """Ends both connections without what is still to be sent, which no one may ever read."""
        for stream in self._both():
            stream.writer.transport.abort()

    def _both(self) -> list[Stream]:
        return [self._client, self._server] if self._server else [self._client]

    async def _forward(self, server: Stream) -> None:
        hears = asyncio.create_task(self._hear(server))
        ends = [asyncio.create_task(self._requests(server)), asyncio.create_task(self._replies())]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (hears, *ends):
                task.cancel()
            await asyncio.gather(hears, *ends, return_exceptions=True)

    async def _requests(self, server: Stream) -> None:
        seen = b""
        while chunk := await _read(self._client):
            seen = seen[-LONGEST_SUBSCRIBE:] + chunk
            self.is_subscriber = self.is_subscriber or SUBSCRIBES.search(seen) is not None
            if not self._swallows_requests():
                server.writer.write(chunk)
                await server.writer.drain()
        await _while(self._swallows_requests)

    async def _hear(self, server: Stream) -> None:
        """Gives each chunk its time of arrival; a delay is a distance, it must not add up over chunks in a row."""
        while True:
            chunk = await _read(server)
            delay_s = self._proxy.delay_s if self._proxy.reaches(self) else 0.0
            self._on_the_way.put_nowait((asyncio.get_running_loop().time() + delay_s, chunk))
            if not chunk:
                return

    async def _replies(self) -> None:
        left: int | None = None
        while chunk := await self._arrived():
            if self._swallows_replies():
                continue
            left = self._proxy.take_cut(self) if left is None else left
            self._client.writer.write(chunk[:left])
            await self._client.writer.drain()
            if left is not None and (left := left - len(chunk)) <= 0:
                return
        await _while(self._swallows_replies)

    async def _arrived(self) -> bytes:
        due_s, chunk = await self._on_the_way.get()
        if (wait_s := due_s - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(wait_s)
        return chunk

    def _swallows_requests(self) -> bool:
        return self._proxy.swallow_requests and self._proxy.reaches(self)

    def _swallows_replies(self) -> bool:
        return self._proxy.swallow_replies and self._proxy.reaches(self)


async def _read(stream: Stream) -> bytes:
    """What comes next; nothing at the connection's end, whatever ended it."""
    try:
        return await stream.reader.read(CHUNK)
    except OSError:
        return b""


async def _while(condition: Callable[[], bool]) -> None:
    while condition():  # noqa: ASYNC110 - faults are plain attributes, of which no event tells
        await asyncio.sleep(POLL_S)
