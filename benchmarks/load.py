"""A load generator that costs little: raw HTTP/1.1 over kept-alive connections, responses counted by their length."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Burst:
    """What a burst of requests measured. Latencies in seconds."""

    requests: int
    elapsed_s: float
    latencies_s: list[float] = field(default_factory=list)

    @property
    def per_second(self) -> float:
        """Requests per second."""
        return self.requests / self.elapsed_s

    def percentile_s(self, share: float) -> float:
        """The latency below which `share` of the requests stayed."""
        ordered = sorted(self.latencies_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


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
    """Sends one request and reads its response, which must have a Content-Length. Returns status and body."""
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    lowered = head.lower()
    at = lowered.index(b"content-length:") + len(b"content-length:")
    length = int(lowered[at : lowered.index(b"\r\n", at)])
    return int(head[9:12]), await reader.readexactly(length)


async def burst(port: int, request: bytes, *, requests: int, connections: int) -> Burst:
    """Sends `requests` in all, each connection one after the other. Raises RuntimeError for a status other than 200."""
    remaining = requests
    latencies: list[float] = []

    async def one_connection() -> None:
        nonlocal remaining
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while remaining > 0:
            remaining -= 1
            began = time.perf_counter()
            status, body = await exchange(reader, writer, request)
            latencies.append(time.perf_counter() - began)
            if status != 200:
                raise RuntimeError(f"status {status}: {body[:200]!r}")
        writer.close()

    began = time.perf_counter()
    await asyncio.gather(*(one_connection() for _ in range(connections)))
    return Burst(requests, time.perf_counter() - began, latencies)
