"""Processor time of a request and of a streamed chunk in each gateway, all in one run, in turns.

The gateways stand before the same fast upstream, and are sent the same bytes: chat requests with bodies of 2 KB over 8
kept connections, then 32 streams of 220 chunks at once, 10 ms apart. The figure is the processor time of the
gateway's own processes, by the kernel's accounts. A machine's speed drifts, so each ratio is the median of the ratios
of the rounds.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.load import burst, post
from benchmarks.overhead import BODY
from benchmarks.overhead import HEADERS as CLIENT_HEADERS
from benchmarks.peers.setting import KEY, MODEL, Gateway, Peer, Setting
from benchmarks.peers.upstream import CHUNKS
from benchmarks.servers import started

CONNECTIONS, STREAMS = 8, 32
WARM_UP_REQUESTS = 300
MAY_MERGE = 20
"""Chunks of a stream that a gateway may pass on together with others."""
BODY_OF_MODEL = json.dumps({**json.loads(BODY), "model": MODEL})
HEADERS = (("Authorization", f"Bearer {KEY}"), *CLIENT_HEADERS[1:])
REQUEST = post("/v1/chat/completions", BODY_OF_MODEL.encode(), HEADERS)
STREAM = post("/v1/chat/completions", BODY_OF_MODEL.replace("{", '{"stream": true, ', 1).encode(), HEADERS)


@dataclass(frozen=True, slots=True)
class Cost:
    """One gateway's microseconds of processor time, one value for each round."""

    request_us: Sequence[float]
    chunk_us: Sequence[float]


async def _stream(port: int) -> int:
    """Reads one stream to its end. Returns how many chunks had come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(STREAM)
    answer = b""
    while not answer.endswith(b"0\r\n\r\n"):
        read = await reader.read(65536)
        if not read:
            break
        answer += read
    writer.close()
    return answer.count(b"data: {")


async def _round(gateway: Gateway, requests: int) -> tuple[float, float]:
    before_s = gateway.processor_time_s()
    await burst(gateway.port, REQUEST, requests=requests, connections=CONNECTIONS)
    between_s = gateway.processor_time_s()
    chunks = await asyncio.gather(*(_stream(gateway.port) for _ in range(STREAMS)))
    if min(chunks) < CHUNKS - MAY_MERGE:
        raise RuntimeError(f"a stream through {gateway.url} had {min(chunks)} of {CHUNKS} chunks")
    after_s = gateway.processor_time_s()
    return (between_s - before_s) / requests * 1e6, (after_s - between_s) / (STREAMS * CHUNKS) * 1e6


async def _rounds(gateways: Mapping[str, Gateway], rounds: int, requests: int) -> dict[str, Cost]:
    for gateway in gateways.values():
        await burst(gateway.port, REQUEST, requests=WARM_UP_REQUESTS, connections=CONNECTIONS)
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in gateways}
    for _ in range(rounds):
        for name, gateway in gateways.items():
            seen[name].append(await _round(gateway, requests))
    return {name: Cost(*(tuple(each) for each in zip(*found, strict=True))) for name, found in seen.items()}


def measure(peers: Sequence[Peer], rounds: int, requests: int) -> dict[str, Cost]:
    """Runs all peers in turns. By their titles."""
    with ExitStack() as running:
        upstream = running.enter_context(started(["fast"], apps="peers.upstream"))["fast"]
        engine = f"http://127.0.0.1:{upstream.port}"
        gateways = {}
        for peer in peers:
            folder = Path(running.enter_context(tempfile.TemporaryDirectory()))
            [gateways[peer.title]] = peer.start(Setting(), engine, folder, running)
        return asyncio.run(_rounds(gateways, rounds, requests))


def ratio(values: Sequence[float], others: Sequence[float]) -> float:
    """Median of the rounds' ratios."""
    return statistics.median(one / other for one, other in zip(values, others, strict=True))
