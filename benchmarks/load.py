"""A load generator that costs little: raw HTTP/1.1 over kept-alive connections, whole answers and streams."""

from __future__ import annotations

import asyncio
import time


def post(path: str, body: bytes, headers: tuple[tuple[str, str], ...] = ()) -> bytes:
    """The bytes of one POST with a JSON body."""
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json"]
    lines += [f"{name}: {value}" for name, value in headers]
    lines += [f"Content-Length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode() + body


def get(path: str) -> bytes:
    """The bytes of one GET."""
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()


async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> tuple[int, bytes]:
    """Sends one request and reads its response, which has a Content-Length or chunks. Returns status and body."""
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    _, _, length = head.partition(b"content-length:")
    if length:
        return int(head[9:12]), await reader.readexactly(int(length.split(b"\r\n")[0]))
    return int(head[9:12]), await reader.readuntil(b"\r\n0\r\n\r\n")


async def burst(port: int, request: bytes, *, requests: int, connections: int) -> float:
    """Sends `requests` in all, each connection one after the other. Returns the seconds that it took.

    Raises RuntimeError for a status other than 200.
    """
    remaining = requests

    async def one_connection() -> None:
        nonlocal remaining
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while remaining > 0:
            remaining -= 1
            status, body = await exchange(reader, writer, request)
            if status != 200:
                raise RuntimeError(f"status {status}: {body[:200]!r}")
        writer.close()

    began = time.perf_counter()
    await asyncio.gather(*(one_connection() for _ in range(connections)))
    return time.perf_counter() - began
