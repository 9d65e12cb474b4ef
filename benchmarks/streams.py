"""How server-sent events come through: time to the first, gaps between them, and whether each came on its own."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.load import post


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """Of all streams together, in milliseconds; `flushes` is the reads that had an event in them, per stream."""

    ttft_p50_ms: float
    ttft_p99_ms: float
    gap_p99_ms: float
    flushes: float


async def streams(port: int, count: int, headers: tuple[tuple[str, str], ...]) -> StreamTimes:
    """Runs `count` streams at once, after a round that warms the connections up."""
    await asyncio.gather(*(_stream(port, headers) for _ in range(count)))
    times = await asyncio.gather(*(_stream(port, headers) for _ in range(count)))
    first = sorted(arrivals[0] for arrivals in times)
    gaps = sorted(later - earlier for arrivals in times for earlier, later in itertools.pairwise(arrivals))
    return StreamTimes(
        ttft_p50_ms=_at(first, 0.5) * 1000,
        ttft_p99_ms=_at(first, 0.99) * 1000,
        gap_p99_ms=_at(gaps, 0.99) * 1000,
        flushes=sum(map(len, times)) / count,
    )


async def _stream(port: int, headers: tuple[tuple[str, str], ...]) -> list[float]:
    """Seconds from the request to each read that had an event in it."""
    body = json.dumps({"model": "m", "stream": True, "max_tokens": 64, "messages": [{"role": "user", "content": "hi"}]})
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    began = time.perf_counter()
    writer.write(post("/v1/chat/completions", body.encode(), headers))
    arrivals: list[float] = []
    while True:
        read = await reader.read(65536)
        if b"data:" in read:
            arrivals.append(time.perf_counter() - began)
        if not read or read.endswith(b"0\r\n\r\n"):
            break
    writer.close()
    return arrivals


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
