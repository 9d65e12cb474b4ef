"""A raw TCP client: sends the bytes it is given, and shows the bytes that came back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to a port of this machine, closed at the end of the block."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def exchange(port: int, request: bytes) -> bytes:
    """Sends `request` on a connection of its own; returns everything that came until the server closed it."""
    async with connected(port) as (reader, writer):
        writer.write(request)
        return await reader.read()


def post(path: str = "/v1/completions", body: bytes = b"{}", *headers: str, close: bool = True) -> bytes:
    """A POST with a right length; `close` asks the server to close the connection after its response."""
    lines = [f"POST {path} HTTP/1.1", "host: sidecar", f"content-length: {len(body)}", *headers]
    lines += ["connection: close"] if close else []
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def get(path: str, *headers: str) -> bytes:
    """A GET after which the server closes the connection."""
    return "\r\n".join([f"GET {path} HTTP/1.1", "host: sidecar", "connection: close", *headers]).encode("latin-1") + (
        b"\r\n\r\n"
    )
